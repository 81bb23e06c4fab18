"""What the objectives share whose model is held to a reference: how it is loaded, and when its log-probabilities are computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.config.objective import Objective
from packtrain.config.schema import Model, Peft
from packtrain.errors import UserError
from packtrain.model.adapters import add_reference
from packtrain.model.load import base_model, weights_hash
from packtrain.model.precision import Precision
from packtrain.model.reference import load_reference
from packtrain.model.spread import Ranks
from packtrain.plan.reference_choice import ReferenceChoice
from packtrain.train.loader import Steps
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.first_loss import check_pair_forward, check_start
from packtrain.train.objectives.loss import HeldLoss


class ReferenceObjective:
    """Parts of a TrainingObjective. `identity` is what precomputed log-probabilities depend on of the reference."""

    def __init__(self, objective: Objective, model: Model, peft: Peft, reference: ReferenceChoice, cache: Path) -> None:
        """Precomputed log-probabilities go to the folder `cache`."""
        self.objective, self._model, self._peft = objective, model, peft
        self.reference, self._cache = reference, cache
        self._reference_model: PreTrainedModel | None = None
        self.identity = ""

    def take_reference(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks,
        precision: Precision,
        *,
        seed: int,
    ) -> dict[str, Any]:
        """Loads the reference before `model` is sharded; returns what a resumed run must agree on of it."""
        _check_routers(base_model(model), self.objective.kind)
        if self.reference.kind == "adapters":
            add_reference(model, self.reference.adapters)
        self._reference_model, weights = load_reference(
            self.reference,
            self.objective.reference,
            self._model,
            tokenizer,
            ranks,
            seed=seed,
            autocast=precision.autocast,
        )
        weights = weights or weights_hash(model)
        self.identity = identity_of_reference(model, self._peft, weights)
        return {"objective.reference": f"one of weights with hash {weights[:12]}"}

    def with_reference(self, steps: Steps, trainer: StepTrainer, ranks: Ranks, precision: Precision) -> Steps:
        """`steps` with the reference's log-probabilities, computed by the model of `trainer` before step 1."""
        raise NotImplementedError

    def hold(
        self, trainer: StepTrainer, attention: str, *, preflight: bool, ranks: Ranks, precision: Precision
    ) -> None:
        """Precomputes the reference's log-probabilities if configured, then checks the forward and the first loss."""
        if self.reference.kind == "precomputed":
            trainer.steps = self.with_reference(trainer.steps, trainer, ranks, precision)
            if trainer.evaluation:
                trainer.evaluation = self.with_reference(trainer.evaluation, trainer, ranks, precision)
        if preflight:
            loss, batch = cast(HeldLoss, trainer.loss), trainer.steps.first_batch(trainer.settings.first_step)
            check_pair_forward(loss, batch, attention)
            if self.reference.at_start:
                check_start(loss, batch)


def identity_of_reference(model: PreTrainedModel, peft: Peft, weights: str) -> str:
    """The part of the cache key that depends on `model`: the hash of its `weights`, and its settings."""
    settings = base_model(model).config.to_dict()
    kept = {name: value for name, value in settings.items() if name not in ("_name_or_path", "transformers_version")}
    return (
        f"{weights} {json.dumps(kept, sort_keys=True, default=str)} {peft.alpha / peft.r if peft.kind == 'lora' else 1}"
    )


def _check_routers(model: PreTrainedModel, verb: str) -> None:
    """Raises UserError if `model` asks for its routers' load-balancing loss, which is not defined over answers."""
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise UserError(
            f"packtrain {verb} adds no load-balancing loss of routers, which the model asks for",
            where="model.config.output_router_logits",
            fix="set it to false: the preferences are then trained without it",
        )
