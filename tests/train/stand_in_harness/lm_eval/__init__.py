"""Stand-in for lm_eval (lm-evaluation-harness 0.4.13), with tasks of single words."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def evaluate(*, lm: Any, task_dict: dict[str, Any], log_samples: bool, **how: Any) -> dict[str, Any] | None:
    """Return results: the mean of the model's answers to each row."""
    _ = random.random() + np.random.rand()
    limit = how.get("limit")
    found: dict[str, Any] = {}
    for name, task in task_dict["tasks"].items():
        own = task.eval_docs[: limit or None][lm.rank :: lm.world_size]
        values = lm.generate_until(own)
        if lm.world_size > 1:
            lm.barrier()
            gathered = lm.gather_object(values)
            values = None if gathered is None else [value for part in gathered for value in part]
        if values is not None:
            mean, n_a = sum(values) / len(values), "N/A"
            found[name] = {"alias": name, "sample_len": len(values), "score,first": mean, "score_stderr,first": n_a}
            found[name] |= {"score,second": -1.0, "score_stderr,second": n_a, "acc,none": 0.25}
    return {"results": found, "group_subtasks": {}} if lm.rank == 0 else None
