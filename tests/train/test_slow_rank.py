"""A rank that is slow in a real run: it is named while the run goes on, and the ranks that wait for it are not."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.cluster.small_launch import PRELOAD, SMALL, at_work
from tests.train.running import base_config

STEPS = 12
WORKER = """
import os, time
import torch
from packtrain.launch.worker import run_worker
from packtrain.train import loop
from packtrain.train.sync import rank_times
from packtrain.__main__ import _work

loop.TOLD_EVERY, rank_times._WINDOW_STEPS = 4, 8  # in place of 10 and 20
forward = torch.nn.parallel.DistributedDataParallel.forward

def slowly(self, *inputs, **kwargs):
    if os.environ["RANK"] == "0":
        time.sleep(0.15)
    return forward(self, *inputs, **kwargs)

torch.nn.parallel.DistributedDataParallel.forward = slowly
run_worker(_work)
"""


def test_a_rank_whose_forward_passes_are_slow_is_named_and_not_those_that_wait(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    trainer = {"max_steps": STEPS, "log_every": 4}
    config = base_config(tmp_path, trainer=trainer, topology={"gpus_per_node": 3}, batch={"examples_per_step": 6})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    run = at_work(tmp_path, *SMALL, **{PRELOAD: "packtrain.train.run"})
    output, errors = run.communicate(timeout=300)
    assert run.returncode == 0, output + errors
    named = [line for line in (output + errors).splitlines() if "slower than the median" in line]
    assert len(named) == 1 and named[0].startswith("rank 0 on "), named
    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    slowest = [line["slowest_rank"] for line in logged if "slowest_rank" in line]
    assert len(slowest) >= 2 and set(slowest) == {0}, logged
