"""Rows under our column names: which columns a source has, and so which format, and what makes rows equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from packtrain.config.keys import suggest
from packtrain.config.objective import TRAITS, ObjectiveKind
from packtrain.config.schema import Format
from packtrain.data.sources.chunks import BadRow, RawRow, wrong_type
from packtrain.errors import UserError

REQUIRED: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
    "ranked": ("answers",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "xlam": ("query", "answers", "tools"),
    "tokenised": ("input_ids",),
}
"""The columns that rows of a format must have, by packtrain's names; `data.columns` maps these to the file's."""
PROMPTS = ("prompt", "conversations", "instruction")
"""Columns that may hold the prompt of a preference."""
READ_TOO = {"preference": (*PROMPTS, "margin"), "ranked": (*PROMPTS, "scores", "ranks", "margin")}
"""Columns beside the required ones and OPTIONAL that only this format reads."""
MASKS = ("labels", "loss_mask", "completion_mask", "assistant_masks")
OPTIONAL = ("tools", "system", "input", "history", "attention_mask", "chat_template_kwargs", *MASKS)
LABEL = "label"
"""The column of packtrain kto that says whether an answer is desirable."""
LABELLED: tuple[Format, ...] = ("messages", "prompt_completion", "sharegpt", "alpaca")
"""The formats that it may be beside."""
ALIASES = {"chosen": "chosen_messages", "rejected": "rejected_messages", "tools": "functions", LABEL: "kto_tag"}
"""Other names that our columns may have without data.columns."""
LISTS = ("answers", "responses", "completions", "candidates")
"""Columns that hold all answers to a prompt."""
PAIR_FORMATS = ("preference", "ranked")
_JSON = json.JSONEncoder(sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class Row:
    """One row under our column names; `columns` maps ours to the file's, `named` are roles of the chat template."""

    values: Mapping[str, Any]
    columns: Mapping[str, str]
    named: frozenset[str]

    def name(self, ours: str) -> str:
        """The file's name of our column."""
        return column_of(ours, self.values, self.columns)

    def has(self, ours: str) -> bool:
        """Whether the row has the column."""
        return self.name(ours) in self.values

    def optional(self, ours: str) -> Any:
        """The value, None where there is none."""
        return self.values.get(self.name(ours))

    def take(self, ours: str) -> Any:
        """The value; raises BadRow where there is no such column."""
        name = self.name(ours)
        if name not in self.values:
            columns = ", ".join(map(repr, self.values)) or "none"
            raise BadRow("missing column", f"no column {name!r}; found: {columns}", name)
        return self.values[name]

    def text(self, ours: str, *, may_be_empty: bool = False) -> str:
        """The value, which must be a string."""
        value = self.take(ours)
        if not isinstance(value, str):
            raise wrong_type("a string", value, self.name(ours))
        if not may_be_empty and not value.strip():
            raise BadRow("empty", "the text is empty", self.name(ours))
        return value


def column_of(ours: str, names: Container[str], columns: Mapping[str, str]) -> str:
    """Which of the file's `names` our column has, or would have; `columns` maps ours to the file's."""
    name = columns.get(ours, ours)
    return ALIASES[name] if name not in names and ALIASES.get(name, name) in names else name


def list_of(value: Any, where: str) -> list[Any]:
    """A list, or the list in a JSON string (csv and parquet files often hold nested columns that way)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRow("wrong type", f"expected a list, found a string that is not JSON: {error}", where) from None
    if not isinstance(value, list):
        raise wrong_type("a list", value, where)
    return value


def name_list_column(names: Sequence[str], columns: Mapping[str, str]) -> str | None:
    """Which of the columns `names` holds ranked answers; `columns` maps our name to the file's."""
    return next((name for name in (columns.get("answers"), *LISTS) if name in names), None)


