"""What the objectives share whose model is held to a reference: how it is loaded, and what TRL's trainers must not do with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from packtrain.train.verify.dpo_start import check_pair_forward, check_start


class OfReference:
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

    def with_reference(self, steps: Steps, trainer: Any, ranks: Ranks, precision: Precision) -> Steps:
        """`steps` with the reference's log-probabilities, computed by the model of `trainer` before step 1."""
        raise NotImplementedError

    def hold(self, trainer: Any, attention: str, *, preflight: bool, ranks: Ranks, precision: Precision) -> None:
        """Precomputes the reference's log-probabilities if configured, then checks the forward and the first loss."""
        if self.reference.kind == "precomputed":
            settings = trainer.settings
            steps = self.with_reference(settings.steps, trainer, ranks, precision)
            held_out = settings.evaluation and self.with_reference(settings.evaluation, trainer, ranks, precision)
            trainer.settings, trainer.steps = replace(settings, steps=steps, evaluation=held_out), steps
        if preflight:
            check_pair_forward(trainer, attention)
            if self.reference.at_start:
                check_start(trainer)


def identity_of_reference(model: PreTrainedModel, peft: Peft, weights: str) -> str:
    """The part of the cache key that depends on `model`: the hash of its `weights`, and its settings."""
    settings = base_model(model).config.to_dict()
    kept = {name: value for name, value in settings.items() if name not in ("_name_or_path", "transformers_version")}
    return (
        f"{weights} {json.dumps(kept, sort_keys=True, default=str)} {peft.alpha / peft.r if peft.kind == 'lora' else 1}"
    )


@contextmanager
def keep_weights_untouched(model: PreTrainedModel, trl: Any) -> Iterator[None]:
    """Inside the block, disables two things of the module `trl` of a TRL trainer that fail on sharded weights and are done elsewhere.

    TRL hashes the weights for precomputed log-probabilities (see model/reference.py), and copies adapters as a reference.
    The copy is not needed: new adapters are zero, like adapters off; continued ones are also loaded as `ref` (adapters.py).
    """
    hash_of, trl.hash_module = trl.hash_module, lambda _: ""
    adapted: Any = model if hasattr(model, "peft_config") else SimpleNamespace(get_parameter=None)
    find = adapted.get_parameter
    adapted.add_adapter = lambda *_, **__: None
    adapted.get_parameter = lambda name: find(name.replace(".ref.", ".default."))
    try:
        yield
    finally:
        del adapted.add_adapter, adapted.get_parameter
        trl.hash_module = hash_of


def _check_routers(model: PreTrainedModel, verb: str) -> None:
    """Raises UserError if `model` asks for its routers' load-balancing loss, which is not defined over answers."""
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise UserError(
            f"packtrain {verb} adds no load-balancing loss of routers, which the model asks for",
            where="model.config.output_router_logits",
            fix="set it to false: the preferences are then trained without it",
        )
