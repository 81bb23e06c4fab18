"""The reference that DPO holds the model to: a model of its own, the model without its adapters or with earlier ones, or
what it said once. Which one is told by launch/reference.py.

Precomputed log-probabilities lie beside the data cache, named by all that they hang on: the pairs, the weights, the
precision, the model's settings, LD-DPO's alpha. Each process computes its share and writes it down as it goes, so that an
interrupted run goes on from there; afterwards no reference model is in memory.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.config.schema import SHARDED_WEIGHTS, Peft, RunConfig
from packtrain.data.tokens.cache import cache_folder
from packtrain.errors import UserError
from packtrain.model.load import load_model, weights_hash
from packtrain.model.spread import spread
from packtrain.monitor.heartbeat import waiting
from packtrain.plan.dpo_reference import reference_of
from packtrain.train.dpo import PackedDPOTrainer
from packtrain.train.loader import PairSteps

_WRITE_EVERY = 20  # steps between two writings of a process's share


def load_reference(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[PreTrainedModel | None, str]:
    """The model that is the reference, frozen, on `device` or spread as the strategy wants, and the hash of its weights;
    None and "" where it is none of its own.

    Raises UserError where it cannot be loaded.
    """
    kind = reference_of(config.model, config.peft, config.objective, config.strategy).kind
    if kind in ("adapters_off", "adapters", "precomputed"):
        return None, ""
    model = (
        config.model if kind == "model" else replace(config.model, path=config.objective.reference, init="pretrained")
    )
    try:
        loaded = load_model(model, Peft(), tokenizer, seed=config.trainer.seed)
    except UserError as error:
        if kind == "model":
            raise
        raise UserError([replace(one, where="objective.reference") for one in error.problems]) from error
    loaded.requires_grad_(False)
    content = weights_hash(loaded)
    spread(loaded, config, device)
    return loaded.eval(), content


def precompute(trainer: PackedDPOTrainer, config: RunConfig, whole: list[PairSteps], identity: str) -> list[np.ndarray]:
    """float32 [pairs, 2] of reference log-probabilities for each data set of `whole` (one pass over it in order).

    `trainer` has the model as it is before step 1, which is the reference; `identity` is all that what it says hangs on.
    """
    precision = (config.trainer.mixed_precision, config.model.dtype, trainer.ld_alpha)
    folder = cache_folder(config.data.cache_dir) / "reference"
    found = []
    for steps in whole:
        key = repr((steps.data.fingerprint, identity, precision)).encode()
        found.append(_of_data_set(trainer, steps, folder / hashlib.blake2b(key, digest_size=16).hexdigest()))
    return found


def _of_data_set(trainer: PackedDPOTrainer, steps: PairSteps, place: Path) -> np.ndarray:
    done = place.with_suffix(".npy")
    there = [done.exists()]  # for the first process: another run may be about to write it, and all have to do the same
    with waiting("rank 0 to look for the reference"):
        (known,) = broadcast_object_list(there)
    if not known:
        own = place.with_suffix(f".rank-{steps.rank}-of-{steps.world_size}.npy")
        values = _begun(place, len(steps.data))
        for step in range(len(steps)):
            trainer.clock.enter("proof", micro=step)
            _fill(trainer, steps, step, values)
            if step % _WRITE_EVERY == _WRITE_EVERY - 1:
                _write(own, values)
        _write(own, values)
        with waiting("all ranks to compute their part of the reference"):
            trainer.accelerator.wait_for_everyone()
        if trainer.accelerator.is_main_process:
            values = _begun(place, len(steps.data))
            if not (np.isnan(values).any() and done.exists()):  # another run was faster, and has taken the parts away
                _write(done, values)
            for part in place.parent.glob(f"{place.name}.rank-*"):
                part.unlink(missing_ok=True)
        with waiting("rank 0 to write the reference"):
            trainer.accelerator.wait_for_everyone()
    try:
        return np.load(done)
    except FileNotFoundError as error:
        what = f"the reference's log-probabilities, which the first process wrote to {done}, are not on this machine"
        fix = "Name a folder on a disk that all machines share, or take another objective.reference."
        raise UserError(what, where="data.cache_dir", fix=fix) from error


def _fill(trainer: PackedDPOTrainer, steps: PairSteps, step: int, values: np.ndarray) -> None:
    together = trainer.settings.strategy in SHARDED_WEIGHTS  # then as often as the others, whatever is known already
    for numbers in steps.schedule.micro_batches(step, steps.rank, steps.world_size):
        if together or (len(numbers) and np.isnan(values[numbers]).any()):
            chosen, rejected = trainer.policy_logps(steps.collate(numbers))
            if len(numbers):
                values[numbers] = torch.stack([chosen, rejected], dim=1).float().cpu().numpy()


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
