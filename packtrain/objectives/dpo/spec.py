"""Declaration of direct preference optimisation, with the losses and arguments of TRL's DPOTrainer."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from packtrain.config import Fault, Option, is_list, is_number
from packtrain.objectives.spec import Figure, Spec
from packtrain.wording import counted

if TYPE_CHECKING:
    from packtrain.config.schema import RunConfig

_LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
_SORTING = ("aot", "aot_unpaired")
_DIVERGING = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
_SMOOTHED = {"exo_pair", "robust", *_SORTING}
_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
_FIGURES = (
    Figure("rewards/chosen", "Rewards", "chosen"),
    Figure("rewards/rejected", "Rewards", "rejected"),
    Figure("rewards/accuracies", "Pairs ranked right", unit="percent", headline=True, note="chance: 50%"),
    Figure("rewards/margins", "Reward margin", headline=True),
    Figure("logps/chosen", "Log-probabilities", "chosen"),
    Figure("logps/rejected", "Log-probabilities", "rejected"),
    Figure("logits/chosen", "Logits", "chosen"),
    Figure("logits/rejected", "Logits", "rejected"),
    Figure("mean_token_accuracy", "Tokens predicted right", unit="percent"),
    Figure("entropy", "Entropy"),
)


def _are_weights(value: object) -> bool:
    return is_list(value) and any(value) and all(is_number(weight) and weight >= 0 for weight in value)


_OPTIONS = {
    "loss_weights": Option(None, "list of numbers ≥ 0, not all 0, one for each loss", _are_weights),
    "label_smoothing": Option(0.0, "number from 0, below 0.5", lambda value: is_number(value) and 0 <= value < 0.5),
    "f_divergence_type": Option("reverse_kl", "|".join(_DIVERGENCES), lambda value: value in _DIVERGENCES),
    "f_alpha_divergence_coef": Option(0.5, "number", is_number),
    "ld_alpha": Option(None, "number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1),
    "use_weighting": Option(False, "true or false", lambda value: isinstance(value, bool)),
    "discopop_tau": Option(0.05, "number > 0", lambda value: is_number(value) and value > 0),
}


def _rules(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Yield combinations of losses and options that TRL's DPOTrainer refuses or gets wrong."""
    objective = config.objective
    losses, smoothing = objective.losses, objective.option("label_smoothing")
    weights = objective.option("loss_weights")
    if is_list(weights) and len(weights) != len(losses):
        what = f"{counted(len(weights), 'weights')} for {counted(len(losses), 'losses')}"
        fix = "Give one for each, in their order."
        yield Fault(("objective.options.loss_weights",), what, fix, code="loss-weights-count")
    if "exo_pair" in losses and smoothing == 0:
        what = "the loss exo_pair needs label smoothing"
        fix = "Set objective.options.label_smoothing; its paper recommends 1e-3."
        yield Fault(("objective.loss",), what, fix, code="exo-needs-smoothing")
    if smoothing and not _SMOOTHED & {*losses}:
        what = f"TRL's {', '.join(losses)} takes no label smoothing"
        fix = "Remove it, or choose the loss robust."
        yield Fault(("objective.options.label_smoothing",), what, fix, code="smoothing-unused")
    divergence = objective.option("f_divergence_type")
    if divergence != "reverse_kl" and (others := sorted({*losses} - _DIVERGING)):
        what = f"{', '.join(others)} is not defined for the divergence {divergence}"
        yield Fault(("objective.options.f_divergence_type",), what, "Use reverse_kl.", code="divergence-undefined")
    if objective.option("use_weighting"):
        reasons = [
            f"{name} sorts pairs, so a pair would get the weight of another" for name in objective.sorting_losses
        ]
        if "sft" in losses:
            reasons.append("sft is a mean over all tokens, so TRL cannot weigh its pairs")
        for what in reasons:
            fix = "Remove it, or choose another loss."
            yield Fault(("objective.options.use_weighting",), what, fix, code="weighting-undefined")


SPEC = Spec(
    name="dpo",
    order=1,
    help="Train on pairs of a preferred and a rejected answer, by any DPO loss of TRL.",
    about="direct preference optimisation",
    run=f"{__package__}.run",
    examples="pairs",
    figures=_FIGURES,
    losses=_LOSSES,
    losses_help="sigmoid to sigmoid_norm of TRL, a list adds several up",
    adds_losses=True,
    sorting_losses=_SORTING,
    options=_OPTIONS,
    rules=_rules,
    reference=True,
)
