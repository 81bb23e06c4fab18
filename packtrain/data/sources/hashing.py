"""Hashes of file contents, remembered by (path, size, time of last change) so that a second start reads nothing."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

SETTLED_S = 2.0
"""A file changed this recently might change again within the file system's clock tick: its hash is not remembered."""


def hash_bytes(path: Path) -> str:
    """Hash of the file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def hash_file(path: Path, memory: Path) -> str:
    """Hash of the file's bytes; `memory` is the folder where hashes are remembered."""
    stat = path.stat()
    key = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    note = memory / f"{hashlib.blake2b(key[0].encode(), digest_size=16).hexdigest()}.json"
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["key"] == key:
            return known["hash"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not remembered, or the note is damaged: hash anew
    digest = hash_bytes(path)
    if time.time() - stat.st_mtime > SETTLED_S:
        with suppress(OSError):  # a cache that is read only, or full, remembers nothing
            memory.mkdir(parents=True, exist_ok=True)
            aside = note.with_suffix(f".{os.getpid()}")
            aside.write_text(json.dumps({"key": key, "hash": digest}), encoding="utf-8")
            aside.replace(note)
    return digest
