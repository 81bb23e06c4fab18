"""Tasks of lm_eval (lm-evaluation-harness), measured on the model in training: trainer.tasks.

Each rank takes its rows of every task. With sharded weights, or fewer rows than ranks, all ranks run all rows together.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather

from packtrain.attention.backends import attention_of
from packtrain.config.keys import suggest
from packtrain.errors import Json, UserError, boundary
from packtrain.monitor.heartbeat import progress, waiting
from packtrain.proof.comparison import evaluating
from packtrain.system import holding
from packtrain.train.measures.due import Deadline
from packtrain.train.measures.generation import Generator

_LIST = "lm-eval ls tasks shows those that there are."


def load_tasks(names: Sequence[str], where: str) -> Json:
    """Load tasks of lm_eval by name, or from YAML files. Raises UserError for an unknown one, with names like it."""
    with boundary("lm_eval failed", where, _LIST, code="lm-eval-failed"), _seeded():
        from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

        asked = [name for name in names if not Path(name).is_file()]
        manager: Any = TaskManager(include_defaults=bool(asked))  # they are over 10,000 files
        if unknown := next((name for name in asked if name not in manager.all_tasks), None):
            fix = suggest(unknown, manager.all_tasks, _LIST, count=3)
            raise UserError(f"lm_eval has no task {unknown!r}", where=where, fix=fix, code="no-such-task")
        loaded: Json = manager.load([*names])
        for task in loaded["tasks"].values():  # as its simple_evaluate does
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=1234)
        return loaded


def ask(model: Any, tokenizer: Any, batch: int | str) -> Any:
    """Wrap `model` for lm_eval, which must not tie its weights. The tokenizer is copied: lm_eval may add a padding token."""
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

    with holding(model, tie_weights=lambda *_, **__: None):
        return HFLM(pretrained=model, tokenizer=deepcopy(tokenizer), batch_size=batch)


def run_tasks(loaded: Json, lm: Any, rows: int | None = None, bootstrap_iters: int = 100_000) -> Json:
    """Return lm_eval's results of the first `rows` of each task. Only rank 0 has some."""
    from lm_eval import evaluate  # type: ignore[import-not-found]

    with _seeded():
        found = evaluate(lm=lm, task_dict=loaded, limit=rows, bootstrap_iters=bootstrap_iters, log_samples=False)
        return found or {"results": {}}


def figures_of(found: Json) -> dict[str, float]:
    """Return the figures TASK/METRIC. The first filter of a metric counts. A group's mean stands for its tasks."""
    inside = {task for group in found.get("groups", ()) for task in found["group_subtasks"][group]}
    figures = dict[str, float]()
    for task in (task for task in found["results"] if task not in inside):
        for key, value in found["results"][task].items():
            if "," in key and not isinstance(value, str):  # standard errors are "N/A" here
                figures.setdefault(f"{task}/{key.partition(',')[0]}", float(value))
    return figures


class _TimeIsOver(RuntimeError):
    pass


@dataclass(slots=True)
class HarnessTasks:
    """The first `rows` of each `loaded` task, asked of the model of `own`."""

    loaded: Json
    rows: int | None
    own: Generator

    def __call__(self, deadline: Deadline) -> dict[str, float] | None:
        """Return the figures. See Measures."""
        own, model, ranks = self.own, self.own.model, self.own.ranks
        fewest = min(len(task.eval_docs) for task in self.loaded["tasks"].values())
        spread = not ranks.sharded and 1 < ranks.world_size <= min(fewest, self.rows or fewest)

        def check(*_: object, together: bool = not spread) -> None:
            progress()
            if deadline.is_over_anywhere() if together else deadline.is_over():
                raise _TimeIsOver

        def answer(call: Callable[[Any], list[Any]], requests: list[Any]) -> list[Any]:
            try:
                return call(requests)
            except _TimeIsOver:  # lm_eval comes to the barrier next, where all ranks learn it
                return [None] * len(requests)

        try:
            with (
                boundary("lm_eval failed", "trainer.tasks", code="lm-eval-failed", through=RuntimeError),
                redirect_stderr(io.StringIO()),  # progress bars
                evaluating(model, own.autocast),
                attention_of(model, own.attention),
                torch.compiler.set_stance("force_eager"),
                model.register_forward_pre_hook(check),
            ):
                torch.manual_seed(1234)  # as lm_eval; `evaluating` restores it
                lm = ask(model, own.tokenizer, max(own.most // 2048, 1))
                lm.mixed_precision_dtype = own.autocast
                if spread:
                    lm._rank, lm._world_size = ranks.rank, ranks.world_size
                    lm.all_gather, lm.barrier = gather, partial(check, together=True)
                    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
                        setattr(lm, kind, partial(answer, getattr(lm, kind)))
                figures = figures_of(run_tasks(self.loaded, lm, self.rows, bootstrap_iters=0))
        except _TimeIsOver:
            return None
        with waiting("rank 0's results of tasks"):
            return cast(list, broadcast_object_list([figures]))[0]


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed Python's and numpy's random generators as lm_eval does, and restore them afterwards."""
    before = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(1234)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
