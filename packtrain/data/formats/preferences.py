"""Parses rows of preference pairs: each becomes two examples that begin with the same prompt.

Known are, as in TRL (https://huggingface.co/docs/trl/dataset_formats#preference) and LLaMA-Factory:

    prompt, chosen, rejected          strings, lists of messages, or a string and two conversations
    chosen, rejected                  the prompt is what both begin with: messages, or the characters of two strings
    conversations, chosen, rejected   ShareGPT's turns, then one turn for each answer
    instruction, chosen, rejected     the user's request, with `input`, `history` and `system` (Alpaca's columns)

and beside messages `tools`, `system` and chat_template_kwargs; and lists of answers, beside a prompt in any of these ways,

    responses, scores                         strings, and a number for each: the highest is the best
    responses, ranks                          strings, and the place of each: the lowest is the best
    completions: [{response, overall_score}]  as UltraFeedback writes them
    answers: [{answer, rank}]                 as Nectar does

and other common names of these columns. A list makes one pair, its best and its worst answer: prompts with more answers
then do not weigh more, and the order of this pair is the most certain. Write other pairs as separate rows. A list that ranks
nothing (one answer, or all equal) is counted like a pair of identical answers.

The prompt of two strings is their common beginning, as in TRL. Where the prompt is in a column of another name this would
mistake common first words of the answers for it, so rows with such a column are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from packtrain.config.schema import PROMPTS, Format
from packtrain.data.formats.columns import LISTS, Row, list_column, list_of
from packtrain.data.formats.conversations import (
    Conversation,
    PromptCompletion,
    asked_in_columns,
    refuse_media,
    refuse_of_chats,
)
from packtrain.data.formats.messages import Messages, messages_in, messages_of, tools_of, variables_of, with_system
from packtrain.data.sources.chunks import BadRow, NoPair, wrong_type

ASKED = ("question", "query", "problem")
"""Columns that hold the prompt in many data sets."""
ASKING = ("system", "developer", "user")
"""Roles that an answer cannot begin with."""
TEXTS = ("response", "answer", "text", "content", "completion", "output", "value")
"""Keys of an answer object that may hold its text; its score or rank is another key of the object."""
SCORES = ("overall_score", "scores", "score", "ratings", "rating", "rewards", "reward", "pm_score")
RANKS = ("ranks", "rank", "rankings", "ranking")
ONE, TIED = "fewer than two answers", "answers ranked equal"
_LARGEST = 3.4e38
"""Of a margin: float32 has no more."""
INSTEAD = "Or write a row for each pair: prompt, chosen (the better answer), rejected (the worse)."


@dataclass(frozen=True, slots=True)
class PreferenceExample:
    """The same prompt twice, with the better and with the worse answer."""

    chosen: Conversation | PromptCompletion
    rejected: Conversation | PromptCompletion


def read_preference(row: Row, format: Format) -> PreferenceExample:
    """A row as its two examples; raises BadRow naming the field, and NoPair where a list of answers ranks nothing."""
    refuse_media(row)
    row = _best_and_worst(row) if format == "ranked" else row
    parts = [row.take("chosen"), row.take("rejected"), *([row.take("prompt")] if row.has("prompt") else [])]
    turns = row.has("conversations") or _has_instruction(row)
    plain = not turns and all(isinstance(part, str) for part in parts)
    return _of_strings(row) if plain else _of_messages(row)


def margin_of(row: Row) -> float:
    """By how much the row says that the chosen answer is better, 0 where it does not; raises BadRow where that is no number.

    Numbers may be text, and an empty one is none: csv has no other.
    """
    value = row.optional("margin")
    if value is None or value == "":
        return 0.0
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST:  # NaN fails too
        raise wrong_type("a number that float32 holds", value, row.name("margin"))
    return number


def prompt_of(row: Row, format: Format) -> str | Messages:
    """The prompt of a row, equal in all rows that ask the same; raises BadRow as `read_preference`.

    A prompt that is the common beginning of two strings loses its last line, where the answers' common words may be.
    """
    chosen = read_preference(row, format).chosen
    if isinstance(chosen, Conversation):
        return chosen.messages[: chosen.answer_from]
    before, line, _ = chosen.prompt.rpartition("\n")
    return before if line and not row.has("prompt") else chosen.prompt


def _of_strings(row: Row) -> PreferenceExample:
    chosen, rejected = row.text("chosen"), row.text("rejected")
    asked = next((name for name in ASKED if name in row.values), "")
    named = row.name("prompt") if row.has("prompt") else asked
    refuse_of_chats(row, f"{f'Set data.columns.instruction={named}, or take' if named else 'Take'} the column out.")
    if row.has("prompt"):
        prompt = row.text("prompt", may_be_empty=True)
        return PreferenceExample(PromptCompletion(prompt, chosen), PromptCompletion(prompt, rejected))
    if asked:
        what = f"there is no prompt; the column {asked!r} looks like one"
        raise BadRow("no prompt", what, asked, f"Set data.columns.prompt={asked}, or rename the column.")
    border = _border(chosen, rejected)
    if border and chosen[border] != rejected[border] and chosen[border - 1] == " ":
        border -= 1  # most tokenizers keep a space with the word behind it
    if not chosen[:border].strip():
        what = f"there is no prompt: no column {row.name('prompt')!r}, and the answers begin differently"
        raise BadRow("no common prompt", what, row.name("chosen"), "Name the prompt's column with data.columns.")
    return PreferenceExample(
        PromptCompletion(chosen[:border], chosen[border:]), PromptCompletion(chosen[:border], rejected[border:])
    )


def _of_messages(row: Row) -> PreferenceExample:
    chosen, rejected = _answer(row, "chosen"), _answer(row, "rejected")
    prompt = _prompt(row)
    whole = chosen[0]["role"] in ASKING and rejected[0]["role"] in ASKING
    if prompt is None or (whole and _repeats(row, prompt, chosen, rejected)):
        border = _border(chosen, rejected)
        prompt, chosen, rejected = chosen[:border], chosen[border:], rejected[border:]
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
    tools, variables = tools_of(row), variables_of(row)
    first, second = (Conversation([*prompt, *side], tools, variables, len(prompt)) for side in (chosen, rejected))
    return PreferenceExample(first, second)


def _has_instruction(row: Row) -> bool:
    """Whether the prompt is Alpaca's."""
    same = row.name("instruction") == row.name("prompt")
    return row.has("instruction") and (same or not row.has("prompt")) and not row.has("conversations")


