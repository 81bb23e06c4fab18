"""Parses rows of preference pairs, and of single answers that are desirable or not.

A pair becomes two examples that begin with the same prompt. These forms are known, as in TRL
(https://huggingface.co/docs/trl/dataset_formats#preference) and LLaMA-Factory:

    prompt, chosen, rejected          strings, lists of messages, or a string and two conversations
    chosen, rejected                  the prompt is what both begin with: messages, or the characters of two strings
    conversations, chosen, rejected   ShareGPT's turns, then one turn for each answer
    instruction, chosen, rejected     the user's request, with `input`, `history` and `system` (Alpaca's columns)

and beside messages `tools`, `system` and chat_template_kwargs. Rows with a prompt in a column of another name are refused: the
words that both answers start with would be taken for it. Single answers with a label (packtrain kto) are rows
of prompt and completion, of messages whose last turn is the answer, or of Alpaca's columns; pairs are split into their two answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from packtrain.config.schema import Format
from packtrain.data.formats.columns import Row
from packtrain.data.formats.conversations import (
    READERS,
    Conversation,
    PromptCompletion,
    ask_by_columns,
    refuse_chat_columns,
    refuse_media,
)
from packtrain.data.formats.messages import (
    Messages,
    read_message,
    read_messages,
    read_tools,
    read_variables,
    refuse_closed_turn,
    with_system,
)
from packtrain.data.sources.chunks import BadRow, wrong_type

ASKED = ("question", "query", "problem")
"""Columns that hold the prompt in many data sets."""
ASKING = ("system", "developer", "user")
"""Roles that an answer cannot begin with."""
_LABELS = {"true": True, "false": False, "1": True, "0": False}
Answered = Conversation | PromptCompletion
"""A prompt with an answer."""


def read_preference(row: Row) -> tuple[Answered, Answered]:
    """The prompt with the better and with the worse answer; raises BadRow naming the field."""
    refuse_media(row)
    parts = [row.take("chosen"), row.take("rejected"), *([row.take("prompt")] if row.has("prompt") else [])]
    turns = row.has("conversations") or _has_instruction(row)
    plain = not turns and all(isinstance(part, str) for part in parts)
    return _pair_strings(row) if plain else _pair_messages(row)


def read_margin(row: Row) -> float:
    """By how much the row says that the chosen answer is better, 0 where it does not; raises BadRow where that is no number."""
    value = row.optional("margin")
    if value is None or value == "":  # as csv has it
        return 0.0
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= 3.4e38:  # NaN fails too
        raise wrong_type("a number that float32 holds", value, row.name("margin"))
    return number


def read_unpaired(row: Row, format: Format) -> tuple[list[Answered], bool]:
    """A row as one answer, or a pair as two, and whether the first is desirable; raises BadRow naming the field."""
    if format == "preference":
        return [*read_preference(row)], True
    refuse_media(row)
    value = row.take("label")  # as text in csv
    label = _LABELS.get(str(value).lower()) if isinstance(value, (bool, int, str)) else None
    if label is None:
        raise wrong_type("true (desirable) or false", value, row.name("label"))
    example = READERS[format](row)
    if isinstance(example, Conversation):
        example = _find_answer(example)
    assert isinstance(example, (Conversation, PromptCompletion))
    return [example], label


def _find_answer(conversation: Conversation) -> Conversation:
    """The conversation with the place where its answer begins, by default the last turn."""
    messages = conversation.messages
    start = len(messages) - 1 if conversation.answer_from is None else conversation.answer_from
    if not 0 < start < len(messages):
        raise BadRow("no prompt", "there is no message before the answer", f"messages[{max(start, 0)}]")
    if (role := messages[start]["role"]) in ASKING:
        fix = "The last turn must be what the assistant says; the label is about it."
        raise BadRow("not an answer", f"the answer is what the {role} says", f"messages[{start}]", fix)
    if any(message.get("weight") == 0 for message in messages[start:]):
        raise BadRow("weight", "the answer is not to be trained; take the row out instead", f"messages[{start}].weight")
    return replace(conversation, answer_from=start)


def common_prompt(row: Row, answered: Answered) -> str | Messages:
    """The prompt of a row that became `answered`, equal in all rows that ask the same.

    A prompt that is the common beginning of two strings loses its last line, where the answers' common words may be.
    """
    if isinstance(answered, Conversation) or row.has("prompt"):
        return answered.prompt
    before, line, _ = answered.prompt.rpartition("\n")
    return before if line else answered.prompt


def _pair_strings(row: Row) -> tuple[Answered, Answered]:
    chosen, rejected = row.text("chosen"), row.text("rejected")
    refuse_chat_columns(row)
    if row.has("prompt"):
        prompt = row.text("prompt", may_be_empty=True)
        return PromptCompletion(prompt, chosen), PromptCompletion(prompt, rejected)
    if asked := next((name for name in ASKED if name in row.values), ""):
        what = f"there is no prompt; the column {asked!r} looks like one"
        raise BadRow("no prompt", what, asked, f"Set data.columns.prompt={asked}, or rename the column.")
    border = _find_border(chosen, rejected)
    if border and chosen[border] != rejected[border] and chosen[border - 1] == " ":
        border -= 1  # most tokenizers keep a space with the word behind it
    if not chosen[:border].strip():
        what = f"there is no prompt: no column {row.name('prompt')!r}, and the answers begin differently"
        raise BadRow("no common prompt", what, row.name("chosen"), "Name the prompt's column with data.columns.")
    prompt = chosen[:border]
    return PromptCompletion(prompt, chosen[border:]), PromptCompletion(prompt, rejected[border:])


def _pair_messages(row: Row) -> tuple[Answered, Answered]:
    chosen, rejected = _read_answer(row, "chosen"), _read_answer(row, "rejected")
    prompt = _read_prompt(row)
    whole = chosen[0]["role"] in ASKING and rejected[0]["role"] in ASKING
    if prompt is None or (whole and _repeat_prompt(row, prompt, chosen, rejected)):
        border = _find_border(chosen, rejected)
        prompt, chosen, rejected = chosen[:border], chosen[border:], rejected[border:]
    else:
        refuse_closed_turn(prompt, chosen, row.name("chosen"))
    if not prompt:
        what = "there is no prompt: chosen and rejected begin with different messages"
        raise BadRow("no common prompt", what, row.name("chosen"), "Put the prompt into a column of its own.")
    if not _has_instruction(row):  # which has it already
        prompt = with_system(row, prompt)
    for ours, answer in (("chosen", chosen), ("rejected", rejected)):
        if answer[0]["role"] in ASKING:
            what = f"the answer begins with what the {answer[0]['role']} says"
            raise BadRow("not an answer", what, row.name(ours), "Both answers must follow the same prompt.")
        if any(message.get("weight") == 0 for message in answer):
            raise BadRow("weight", "a turn of the answer is not to be trained; dpo trains all of it", row.name(ours))
    tools, variables = read_tools(row), read_variables(row)
    first, second = (Conversation([*prompt, *side], tools, variables, len(prompt)) for side in (chosen, rejected))
    return first, second


def _has_instruction(row: Row) -> bool:
    """Whether the prompt is Alpaca's."""
    same = row.name("instruction") == row.name("prompt")
    return row.has("instruction") and (same or not row.has("prompt")) and not row.has("conversations")


