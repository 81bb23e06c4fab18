"""Direct preference optimisation as an objective: pairs instead of documents, the reference, and their proofs.

The trainer and its loss are in dpo_trainer.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import DPOConfig

from packtrain.config.schema import Batch, Model, Objective, Packing, Peft
from packtrain.data.dataset import PairDataset
from packtrain.data.prepare import prepare_pairs
from packtrain.errors import UserError
from packtrain.model.adapters import add_reference
from packtrain.model.load import base_model, weights_hash
from packtrain.model.precision import Precision
from packtrain.model.reference import cache_key, computer, load_reference, precompute
from packtrain.model.spread import Ranks
from packtrain.packing.schedule import Schedule
from packtrain.plan.reference_choice import ReferenceChoice
from packtrain.train import console
from packtrain.train.console import Log
from packtrain.train.loader import PairSteps, Steps
from packtrain.train.objectives.dpo_trainer import PackedDPOTrainer, check_routers, objective_arguments
from packtrain.train.objectives.of_pairs import OfPairs
from packtrain.train.verify.dpo_start import check_pair_forward, check_start


class DPO(OfPairs):
    """The TrainingObjective (train/run.py) of preference optimisation."""

    prepare_data = staticmethod(prepare_pairs)

    def __init__(
        self,
        objective: Objective,
        packing: Packing,
        batch: Batch,
        model: Model,
        peft: Peft,
        reference: ReferenceChoice,
        cache: Path,
    ) -> None:
        """Precomputed log-probabilities go to the folder `cache`."""
        super().__init__(packing, batch)
        self.objective, self._model, self._peft = objective, model, peft
        self.reference, self._cache = reference, cache
        self._reference_model: PreTrainedModel | None = None
        self._identity = ""

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
        check_routers(base_model(model))
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
        self._identity = identity_of_reference(model, self._peft, weights)
        return {"objective.reference": f"one of weights with hash {weights[:12]}"}

    def steps(self, data: PairDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks) -> PairSteps:
        """The optimizer steps over `data`. Raises UserError if a loss that sorts all pairs of a step would get only some."""
        steps = PairSteps(data, schedule, self.layout, pad_token_id, ranks.rank, ranks.world_size)
        if sorting := self.objective.sorting_losses:
            most = schedule.summary(ranks.world_size).micro_batches_max
            if ranks.world_size > 1 or most > 1:
                raise UserError(
                    f"{' and '.join(sorting)} sorts all pairs of a step, which here are spread over {ranks.world_size} process"
                    f"{'es' if ranks.world_size > 1 else ''} and up to {most} micro-batches",
                    where="objective.loss_type",
                    fix="use one process and a larger batch.tokens_per_device (and batch.examples_per_device), or another "
                    "loss",
                )
        return steps

    def trainer(
        self, model: PreTrainedModel, arguments: dict[str, Any], tokenizer: PreTrainedTokenizerBase, **given: Any
    ) -> PackedDPOTrainer:
        """The trainer, before its proofs; `given` are its settings and callbacks."""
        own = objective_arguments(self.objective, precomputed=self.reference.kind == "precomputed")
        return PackedDPOTrainer(
            model, DPOConfig(**arguments, **own), tokenizer, reference=self._reference_model, **given
        )

    def prove(
        self,
        trainer: PackedDPOTrainer,
        log: Log,
        attention: str,
        *,
        preflight: bool,
        ranks: Ranks,
        precision: Precision,
    ) -> None:
        """Precomputes the reference's log-probabilities if configured, then checks the forward and the first loss."""
        console.pairs(log, self.objective, self.layout, self.unshared, self.reference, self._peft.dropout)
        if self.reference.kind == "precomputed":
            settings = trainer.settings
            steps = self._with_reference(settings.steps, trainer, ranks, precision)
            held_out = settings.evaluation and self._with_reference(settings.evaluation, trainer, ranks, precision)
            trainer.settings, trainer.steps = replace(settings, steps=steps, evaluation=held_out), steps
        if preflight:
            check_pair_forward(trainer, attention)
            if self.reference.at_start:
                check_start(trainer)

    def _with_reference(self, steps: Steps, trainer: PackedDPOTrainer, ranks: Ranks, precision: Precision) -> PairSteps:
        """`steps` with the reference's log-probabilities of every pair; the reference is the model before step 1.

        They are computed in the rows of the first pass: in 16 bits an answer has another one in another row.
        """
        pairs, schedule = cast(PairSteps, steps), steps.schedule
        once = replace(schedule, total_steps=schedule.steps_per_epoch(0))

        def logps(numbers: np.ndarray) -> torch.Tensor:
            trainer.clock.enter("proof")
            return torch.stack(trainer.policy_logps(pairs.collate(numbers)), dim=1)

        rows = None
        if trainer.compute_dtype.itemsize == 2:
            rows = (schedule.settings, pairs.layout, trainer.settings.backend, ranks.world_size, computer(ranks.device))
        formats = (precision.weights, precision.autocast)
        key = cache_key(pairs.data.fingerprint, self._identity, formats, trainer.ld_alpha, rows)
        return replace(pairs, reference=precompute(self._cache / key, once, ranks, logps))


def identity_of_reference(model: PreTrainedModel, peft: Peft, weights: str) -> str:
    """The part of the cache key that depends on `model`: the hash of its `weights`, and its settings."""
    settings = base_model(model).config.to_dict()
    kept = {name: value for name, value in settings.items() if name not in ("_name_or_path", "transformers_version")}
    return (
        f"{weights} {json.dumps(kept, sort_keys=True, default=str)} {peft.alpha / peft.r if peft.kind == 'lora' else 1}"
    )
