"""A run on a narrow terminal keeps the figures that matter; trackers ask nothing."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from packtrain.config.schema import RunConfig, Tracking
from packtrain.run_folder import RunFolder
from packtrain.train.log.console import Log
from packtrain.train.log.metrics import TerminalProgress
from packtrain.train.log.trackers import trackers_of
from packtrain.train.run_state import RunState

LOGS = {"loss": 12.3456, "tokens_per_second": 1234567.8, "padding_fraction": 0.123, "learning_rate": 1e-3}


def log_of(folder: Path, width: int) -> tuple[Log, io.StringIO]:
    """A log on a terminal of that width, and what this shows."""
    log, shown = Log(folder / "log", main=True), io.StringIO()
    log.console = Console(file=shown, force_terminal=True, width=width, highlight=False, soft_wrap=True)
    return log, shown


def plain(shown: io.StringIO) -> list[str]:
    """The lines without colours and movements of the cursor."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).strip())


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_line_of_progress_keeps_step_loss_speed_and_time_left(width: int, tmp_path: Path) -> None:
    log, shown = log_of(tmp_path, width)
    progress, state = TerminalProgress(log), RunState(step=99_998, last_step=100_000)
    progress.train_begin(state)
    state.step += 1
    progress.step_end(state)
    progress.log(state, LOGS)
    progress.close()
    line = plain(shown)[-1]
    assert len(line) <= width
    kept = r"step +99999/100000 .*loss 12\.3456  1,234,568 tokens/s .*left +(\d+:\d+:\d+|-:--:--)"
    assert re.match(kept, line), line
    assert ("lr 1.00e-03" in line) == (width >= 120)


def test_a_tracker_that_has_no_login_finds_nobody_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = os.fdopen(os.openpty()[1], closefd=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert trackers_of(RunConfig(), RunFolder(tmp_path), print) == [] and sys.stdin.isatty()
    trackers_of(RunConfig(tracking=Tracking(report_to=["tensorboard"])), RunFolder(tmp_path), print)
    assert not sys.stdin.isatty() and sys.stdin.read() == ""
