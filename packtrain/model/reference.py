"""The reference of dpo and kto: a separate model, or precomputed log-probabilities.

plan/known_model.py decides which. Precomputed ones are kept beside the data cache, named by a hash of everything they depend on. Each process
computes its share, and rank 0 writes the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, reduce
from filelock import FileLock
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.config.schema import Model, Peft
from packtrain.errors import UserError, boundary
from packtrain.model.load import load_model
from packtrain.model.spread import Ranks, reading_mesh, spread
from packtrain.model.weights import weights_hash
from packtrain.monitor.heartbeat import waiting
from packtrain.plan.known_model import ReferenceChoice
from packtrain.system import aside, publish


def load_reference(
    reference: ReferenceChoice,
    named: str,
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    *,
    seed: int,
    autocast: torch.dtype | None = None,
) -> tuple[PreTrainedModel | None, str]:
    """Load the frozen reference model, sharded by the strategy. Returns it and the hash of its weights; None and "" if there is none.

    `named` is objective.reference; `model`, `seed` and `autocast` belong to the trained model.
    """
    if reference.kind not in ("model", "path"):
        return None, ""
    source = model if reference.kind == "model" else replace(model, path=named, init="pretrained", experts="auto")
    try:
        loaded = load_model(source, Peft(), tokenizer, seed=seed, mesh=reading_mesh(ranks))
    except UserError as error:
        if reference.kind == "model":
            raise
        raise UserError([replace(problem, where="objective.reference") for problem in error.problems]) from error
    loaded.requires_grad_(False)
    content = weights_hash(loaded)
    spread(loaded, ranks, autocast)
    return loaded.eval(), content


def precompute(
    place: Path,
    shape: tuple[int, ...],
    parts: Iterable[tuple[np.ndarray, Any]],
    ranks: Ranks,
    logps: Callable[[Any], torch.Tensor],
) -> np.ndarray:
    """Return the log-probabilities of all examples, float32 of this `shape`. They are read from `place`.npy, or computed and written there.

    `parts` of this process: the numbers of examples, and the micro-batch that `logps` reads.
    """
    done = place.with_suffix(".npy")
    with waiting("rank 0 to read the reference"):
        (known,) = broadcast_object_list([_read(done, shape) if ranks.main else None])
    if known is not None:
        return known
    values = torch.zeros(shape, device=ranks.device)
    for numbers, batch in parts:
        if len(numbers) or ranks.sharded:  # with sharded weights every rank makes the same number of calls
            own = logps(batch).float()[: len(numbers)]
            if batch.part == 0:  # all ranks have the values of a row that they split
                values[numbers] = own
    with waiting("all ranks to compute their part of the reference"):
        reduced = cast(torch.Tensor, reduce(values, "sum")).cpu().numpy()
    if ranks.main:
        what, fix = "the reference's log-probabilities cannot be written", "Free some space, or set data.cache_dir."
        with boundary(what, str(done.parent), fix, code="reference-unwritable"):
            done.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(done.with_suffix(".lock")):  # another run may compute the same
                with aside(done).open("wb") as file:
                    np.save(file, reduced)
                publish(aside(done), done)
    return reduced


def _read(file: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """Read the values of an earlier run. None if there are none, or the file is damaged."""
    with suppress(OSError, ValueError, EOFError):
        if (values := np.load(file)).shape == shape:
            return values
    return None


def computer(device: torch.device) -> str:
    """Return the device's name and torch's version: rounding depends on both."""
    return f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type}, torch {torch.__version__}"


def cache_key(*depends_on: object) -> str:
    """Return the file name of precomputed log-probabilities: a hash of everything they depend on."""
    return hashlib.blake2b(repr(depends_on).encode(), digest_size=16).hexdigest()
