"""The reference of dpo and kto: a separate model, or log-probabilities that were precomputed (plan/known_model.py decides).

Precomputed ones are kept beside the data cache, named by a hash of everything they depend on. Each process computes its share,
and rank 0 writes the file.
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

from packtrain.boundary import boundary
from packtrain.config.schema import Model, Peft
from packtrain.durable import aside, publish
from packtrain.errors import UserError
from packtrain.model.load import load_model
from packtrain.model.spread import Ranks, reading_mesh, spread
from packtrain.model.weights.hashes import weights_hash
from packtrain.monitor.heartbeat import waiting
from packtrain.plan.known_model import ReferenceChoice


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
    """The frozen reference model, spread by the strategy, and the hash of its weights; None and "" if it is no separate model.

    `named` is objective.reference; `model`, `seed` and `autocast` are those of the trained model.
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
    """float32 of this `shape`: log-probabilities of all examples, read from `place`.npy, or computed and written.

    `parts` of this process: the numbers of examples, and the micro-batch of which `logps` gives theirs.
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
            if batch.part == 0:  # of a row that ranks split, all have them
                values[numbers] = own
    with waiting("all ranks to compute their part of the reference"):
        reduced = cast(torch.Tensor, reduce(values, "sum")).cpu().numpy()
    if ranks.main:
        fix = "Free some space, or set data.cache_dir."
        with boundary("the reference's log-probabilities cannot be written", str(done.parent), fix):
            done.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(done.with_suffix(".lock")):  # another run may compute the same
                with aside(done).open("wb") as file:
                    np.save(file, reduced)
                publish(aside(done), done)
    return reduced


def _read(file: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """What an earlier run has computed; None if there is none, or the file is damaged."""
    with suppress(OSError, ValueError, EOFError):
        if (values := np.load(file)).shape == shape:
            return values
    return None


def computer(device: torch.device) -> str:
    """What rounds: the device's name and torch's version."""
    return f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type}, torch {torch.__version__}"


def cache_key(*depends_on: object) -> str:
    """The file name of precomputed log-probabilities: a hash of everything they depend on."""
    return hashlib.blake2b(repr(depends_on).encode(), digest_size=16).hexdigest()
