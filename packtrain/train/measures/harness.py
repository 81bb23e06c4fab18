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
from packtrain.config.rules import names_in_evaluations
from packtrain.config.schema import RunConfig
from packtrain.errors import Json, PacktrainError, Problem, UserError, boundary
from packtrain.model.spread import Ranks
from packtrain.monitor.heartbeat import progress, waiting
from packtrain.proof.comparison import evaluating
from packtrain.system import holding
from packtrain.train.measures.due import Deadline
from packtrain.train.measures.generation import Generator

_REQUESTS = "loglikelihood", "loglikelihood_rolling", "generate_until"
_LIST = "lm-eval ls tasks shows those that there are."
_SLOTS = 2048
"""Token slots of trainer.measured rows in a batch."""


class _TimeIsOver(PacktrainError):
    pass


def load_tasks(names: Sequence[str], where: str) -> Json:
    """Load tasks of lm_eval by name, or from YAML files. Raises UserError for an unknown one, with names like it."""
    with boundary("lm_eval failed", where, _LIST, code="lm-eval-failed"), _seeded():
        from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

        asked = [name for name in names if not Path(name).is_file()]
        manager: Any = TaskManager(include_defaults=bool(asked))  # they are over 10,000 files
        known: list[str] = manager.all_tasks
        fixes = {name: suggest(name, known, _LIST, count=3) for name in asked if name not in known}
        if fixes:
            raise UserError(
                [Problem(f"lm_eval has no task {name!r}", where, fix, "no-such-task") for name, fix in fixes.items()]
            )
        loaded: Json = manager.load([*names])
        for task in loaded["tasks"].values():  # as its simple_evaluate does
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=1234)
        return loaded


def check_best(config: RunConfig, loaded: Json) -> None:
    """Raise UserError if trainer.best_by names a figure that the `loaded` tasks do not have."""
    metrics = {name: [*task.aggregation()] for name, task in loaded["tasks"].items()}
    metrics |= {
        name: [one.metric for one in group.aggregate_metric_list or ()] for name, group in loaded["groups"].items()
    }
    known = [*names_in_evaluations(config), *(f"eval_{name}/{metric}" for name in metrics for metric in metrics[name])]
    if (named := config.trainer.best.figure) not in known:
        what, fix = f"evaluations have no figure {named!r}", suggest(named, known, f"They have {', '.join(known)}.")
        raise UserError(what, where="trainer.best_by", fix=fix, code="no-such-figure")


def run_tasks(
    loaded: Json, model: Any, tokenizer: Any, change: Callable[[Any], object] = lambda lm: None, **how: Any
) -> Json:
    """Return what lm_eval's `evaluate` finds, called with `how`. `change` gets its model (HFLM) first."""
    from lm_eval import evaluate  # type: ignore[import-not-found]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

    batch = how.pop("batch_size", "auto" if model.device.type == "cuda" else 1)
    with _seeded(), holding(model, tie_weights=lambda *_, **__: None):
        torch.manual_seed(1234)
        lm: Any = HFLM(pretrained=model, tokenizer=deepcopy(tokenizer), batch_size=batch)  # it may name a padding token
        change(lm)
        return evaluate(lm=lm, task_dict=loaded, log_samples=False, **how) or {}


def figures_of(found: Json) -> dict[str, float]:
    """Return the figures TASK/METRIC. Of a metric's filters the first counts, and a group's mean stands for its tasks."""
    inside = {task for group in found.get("groups", ()) for task in found["group_subtasks"][group]}
    figures = dict[str, float]()
    for task, values in found["results"].items():
        for key, value in values.items() if task not in inside else ():
            if "," in key and isinstance(value, int | float | np.number):  # standard errors are "N/A" here
                figures.setdefault(f"{task}/{key.partition(',')[0]}", float(value))
    return figures


@dataclass(slots=True)
class HarnessTasks:
    """The tasks of a run: `loaded`, the first `rows` of each. `generator` has the model, and how it computes."""

    loaded: Json
    rows: int | None
    generator: Generator
    ranks: Ranks

    def __call__(self, deadline: Deadline) -> dict[str, float] | None:
        """Return the figures. See Measures."""
        own, ranks = self.generator, self.ranks
        fewest = min(len(task.eval_docs) for task in self.loaded["tasks"].values())
        spread = not ranks.sharded and ranks.world_size <= min(fewest, self.rows or fewest)

        def check(*_: object) -> None:
            progress()
            if deadline.is_over() if spread else deadline.is_over_anywhere():
                raise _TimeIsOver("")

        def agree() -> None:
            if deadline.is_over_anywhere():
                raise _TimeIsOver("")

        def answer(call: Callable[[Any], list[Any]], requests: Any) -> list[Any]:
            try:
                return call(requests)
            except _TimeIsOver:  # the other ranks learn it in `agree`, which follows
                return [None] * len(requests)

        def settle(lm: Any) -> None:
            lm.mixed_precision_dtype = own.autocast
            if spread and ranks.world_size > 1:
                lm._rank, lm._world_size, lm.all_gather, lm.barrier = ranks.rank, ranks.world_size, gather, agree
                for kind in _REQUESTS:
                    setattr(lm, kind, partial(answer, getattr(lm, kind)))

        how: Json = {"limit": self.rows, "bootstrap_iters": 0}
        how |= {"batch_size": max(own.most // _SLOTS, 1)} if own.model.device.type == "cuda" else {}
        try:
            with (
                open(os.devnull, "w") as nowhere,
                redirect_stderr(nowhere),
                evaluating(own.model, own.autocast),
                attention_of(own.model, own.attention),
                torch.compiler.set_stance("force_eager"),
                own.model.register_forward_pre_hook(check),
            ):
                found = run_tasks(self.loaded, own.model, own.tokenizer, settle, **how)
        except _TimeIsOver:
            return None
        with waiting("rank 0's results of tasks"):
            return cast(list, broadcast_object_list([figures_of(found) if ranks.main else None]))[0]


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
