"""Declaration of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from packtrain.config import Fault, Option, is_number
from packtrain.objectives.spec import Spec

if TYPE_CHECKING:
    from packtrain.config.schema import RunConfig


def _rules(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    if config.packing.share_prefix and config.objective.option("neftune_noise_alpha"):
        what = (
            "the noise on embeddings depends on the length of a document, and shared tokens belong to several documents"
        )
        yield Fault(("packing.share_prefix", "objective.options.neftune_noise_alpha"), what, "Remove one of them.")


SPEC = Spec(
    name="sft",
    order=0,
    help="Fine-tune on conversations, prompts with completions, or text.",
    about="supervised fine-tuning",
    run=f"{__package__}.run",
    examples="documents",
    losses=("nll", "dft"),
    options={"neftune_noise_alpha": Option(None, "number > 0", lambda value: is_number(value) and value > 0)},
    rules=_rules,
)
