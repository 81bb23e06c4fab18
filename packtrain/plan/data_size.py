"""How much data a run has, as the last command that tokenised it counted: for plans, which tokenise nothing and import no torch.

`remember` writes a small note beside the cached tokens, named by a hash of all settings that change the counts and of the size
and time of the files; `recall` finds it. A hub data set or tokenizer counts as unchanged.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from packtrain.config.schema import Data, Model, sources
from packtrain.durable import write_text

_MOST_FILES = 10_000
_OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class DataSize:
    """Of the training set: `documents` (of dpo: pairs), their `tokens`, the `longest` (of dpo: answer with its prompt)."""

    documents: int
    tokens: int
    longest: int


def cache_path(configured: str | None) -> Path:
    """The folder of tokenised data: data.cache_dir, else $PACKTRAIN_CACHE, else ~/.cache/packtrain."""
    return Path(os.path.expanduser(configured or os.environ.get("PACKTRAIN_CACHE") or "~/.cache/packtrain"))


def remember(size: DataSize, model: Model, data: Data, kind: str, seed: int) -> None:
    """Keeps the size of the data of a run with these settings; does nothing where the folder cannot be written."""
    note = _note(model, data, kind, seed)
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, json.dumps(asdict(size)))


def recall(model: Model, data: Data, kind: str, seed: int) -> DataSize | None:
    """The size that was kept for these settings; None if there is none."""
    try:
        note = json.loads(_note(model, data, kind, seed).read_text())
        return DataSize(**{name: int(value) for name, value in note.items()})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _note(model: Model, data: Data, kind: str, seed: int) -> Path:
    held_out = data.eval if isinstance(data.eval, (int, float)) else None  # else the training set is all of data.train
    settings = asdict(replace(data, eval=held_out, cache_dir=None, shuffle=True))
    tokenizer = model.tokenizer or model.path or ""
    names = [item.path for item in sources(data.train)] + [data.chat_template or ""]
    stamps = []  # path, size and time of change of each file
    for name in filter(None, [*names, *(os.path.join(tokenizer, name) for name in _OF_TOKENIZER)]):
        path = os.path.expanduser(name)
        for item in sorted(glob.glob(path)) or [path]:
            for file in islice(sorted(Path(item).rglob("*")), _MOST_FILES) if os.path.isdir(item) else [Path(item)]:
                with suppress(OSError):
                    stamps.append((str(file), file.stat().st_size, file.stat().st_mtime_ns))
    parts = (settings, tokenizer, model.revision, kind, seed, stamps)
    return cache_path(data.cache_dir) / "sizes" / hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
