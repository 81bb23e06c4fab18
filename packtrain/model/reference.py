"""The reference that DPO holds the model to: a model of its own, or log-probabilities that were computed once.

(Where it is the model without its adapters, or with earlier ones, nothing has to be loaded; plan/dpo_reference.py decides.)
Precomputed log-probabilities lie beside the data cache, named by all that they depend on: the pairs, the weights, the
precision, the model's settings, LD-DPO's alpha. Each process computes its share, the first one writes all of them down;
afterwards no reference model is in memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, reduce
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.config.schema import Model, Peft
from packtrain.errors import UserError
from packtrain.model.load import load_model, weights_hash
from packtrain.model.spread import Ranks, spread
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.schedule import Schedule
from packtrain.plan.dpo_reference import DpoReference


def load_reference(
    reference: DpoReference, named: str, model: Model, tokenizer: PreTrainedTokenizerBase, ranks: Ranks, *, seed: int
) -> tuple[PreTrainedModel | None, str]:
    """The model that is the reference, frozen, on its device or spread as the strategy wants, and the hash of its weights;
    None and "" where it is none of its own. `named` is objective.reference, `model` and `seed` are those
    of the model that is trained.

    Raises UserError where it cannot be loaded.
    """
    if reference.kind not in ("model", "path"):
        return None, ""
    source = model if reference.kind == "model" else replace(model, path=named, init="pretrained")
    try:
        loaded = load_model(source, Peft(), tokenizer, seed=seed)
    except UserError as error:
        if reference.kind == "model":
            raise
        raise UserError([replace(one, where="objective.reference") for one in error.problems]) from error
    loaded.requires_grad_(False)
    content = weights_hash(loaded)
    spread(loaded, ranks)
    return loaded.eval(), content


def precompute(
    place: Path, schedule: Schedule, ranks: Ranks, logps: Callable[[np.ndarray], torch.Tensor]
) -> np.ndarray:
    """float32 [pairs, 2]: log-probabilities of both answers of all pairs, read from `place`.npy, or computed and written.

    `schedule` is one pass over the pairs; `logps` gives float32 [n, 2] of the pairs of these numbers.
    """
    done = place.with_suffix(".npy")
    found = [np.load(done) if ranks.main and done.exists() else None]
    with waiting("rank 0 to look for the reference"):
        (known,) = broadcast_object_list(found)
    if known is not None:
        return known
    values = torch.zeros((len(schedule.lengths), 2), device=ranks.device)
    for step in range(schedule.total_steps):
        for numbers in schedule.micro_batches(step, ranks.rank, ranks.world_size):
            if len(numbers) or ranks.sharded:  # where weights are spread as often as the others
                said = logps(numbers)
                values[numbers] = said.float()[: len(numbers)]
    with waiting("all ranks to compute their part of the reference"):
        computed = cast(torch.Tensor, reduce(values, "sum")).cpu().numpy()
    if ranks.main:
        done.parent.mkdir(parents=True, exist_ok=True)
        aside = done.with_suffix(f".{os.getpid()}.tmp")
        with aside.open("wb") as file:
            np.save(file, computed)
        aside.replace(done)
    return computed


def cache_key(*depends_on: object) -> str:
    """The name of precomputed log-probabilities, by all that they depend on."""
    return hashlib.blake2b(repr(depends_on).encode(), digest_size=16).hexdigest()