def detect_format(
    first: list[str], names: list[str], wanted: str, columns: Mapping[str, str], where: str, objective: ObjectiveKind
) -> Format:
    """The format of a source; raises UserError unless exactly one fits, and it is one for the objective.

    `auto` uses the columns of the `first` row only, so that a stray row is a bad row; `names` are those of all rows seen.
    """
    columns_there, pairs = f"found: {', '.join(names)}", TRAITS[objective].pairs
    shown = PAIR_FORMATS if pairs else [name for name in REQUIRED if name not in PAIR_FORMATS]
    needs = "; ".join(f"{name}: {', '.join(REQUIRED[name])}" for name in shown)
    fix = f"Rename with data.columns.OURS=THEIRS, or set data.format. Needed are {needs}."
    label = column_of(LABEL, names, columns)

    def refuse(what: str, fix: str) -> UserError:
        return UserError(f"{what}; {columns_there}", where=where, fix=fix)

    known = {*OPTIONAL, LABEL, *(name for named in (REQUIRED, READ_TOO) for some in named.values() for name in some)}
    if unknown := sorted(set(columns) - known):
        fix = suggest(unknown[0], known, f"Ours, which come first, are {', '.join(sorted(known))}.")
        raise refuse(f"data.columns: packtrain has no column {unknown[0]!r}", fix)
    if absent := sorted(set(columns.values()) - set(names)):
        raise refuse(f"data.columns names the column {absent[0]!r}, which is not there", "")
    fits = _find_fitting(first, columns, objective) if wanted == "auto" else [wanted]
    if pairs and not set(fits) & set(PAIR_FORMATS):
        what = f"these are {' or '.join(fits)}" if fits else "the columns are not those of preference pairs"
        raise refuse(what, f"{fix} Or train on them with packtrain {'kto' if label in names else 'sft'}.")
    if len(fits) != 1:
        what = f"the columns fit {' and '.join(fits) or 'no known format'}"
        raise refuse(what, f"Set data.format to {' or '.join(fits)}." if fits else fix)
    format = fits[0]
    if format in PAIR_FORMATS and not pairs and objective != "kto":
        raise refuse("these are preference pairs", "Train on them with packtrain dpo.")
    if objective == "kto" and format not in (*LABELLED, *PAIR_FORMATS):
        answers = f"Formats with answers are {', '.join(LABELLED)}, and pairs: {', '.join(PAIR_FORMATS)}."
        raise refuse(f"rows of {format} have no answer that could be good or bad", answers)
    if objective == "kto" and format not in PAIR_FORMATS and label not in names:
        add = f"Add it (true or false), name it with data.columns.{LABEL}=THEIRS, or train on all answers with packtrain sft."
        raise refuse(f"no column {label!r} says which answers are desirable", add)
    if missing := _missing(format, names, columns):
        raise refuse(f"data.format={format} needs the column {missing[0]!r}", fix)
    return cast(Format, format)


def _find_fitting(first: list[str], columns: Mapping[str, str], objective: ObjectiveKind) -> list[str]:
    """The formats whose required columns are all present. Where pairs are trained, they win over every other format, then ranked lists."""
    fits = [name for name in REQUIRED if name != "ranked" and not _missing(name, first, columns)]
    takes_pairs = TRAITS[objective].pairs
    if objective == "kto":  # a pair is two answers with labels, where a row has none of its own
        takes_pairs = column_of(LABEL, first, columns) not in first
    if takes_pairs and "preference" in fits:
        return ["preference"]  # other columns may hold the prompt, or the chosen answer once more
    # only pairs are ranked lists: many other data sets have a column `answers` too
    return ["ranked"] if takes_pairs and not _missing("ranked", first, columns) else fits


def _missing(format: str, names: list[str], columns: Mapping[str, str]) -> list[str]:
    """The columns that rows of the format need and that are not there, by the file's names."""
    if format == "ranked":
        return [] if name_list_column(names, columns) else [columns.get("answers", " or ".join(LISTS))]
    needed = [column_of(need, names, columns) for need in REQUIRED[format]]
    return [name for name in needed if name not in names]


def hash_row(row: RawRow, format: Format, columns: Mapping[str, str]) -> int:
    """A hash of 64 bits that is equal for equal rows, whatever template, tokenizer and data.max_length make of them.

    Only the columns that the format reads count (not an id, not a score), so copies of a conversation have one hash and
    fall on the same side of a held-out split. The hash of an unreadable row is that of its error.
    """
    if isinstance(row, BadRow):
        return hash_content([row.reason, row.what])
    read = (*REQUIRED[format], *READ_TOO.get(format, ()), *OPTIONAL)
    ours = {name: row.get(column_of(name, row, columns)) for name in read}
    return hash_content({name: value for name, value in ours.items() if value is not None})


def hash_content(content: object) -> int:
    """A 64-bit hash of `content` as JSON."""
    return int.from_bytes(hashlib.blake2b(_JSON.encode(content).encode(), digest_size=8).digest(), "little")