def _prompt(row: Row) -> Messages | None:
    """The messages before the answers; None if only the answers contain them."""
    if _has_instruction(row):
        return asked_in_columns(row)
    if row.has("conversations"):
        return messages_of(row, "conversations")
    if not row.has("prompt"):
        return None
    if isinstance(row.take("prompt"), str):
        return [{"role": "user", "content": row.text("prompt")}]
    return _turns(row, "prompt")


def _answer(row: Row, ours: str) -> Messages:
    """The messages of `chosen` or `rejected`; a string is what the assistant says, an object the only message."""
    value = row.take(ours)
    if isinstance(value, str) and not value.lstrip().startswith(("[", "{")):
        return [{"role": "assistant", "content": row.text(ours)}]
    return messages_in(value, row.name(ours), row) if isinstance(value, dict) else _turns(row, ours)


def _turns(row: Row, ours: str) -> Messages:
    if not isinstance(row.take(ours), (str, list)):
        raise wrong_type("a string or a list of messages", row.take(ours), row.name(ours))
    return messages_of(row, ours)


def _repeats(row: Row, prompt: Messages, chosen: Messages, rejected: Messages) -> bool:
    """Whether the answers are whole conversations that repeat the prompt."""
    asked = isinstance(row.optional("prompt"), str) or _has_instruction(row)
    return asked or chosen[: len(prompt)] == rejected[: len(prompt)] == prompt


