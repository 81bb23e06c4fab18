"""Tasks of lm_eval (lm-evaluation-harness), measured on the model in training: trainer.tasks.

Each rank takes its rows of every task. With sharded weights, or fewer rows than ranks, all ranks run all rows together.
"""

from __future__ import annotations

import os
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
from packtrain.model.spread import Ranks
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


def run_tasks(
    loaded: Json, model: Any, tokenizer: Any, change: Callable[[Any], object] = id, batch: int | str = 1, **how: Any
) -> Json:
    """Return what lm_eval's `evaluate` finds, called with `how`. Its model (HFLM) goes through `change` first."""
    from lm_eval import evaluate  # type: ignore[import-not-found]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

    with _seeded(), holding(model, tie_weights=lambda *_, **__: None):
        lm = HFLM(pretrained=model, tokenizer=deepcopy(tokenizer), batch_size=batch)  # it may name a padding token
        change(lm)
        return evaluate(lm=lm, task_dict=loaded, log_samples=False, **how) or {"results": {}}


def figures_of(found: Json) -> dict[str, float]:
    """Return the figures TASK/METRIC. Of a metric's filters the first counts, and a group's mean stands for its tasks."""
    inside = {task for group in found.get("groups", ()) for task in found["group_subtasks"][group]}
    figures = dict[str, float]()
    for task in (task for task in found["results"] if task not in inside):
        for key, value in found["results"][task].items():
            if "," in key and not isinstance(value, str):  # standard errors are "N/A" here
                figures.setdefault(f"{task}/{key.partition(',')[0]}", float(value))
    return figures


class _TimeIsOver(Exception):
    pass


@dataclass(slots=True)
class HarnessTasks:
    """The tasks of a run: `loaded`, the first `rows` of each. `own` has the model, and how it computes."""

    loaded: Json
    rows: int | None
    own: Generator
    ranks: Ranks

    def __call__(self, deadline: Deadline) -> dict[str, float] | None:
        """Return the figures. See Measures."""
        own, world = self.own, self.ranks.world_size
        fewest = min(len(task.eval_docs) for task in self.loaded["tasks"].values())
        spread = not self.ranks.sharded and 1 < world <= min(fewest, self.rows or fewest)

        def check(*_: object, together: bool = not spread) -> None:
            progress()
            if deadline.is_over_anywhere() if together else deadline.is_over():
                raise _TimeIsOver

        def answer(call: Callable[[Any], list[Any]], requests: list[Any]) -> list[Any]:
            try:
                return call(requests)
            except _TimeIsOver:  # lm_eval comes to the barrier next, where all ranks learn it
                return [None] * len(requests)

        def change(lm: Any) -> None:
            lm.mixed_precision_dtype = own.autocast
            if spread:
                lm._rank, lm._world_size = self.ranks.rank, world
                lm.all_gather, lm.barrier = gather, partial(check, together=True)
                for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
                    setattr(lm, kind, partial(answer, getattr(lm, kind)))

        how: Json = {"batch": max(own.most // 2048, 1), "limit": self.rows, "bootstrap_iters": 0}
        try:
            with (
                open(os.devnull, "w") as nowhere,
                redirect_stderr(nowhere),
                evaluating(own.model, own.autocast),
                attention_of(own.model, own.attention),
                torch.compiler.set_stance("force_eager"),
                own.model.register_forward_pre_hook(check),
            ):
                torch.manual_seed(1234)
                figures = figures_of(run_tasks(self.loaded, own.model, own.tokenizer, change, **how))
        except _TimeIsOver:
            return None
        with waiting("rank 0's results of tasks"):
            return cast(list, broadcast_object_list([figures]))[0]


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the random generators of Python and numpy as lm_eval does inside the block, and restore them afterwards."""
    before = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(1234)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
