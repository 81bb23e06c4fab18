"""The share of right answers to data.eval (trainer.answers), and the scores that judge them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, cast

from accelerate.utils import gather_object

from packtrain.config.schema import Trainer
from packtrain.data.tokens.cache import Document
from packtrain.errors import UserError, boundary
from packtrain.monitor.heartbeat import waiting
from packtrain.train.measures.due import Deadline
from packtrain.train.measures.generation import Generator
from packtrain.train.questions import split_example
from packtrain.train.run_state import RunState
from packtrain.train.verify.foreign_collator import import_named
from packtrain.wording import first_line

Score = Callable[[str, str, str], float]
"""Score from 0 (wrong) to 1 (right), given the answer, the held-out answer and the prompt."""


class HeldOut(NamedTuple):
    """Prompt of a row of data.eval, in tokens and as text, and its `expected` answer."""

    tokens: Document
    prompt: str
    expected: str


def score_of(spec: str, where: str) -> Score:
    """Return the score that `spec` names, by the option or key `where`. Raises UserError if it names none."""
    kind, _, pattern = spec.partition(":")
    if spec == "exact":
        return lambda answer, wanted, prompt: float(answer.strip() == wanted.strip())
    if kind == "regex" and pattern:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            what = f"{pattern!r} is no pattern: {error}"
            raise UserError(what, where=where, fix="See Python's re.", code="bad-pattern") from error
        return lambda answer, wanted, prompt: float(_found(compiled, answer) == _found(compiled, wanted) is not None)
    if ":" not in spec or not kind or kind == "regex":
        fix = "Give exact, regex:PATTERN, or module:function (also FILE.py:function)."
        raise UserError(f"there is no score {spec!r}", where=where, fix=fix, code="no-such-score")
    return import_named(spec, where)


def _found(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match: its first group, or all of it."""
    matches = [*pattern.finditer(text)]
    return matches[-1][1 if pattern.groups else 0] if matches else None


def judged(score: Score, answer: str, row: HeldOut, where: str) -> float:
    """Return the score of an answer. Raises UserError if the function fails, or returns no number."""
    with boundary("the score failed", where, code="score-failed"):
        value = float(score(answer, row.expected, row.prompt))
        if not math.isfinite(value):
            raise ValueError(f"it returned {value}")
    return value


def held_out_rows(documents: Any, tokenizer: Any) -> Iterator[HeldOut]:
    """Yield the documents with a prompt. Labelled answers give only the desirable ones."""
    labels = getattr(documents, "labels", None)
    for index in range(len(documents)):
        if (labels is None or labels[index]) and (found := split_example(documents[index])):
            texts = (str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in (found[0].input_ids, found[1]))
            yield HeldOut(found[0], *texts)


class RightAnswers:
    """Share of right answers over all held-out rows (`answers`), and over each named set (`NAME_answers`)."""

    advice = "lower trainer.measured_rows or trainer.answer_tokens, or raise trainer.measure_every"

    def __init__(
        self, trainer: Trainer, sets: Mapping[str, Any], generator: Generator, say: Callable[[str], None]
    ) -> None:
        """Take the first trainer.measured_rows of each of the `sets`. Raises UserError if the score fails on the first of them."""
        where = "trainer.answers"
        self._judge, self._tokens = score_of(trainer.answers or "exact", where), trainer.answer_tokens
        self._generator, self._say = generator, say
        found = (
            (name, row)
            for name, documents in sets.items()
            for row in islice(held_out_rows(documents, generator.tokenizer), trainer.measured_rows)
        )
        self._names, self._rows = cast(
            "tuple[tuple[str, ...], tuple[HeldOut, ...]]", tuple(zip(*found, strict=True)) or ((), ())
        )
        if not self._rows:
            what = "no document of data.eval has a prompt"
            raise UserError(what, where=where, fix="Give conversations or prompts.", code="no-prompts")
        judged(self._judge, self._rows[0].expected, self._rows[0], where)

    def measure(self, state: RunState, deadline: Deadline) -> dict[str, float] | None:
        """See MeasuredPart. A score that fails before step 1 ends the run, later its figures are left out."""
        made = self._generator.answers([row.tokens for row in self._rows], self._tokens, deadline)
        if made is None:
            return None
        scores, failure = list[tuple[int, float]](), ""
        try:
            scores = [
                (row, judged(self._judge, answer, self._rows[row], "trainer.answers")) for row, answer in made.items()
            ]
        except UserError as error:
            failure = first_line(error)
        with waiting("the answers of all ranks"):
            gathered = gather_object([(scores, failure)])
        if failures := [failure for _, failure in gathered if failure]:
            if state.step == 0:
                raise UserError(failures[0], where="trainer.answers", code="score-failed")
            self._say(f"eval_answers is left out after step {state.step}: {failures[0]}")
            return {}
        values = dict(sorted(pair for part, _ in gathered for pair in part))
        figures = {"answers": sum(values.values()) / len(values)}
        for name in dict.fromkeys(filter(None, self._names)):
            own = [values[row] for row, set_name in enumerate(self._names) if set_name == name]
            figures[f"{name}_answers"] = sum(own) / len(own)
        return figures
