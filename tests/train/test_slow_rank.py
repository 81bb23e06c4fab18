"""A rank that is slow in a real run: it is named while the run goes on, and the ranks that wait for it are not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from running import Run, base_config

from packtrain.train import loop
from packtrain.train.sync import rank_times
from tests.train import forked

STEPS = 12


def with_a_slow_rank(*given: Any) -> None:
    """`forked.run`, in which the forward passes of rank 0 take longer."""
    loop.EXCHANGE_EVERY, rank_times._WINDOW_STEPS = 4, 8  # in place of 10 and 20
    forward = torch.nn.parallel.DistributedDataParallel.forward

    def slowly(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "0":
            time.sleep(0.15)
        return forward(self, *inputs, **kwargs)

    torch.nn.parallel.DistributedDataParallel.forward = slowly  # type: ignore[method-assign]
    forked.run(*given)


def test_a_rank_whose_forward_passes_are_slow_is_named_and_not_those_that_wait(tmp_path: Path) -> None:
    trainer = {"max_steps": STEPS, "log_every": 4}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(base_config(tmp_path, trainer=trainer, batch={"examples_per_step": 6})))
    ranks = forked.joined(3, "sft", str(path), begin=with_a_slow_rank)
    said = "".join(one.stdout + one.stderr for one in ranks)
    assert [one.returncode for one in ranks] == [0, 0, 0], said
    named = [line for line in said.splitlines() if "slower than the median" in line]
    assert len(named) == 1 and named[0].startswith("rank 0 on "), named
    slowest = [line["slowest_rank"] for line in Run(tmp_path / "run").lines if "slowest_rank" in line]
    assert len(slowest) >= 2 and set(slowest) == {0}, slowest
