"""Answers that a model makes to held-out documents, scored: to what stands before the last trained part of each, greedily.

The prompt is the document's own tokens, so it is asked as it was trained, whatever the format of the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from packtrain.boundary import boundary
from packtrain.config.schema import RunConfig
from packtrain.errors import UserError

Score = Callable[[str, str, str], float]
"""From the answer, the held-out answer and the prompt to 0 (wrong) to 1 (right)."""


def score_of(spec: str) -> Score:
    """The score that --score names. Raises UserError where it names none."""
    kind, _, pattern = spec.partition(":")
    if spec == "exact":
        return lambda answer, wanted, prompt: float(answer.strip() == wanted.strip())
    if kind == "regex" and pattern:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise UserError(f"{pattern!r} is no pattern: {error}", where="--score", fix="See Python's re.") from error
        return lambda answer, wanted, prompt: float(_found(compiled, answer) == _found(compiled, wanted) is not None)
    if ":" not in spec or not kind or kind == "regex":
        fix = "Give exact, regex:PATTERN, or module:function (also FILE.py:function)."
        raise UserError(f"there is no score {spec!r}", where="--score", fix=fix)
    from packtrain.train.verify.foreign_collator import import_named

    return import_named(spec, "--score")


def _found(pattern: re.Pattern[str], text: str) -> str | None:
    """The last match: its first group, or all of it."""
    matches = [*pattern.finditer(text)]
    return matches[-1][1 if pattern.groups else 0] if matches else None


def answer_held_out(
    model: Any, tokenizer: Any, run: RunConfig, judge: Score, *, rows: int, tokens: int
) -> dict[str, Any]:
    """Answers the first `rows` documents of data.eval in up to `tokens` tokens each; returns the share that is right, and the answers."""
    import torch

    from packtrain.data.prepare import prepare
    from packtrain.data.tokens.chat_template import give_template

    documents = prepare(run.data, tokenizer, run.objective.kind, seed=run.trainer.seed).eval
    if run.data.chat_template:
        give_template(tokenizer, run.data.chat_template)
    answers = []
    for prompt, wanted in _questions(documents, rows):
        ids = torch.tensor(prompt[None].astype("int64"), device=model.device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": tokenizer.pad_token_id}
        made = model.generate(**given, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
        texts = [tokenizer.decode(part, skip_special_tokens=True) for part in (made, wanted, prompt)]
        named = dict(zip(("answer", "expected", "prompt"), texts, strict=True))
        with boundary("the score failed", "--score"):
            answers.append({**named, "score": float(judge(*texts))})
    if not answers:
        what = "no document of data.eval has a prompt"
        raise UserError(what, where="--generate", fix="Give conversations or prompts.")
    return {
        "rows": len(answers),
        "share": sum(answer["score"] for answer in answers) / len(answers),
        "answers": answers,
    }


def _questions(documents: Any, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids of the prompt and of the answer of the first documents, of pairs the chosen ones, of labelled answers the good ones."""
    labels = getattr(documents, "labels", None)
    for index in range(len(documents)):
        if rows == 0 or not (labels is None or labels[index]):
            continue  # no more are asked for, or it is a bad answer
        document = getattr(documents[index], "chosen", documents[index])
        last = int(np.flatnonzero(document.loss_mask)[-1]) + 1
        if begin := last - int(np.argmin([*document.loss_mask[:last][::-1], False])):
            rows -= 1
            yield document.input_ids[:begin], document.input_ids[begin:last]


def run_tasks(tasks: list[str], model: Any, tokenizer: Any) -> dict[str, Any]:
    """The results of tasks of lm-evaluation-harness, by their names. Raises UserError where it fails, or knows no such task."""
    with boundary("lm_eval failed", "--tasks", "lm-eval ls tasks shows those that there are."):
        from lm_eval import simple_evaluate  # type: ignore[import-not-found]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

        loaded = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1 if model.device.type == "cpu" else "auto")
        return dict((simple_evaluate(model=loaded, tasks=tasks) or {})["results"])