def _read_prompt(row: Row) -> Messages | None:
    """The messages before the answers; None if only the answers contain them."""
    if _has_instruction(row):
        return ask_by_columns(row)
    if row.has("conversations"):
        return read_messages(row, "conversations")
    if not row.has("prompt"):
        return None
    if isinstance(row.take("prompt"), str):
        return [{"role": "user", "content": row.text("prompt")}]
    return read_messages(row, "prompt")


def _read_answer(row: Row, ours: str) -> Messages:
    """The messages of `chosen` or `rejected`; a string is what the assistant says, an object the only message."""
    value = row.take(ours)
    if isinstance(value, str) and not value.lstrip().startswith(("[", "{")):
        return [{"role": "assistant", "content": row.text(ours)}]
    return [read_message(value, row.name(ours), row)] if isinstance(value, dict) else read_messages(row, ours)


def _repeat_prompt(row: Row, prompt: Messages, chosen: Messages, rejected: Messages) -> bool:
    """Whether the answers are whole conversations that repeat the prompt."""
    asked = isinstance(row.optional("prompt"), str) or _has_instruction(row)
    return asked or chosen[: len(prompt)] == rejected[: len(prompt)] == prompt


def _find_border(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """The index of the first difference; the last common index if one is a prefix of the other."""
    shortest = min(len(chosen), len(rejected))
    return next((at for at in range(shortest) if chosen[at] != rejected[at]), shortest - 1)
