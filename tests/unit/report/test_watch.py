"""`packtrain report --watch`: the curves in a terminal, drawn anew until the run ends."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from command_line import packtrain
from rich.console import Console

from packtrain.launch.attempt import locked
from packtrain.report.run_record import read_run
from packtrain.report.watch import bars, picture, watch
from packtrain.run_folder import write_json
from tests.unit.report.run_folders import leave_run


def test_one_picture_where_there_is_no_terminal(tmp_path: Path) -> None:
    leave_run(tmp_path / "mine")
    done = packtrain("report", "--watch", "mine", folder=tmp_path, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine done  step ") and "\x1b" not in done.stdout
    names = [line.split("  ")[0] for line in done.stdout.splitlines()[1:]]
    assert {"loss", "held-out loss", "tokens a second"} <= {*names}
    assert not (tmp_path / "mine" / "report.html").exists()


def test_bars_are_the_means_of_equal_parts_of_a_curve(tmp_path: Path) -> None:
    assert bars(np.arange(16.0), 8) == "▁▂▃▄▅▆▇█" and bars(np.array([2.0, 1.0]), 8) == "█▁"
    assert bars(np.ones(3), 8) == "▁▁▁"
    folder = leave_run(tmp_path / "run")
    folder.metrics.write_text('{"step": 3, "loss": 2.0}\n{"step": 4, "loss": NaN}\n{"step": 5, "loss": 6.5}\n{"ste')
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(picture(read_run(folder), 100))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[1].split() == ["loss", "6.5", "▁█", "2", "to", "6.5"]


def test_in_a_terminal_it_follows_the_run_to_its_end(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = leave_run(tmp_path / "run", status=None)
    lock, pauses = locked(folder.root), []
    lock.__enter__()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            lock.__exit__(None, None, None)
            write_json(folder.summary, {"status": "done"})

    monkeypatch.setattr("packtrain.report.watch.time.sleep", pause)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    assert watch(str(folder.root)) == 0
    shown = capsys.readouterr().out
    assert len(pauses) == 2 and " done" in shown
