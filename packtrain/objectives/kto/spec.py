"""Declaration of Kahneman-Tversky optimisation, with the losses and arguments of TRL's KTOTrainer."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from packtrain.config import Fault, Option, is_number
from packtrain.objectives.spec import Figure, Spec

if TYPE_CHECKING:
    from packtrain.config.schema import RunConfig

_WEIGHT = Option(1.0, "number ≥ 0", lambda value: is_number(value) and value >= 0)
_OPTIONS = {"desirable_weight": _WEIGHT, "undesirable_weight": _WEIGHT}
_FIGURES = (
    Figure("rewards/chosen", "Rewards", "chosen", headline=True),
    Figure("rewards/rejected", "Rewards", "rejected", headline=True),
    # no mean, since a batch may have answers of one label alone
    Figure("rewards/margins", "Reward margin", headline=True, difference=("rewards/chosen", "rewards/rejected")),
    Figure("kl", "KL estimate", "model from reference"),
    Figure("logps/chosen", "Log-probabilities", "chosen"),
    Figure("logps/rejected", "Log-probabilities", "rejected"),
    Figure("logits/chosen", "Logits", "chosen"),
    Figure("logits/rejected", "Logits", "rejected"),
    Figure("entropy", "Entropy"),
)


def _rules(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    objective = config.objective
    if all(objective.option(name) == 0 for name in _OPTIONS):
        what = "both weights are 0, which trains nothing"
        yield Fault(("objective.options",), what, "Set one above 0.", code="weights-all-zero")
    if config.data.streaming:
        what = "the last step may have a single answer, which gives no KL estimate"
        fix = "Change objective.kind, or leave data.streaming out."
        yield Fault(("objective.kind", "data.streaming"), what, fix, code="kto-streams")
    if config.batch.examples_per_step == 1 and objective.losses == ["kto"]:
        what = "the KL estimate of a step needs two answers or more"
        fix = "Set it to 2 or more (e.g. 32), or objective.loss=apo_zero_unpaired."
        yield Fault(("batch.examples_per_step",), what, fix, code="kl-needs-two-answers")


SPEC = Spec(
    name="kto",
    order=2,
    help="Train on answers that are each labelled good or bad (Kahneman-Tversky optimisation).",
    about="Kahneman-Tversky optimisation",
    run=f"{__package__}.run",
    examples="answers",
    figures=_FIGURES,
    losses=("kto", "apo_zero_unpaired"),
    losses_help="kto or apo_zero_unpaired (arXiv 2408.06266)",
    options=_OPTIONS,
    rules=_rules,
    reference=True,
)
