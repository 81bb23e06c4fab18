"""The reference that DPO holds the model to: a model of its own, or log-probabilities that were computed once.

(Where it is the model without its adapters, or with earlier ones, nothing has to be loaded; plan/dpo_reference.py decides.)
Precomputed log-probabilities lie beside the data cache, named by all that they depend on: the pairs, the weights, the
precision, the model's settings, LD-DPO's alpha. Each process computes its share and writes it down as it goes, so that an
interrupted run goes on from there; afterwards no reference model is in memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.config.schema import Model, Peft
from packtrain.errors import UserError
from packtrain.model.load import load_model, weights_hash
from packtrain.model.spread import Ranks, spread
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.schedule import Schedule
from packtrain.plan.dpo_reference import DpoReference

_WRITE_EVERY = 20  # steps between two writings of a process's share


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
    there = [done.exists()]  # for the first process: another run may be about to write it, and all have to do the same
    with waiting("rank 0 to look for the reference"):
        (known,) = broadcast_object_list(there)
    if not known:
        own, state = place.with_suffix(f".rank-{ranks.rank}-of-{ranks.world_size}.npy"), PartialState()
        values = _begun(place, len(schedule.lengths))
        for step in range(schedule.total_steps):
            _fill(schedule, step, ranks, values, logps)
            if step % _WRITE_EVERY == _WRITE_EVERY - 1:
                _write(own, values)
        _write(own, values)
        with waiting("all ranks to compute their part of the reference"):
            state.wait_for_everyone()
        if ranks.main:
            values = _begun(place, len(schedule.lengths))
            if not (np.isnan(values).any() and done.exists()):  # another run was faster, and has taken the parts away
                _write(done, values)
            for part in place.parent.glob(f"{place.name}.rank-*"):
                part.unlink(missing_ok=True)
        with waiting("rank 0 to write the reference"):
            state.wait_for_everyone()
    try:
        return np.load(done)
    except FileNotFoundError as error:
        what = f"the reference's log-probabilities, which the first process wrote to {done}, are not on this machine"
        fix = "Name a folder on a disk that all machines share, or take another objective.reference."
        raise UserError(what, where="data.cache_dir", fix=fix) from error


def cache_key(*depends_on: object) -> str:
    """The name of precomputed log-probabilities, by all that they depend on."""
    return hashlib.blake2b(repr(depends_on).encode(), digest_size=16).hexdigest()


def _fill(
    schedule: Schedule, step: int, ranks: Ranks, values: np.ndarray, logps: Callable[[np.ndarray], torch.Tensor]
) -> None:
    for numbers in schedule.micro_batches(step, ranks.rank, ranks.world_size):
        # where weights are spread as often as the others, whatever is known already
        if ranks.sharded or (len(numbers) and np.isnan(values[numbers]).any()):
            said = logps(numbers)
            if len(numbers):
                values[numbers] = said.float().cpu().numpy()


def _begun(place: Path, pairs: int) -> np.ndarray:
    """What all processes have written down so far, NaN where nothing."""
    values = np.full((pairs, 2), np.nan, dtype=np.float32)
    for part in sorted(place.parent.glob(f"{place.name}.rank-*.npy")):
        with suppress(FileNotFoundError):  # taken away by another run, which has them all
            values = np.where(np.isnan(values), np.load(part), values)
    return values


def _write(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    with aside.open("wb") as file:
        np.save(file, values)
    aside.replace(path)
