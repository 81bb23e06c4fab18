"""Rows under our column names: their format, unread columns, equal rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, cast

from packtrain.config import is_list
from packtrain.config.keys import suggest
from packtrain.config.schema import Format
from packtrain.data.sources.chunks import UNLISTED, BadRow, RawRow, is_object, wrong_type
from packtrain.errors import UserError
from packtrain.objectives.spec import OBJECTIVES, Examples, objective_for

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
"""Columns that rows of a format must have, by packtrain's names; `data.columns` maps these to the file's names."""
PROMPTS = ("conversations", "prompt", "messages", "instruction")
"""Columns that may hold the prompt of a preference; the first one present counts."""
MASKS = ("labels", "loss_mask", "completion_mask", "assistant_masks")
OPTIONAL = (
    *("tools", "system", "input", "history", "reasoning_content", "attention_mask", "chat_template_kwargs", "images"),
    *(*MASKS, "margin"),
)
LABEL = "label"
"""The column of packtrain kto that marks an answer as desirable or not."""
LABELS = {"true": True, "false": False, "1": True, "0": False}
"""Labels by their text in lower case, since csv has text."""
LABELLED: tuple[Format, ...] = ("messages", "prompt_completion", "sharegpt", "alpaca")
"""Formats whose rows may have a label."""
CHOSEN: dict[str, Format] = {"messages": "messages", "conversations": "sharegpt", "output": "alpaca"}
"""Columns that end in the chosen answer of ms-swift's pairs (without a column `chosen`), and the format to read them as."""
ALIASES: dict[str, tuple[str, ...]] = {
    "chosen": ("chosen_messages", "chosen_response"),
    "rejected": ("rejected_messages", "rejected_response"),
    "conversations": ("conversation",),
    "instruction": ("query", "question", "problem", "input", "prompt"),
    "input": ("context",),
    "output": ("response",),
    "system": ("system_prompt", "system_message"),
    "tools": ("functions", "available_tools", "available_functions", "tool_definitions", "function_definitions"),
    "reasoning_content": ("reasoning", "thinking"),
    "images": ("image",),
    LABEL: ("kto_tag",),
}
"""Other names of our columns, read without data.columns; from public data sets, ms-swift, axolotl and LLaMA-Factory."""
COLUMNS = {*PROMPTS, *OPTIONAL, LABEL, *chain.from_iterable((*REQUIRED.values(), *ALIASES.values()))}
"""All column names known without data.columns."""
HINTS = {
    "system": "sys|persona|role_?play",
    "tools": "tool|function|apis?(?![a-z])",
    "history": "histor|previous|past",
    "reasoning_content": "reason|think|thought|cot(?![a-z])|chain_of|rationale|analysis",
    "input": "input|context|passage|document|article|background|reference",
    "chat_template_kwargs": "kwargs|template",
    "loss_mask": "mask",
}
"""Our optional columns, with beginnings of words in column names that may mean them."""
NOTE, MARK = "note", "mark"
"""Kinds of unread columns: an id or another note on the row; a mark that was meant to choose trained text."""
WEIGHTS = ("weight", "loss_weight", "loss_scale", "loss_mask", "train", "training", "trainable", "loss")
MASKED = "masked"  # torchtune's key, true if the turn is not trained
_MARK = re.compile(r"(.+[].])?(do_?)?(not?_?|un)?(train|learn|loss|mask|weight|ignore|skip)(able|ed|ing|s)?(_\w+)?")
_NOTES = re.compile(
    r"(.*[^a-z])?u{0,2}(id|idx|index|key|hash|source|origin|dataset|split|domain|category|topic|tag|type|task|subject|difficulty|level|"
    r"lang|language|license|url|link|path|file|filename|model|version|author|date|time|timestamp|created_at|score|rating|rank|reward|"
    r"quality|margin|count|length|tokens|meta|metadata|info|stats|embedding)s?(_?\d+_*)?"
)
_JSON = json.JSONEncoder(sort_keys=True, default=lambda value: _spell(value))


