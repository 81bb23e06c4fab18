"""The reference that DPO holds the model to: a model of its own, the model without its adapters, or what it said once.

Precomputed log-probabilities lie beside the data cache, named by all that they hang on: the pairs, the weights, the
precision, LD-DPO's alpha. Each process computes its share and writes it down as it goes, so that an interrupted run goes
on from there; afterwards no reference model is in memory.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl.trainer.utils import hash_module

from packtrain.config.schema import Peft, RunConfig
from packtrain.data.cache import cache_folder
from packtrain.errors import UserError
from packtrain.train.dpo import PackedDPOTrainer
from packtrain.train.loader import PairSteps
from packtrain.train.model import load_model

Kind = Literal["model", "adapters_off", "precomputed", "path"]
_WRITE_EVERY = 20  # steps between two writings of a process's share


def kind_of(config: RunConfig) -> Kind:
    """What objective.reference means in this run."""
    wanted = config.objective.reference
    if wanted == "auto":
        return "adapters_off" if config.peft.kind == "lora" else "model"
    return cast(Kind, wanted) if wanted in ("model", "adapters_off", "precomputed") else "path"


def load_reference(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> PreTrainedModel | None:
    """The model that is the reference, frozen, on `device`; None where it is none of its own.

    Raises UserError where it cannot be loaded.
    """
    kind = kind_of(config)
    if kind in ("adapters_off", "precomputed"):
        return None
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
    return cast(Any, loaded).to(device).eval()


def precompute(trainer: PackedDPOTrainer, config: RunConfig, whole: list[PairSteps]) -> list[np.ndarray]:
    """float32 [pairs, 2] of reference log-probabilities for each data set of `whole` (one pass over it in order).

    `trainer` has the model as it is before step 1, which is the reference.
    """
    weights = hash_module(cast(Any, trainer.accelerator.unwrap_model(trainer.model)))
    precision = (config.trainer.mixed_precision, config.model.dtype, trainer.ld_alpha)
    folder = cache_folder(config.data.cache_dir) / "reference"
    found = []
    for steps in whole:
        key = repr((steps.data.fingerprint, weights, precision)).encode()
        found.append(_of_data_set(trainer, steps, folder / hashlib.blake2b(key, digest_size=16).hexdigest()))
    return found


def _of_data_set(trainer: PackedDPOTrainer, steps: PairSteps, place: Path) -> np.ndarray:
    done = place.with_suffix(".npy")
    if not done.exists():
        own = place.with_suffix(f".rank-{steps.rank}-of-{steps.world_size}.npy")
        values = _begun(place, len(steps.data))
        for step in range(len(steps)):
            _fill(trainer, steps, step, values)
            if step % _WRITE_EVERY == _WRITE_EVERY - 1:
                _write(own, values)
        _write(own, values)
        trainer.accelerator.wait_for_everyone()
        if trainer.accelerator.is_main_process:
            _write(done, _begun(place, len(steps.data)))
            for part in place.parent.glob(f"{place.name}.rank-*.npy"):
                part.unlink(missing_ok=True)
        trainer.accelerator.wait_for_everyone()
    return np.load(done)


def _fill(trainer: PackedDPOTrainer, steps: PairSteps, step: int, values: np.ndarray) -> None:
    for numbers in steps.schedule.micro_batches(step, steps.rank, steps.world_size):
        if len(numbers) and np.isnan(values[numbers]).any():
            chosen, rejected = trainer.reference_logps(steps.collate(numbers))
            values[numbers] = torch.stack([chosen, rejected], dim=1).float().cpu().numpy()


def _begun(place: Path, pairs: int) -> np.ndarray:
    """What all processes have written down so far, NaN where nothing."""
    values = np.full((pairs, 2), np.nan, dtype=np.float32)
    for part in sorted(place.parent.glob(f"{place.name}.rank-*.npy")):
        known = np.load(part)
        values = np.where(np.isnan(values), known, values)
    return values


def _write(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    with aside.open("wb") as file:
        np.save(file, values)
    aside.replace(path)
