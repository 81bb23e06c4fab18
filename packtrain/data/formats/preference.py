"""Rows of preference pairs become one thing: two examples that begin with the same prompt.

Known are, as in TRL (https://huggingface.co/docs/trl/dataset_formats#preference) and LLaMA-Factory:

    prompt, chosen, rejected          strings, lists of messages, or a string and two conversations
    chosen, rejected                  the prompt is what both begin with: messages, or the characters of two strings
    conversations, chosen, rejected   ShareGPT's turns, then a turn each
    instruction, chosen, rejected     what a user asks, followed by `input` where there is one (Alpaca's columns)

and beside messages `tools`, `system` and chat_template_kwargs. Lists of answers with scores or ranks come here as the pair
that ranked.py makes of them.

The prompt of two strings is found as TRL finds it. That would take the words that two answers happen to begin with for
the prompt where the prompt is in a column of another name, so rows with such a column are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packtrain.data.formats.conversations import (
    Conversation,
    Pair,
    Row,
    list_of,
    system_of,
    tools_of,
    turn_of,
    variables_of,
)
from packtrain.data.sources.rows import BadRow, kind_of

Messages = list[dict[str, Any]]
ASKED = ("question", "query", "problem")
"""Columns that hold the prompt in many data sets."""
ASKING = ("system", "developer", "user")
"""Roles that no answer begins with."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The same prompt twice, with the better and with the worse answer."""

    chosen: Conversation | Pair
    rejected: Conversation | Pair


def choice_of(row: Row) -> Choice:
    """A row as a Choice; raises BadRow naming the field."""
    parts = [row.take("chosen"), row.take("rejected"), *([row.take("prompt")] if _has(row, "prompt") else [])]
    turns = _has(row, "conversations") or _instructs(row)
    plain = not turns and all(isinstance(part, str) for part in parts)
    return _of_strings(row) if plain else _of_messages(row)


def asked_by(row: Row) -> str | Messages:
    """The prompt of a row, equal in all rows that ask the same; raises BadRow as `choice_of`.

    Where it is what two strings begin with, without its last line, which may hold words that the two answers share.
    """
    chosen = choice_of(row).chosen
    if isinstance(chosen, Conversation):
        return chosen.messages[: chosen.answer_from]
    before, line, _ = chosen.prompt.rpartition("\n")
    return before if line and not _has(row, "prompt") else chosen.prompt


def _of_strings(row: Row) -> Choice:
    chosen, rejected = row.text("chosen"), row.text("rejected")
    if _has(row, "prompt"):
        prompt = row.text("prompt", may_be_empty=True)
        return Choice(Pair(prompt, chosen), Pair(prompt, rejected))
    if asked := next((name for name in ASKED if name in row.values), None):
        what = f"there is no prompt; the column {asked!r} looks like one"
        raise BadRow("no prompt", what, asked, f"Set data.columns={{prompt: {asked}}}, or rename the column.")
    border = _border(chosen, rejected)
    if border and chosen[border] != rejected[border] and chosen[border - 1] == " ":
        border -= 1  # most tokenizers keep a space with the word behind it
    if not chosen[:border].strip():
        what = f"there is no prompt: no column {row.name('prompt')!r}, and the answers begin differently"
        raise BadRow("no common prompt", what, row.name("chosen"), "Name the prompt's column with data.columns.")
    return Choice(Pair(chosen[:border], chosen[border:]), Pair(chosen[:border], rejected[border:]))


def _of_messages(row: Row) -> Choice:
    chosen, rejected = _answer(row, "chosen"), _answer(row, "rejected")
    prompt = _prompt(row)
    whole = chosen[0]["role"] in ASKING and rejected[0]["role"] in ASKING
    if prompt is None or (whole and _repeats(row, prompt, chosen, rejected)):
        border = _border(chosen, rejected)
        prompt, chosen, rejected = chosen[:border], chosen[border:], rejected[border:]
    if not prompt:
        what = "there is no prompt: chosen and rejected begin with different messages"
        raise BadRow("no common prompt", what, row.name("chosen"), "Put the prompt into a column of its own.")
    if prompt[0]["role"] != "system":
        prompt = [*system_of(row), *prompt]
    for ours, answer in (("chosen", chosen), ("rejected", rejected)):
        if answer[0]["role"] in ASKING:
            what = f"the answer begins with what the {answer[0]['role']} says"
            raise BadRow("not an answer", what, row.name(ours), "Both answers must follow the same prompt.")
    tools, variables = tools_of(row), variables_of(row)
    first, second = (Conversation([*prompt, *side], tools, variables, len(prompt)) for side in (chosen, rejected))
    return Choice(first, second)


def _has(row: Row, ours: str) -> bool:
    return row.name(ours) in row.values


def _instructs(row: Row) -> bool:
    """Whether the prompt is Alpaca's."""
    return _has(row, "instruction") and not _has(row, "prompt") and not _has(row, "conversations")


def _instruction(row: Row) -> str:
    more = row.text("input", may_be_empty=True) if row.optional("input") is not None else ""
    asked = row.text("instruction")
    return f"{asked}\n{more}" if more.strip() else asked


def _prompt(row: Row) -> Messages | None:
    """The messages before the answers, None where only the answers hold them."""
    if _instructs(row):
        return [{"role": "user", "content": _instruction(row)}]
    ours = "conversations" if _has(row, "conversations") else "prompt"
    if not _has(row, ours):
        return None
    if ours == "prompt" and isinstance(row.take(ours), str):
        return [{"role": "user", "content": row.text(ours)}]
    return _turns(row, ours)


def _answer(row: Row, ours: str) -> Messages:
    """The messages of `chosen` or `rejected`; a string is what the assistant says, an object the only message."""
    value = row.take(ours)
    if isinstance(value, str) and not value.lstrip().startswith(("[", "{")):
        return [{"role": "assistant", "content": row.text(ours)}]
    return [turn_of(value, row.name(ours), row)] if isinstance(value, dict) else _turns(row, ours)


def _turns(row: Row, ours: str) -> Messages:
    name = row.name(ours)
    if ours != "conversations" and not isinstance(row.take(ours), (str, list)):
        what = f"expected a string or a list of messages, found {kind_of(row.take(ours))}"
        raise BadRow("wrong type", what, name)
    messages = [turn_of(turn, f"{name}[{index}]", row) for index, turn in enumerate(list_of(row.take(ours), name))]
    if not messages:
        raise BadRow("empty", "there are no messages", name)
    return messages


def _repeats(row: Row, prompt: Messages, chosen: Messages, rejected: Messages) -> bool:
    """Whether the answers are whole conversations, which hold the prompt once more."""
    asked = isinstance(row.optional("prompt"), str) or _instructs(row)
    return asked or chosen[: len(prompt)] == rejected[: len(prompt)] == prompt


def _border(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Where the two part; before the last thing that they share where one of them holds nothing else."""
    shortest = min(len(chosen), len(rejected))
    return next((at for at in range(shortest) if chosen[at] != rejected[at]), shortest - 1)
