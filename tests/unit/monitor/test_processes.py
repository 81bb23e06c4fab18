"""What the system tells of processes, with /proc and without."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from packtrain.launch import processes


@pytest.mark.parametrize("has_proc", [True, False])
def test_a_process_is_seen_to_be_there_stopped_and_gone(has_proc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HAS_PROC", has_proc and processes.HAS_PROC)
    own = processes.sight(os.getpid())
    assert own.state in ("R", "S") and own.cpu > 0
    child = subprocess.Popen(["sleep", "600"])

    def comes_to(state: str) -> bool:
        until = time.monotonic() + 60
        while processes.sight(child.pid).state != state and time.monotonic() < until:
            time.sleep(0.02)
        return processes.sight(child.pid).state == state

    try:
        assert child.pid in processes.families([os.getpid()])[os.getpid()]
        os.kill(child.pid, signal.SIGSTOP)
        assert comes_to("T")
    finally:
        child.kill()
    assert comes_to("Z")
    child.wait()
    assert processes.sight(child.pid).state == ""


def test_the_error_of_a_gpu_is_read_from_the_kernels_log_where_it_is_newer_than_the_run() -> None:
    xid = "NVRM: Xid (PCI:0000:c3:00): 79, pid=4711, name=python, GPU has fallen off the bus."
    log = [
        "6,1,1000000,-;Linux version 6.18",
        f"3,2,5000000,-;{xid.replace('79', '31')}\n SUBSYSTEM=pci\n",
        "no entry",
        f"3,3,9000000,-;{xid}\n",
    ]
    assert processes.gpu_error(6.0, log) == xid
    assert processes.gpu_error(5.0, log) == xid.replace("79", "31")
    assert processes.gpu_error(10.0, log) == ""
    assert "Xid" not in processes.gpu_error(float("inf"))
