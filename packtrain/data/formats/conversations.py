"""Parse rows with one answer: a conversation, a prompt with its completion, text, or tokens.

One function reads one format. A new format is one more entry of READERS, with its columns in columns.py. Shapes follow
TRL's dataset formats (https://huggingface.co/docs/trl/dataset_formats), ShareGPT, Stanford Alpaca and Salesforce's xLAM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from packtrain.config.schema import Format
from packtrain.data.formats.columns import LABEL, LABELS, MASKS, Row, is_answer_alone, list_of
from packtrain.data.formats.messages import (
    Messages,
    Tools,
    are_same_tools,
    read_calls,
    read_listed_tools,
    read_messages,
    read_system,
    read_tools,
    read_variables,
    refuse_closed_turn,
    with_system,
    with_thought,
)
from packtrain.data.sources.chunks import BadRow, JsonObject, wrong_type

MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Columns of media: we refuse rows that have them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a chat template. The answer starts at `answer_from`, or is the last turn.

    `tools_in_system`: the system prompt lists the row's tools, so `tools` is None.
    """

    messages: Messages
    tools: Tools | None = None
    variables: JsonObject = field(default_factory=dict)
    answer_from: int | None = None
    tools_in_system: bool = False

    @property
    def prompt(self) -> Messages:
        """Return the messages before the answer."""
        return self.messages[: self.answer_from]


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """Prompt and completion as plain text; running text is the completion of an empty prompt."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids int32[n] with a loss mask bool[n]. `mask` is None if the row has none."""

    input_ids: np.ndarray
    mask: np.ndarray | None


Example = Conversation | PromptCompletion | Tokens


def read_row(row: Row, format: Format) -> Example:
    """Read a row as an example; raises BadRow naming the field."""
    if format not in ("text", "tokenised"):
        refuse_media(row)
        refuse_unwanted(row)
    return READERS[format](row)


def refuse_media(row: Row) -> None:
    """Raise BadRow for a row with a picture, a film or a sound."""
    if given := next((name for name in MEDIA if row.values.get(name)), None):
        fix = "If the text makes sense without it, remove the column."
        raise BadRow("not text", "this row is not of text alone; packtrain trains on text", given, fix)


def refuse_unwanted(row: Row) -> None:
    """Raise BadRow for an answer that is marked as undesirable. Other labels than true and false stay unread."""
    value = row.values.get(row.name(LABEL))
    label = LABELS.get(str(value).lower().removesuffix(".0"))  # a table with gaps has 0.0 for 0
    if label is not None:
        row.optional(LABEL)
    if label is False:
        what = f"this answer is marked as undesirable ({value}), and packtrain sft would train on it"
        fix = "Train on them with packtrain kto, or remove the column to train on all answers."
        raise BadRow("unwanted answer", what, row.name(LABEL), fix)


def refuse_chat_columns(row: Row) -> None:
    """Raise BadRow for plain text with columns that only a chat template can render."""
    if given := next((ours for ours in ("system", "history", "tools") if row.optional(ours)), None):
        what = "the row is read as plain text, which has no place for this"
        fix = "Make a conversation of it (data.columns.instruction names the column of the prompt), or take this column out."
        raise BadRow("not plain text", what, row.name(given), fix)


def make_conversation(row: Row, messages: Messages, answer_from: int | None = None) -> Conversation:
    """Make the conversation of these messages, with the row's tools and template variables.

    A system prompt that lists the same tools stays unchanged. The template then gets none, or it would list them again.
    Raises BadRow if it lists other tools.
    """
    tools, variables = read_tools(row), read_variables(row)
    if not (tools and (listed := read_listed_tools(messages))):
        return Conversation(messages, tools, variables, answer_from)
    if not are_same_tools(tools, listed):
        fix = "Take one of the two lists out: the model would see both."
        raise BadRow("two lists of tools", "the system prompt lists other tools in <tools>", row.name("tools"), fix)
    return Conversation(messages, None, variables, answer_from, tools_in_system=True)


def _read_messages(row: Row, ours: str = "messages") -> Conversation:
    messages = with_thought(row, with_system(row, read_messages(row, ours)))
    return make_conversation(row, messages)