@dataclass(frozen=True, slots=True)
class Row:
    """One row under our column names.

    `columns` maps our names to the file's. Relative paths of pictures start from `folder`, a path or URL. `roles` and `keys` (of messages) are named by the chat template. `system` is data.system.
    The template does not write the `name` of a speaker with one of the roles `nameless`.
    `asked` are the columns that readers asked for. `unknown` are keys of messages that neither a reader nor the template knows.
    """

    values: Mapping[str, object]
    columns: Mapping[str, str]
    roles: frozenset[str]
    keys: frozenset[str]
    system: str | None = None
    nameless: frozenset[str] = frozenset()
    folder: str = ""
    asked: set[str] = field(default_factory=set[str])
    unknown: set[str] = field(default_factory=set[str])

    def name(self, ours: str) -> str:
        """Return the file's name of our column."""
        return column_of(ours, self.values, self.columns)

    def has(self, ours: str) -> bool:
        """Return whether the row has the column."""
        return self.name(ours) in self.values

    def optional(self, ours: str) -> object:
        """Return the value, or None without one."""
        self.asked.add(ours)
        return self.values.get(self.name(ours))

    def unread(self) -> dict[str, str]:
        """Return unread columns with a value. Each has our column that would read it, "" for none, NOTE or MARK."""
        names = {self.name(ours): ours for ours in self.asked}
        absent = {ours for name, ours in names.items() if name not in self.values}
        read = names.keys() | read_marks(self.values, self.columns).keys()
        left = ((name, self.values[name]) for name in self.values.keys() - read)
        found = {name: _use_of(name, value, absent) for name, value in left if value not in (None, "", [], {})}
        marks = {name: MARK for name in self.unknown if _MARK.fullmatch(name.lower())}
        return found | {name: NOTE if _classify(name)[0] else "" for name in self.unknown} | marks

    def take(self, ours: str) -> object:
        """Return the value; raises BadRow without this column."""
        self.asked.add(ours)
        name = self.name(ours)
        if name not in self.values:
            columns = ", ".join(map(repr, self.values)) or "none"
            raise BadRow("missing column", f"no column {name!r}; found: {columns}", name)
        return self.values[name]

    def text(self, ours: str, *, may_be_empty: bool = False) -> str:
        """Return the value, which must be a string."""
        value = self.take(ours)
        if not isinstance(value, str):
            raise wrong_type("a string", value, self.name(ours))
        if not may_be_empty and not value.strip():
            raise BadRow("empty", "the text is empty", self.name(ours))
        return value


def read_marks(values: Mapping[str, object], columns: Mapping[str, str]) -> dict[str, bool]:
    """Return whether each mark of the row says that the row is trained.

    Marks are columns of WEIGHTS and MASKED that are 0 or 1. Columns with another use, the values of `columns`, are left out.
    """
    names = {*WEIGHTS, MASKED} - {*columns.values()}
    labels = {name: LABELS.get(str(values.get(name)).lower().removesuffix(".0")) for name in names}
    return {name: label ^ (name == MASKED) for name, label in labels.items() if label is not None}


def column_of(ours: str, names: Container[str], columns: Mapping[str, str]) -> str:
    """Return the name of our column in the file's `names`, or its expected name. `columns` maps our names to the file's."""
    name = columns.get(ours, ours)
    return name if name in names else next((other for other in ALIASES.get(name, ()) if other in names), name)


def is_answer_alone(names: Iterable[str], columns: Mapping[str, str]) -> bool:
    """Return whether only `output` has content. ms-swift takes it as the answer to an empty question."""
    ours = {column_of(name, {*names}, columns) for name in ("output", "system", "tools", LABEL, "rejected")}
    return all(name in ours or name.lower().endswith(("id", "idx", "index")) for name in names)


def fill_in_questions(rows: list[tuple[str, RawRow]], columns: Mapping[str, str]) -> list[tuple[str, RawRow]]:
    """Give rows without an `instruction` a null one, as in tables. Only if another row of the chunk has one."""

    def asks(row: RawRow) -> bool:
        return is_object(row) and column_of("instruction", row, columns) in row

    if not any(asks(row) for _, row in rows):
        return rows
    null = {columns.get("instruction", "instruction"): None}
    return [(where, null | row if is_object(row) and not asks(row) else row) for where, row in rows]


