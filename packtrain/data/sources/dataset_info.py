"""Data sets listed in LLaMA-Factory's `dataset_info.json`: their source, and rows under our column names.

An entry names a file, a folder or a hub data set. Its `columns`, `tags`, `formatting` and `ranking` describe the rows. `Translation`
renames the columns during parsing, so that all later code sees Alpaca's or ShareGPT's columns. LLaMA-Factory's `columns` and `tags` replace
all defaults, and ours do too: a column that an entry does not name is not read, and reported. A prompt without an answer is running text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packtrain.config.dataset_names import read_info
from packtrain.config.keys import suggest
from packtrain.config.schema import LISTED, DataSource
from packtrain.data.sources.chunks import UNLISTED, BadRow, RawRow
from packtrain.errors import UserError

_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_ROLES = {"observation": "tool", "function_call": "function_call", "human": "user", "gpt": "assistant"}
"""ShareGPT's speakers → roles of messages, if they differ."""
_OURS = {**_COLUMNS, "kto_tag": "label"}
_KNOWN = {
    *("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name"),
    *("formatting", "ranking", "subset", "split", "folder", "num_samples", "columns", "tags"),
}


@dataclass(frozen=True)
class Translation:
    """Column names of an entry: `columns`, `tags` and `ranking`. `form` is its formatting: alpaca, sharegpt or openai."""

    form: str
    ranking: bool
    columns: Mapping[str, str]
    tags: Mapping[str, str]

    def __call__(self, row: RawRow) -> RawRow:
        """Return the row under our names."""
        if isinstance(row, BadRow):
            return row
        chat, columns = self.form != "alpaca", self.columns
        read = ("messages",) if chat else ("prompt", "query", "response", "history")
        read += ("system", "tools", "images", "videos", "audios", "kto_tag")
        read += ("chosen", "rejected") if self.ranking else ()
        ours = {_OURS.get(name, name): row[columns[name]] for name in read if columns.get(name) in row}
        named = {columns.get(name) for name in read}
        ours |= {f"{name}{UNLISTED}": value for name, value in row.items() if name not in named}
        if not chat and not self.ranking and "response" not in columns:
            return {"text": ours.pop("instruction", None), **ours}
        if not chat:
            return ours if "prompt" in columns else {"instruction": "", **ours}
        if self.form == "openai":
            ours["messages"] = ours.pop("conversations", None)
        for name in ("conversations", "messages", "chosen", "rejected"):
            if isinstance(turns := ours.get(name), list):
                ours[name] = [self._turn(turn) for turn in turns]
            elif isinstance(turns, dict):
                ours[name] = self._turn(turns)
        return ours

    def _turn(self, turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        role_tag, content_tag = self.tags.get("role_tag", "from"), self.tags.get("content_tag", "value")
        spoken = {self.tags[name]: word for name, word in _TAGS.items() if name in self.tags}
        role: Any = turn.get(str(role_tag))
        role = spoken.get(role, role) if isinstance(role, str) else role
        if self.form != "openai":
            return {"from": role, "value": turn.get(content_tag)}
        rest = {name: value for name, value in turn.items() if name not in (role_tag, content_tag)}
        return {**rest, "role": _ROLES.get(role, role), "content": turn.get(content_tag)}


def look_up(source: DataSource, where: str) -> tuple[DataSource, Translation, int | None]:
    """Return the source of an entry `lf:FILE#NAME`, its Translation, and its num_samples or None.

    Raises UserError for a missing entry, or one that packtrain cannot read. num_samples counts documents in an epoch.
    """
    path, _, name = source.path.removeprefix(LISTED).rpartition("#")
    entries = read_info(Path(path))
    if (entry := entries.get(name)) is None:
        raise UserError(f"{path} has no data set {name!r}", where=where, fix=suggest(name, entries, "", 3))
    place, form = f"{path}, {name}", entry.get("formatting", "alpaca")
    if unknown := sorted({*entry} - _KNOWN):
        raise UserError(f"{unknown[0]!r} is no key of an entry", where=place, fix=suggest(unknown[0], _KNOWN))
    if form not in ("alpaca", "sharegpt", "openai"):
        raise UserError(f"formatting is {form!r}", where=place, fix="It is alpaca, sharegpt or openai.")
    if "folder" in entry:
        fix = "Name its files in data.train, as hf://datasets/OWNER/NAME/FOLDER/* with data.streaming=true."
        raise UserError("a folder of a hub data set is not read by its name", where=place, fix=fix)
    found = entry.get("hf_hub_url") or entry.get("cloud_file_name")
    if found is None and "file_name" in entry and not {"ms_hub_url", "om_hub_url", "script_url"} & {*entry}:
        found = str(Path(path).parent / entry["file_name"])
    if found is None:
        what = "it is on a hub that packtrain does not read, or made by a script"
        raise UserError(what, where=place, fix="Give data.train its files.")
    columns, tags = entry.get("columns", _COLUMNS), entry.get("tags", _TAGS)
    translation = Translation(form, bool(entry.get("ranking")), columns, tags)
    split = str(entry.get("split", "train")) if "hf_hub_url" in entry else "train"
    plain = replace(source, path=str(found), subset=entry.get("subset"), split=split)
    return plain, translation, entry.get("num_samples")
