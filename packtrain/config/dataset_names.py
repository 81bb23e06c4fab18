"""Lookup of LLaMA-Factory's data set names: `lf:alpaca_en_demo` → `lf:data/dataset_info.json#alpaca_en_demo`.

The search for dataset_info.json begins beside the config and below its folder; then it looks where the command runs. LLaMA-Factory's own
configs are in examples/ and its file in data/, and its commands run in the folder above both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain.config import is_list, is_mapping
from packtrain.config.keys import suggest
from packtrain.config.schema import LISTED, Data, DataSource
from packtrain.errors import UserError

FILE = "dataset_info.json"
_PLACES = (FILE, f"data/{FILE}", f"*/{FILE}", f"*/*/{FILE}")


def name_files(data: Data, folders: Sequence[Path]) -> Data:
    """Add the file to each name without one. Raises UserError for a name that no file has, or several have."""

    def named(value: object, key: str) -> Any:
        if is_list(value):
            return [named(item, key) for item in value]
        if is_mapping(value):
            return {name: named(item, f"{key}.{name}") for name, item in value.items()}
        if isinstance(value, DataSource):
            return replace(value, path=named(value.path, key))
        if not isinstance(value, str) or not value.startswith(LISTED) or "#" in value:
            return value
        return f"{LISTED}{_file_of(value.removeprefix(LISTED), folders, key)}#{value.removeprefix(LISTED)}"

    return replace(data, train=named(data.train, "data.train"), eval=named(data.eval, "data.eval"))


def read_info(file: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a dataset_info.json by name. Raises UserError if it is unreadable or not LLaMA-Factory's."""
    try:
        entries = json.loads(file.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = "Write lf:NAME, or lf:FOLDER/dataset_info.json#NAME."
        what = f"cannot read the list of data sets: {error}"
        raise UserError(what, where=str(file), fix=fix, code="unreadable-data-set-list") from error
    if not is_mapping(entries) or not all(map(is_mapping, entries.values())):
        what = "this is no list of data sets as LLaMA-Factory has it, an object for each name"
        raise UserError(what, where=str(file), fix="Name another file.", code="not-a-data-set-list")
    return dict(entries)


def _files(folder: Path) -> list[Path]:
    """Return the lists nearest to `folder`. A list beside it comes before lists in folders below."""
    for pattern in _PLACES:
        if files := sorted(folder.glob(pattern)):
            return files
    return []


def _file_of(name: str, folders: Sequence[Path], key: str) -> Path:
    files = [file for folder in folders for file in _files(folder)]
    lists: dict[Path, dict[str, Path]] = {}
    for file in files:
        with suppress(UserError):  # `datasets` saves a file of this name beside its own
            lists.setdefault(file.resolve(), {}).update(dict.fromkeys(read_info(file), file))
    having = [entries[name] for entries in lists.values() if name in entries]
    if len(having) == 1:
        return having[0]
    fix = f"Write {LISTED}FOLDER/{FILE}#{name}."
    if having:
        what = f"{' and '.join(map(str, having))} both have {name!r}"
        raise UserError(what, where=key, fix=fix, code="name-in-two-lists")
    if not lists:
        what = f"no {FILE} is beside this config or below its folder"
        raise UserError(what, where=key, fix=fix, code="no-data-set-list")
    known = [entry for entries in lists.values() for entry in entries]
    what = f"{' and '.join(str(file) for file in dict.fromkeys(files))} has no data set {name!r}"
    fix = suggest(name, known, f"It has {', '.join(known[:8])} …", 3)
    raise UserError(what, where=key, fix=fix, code="no-such-data-set")
