"""`packtrain report --watch`: the curves in a terminal, drawn anew until the run ends."""

from __future__ import annotations

import io
import re
from pathlib import Path

from command_line import packtrain
from rich.console import Console

from packtrain.launch.attempt import locked
from packtrain.report.run_record import read_run
from packtrain.report.watch import picture, watch
from packtrain.run_folder import RunFolder, write_json
from tests.unit.report.run_folders import leave_run

DOTS = re.compile("[\u2801-\u28ff]")


def drawn(folder: RunFolder, width: int = 100, height: int = 13) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(picture(read_run(folder), width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_one_picture_where_there_is_no_terminal(tmp_path: Path) -> None:
    leave_run(tmp_path / "mine")
    done = packtrain("report", "--watch", "mine", folder=tmp_path, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine done  step ")
    assert "loss " in done.stdout and "held out " in done.stdout and "tokens a second" in done.stdout
    assert DOTS.search(done.stdout) and "\x1b" not in done.stdout
    assert not (tmp_path / "mine" / "report.html").exists()


def test_a_curve_has_its_extremes_at_its_sides_and_its_last_value_above(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run")
    folder.metrics.write_text("".join(f'{{"step": {n}, "loss": {n % 7 + 0.5}}}\n' for n in range(1, 5001)))
    title, top, *rest = drawn(folder, 60)[1:]
    assert title.startswith("loss 2.5") and top.split()[0] == "6.5"
    assert rest[6].split()[0] == "0.5" and rest[7].split() == ["1", "5,000"]
    folder.metrics.write_text('{"step": 3, "loss": 2.0}\n{"step": 4, "loss": NaN}\n{"ste')
    assert any(DOTS.search(line) for line in drawn(folder))


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
