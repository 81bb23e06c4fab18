"""Rows under our column names: which columns a source has, and so which format, and what makes rows equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, cast

from packtrain.config.keys import suggest
from packtrain.config.objective import ObjectiveKind
from packtrain.config.schema import Format
from packtrain.data.sources.chunks import BadRow, RawRow, wrong_type
from packtrain.errors import UserError

REQUIRED: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "xlam": ("query", "answers", "tools"),
    "tokenised": ("input_ids",),
}
"""The columns that rows of a format must have, by packtrain's names; `data.columns` maps these to the file's."""
PROMPTS = ("prompt", "conversations", "instruction")
"""Columns that may hold the prompt of a preference."""
MASKS = ("labels", "loss_mask", "completion_mask", "assistant_masks")
OPTIONAL = ("tools", "system", "input", "history", "attention_mask", "chat_template_kwargs", *MASKS, "margin")
LABEL = "label"
"""The column of packtrain kto that says whether an answer is desirable."""
LABELLED: tuple[Format, ...] = ("messages", "prompt_completion", "sharegpt", "alpaca")
"""The formats whose rows may have a label."""
ALIASES = {"chosen": "chosen_messages", "rejected": "rejected_messages", "tools": "functions", LABEL: "kto_tag"}
ALIASES |= {"instruction": "query", "output": "response"}  # as ms-swift has them
"""Other names that our columns may have without data.columns."""
_JSON = json.JSONEncoder(sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class Row:
    """One row under our column names; `columns` maps ours to the file's, `roles` are those that the chat template names, `system` is
    data.system."""

    values: Mapping[str, Any]
    columns: Mapping[str, str]
    roles: frozenset[str]
    system: str | None = None

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


def parse_json(text: str, reason: str, what: str, where: str) -> Any:
    """The value of JSON text; raises BadRow, which begins with `what`, if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(reason, f"{what}: {error}", where) from None


def list_of(value: Any, where: str) -> list[Any]:
    """A list, or the list in a JSON string (csv and parquet files often hold nested columns that way)."""
    if isinstance(value, str):
        value = parse_json(value, "wrong type", "expected a list, found a string that is not JSON", where)
    if not isinstance(value, list):
        raise wrong_type("a list", value, where)
    return value


def detect_format(
    first: list[str], names: list[str], wanted: str, columns: Mapping[str, str], where: str, objective: ObjectiveKind
) -> Format:
    """The format of a source; raises UserError unless exactly one fits, and it is one for the objective.

    `auto` uses the columns of the `first` row only, so that a stray row is a bad row; `names` are those of all rows seen.
    """
    label, single = column_of(LABEL, names, columns), [name for name in REQUIRED if name != "preference"]
    allowed = {"sft": single, "kto": [*LABELLED, "preference"]}.get(objective, ["preference"])

    def missing(format: str, names: list[str]) -> list[str]:
        needed = [column_of(need, names, columns) for need in REQUIRED[format]]
        return [name for name in needed if name not in names]

    def refuse(what: str, fix: str) -> UserError:
        return UserError(f"{what}; found: {', '.join(names)}", where=where, fix=fix)

    known = {*OPTIONAL, *PROMPTS, LABEL, *(name for needed in REQUIRED.values() for name in needed)}
    if unknown := sorted(set(columns) - known):
        fix = suggest(unknown[0], known, f"Ours, which come first, are {', '.join(sorted(known))}.")
        raise refuse(f"data.columns: packtrain has no column {unknown[0]!r}", fix)
    if absent := sorted(set(columns.values()) - set(names)):
        what = f"data.columns names the column {absent[0]!r}, which is not there"
        raise refuse(what, f"The columns are {', '.join(names)}.")
    fits = [name for name in REQUIRED if not missing(name, first)] if wanted == "auto" else [wanted]
    is_labelled = objective == "kto" and column_of(LABEL, first, columns) in first
    if "preference" in fits and objective != "sft" and not is_labelled:
        fits = ["preference"]  # other columns may hold the prompt, or the chosen answer once more
    if fits and not set(fits) & set(allowed):
        verb = "dpo" if "preference" in fits else "kto" if label in names and objective != "kto" else "sft"
        what = f"these are rows of {' or '.join(fits)}, and packtrain {objective} needs rows of {' or '.join(allowed)}"
        raise refuse(what, f"Train on them with packtrain {verb}.")
    if len(fits) > 1:
        raise refuse(f"the columns fit {' and '.join(fits)}", f"Set data.format to {' or '.join(fits)}.")
    if not fits or (lacking := missing(fits[0], names)):
        what = f"data.format={fits[0]} needs the column {lacking[0]!r}" if fits else "the columns fit no known format"
        needs = "; ".join(f"{name} ({', '.join(REQUIRED[name])})" for name in fits or allowed)
        fix = "Say which column is which, as in data.columns.prompt=question data.columns.completion=answer. Formats with "
        fix += f"their columns: {needs}."
        raise refuse(what, fix)
    if objective == "kto" and fits != ["preference"] and label not in names:
        fix = f"Name it with data.columns.{LABEL}=COLUMN, or train on all answers with packtrain sft."
        raise refuse(f"no column {label!r} says which answers are desirable", fix)
    return cast(Format, fits[0])


def hash_row(row: RawRow, format: Format, columns: Mapping[str, str]) -> int:
    """A hash of 64 bits that is equal for equal rows, whatever template, tokenizer and data.max_length make of them.

    Only the columns that the format reads count (not an id, not a score), so copies of a conversation have one hash and
    fall on the same side of a held-out split. The hash of an unreadable row is that of its error.
    """
    if isinstance(row, BadRow):
        return hash_content([row.reason, row.what])
    read = (*REQUIRED[format], *(PROMPTS if format == "preference" else ()), *OPTIONAL)
    ours = {name: row.get(column_of(name, row, columns)) for name in read}
    return hash_content({name: value for name, value in ours.items() if value is not None})


def hash_content(content: object) -> int:
    """A 64-bit hash of `content` as JSON."""
    return int.from_bytes(hashlib.blake2b(_JSON.encode(content).encode(), digest_size=8).digest(), "little")