@lru_cache(4096)
def _classify(name: str) -> tuple[bool, tuple[str, ...]]:
    """Return whether the name means a NOTE, and our columns that it hints at."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removesuffix(UNLISTED)).lower()
    hinted = (ours for ours, hint in HINTS.items() if re.search(rf"(^|[^a-z])({hint})", plain))
    return _NOTES.fullmatch(plain) is not None, () if name.endswith(UNLISTED) else tuple(hinted)


def _use_of(name: str, value: object, absent: Container[str]) -> str:
    """Return our `absent` column for this one, "" for none, NOTE, or MARK."""
    is_note, hinted = _classify(name)
    if isinstance(value, (bool, int, float)) and not is_note and _MARK.fullmatch(name.lower()):
        return MARK if value in (0, 1) else ""
    if is_note or not isinstance(value, (str, list, dict)):
        return NOTE
    if not hinted and isinstance(value, str) and " " in value and not name.endswith(UNLISTED) and name not in COLUMNS:
        hinted = ("input",)
    return next((ours for ours in hinted if ours in absent), "")


def merge_uses(into: dict[str, str], more: Mapping[str, str]) -> None:
    """Add the results of `Row.unread` for other rows. A use counts more than none, and none more than NOTE."""
    worth = {NOTE: 0, "": 1}
    into.update({name: max(into.get(name, NOTE), use, key=lambda use: worth.get(use, 2)) for name, use in more.items()})


def name_unread(source: str, unread: Mapping[str, str]) -> list[str]:
    """Name the unread columns of a source: first the ones that may matter, then notes."""
    notes = sorted(name for name, use in unread.items() if use == NOTE)
    others = sorted((name, use) for name, use in unread.items() if use != NOTE)
    told = [
        f"{name} (trained all the same: write weight, 0 or 1)"
        if use == MARK
        else f"{name} (data.columns.{use}={name} reads it)"
        if use
        else name
        for name, use in others
    ]
    both = (("not read", told), ("not read, about the rows only", notes))
    return [f"{source}: {what}: {', '.join(names)}" for what, names in both if names]


def parse_json(text: str, reason: str, what: str, where: str) -> object:
    """Parse JSON text. If it is not JSON, raise BadRow with a message that begins with `what`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(reason, f"{what}: {error}", where) from None


def list_of(value: object, where: str) -> list[Any]:
    """Return a list, or the list in a JSON string. Csv and parquet files often hold nested columns as strings."""
    if isinstance(value, str):
        value = parse_json(value, "wrong type", "expected a list, found a string that is not JSON", where)
    if not is_list(value):
        raise wrong_type("a list", value, where)
    return value