def _border(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """The index of the first difference; the last common index if one is a prefix of the other."""
    shortest = min(len(chosen), len(rejected))
    return next((at for at in range(shortest) if chosen[at] != rejected[at]), shortest - 1)


def _best_and_worst(row: Row) -> Row:
    """The row with its best answer in the column `chosen` and its worst in `rejected`; of equals the first."""
    column = list_column(list(row.values), row.columns)
    found = ", ".join(map(repr, row.values)) or "none"
    if column is None:
        raise BadRow("missing column", f"no column {' or '.join(map(repr, LISTS))}; found: {found}")
    answers = list_of(row.values[column], column)
    if not any(row.has(ours) for ours in PROMPTS):  # the common beginning of answers in a list is not a prompt
        asked = next((name for name in ASKED if name in row.values), "…")
        fix = f"Set data.columns.prompt={asked}, or rename the column."
        raise BadRow("no prompt", f"there is no prompt; found: {found}", fix=fix)
    if len(answers) < 2:
        raise NoPair(ONE, f"there is {'one answer' if answers else 'no answer'}", column)
    worth = _worth(row, column, answers)
    best, worst = (worth.index(most) for most in (max(worth), min(worth)))
    if best == worst:
        raise NoPair(TIED, "all answers are ranked equal", column)
    values = dict(row.values)
    for ours, at in (("chosen", best), ("rejected", worst)):
        values[row.name(ours)] = _text_of(answers[at], f"{column}[{at}]")
    return replace(row, values=values)


def _worth(row: Row, column: str, answers: list[Any]) -> list[float]:
    """A number for each answer, higher for better ones."""
    scores = _beside(row, "scores", SCORES) or _within(column, answers, SCORES)
    found = scores or _beside(row, "ranks", RANKS) or _within(column, answers, RANKS)
    if found is None:
        what = (
            f"nothing says which answer is better: no list of {SCORES[1]} or {RANKS[0]}, nor one of them in each answer"
        )
        raise BadRow("not ranked", what, column, f"Name their column with data.columns.scores=…. {INSTEAD}")
    place, numbers = found
    if len(numbers) != len(answers):
        raise BadRow("lengths differ", f"{len(numbers)} {place} for {len(answers)} answers", place)
    for at, number in enumerate(numbers, 1):
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not math.isfinite(number):
            raise wrong_type("a number", number, f"{place}, answer {at}")
    return [number if scores else -number for number in numbers]


def _beside(row: Row, ours: str, names: Sequence[str]) -> tuple[str, list[Any]] | None:
    """Name and values of the column that has a number for each answer."""
    for name in (row.columns.get(ours), *names):
        value = row.values.get(name) if name else None
        if isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("[")):
            return str(name), list_of(value, str(name))
    return None


def _within(column: str, answers: list[Any], names: Sequence[str]) -> tuple[str, list[Any]] | None:
    """As `_beside`, for numbers inside the answer objects, under a key that the first one has."""
    first = answers[0] if isinstance(answers[0], dict) else {}
    name = next((name for name in names if name in first), None)
    if name is None:
        return None
    return f"{column}[…].{name}", [answer.get(name) if isinstance(answer, dict) else None for answer in answers]


def _text_of(answer: Any, where: str) -> str:
    if isinstance(answer, dict):
        name = next((name for name in TEXTS if name in answer), None)
        if name is None:
            what = f"no text of the answer ({', '.join(TEXTS)}); found: {', '.join(map(repr, answer)) or 'nothing'}"
            raise BadRow("missing field", what, where)
        answer, where = answer[name], f"{where}.{name}"
    if not isinstance(answer, str):
        raise wrong_type("a string", answer, where)
    if not answer.strip():
        raise BadRow("empty", "the answer is empty", where)
    return answer
