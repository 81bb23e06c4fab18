"""The group `objective`, its kinds, and `key`, the declaration of a config field."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

ObjectiveKind = Literal["sft", "dpo", "kto", "reward"]


def key(default: Any, doc: str, *, objective: ObjectiveKind | tuple[ObjectiveKind, ...] = (), **bounds: float) -> Any:
    """Declare a config field: default, a sentence (`doc`), its `objective`s (none: all), and bounds.

    Bounds are minimum, above, below and maximum, as in config/keys.py::Key.
    """
    objectives = (objective,) if isinstance(objective, str) else objective
    metadata = {"doc": f"{', '.join(objectives)}: {doc}" if objectives else doc, **bounds, "objectives": objectives}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


TokenLoss = Literal["nll", "dft"]
LossType = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]
"""The losses of TRL's DPOTrainer."""
UnpairedLoss = Literal["kto", "apo_zero_unpaired"]
"""The losses of TRL's KTOTrainer."""
LOSSES: dict[ObjectiveKind, tuple[str, ...]] = {
    "sft": get_args(TokenLoss),
    "dpo": get_args(LossType),
    "kto": get_args(UnpairedLoss),
    "reward": (),
}
"""The values of objective.loss, the default first."""
REFERENCES = ("auto", "model", "adapters_off", "precomputed")
"""Values of objective.reference that are not paths."""
SORTING_LOSSES: tuple[LossType, ...] = ("aot", "aot_unpaired")


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of another library: its `default`, its `allowed` values in words, and their test."""

    default: Any
    allowed: str
    accepts: Callable[[Any], bool]


def is_number(value: object) -> bool:
    """Return whether `value` is a finite number and no boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
_WEIGHT = Option(1.0, "number ≥ 0", lambda value: is_number(value) and value >= 0)
OPTIONS: dict[ObjectiveKind, dict[str, Option]] = {
    "sft": {"neftune_noise_alpha": Option(None, "number > 0", lambda value: is_number(value) and value > 0)},
    "dpo": {
        "loss_weights": Option(
            None,
            "list of numbers ≥ 0, not all 0, one for each loss",
            lambda value: isinstance(value, list) and any(value) and all(map(_WEIGHT.accepts, value)),
        ),
        "label_smoothing": Option(0.0, "number from 0, below 0.5", lambda value: is_number(value) and 0 <= value < 0.5),
        "f_divergence_type": Option("reverse_kl", "|".join(_DIVERGENCES), lambda value: value in _DIVERGENCES),
        "f_alpha_divergence_coef": Option(0.5, "number", is_number),
        "ld_alpha": Option(None, "number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1),
        "use_weighting": Option(False, "true or false", lambda value: isinstance(value, bool)),
        "discopop_tau": Option(0.05, "number > 0", lambda value: is_number(value) and value > 0),
    },
    "kto": {"desirable_weight": _WEIGHT, "undesirable_weight": _WEIGHT},
    "reward": {"center_rewards_coefficient": Option(None, _WEIGHT.allowed, _WEIGHT.accepts)},
}
"""The entries of objective.options by objective.kind, with names and defaults of TRL's config."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of an objective that other modules need.

    An example has `documents` documents of the data set (2: preference pairs); `unit` is the word for examples. `reference`: the
    model is held to a reference. `scores`: the model has a score instead of the output head. `about`: in words.
    """

    about: str
    unit: str
    documents: int
    reference: bool
    scores: bool = False

    @property
    def pairs(self) -> bool:
        """Whether it trains on preference pairs."""
        return self.documents == 2


TRAITS: dict[ObjectiveKind, Traits] = {
    "sft": Traits("supervised fine-tuning", "documents", 1, reference=False),
    "dpo": Traits("direct preference optimisation", "pairs", 2, reference=True),
    "kto": Traits("Kahneman-Tversky optimisation", "answers", 1, reference=True),
    "reward": Traits("a reward model", "pairs", 2, reference=False, scores=True),
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Objective:
    """The loss."""

    kind: ObjectiveKind = key("sft", "Training method; each has a verb of its name (packtrain dpo).")
    loss: TokenLoss | LossType | UnpairedLoss | list[LossType] | None = key(
        None,
        "Loss of the kind, by TRL's name: nll or dft (arXiv 2508.05629) of sft, kto or apo_zero_unpaired (arXiv 2408.06266) of "
        "kto, all others of dpo, a list to add several up; none for nll, sigmoid and kto.",
    )
    options: dict[str, Any] = key(
        {}, "Rarely used arguments of TRL's config for the kind (docs/preferences.md, kto.md, …)."
    )
    beta: float = key(0.1, "how strongly the model is held to the reference.", above=0, objective=("dpo", "kto"))
    reference: str = key(
        "auto",
        "model (a second copy of model.path), adapters_off (LoRA), precomputed (its log-probabilities, once), or the "
        "path of another model or of earlier adapters (with LoRA on the same base, no second copy of it); auto is the start "
        "of training: adapters_off with new adapters, the same adapters if model.path names adapters, else model.",
        objective=("dpo", "kto"),
    )

    @property
    def traits(self) -> Traits:
        """The traits of this kind."""
        return TRAITS[self.kind]

    @property
    def losses(self) -> list[Any]:
        """The losses by name, one or several."""
        if self.loss is None:
            return [LOSSES[self.kind][0]] if LOSSES[self.kind] else []
        return self.loss if isinstance(self.loss, list) else [self.loss]

    @property
    def token_loss(self) -> TokenLoss:
        """The output head's loss for each token. All kinds but sft use the negative log-likelihood."""
        return self.losses[0] if self.kind == "sft" else "nll"

    def option(self, name: str) -> Any:
        """Return the value of one of OPTIONS; TRL's default if it is not set."""
        return self.options.get(name, OPTIONS[self.kind][name].default)

    @property
    def sorting_losses(self) -> list[str]:
        """The losses that sort all pairs of a step. With them a step is one micro-batch of one process."""
        return [name for name in self.losses if name in SORTING_LOSSES]
