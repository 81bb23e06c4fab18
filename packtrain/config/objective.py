"""What is trained: the group `objective`, and what sets its kinds apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packtrain.config.fields import ObjectiveKind, key

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
REFERENCES = ("auto", "model", "adapters_off", "precomputed")
"""What objective.reference may be beside a path."""
SORTING_LOSSES: tuple[LossType, ...] = ("aot", "aot_unpaired")


@dataclass(frozen=True, slots=True)
class Traits:
    """What sets an objective apart outside of its own files.

    An example is `documents` documents of the data set (2: preference pairs) and is called one of `unit`; `reference`: the
    model is held to a reference; `scores`: it has a score in place of the output head; `about`: in words.
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

    kind: ObjectiveKind = key("sft", "What is trained; each has a verb of its name (packtrain dpo).")
    loss: TokenLoss = key("nll", "negative log-likelihood, or dynamic fine-tuning (arXiv 2508.05629).", objective="sft")
    neftune_alpha: float | None = key(
        None, "scale of NEFTune's noise on the embeddings (arXiv 2310.05914).", above=0, objective="sft"
    )
    router_aux_coef: float | None = key(
        None,
        "weight of the routers' load-balancing loss over the real tokens of a step, part of loss; none for the model's "
        "own where model.config.output_router_logits is set, else 0. Steps of several micro-batches take one forward pass "
        "more.",
        minimum=0,
        objective="sft",
    )
    loss_type: LossType | list[LossType] = key(
        "sigmoid", "loss by TRL's name, or several that are added up.", objective="dpo"
    )
    loss_weights: list[float] | None = key(None, "weight of each of several losses; none for 1 each.", objective="dpo")
    kto_loss: UnpairedLoss = key(
        "kto",
        "loss by TRL's name: around the mean divergence of the model from the reference (arXiv 2402.01306), or without it "
        "(APO, arXiv 2408.06266).",
        objective="kto",
    )
    desirable_weight: float = key(1.0, "weight of the losses of desirable answers.", minimum=0, objective="kto")
    undesirable_weight: float = key(1.0, "weight of the losses of undesirable answers.", minimum=0, objective="kto")
    beta: float = key(0.1, "how strongly the model is held to the reference.", above=0, objective=("dpo", "kto"))
    label_smoothing: float = key(
        0.0, "share of pairs whose preference is taken to be wrong.", minimum=0, below=0.5, objective="dpo"
    )
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = key(
        "reverse_kl", "divergence from the reference (arXiv 2309.16240).", objective="dpo"
    )
    f_alpha_divergence_coef: float = key(0.5, "alpha of the alpha divergence.", objective="dpo")
    ld_alpha: float | None = key(
        None,
        "weight of tokens beyond the shorter answer's length (LD-DPO, arXiv 2409.06411); none for 1.",
        minimum=0,
        maximum=1,
        objective="dpo",
    )
    use_weighting: bool = key(
        False, "weigh pairs by how likely the model finds them (WPO, arXiv 2406.11827).", objective="dpo"
    )
    discopop_tau: float = key(0.05, "temperature of the discopop loss.", above=0, objective="dpo")
    reference: str = key(
        "auto",
        "model (a second copy of model.path), adapters_off (LoRA), precomputed (its log-probabilities, once), or the "
        "path of another model or of earlier adapters (with LoRA on the same base, no second copy of it); auto is what "
        "training starts from: adapters_off with new adapters, the same ones where model.path names adapters, else model.",
        objective=("dpo", "kto"),
    )

    center_rewards_coefficient: float | None = key(
        None,
        "weight of a loss that holds the mean of a pair's rewards near zero (arXiv 2312.09244, which takes 0.01); none for none.",
        minimum=0,
        objective="reward",
    )

    @property
    def traits(self) -> Traits:
        """What the objective is made of."""
        return TRAITS[self.kind]

    @property
    def losses(self) -> list[LossType]:
        """The dpo losses, one or several."""
        return self.loss_type if isinstance(self.loss_type, list) else [self.loss_type]

    @property
    def sorting_losses(self) -> list[LossType]:
        """Those that sort all pairs of a step: it has to be one micro-batch of one process."""
        return [name for name in self.losses if name in SORTING_LOSSES]
