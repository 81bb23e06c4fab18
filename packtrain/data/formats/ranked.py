"""Lists of answers with scores or ranks become pairs: the best answer of a list against its worst.

Known are, beside a prompt in any way that preference.py reads,

    responses, scores                         strings, and a number for each: the highest is the best
    responses, ranks                          strings, and the place of each: the lowest is the best
    completions: [{response, overall_score}]  as UltraFeedback writes them
    answers: [{answer, rank}]                 as Nectar does

and the other names of these that are in use. A list makes one pair, so that a prompt does not weigh more for having more
answers, and the one whose order is surest: what judges say of neighbours is mostly noise. Whoever wants other pairs of it
writes them as rows of their own. A list that ranks nothing (one answer, or all equal) is counted like identical answers are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from packtrain.data.formats.conversations import READ_TOO, Row, list_of
from packtrain.data.formats.preference import ASKED
from packtrain.data.sources.rows import BadRow, NoPair, kind_of

LISTS = ("answers", "responses", "completions", "candidates")
"""Columns that hold all answers to a prompt."""
TEXTS = ("response", "answer", "text", "content", "completion", "output", "value")
"""Where an answer that is an object has its text; its score or rank is beside it."""
SCORES = ("overall_score", "scores", "score", "ratings", "rating", "rewards", "reward", "pm_score")
RANKS = ("ranks", "rank", "rankings", "ranking")
ONE, TIED = "fewer than two answers", "answers ranked equal"
INSTEAD = "Or write a row for each pair: prompt, chosen (the better answer), rejected (the worse)."


def list_column(names: Sequence[str], columns: Mapping[str, str]) -> str | None:
    """Which of the columns `names` holds the answers; `columns` maps our name to the file's."""
    return next((name for name in (columns.get("answers"), *LISTS) if name in names), None)


def best_and_worst(row: Row) -> Row:
    """The row with its best answer in the column `chosen` and its worst in `rejected`; the first of equals each.

    Raises BadRow naming the field, and NoPair where nothing is better than anything.
    """
    column = list_column(list(row.values), row.columns)
    if column is None:
        what = f"no column {' or '.join(map(repr, LISTS))}; found: {', '.join(map(repr, row.values)) or 'none'}"
        raise BadRow("missing column", what)
    answers = list_of(row.values[column], column)
    _check_prompt(row)
    if len(answers) < 2:
        raise NoPair(ONE, f"there is {'one answer' if answers else 'no answer'}", column)
    worth = _worth(row, column, answers)
    best, worst = (worth.index(most) for most in (max(worth), min(worth)))
    if best == worst:
        raise NoPair(TIED, "all answers are ranked equal", column)
    values = dict(row.values)
    for ours, at in (("chosen", best), ("rejected", worst)):
        values[row.name(ours)] = _text(answers[at], f"{column}[{at}]")
    return replace(row, values=values)


def _check_prompt(row: Row) -> None:
    """Raises BadRow where there is none: what two answers of a list begin with is no prompt."""
    if not any(row.name(ours) in row.values for ours in READ_TOO["preference"]):
        asked = next((name for name in ASKED if name in row.values), "…")
        what = f"there is no prompt; found: {', '.join(map(repr, row.values))}"
        raise BadRow("no prompt", what, fix=f"Set data.columns={{prompt: {asked}}}, or rename the column.")


def _worth(row: Row, column: str, answers: list[Any]) -> list[float]:
    """A number for each answer, more for the better."""
    found = [
        (place, numbers, sign)
        for ours, names, sign in (("scores", SCORES, 1), ("ranks", RANKS, -1))
        for place, numbers in (_beside(row, ours, names) or _within(column, answers, names),)
        if place
    ]
    if not found:
        what = (
            f"nothing says which answer is better: no list of {SCORES[1]} or {RANKS[0]}, nor one of them in each answer"
        )
        raise BadRow("not ranked", what, column, f"Name their column with data.columns={{scores: …}}. {INSTEAD}")
    if len(found) > 1:
        what = f"both {found[0][0]} and {found[1][0]} say which answer is better"
        raise BadRow("ambiguous", what, column, "Keep one.")
    ((place, numbers, sign),) = found
    if len(numbers) != len(answers):
        raise BadRow("lengths differ", f"{len(numbers)} {place} for {len(answers)} answers", place)
    for at, number in enumerate(numbers):
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not math.isfinite(number):
            raise BadRow("wrong type", f"expected a number, found {kind_of(number)}", f"{place}, answer {at + 1}")
    return [sign * number for number in numbers]


def _beside(row: Row, ours: str, names: Sequence[str]) -> tuple[str, list[Any]] | None:
    """The column of numbers, one for each answer, and what is in it."""
    for name in (row.columns.get(ours), *names):
        value = row.values.get(name) if name else None
        if isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("[")):
            return str(name), list_of(value, str(name))
    return None


def _within(column: str, answers: list[Any], names: Sequence[str]) -> tuple[str, list[Any]]:
    """The same of numbers inside the answers, by what the first one has; ("", []) where it has none."""
    first = answers[0] if isinstance(answers[0], dict) else {}
    name = next((name for name in names if name in first), None)
    if name is None:
        return "", []
    return f"{column}[…].{name}", [answer.get(name) if isinstance(answer, dict) else None for answer in answers]


def _text(answer: Any, where: str) -> str:
    if isinstance(answer, dict):
        name = next((name for name in TEXTS if name in answer), None)
        if name is None:
            what = f"no text of the answer ({', '.join(TEXTS)}); found: {', '.join(map(repr, answer)) or 'nothing'}"
            raise BadRow("missing field", what, where)
        answer, where = answer[name], f"{where}.{name}"
    if not isinstance(answer, str):
        raise BadRow("wrong type", f"expected a string, found {kind_of(answer)}", where)
    if not answer.strip():
        raise BadRow("empty", "the answer is empty", where)
    return answer
