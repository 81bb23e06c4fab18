"""Files of a disk that may have stalled."""

from __future__ import annotations

import threading
import time

import pytest

from packtrain import run_folder as disk
from packtrain.run_folder import in_time


def fails() -> str:
    raise OSError


def test_what_a_disk_does_not_take_in_time_is_left_behind_and_what_comes_after_it_is_done_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk, "DISK_S", 60)
    assert (in_time(lambda: "read", ""), in_time(fails, "nothing")) == ("read", "nothing")
    monkeypatch.setattr(disk, "DISK_S", 0.05)
    back, done = threading.Event(), threading.Event()
    assert in_time(lambda: back.wait(300), None) is None
    monkeypatch.setattr(disk, "DISK_S", 300)
    begun = time.monotonic()
    assert in_time(lambda: done.set() or "written", "not yet") == "not yet"
    assert time.monotonic() - begun < 100 and not done.is_set()
    back.set()
    assert done.wait(60)
