"""Declaration of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from packtrain.config import Fault, Option, is_number
from packtrain.objectives.spec import Spec, equal_weights

if TYPE_CHECKING:
    from torch import Tensor

    from packtrain.config.schema import RunConfig


def dynamic_weights(log_probs: Tensor) -> Tensor:
    """Weigh a token by its probability, without a gradient: DFT, arXiv 2508.05629."""
    return log_probs.exp().detach()


TOKEN_WEIGHTS = {"nll": equal_weights, "dft": dynamic_weights}
"""The losses of TRL's SFTTrainer: their mean is over targets."""


def _rules(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    if config.packing.share_prefix and config.objective.option("neftune_noise_alpha"):
        what = (
            "the noise on embeddings depends on the length of a document, and shared tokens belong to several documents"
        )
        keys = ("packing.share_prefix", "objective.options.neftune_noise_alpha")
        yield Fault(keys, what, "Remove one of them.", code="noise-on-shared-tokens")


SPEC = Spec(
    name="sft",
    order=0,
    help="Fine-tune on conversations, prompts with completions, or text.",
    about="supervised fine-tuning",
    run=f"{__package__}.run",
    examples="documents",
    losses=(*TOKEN_WEIGHTS,),
    losses_help="nll or dft (arXiv 2508.05629)",
    token_weights=TOKEN_WEIGHTS,
    options={"neftune_noise_alpha": Option(None, "number > 0", lambda value: is_number(value) and value > 0)},
    rules=_rules,
)