def detect_format(
    first: list[str], names: list[str], wanted: str, columns: Mapping[str, str], where: str, objective: str
) -> Format:
    """Detect the format of a source. Raises UserError unless exactly one fits, and the objective allows it.

    `auto` uses the columns of the `first` row only, so that a stray row is a bad row; `names` are the columns of all rows seen. A format
    that fits by our own column names goes before one that fits by ALIASES.
    """
    label, single = column_of(LABEL, names, columns), [name for name in REQUIRED if name != "preference"]
    examples = OBJECTIVES[objective].examples
    allowed = {"documents": single, "answers": [*LABELLED, "preference"], "pairs": ["preference"]}[examples]

    def missing(format: str, names: list[str]) -> list[str]:
        needed = {need: column_of(need, names, columns) for need in REQUIRED[format]}
        lacking = {need: name for need, name in needed.items() if name not in names}
        if "instruction" in lacking and is_answer_alone(names, columns):
            del lacking["instruction"]
        if "chosen" in lacking and any(column_of(ours, names, columns) in names for ours in CHOSEN):
            del lacking["chosen"]
        return [*lacking.values()]

    def refuse(what: str, fix: str, code: str) -> UserError:
        return UserError(f"{what}; found: {', '.join(names)}", where=where, fix=fix, code=code)

    known = {*OPTIONAL, *PROMPTS, LABEL, *(name for needed in REQUIRED.values() for name in needed)}
    if unknown := sorted(set(columns) - known):
        fix = suggest(unknown[0], known, f"Ours, which come first, are {', '.join(sorted(known))}.")
        raise refuse(f"data.columns: packtrain has no column {unknown[0]!r}", fix, code="no-such-column")
    if absent := sorted(set(columns.values()) - set(names)):
        what = f"data.columns names the column {absent[0]!r}, which is not there"
        raise refuse(what, f"The columns are {', '.join(names)}.", code="column-missing")
    fits = [name for name in REQUIRED if not missing(name, first)] if wanted == "auto" else [wanted]
    is_labelled = examples == "answers" and column_of(LABEL, first, columns) in first
    if "preference" in fits and examples != "documents" and not is_labelled:
        fits = ["preference"]  # other columns may hold the prompt, or the chosen answer once more
    exact = [name for name in fits if all(columns.get(need, need) in first for need in REQUIRED[name])]
    fits = exact if len(exact) == 1 else fits
    absent = [ours for ours in ("chosen", "rejected") if column_of(ours, names, columns) not in names]
    near = {ours: name for ours in absent for name in names if name.lower().startswith(ours) and not _classify(name)[0]}
    pairs = " ".join(f"data.columns.{ours}={name}" for ours, name in near.items() if "preference" in allowed)
    if pairs and not set(fits) & set(allowed):
        what = (
            f"packtrain {objective} needs rows of {' or '.join(allowed)}, and no column is called {' or '.join(near)}"
        )
        raise refuse(what, f"If it is there under another name: {pairs}", code="pair-column-unnamed")
    if fits and not set(fits) & set(allowed):
        meant: Examples = "answers" if label in names and examples != "answers" else "documents"
        verb = objective_for("pairs" if "preference" in fits else meant).name
        what = f"these are rows of {' or '.join(fits)}, and packtrain {objective} needs rows of {' or '.join(allowed)}"
        raise refuse(what, f"Train on them with packtrain {verb}.", code="rows-of-other-verb")
    if len(fits) > 1:
        fix = f"Set data.format to {' or '.join(fits)}."
        raise refuse(f"the columns fit {' and '.join(fits)}", fix, code="two-formats-fit")
    lacking = missing(fits[0], names) if fits else []
    if lacking or not fits:
        what = f"data.format={fits[0]} needs the column {lacking[0]!r}" if fits else "the columns fit no known format"
        needs = "; ".join(f"{name} ({', '.join(REQUIRED[name])})" for name in fits or allowed)
        pair = "data.columns.prompt=question data.columns.chosen=better data.columns.rejected=worse"
        chat = "data.columns.instruction=question data.columns.output=answer for a chat, or "
        chat += "data.columns.prompt=question data.columns.completion=answer for plain text without the chat template"
        example = pair if allowed == ["preference"] else chat
        fix = f"Say which column is which, as in {example}. Formats with their columns: {needs}."
        raise refuse(what, fix, code="column-missing" if fits else "no-format-fits")
    if examples == "answers" and fits != ["preference"] and label not in names:
        other = objective_for("documents").name
        fix = f"Name it with data.columns.{LABEL}=COLUMN, or train on all answers with packtrain {other}."
        raise refuse(f"no column {label!r} says which answers are desirable", fix, code="no-label")
    return cast(Format, fits[0])


def hash_row(row: RawRow, format: Format, columns: Mapping[str, str]) -> int:
    """Return a 64-bit hash that equal rows share, independent of template, tokenizer and data.max_length.

    Only the columns that the format reads count (not an id, not a score). Copies of a conversation therefore have one hash and
    fall on the same side of a held-out split. The hash of an unreadable row is its error's hash.
    """
    if isinstance(row, BadRow):
        return hash_content([row.reason, row.what])
    read = (*REQUIRED[format], *(PROMPTS if format == "preference" else ()), *OPTIONAL)
    ours = {name: row.get(column_of(name, row, columns)) for name in read}
    return hash_content({name: value for name, value in ours.items() if value is not None})


def _spell(value: object) -> str:
    """Return a value without a form in JSON as text; bytes by their hash."""
    return hashlib.blake2b(value, digest_size=16).hexdigest() if isinstance(value, bytes) else str(value)


def hash_content(content: object) -> int:
    """Return a 64-bit hash of `content` as JSON."""
    return int.from_bytes(hashlib.blake2b(_JSON.encode(content).encode(), digest_size=8).digest(), "little")
