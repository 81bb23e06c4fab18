"""A disk that takes nothing any more, the run folder on it: why is told, and all is ended, without waiting for it."""

from __future__ import annotations

import time
from pathlib import Path

from tests.cluster.test_stalls import running, start

STALLS = """
    logs = Path("out/logs")
    if rank == 1:
        names = ["stacks-rank-00000.txt", "stacks-rank-00001.txt", "diagnosis.txt", "launcher.log", "rank-00001.log"]
        for name in [*names, ".ranks.json.partial"]:
            os.mkfifo(logs / f"{name}.stalled")  # who opens it waits for ever
            os.rename(logs / f"{name}.stalled", logs / name)
    heartbeat.enter("checkpoint", step=3)
    Path("since").write_text(str(time.time()))
    def _sync():
        (logs / "rank-00001.log").write_text("weights")
    if rank == 1: _sync()
    group.all_reduce(name="barrier")
"""
ENDED_S = 2 * 60  # twice what is promised


def test_a_run_whose_folder_is_on_a_stalled_disk_is_told_of_and_ended_all_the_same(tmp_path: Path) -> None:
    process = start(tmp_path, STALLS)
    _, stderr = process.communicate(timeout=2 * ENDED_S)
    took = time.time() - float((tmp_path / "since").read_text())
    assert process.returncode == 4, stderr
    assert "rank 1 on " in stderr and "in the checkpoint after step 3" in stderr and "in _sync" in stderr
    assert "slow or stalled storage" in stderr
    assert took < ENDED_S
    assert not running(tmp_path)
