"""Rows as files, and what training sees of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from data_tokenizers import tokenizer_of

from packtrain.config.schema import Data
from packtrain.data.prepare import PreparedData, prepare

TOKENIZER = tokenizer_of("smollm")


def write(path: Path, *rows: Any) -> str:
    """JSON Lines; bytes are written as they are."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return str(path)


def ready(
    folder: Path, train: Any, kind: Any = "sft", tokenizer: Any = TOKENIZER, *, seed: int = 0, **keys: Any
) -> PreparedData:
    """Data with its cache in `folder`."""
    train = str(train) if isinstance(train, Path) else train
    return prepare(Data(**{"train": train, "cache_dir": str(folder / "cache"), **keys}), tokenizer, kind, seed=seed)


def texts(data: PreparedData, tokenizer: Any = TOKENIZER) -> list[str]:
    """The text of each document to train."""
    return [tokenizer.decode(data.train[at].input_ids) for at in range(len(data.train))]


def trained_runs(tokenizer: Any, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """The text of each run of trained tokens."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]]))).reshape(-1, 2)
    return [tokenizer.decode(ids[start:end]) for start, end in borders]