def _read_prompt_completion(row: Row) -> Conversation | PromptCompletion:
    if isinstance(row.take("prompt"), str):
        refuse_chat_columns(row)
        return PromptCompletion(row.text("prompt", may_be_empty=True), row.text("completion"))
    before = with_system(row, read_messages(row, "prompt"))
    after = with_thought(row, read_messages(row, "completion"))
    refuse_closed_turn(before, after, row.name("completion"))
    return make_conversation(row, [*before, *after], len(before))


def _read_alpaca(row: Row) -> Conversation:
    answer = {"role": "assistant", "content": row.text("output")}
    return make_conversation(row, with_thought(row, [*ask_by_columns(row), answer]))


def _read_xlam(row: Row) -> Conversation:
    asked = {"role": "user", "content": row.text("query")}
    calls = {"role": "assistant", "content": "", **read_calls(row.take("answers"), row.name("answers"))}
    return make_conversation(row, [*read_system(row), asked, calls])


def ask_by_columns(row: Row) -> Messages:
    """Build the messages before the answer from Alpaca's columns.
    `system`, pairs of `history`, then `instruction` with `input` on the next line."""
    messages, where = read_system(row), row.name("history")
    for index, pair in enumerate(list_of(row.optional("history") or [], where)):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(said, str) and said for said in pair):
            raise BadRow("wrong type", "expected [question, answer], two strings", f"{where}[{index}]")
        messages += [{"role": role, "content": said} for role, said in zip(("user", "assistant"), pair, strict=True)]
    extra, name = "", row.name("instruction")
    if row.name("input") != name and row.optional("input") is not None:
        extra = row.text("input", may_be_empty=True)
    if name not in row.values and is_answer_alone(row.values, row.columns):
        return [*messages, {"role": "user", "content": ""}]
    asked = (row.text("instruction", may_be_empty=bool(extra.strip())), extra)
    return [*messages, {"role": "user", "content": "\n".join(part for part in asked if part.strip())}]


def _read_tokens(row: Row) -> Tokens:
    ids = _read_integers(row, "input_ids")
    if not len(ids):
        raise BadRow("empty", "there are no tokens", row.name("input_ids"))
    if row.optional("attention_mask") is not None and not np.all(_read_integers(row, "attention_mask", len(ids))):
        raise BadRow("padded", "it has zeros", row.name("attention_mask"), "Give the tokens without padding.")
    given = [name for name in MASKS if row.optional(name) is not None]
    if len(given) > 1:
        what = f"both {given[0]} and {given[1]} say what is trained"
        raise BadRow("ambiguous", what, row.name(given[1]), "Keep one.")
    if not given:
        return Tokens(ids, None)
    values, name = _read_integers(row, given[0], len(ids)), row.name(given[0])
    mask = values != -100 if given[0] == "labels" else values.astype(bool)
    if len(strange := np.flatnonzero(values != np.where(mask, ids, -100) if given[0] == "labels" else values != mask)):
        at = strange[0]
        wanted = f"{ids[at]} (the token; labels are not shifted) or -100" if given[0] == "labels" else "0 or 1"
        raise BadRow("wrong mask", f"expected {wanted}, found {values[at]}", f"{name}[{at}]")
    return Tokens(ids, mask)


READERS: dict[str, Callable[[Row], Example]] = {
    "messages": _read_messages,
    "prompt_completion": _read_prompt_completion,
    "text": lambda row: PromptCompletion("", row.text("text")),
    "sharegpt": lambda row: _read_messages(row, "conversations"),
    "alpaca": _read_alpaca,
    "xlam": _read_xlam,
    "tokenised": _read_tokens,
}


def _read_integers(row: Row, ours: str, length: int | None = None) -> np.ndarray:
    where = row.name(ours)
    values = list_of(row.take(ours), where)
    for index, value in enumerate(values):
        is_flag = isinstance(value, bool) and ours in ("input_ids", "labels")
        if is_flag or not isinstance(value, int) or not -(2**31) <= value < 2**31:
            raise wrong_type("an integer of 32 bits", value, f"{where}[{index}]")
    if length is not None and len(values) != length:
        raise BadRow("lengths differ", f"{len(values)} values for {length} tokens", where)
    return np.asarray(values, dtype=np.int32)
