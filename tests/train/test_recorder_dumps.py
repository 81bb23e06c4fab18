"""packtrain doctor on dumps that torch's own flight recorder has written."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # pyright: ignore[reportAttributeAccessIssue]

from packtrain.diagnose.doctor import examine
from packtrain.monitor.heartbeat import TimeLimits
from packtrain.monitor.stacks import recorded_into
from packtrain.monitor.watchdog import Watchdog
from packtrain.run_folder import RunFolder


def test_a_dump_that_torch_has_written_is_understood_and_is_gone_when_the_next_run_begins(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.logs.mkdir()
    Watchdog([("n0", range(2))], TimeLimits(), run.logs).close()
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
    Watchdog([("n0", range(2))], TimeLimits(), run.logs)
    assert not dump.exists()
