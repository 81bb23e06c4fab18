"""The start of a preference run on random pairs, for `packtrain verify`: what the run checks of its own first pairs.

The reference is the one of the config, made as the run makes it, and the pairs are laid out as the run lays them out. Only
log-probabilities that were kept are not looked at, being those of the data: they are computed of the random pairs.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.attention.backends import attending_by
from packtrain.config.schema import RunConfig
from packtrain.model.adapters import add_reference
from packtrain.model.load import base_model
from packtrain.model.reference import load_reference
from packtrain.model.spread import Ranks
from packtrain.packing.collate import PairRows
from packtrain.plan.dpo_reference import reference_of
from packtrain.train.dpo import PackedDPOTrainer, check_routers
from packtrain.train.dpo_start import Start, start_of
from packtrain.train.loader import PairSteps
from packtrain.train.verify.pair_modes import said_of_each, trainer_on_random_pairs


def trainer_at_start(config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PackedDPOTrainer:
    """A trainer on random pairs, against the reference of `config`. Raises UserError where a run would: that
    cannot be loaded, or the routers of the model want a loss of their own."""
    check_routers(base_model(model))
    held_to = reference_of(config.model, config.peft, config.objective, config.strategy)
    ranks, named = Ranks(0, 1, model.device, config.strategy.name), config.objective.reference
    reference, _ = load_reference(held_to, named, config.model, tokenizer, ranks, seed=config.trainer.seed)
    if held_to.kind == "adapters":
        add_reference(model, held_to.adapters)
    return trainer_on_random_pairs(config, model, tokenizer, reference)


def prove_start(config: RunConfig, trainer: PackedDPOTrainer, backend: str | None, *, shares: bool) -> Start | None:
    """Where the run starts; None where the model is not its own reference. `shares`: prompts are computed once.

    Padded where `backend` is None or packing.mode says so.
    """
    reference = reference_of(config.model, config.peft, config.objective, config.strategy)
    if not reference.at_start:
        return None
    packed = backend is not None and config.packing.mode != "padding"
    layout: PairRows = "padding" if not packed else "shared" if shares else "flat"
    known = said_of_each(trainer) if reference.kind == "precomputed" else None
    padded = cast(PairSteps, trainer.steps)
    trainer.steps = replace(padded, layout=layout, reference=known)
    with ExitStack() as attending:
        for one in filter(None, (trainer.model, trainer.ref_model)) if packed else ():
            attending.enter_context(attending_by(base_model(cast(Any, one)), cast(str, backend)))
        start = start_of(trainer)
    trainer.steps = padded
    return start
