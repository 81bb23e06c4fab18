"""`packtrain report --watch`: the curves in a terminal, drawn anew until the run ends."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import packtrain
from rich.console import Console

from packtrain.launch.attempt import locked
from packtrain.report.run_record import read_run
from packtrain.report.watch import picture
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


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal(width: int, tmp_path: Path) -> None:
    lines = drawn(leave_run(tmp_path / "run"), width)
    assert max(map(len, lines)) <= width
    beside = sum("learning rate" in line and "loss" in line for line in lines)
    assert beside == (width >= 80)


def test_a_curve_has_its_extremes_at_its_sides_and_its_last_value_above(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run")
    folder.metrics.write_text("".join(f'{{"step": {n}, "loss": {n % 7 + 0.5}}}\n' for n in range(1, 5001)))
    title, top, *rest = drawn(folder, 60)[1:]
    assert title.startswith("loss 2.5") and top.split()[0] == "6.5"
    assert rest[6].split()[0] == "0.5" and rest[7].split() == ["1", "5,000"]
    folder.metrics.write_text('{"step": 3, "loss": 2.0}\n{"step": 4, "loss": NaN}\n{"ste')
    assert any(DOTS.search(line) for line in drawn(folder))


def test_a_run_without_lines_says_so_and_its_name_does_nothing(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "x\x1b[31m[bold]", lines=[])
    lines = drawn(folder)
    assert lines[0].startswith("x␛[31m[bold] done") and "\x1b" not in "".join(lines)
    assert any("no line in metrics.jsonl yet" in line for line in lines)


def test_in_a_terminal_it_follows_the_run_to_its_end(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", status=None)
    folder.metrics.write_text('{"step": 1, "loss": 4.5}\n')
    with locked(folder.root):
        shown, process = in_a_terminal(folder.root)
        read_until(shown, "running")
        with folder.metrics.open("a") as file:
            file.write('{"step": 2, "loss": 3.25}\n')
        read_until(shown, "loss 3.25")
    write_json(folder.summary, {"status": "done"})
    read_until(shown, "done")
    assert process.wait(20) == 0


def in_a_terminal(folder: Path) -> tuple[int, subprocess.Popen[bytes]]:
    ours, theirs = pty.openpty()
    own = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "LINES": "30", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "packtrain", "report", "--watch", str(folder)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=own)
    os.close(theirs)
    return ours, process


def read_until(terminal: int, said: str, limit_s: float = 30) -> None:
    seen, limit = "", time.monotonic() + limit_s
    while said not in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen):
        assert time.monotonic() < limit, seen[-500:]
        seen += os.read(terminal, 65536).decode(errors="replace")
