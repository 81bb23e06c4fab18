"""packtrain doctor on dumps that torch's own flight recorder has written."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # pyright: ignore[reportAttributeAccessIssue]

from packtrain.diagnose.doctor import examine
from packtrain.monitor.old.flight_recorder import recorded_into
from packtrain.monitor.old.watchdog import Watchdog
from packtrain.run_folder import RunFolder


def test_a_dump_that_torch_has_written_is_understood_and_is_gone_when_the_next_run_begins(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.logs.mkdir()
    pointer = {"host": "n0", "ranks": [0, 2], "step_timeout": 600, "last": {}, "codes": {}}
    (run.logs / "heartbeats-00000.json").write_text(json.dumps(pointer))
    dump = Path(f"{recorded_into(run.logs)['TORCH_FR_DUMP_TEMP_FILE']}1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3, 5))
        dump.write_bytes(_dump_fr_trace(includeStackTraces=False))  # which take 4 s to look up
    finally:
        dist.destroy_process_group()
    (said,) = [line for line in examine(run).lines if "rank 1" in line]
    assert said.startswith(
        "  rank 1 on n0 waited in no collective operation; the last that it passed is gloo:all_reduce"
    )
    assert said.endswith("(Float 3x5)")
    with Watchdog(tmp_path, run.logs, ranks=range(2), host="n0", step_timeout=600).found_by_others(0, answers=False):
        assert not dump.exists()
