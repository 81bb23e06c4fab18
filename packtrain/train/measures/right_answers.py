"""The share of right answers to data.eval (trainer.answers), and the scores that judge them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from accelerate.utils import gather_object

from packtrain.config.schema import Trainer
from packtrain.errors import UserError, boundary
from packtrain.monitor.heartbeat import progress, waiting
from packtrain.proof.comparison import evaluating
from packtrain.train.measures.due import Deadline
from packtrain.train.measures.generation import Generator
from packtrain.train.questions import Question, split_example
from packtrain.train.verify.foreign_collator import import_named
from packtrain.wording import first_line

Score = Callable[[str, str, str], float]
"""Score from 0 (wrong) to 1 (right), given the answer, the held-out answer and the prompt."""
_KEY = "trainer.answers"


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


def judged(score: Score, answer: str, row: Question, where: str) -> float:
    """Return the score of an answer. Raises UserError if the function fails, or returns no number."""
    progress()
    try:
        value = float(score(answer, row.expected, row.text))
        if not 0 <= value <= 1:
            raise ValueError(f"it returned {value:g}, not a number from 0 to 1")
    except (Exception, SystemExit) as error:
        what, fix = f"the score failed: {first_line(error)}", "It takes answer, held-out answer and prompt."
        raise UserError(what, where=where, fix=fix, code="score-failed") from error
    return value


def held_out_rows(sets: Mapping[str, Any], tokenizer: Any, most: int | None, where: str) -> list[Question]:
    """Return the first `most` rows with a prompt of each set. Labelled answers give only the desirable ones.

    Raises UserError, at the option or key `where`, if there are none.
    """
    rows = list[Question]()
    for name, documents in sets.items():
        labels = getattr(documents, "labels", None)
        asked = (documents[index] for index in range(len(documents)) if labels is None or labels[index])
        found = (split for split in map(split_example, asked) if split and len(split[0].input_ids) > 1)  # else a text
        for prompt, answer in islice(found, most):
            text, expected = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt.input_ids, answer))
            rows.append(Question(text, prompt, expected, name))
    if not rows:
        what = "no document of data.eval has a prompt"
        raise UserError(what, where=where, fix="Give conversations or prompts.", code="no-prompts")
    return rows


class RightAnswers:
    """Shares of right answers: of all held-out rows (`right`) and of each named set (`NAME_right`)."""

    def __init__(
        self, trainer: Trainer, sets: Mapping[str, Any], generator: Generator, say: Callable[[str], None]
    ) -> None:
        """Ask trainer.measured_rows of each set. Raises UserError if the score fails on the first held-out answer."""
        self._judge = score_of(trainer.answers or "exact", _KEY)
        self._rows = held_out_rows(sets, generator.tokenizer, trainer.measured_rows, _KEY)
        self._generator, self._tokens, self._say = generator, trainer.answer_tokens, say
        with evaluating(generator.model):  # for the random state, which a score may change
            judged(self._judge, self._rows[0].expected, self._rows[0], _KEY)

    def __call__(self, deadline: Deadline) -> dict[str, float] | None:
        """Return the figures; {} with a warning if the score fails. See Measures."""
        fix = "Lower trainer.answer_tokens."
        with boundary("the model cannot answer", _KEY, fix, code="answer-failed", through=RuntimeError):
            made = self._generator.answers([row.document for row in self._rows], self._tokens, deadline)
        if made is None:
            return None
        failure, scores = "", dict[int, float]()
        try:
            with evaluating(self._generator.model):
                scores = {number: judged(self._judge, text, self._rows[number], _KEY) for number, text in made.items()}
        except UserError as error:
            failure = first_line(error)
        with waiting("the scores of all ranks"):
            gathered = gather_object([(failure, scores)])
        if failures := [failure for failure, _ in gathered if failure]:
            self._say(f"eval_right is left out: {failures[0]}")
            return {}
        values = {number: score for _, part in gathered for number, score in part.items()}
        names = {"": "right"} | {row.set_name: f"{row.set_name}_right" for row in self._rows if row.set_name}
        of_set = {name: [n for n, row in enumerate(self._rows) if name in ("", row.set_name)] for name in names}
        return {names[name]: sum(values[n] for n in own) / len(own) for name, own in of_set.items()}
