"""The files in the folder of a model, looked at before libraries read them, whose own words would be "header too large"."""

from __future__ import annotations

import json
from pathlib import Path

from packtrain.data.sources.regular import check_regular
from packtrain.errors import UserError

_READ = (".json", ".safetensors", ".bin", ".gguf", ".model", ".jinja", ".txt", ".py")
_OBJECTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "adapter_config.json")
_MOST_PARSED = 1 << 20
"""Bytes: a large tokenizer.json takes a fourth of a second to parse, and its library says where it is broken."""
_LFS = b"version https://git-lfs.github.com/"


def check_model_folder(folder: Path) -> None:
    """Raises UserError for what is no regular file, a pointer of Git LFS, or JSON of another shape; hub ids are no folders."""
    inside = folder.is_dir()
    for file in sorted(folder.iterdir()) if inside else [folder]:
        if (inside and file.suffix not in _READ) or not file.exists():
            continue
        check_regular(file)
        with file.open("rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                fix = f"Get the file itself: git lfs pull in {file.parent}, or hf download."
                raise UserError("it is a pointer of Git LFS, not the file", where=str(file), fix=fix)
        if file.name in _OBJECTS or file.name.endswith(".safetensors.index.json"):
            _check_object(file)


def _check_object(file: Path) -> None:
    if file.stat().st_size > _MOST_PARSED:
        return
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is not valid JSON: {error}", where=str(file), fix="Mend it, or get it anew.") from error
    if not isinstance(found, dict):
        shown = json.dumps(found)
        what = f"expected an object of settings, found {shown if len(shown) < 40 else shown[:40] + ' …'}"
        raise UserError(what, where=str(file), fix="Mend it, or get it anew.")
