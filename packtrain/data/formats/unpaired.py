"""Parses rows of single answers, each of which is desirable or not: what packtrain kto trains on.

    prompt, completion, label              strings, or lists of messages (TRL's unpaired preference)
    messages or conversations, label       the last turn is the answer (LLaMA-Factory's, whose kto_tag is a label)
    instruction, input, output, label      Alpaca's columns

and rows of pairs (preferences.py), each split into its two answers: the chosen one is desirable, the rejected one is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from packtrain.config.schema import Format
from packtrain.data.formats.columns import OF_PAIRS, Row
from packtrain.data.formats.conversations import (
    READERS,
    Conversation,
    PromptCompletion,
    alpaca_as_text,
    refuse_media,
)
from packtrain.data.formats.messages import Messages
from packtrain.data.formats.preferences import ASKING, prompt_of, read_preference
from packtrain.data.sources.chunks import BadRow, wrong_type

_LABELS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True)
class UnpairedExample:
    """A prompt with its answer, and whether this is one to give."""

    answered: Conversation | PromptCompletion
    desirable: bool


def read_unpaired(row: Row, format: Format, *, as_text: bool = False) -> list[UnpairedExample]:
    """A row as one example, or a pair as two; raises BadRow naming the field. `as_text`: of Alpaca's columns as plain text."""
    if format in OF_PAIRS:
        pair = read_preference(row, format)
        return [UnpairedExample(pair.chosen, True), UnpairedExample(pair.rejected, False)]
    refuse_media(row)
    desirable = label_of(row)
    example = alpaca_as_text(row) if as_text else READERS[format](row)
    if isinstance(example, Conversation):
        return [UnpairedExample(_answered(example), desirable)]
    assert isinstance(example, PromptCompletion)
    return [UnpairedExample(example, desirable)]


def asked_in(row: Row, format: Format) -> str | Messages:
    """The prompt of a row, equal in all rows that ask the same; raises BadRow as `read_unpaired`."""
    if format in OF_PAIRS:
        return prompt_of(row, format)
    answered = read_unpaired(row, format)[0].answered
    return answered.messages[: answered.answer_from] if isinstance(answered, Conversation) else answered.prompt


def label_of(row: Row) -> bool:
    """The row's label: true or false, also as 1 or 0 and as text (csv has no other); raises BadRow for all else."""
    value = row.take("label")
    known = _LABELS.get(str(value).lower()) if isinstance(value, (bool, int, str)) else None
    if known is None:
        raise wrong_type("true (desirable) or false", value, row.name("label"))
    return known


def _answered(conversation: Conversation) -> Conversation:
    """The conversation with the place where its answer begins, by default the last turn."""
    messages = conversation.messages
    start = len(messages) - 1 if conversation.answer_from is None else conversation.answer_from
    if not 0 < start < len(messages):
        raise BadRow("no prompt", "there is nothing that is answered", f"messages[{max(start, 0)}]")
    if (role := messages[start]["role"]) in ASKING:
        fix = "The last turn must be what the assistant says; the label is about it."
        raise BadRow("not an answer", f"the answer is what the {role} says", f"messages[{start}]", fix)
    if any(message.get("weight") == 0 for message in messages[start:]):
        raise BadRow("weight", "the answer is not to be trained; take the row out instead", f"messages[{start}].weight")
    return replace(conversation, answer_from=start)
