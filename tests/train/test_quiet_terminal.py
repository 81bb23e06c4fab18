"""The terminal of a run shows lines of packtrain. Libraries write into the log; a bug shows their words, too."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from packtrain import system
from packtrain.errors import report_error
from packtrain.train.log.console import Log, quiet_libraries, warnings_to


def test_warnings_before_and_after_there_is_a_log_go_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back after the test
    system.kept.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        quiet_libraries(on_cpu=True)
        warnings.warn("said while joining", stacklevel=1)
        log = Log(tmp_path / "rank.log", main=True)
        warnings_to(log)
        warnings.warn("said in training", stacklevel=1)
    assert "".join(capfd.readouterr()) == ""
    lines = (tmp_path / "rank.log").read_text().splitlines()
    assert [line.rpartition("UserWarning: ")[2] for line in lines] == ["said while joining", "said in training"]


def test_a_bug_before_there_is_a_log_shows_what_libraries_said(capsys: pytest.CaptureFixture[str]) -> None:
    system.kept[:] = ["a library's last words\n"]
    assert report_error(AssertionError("ours")) == 1
    words, bug = capsys.readouterr().err.split("\n", 1)
    assert words == "a library's last words" and "AssertionError: ours" in bug
    system.kept.clear()


TRACKER = """
import atexit, os
def end():
    os.write(2, b"the run is at example.org\\n")
    raise OSError("not sent")
atexit.register(end)
class Leak:
    def __del__(self, write=os.write):
        write(2, b"nanobind: leaked function\\n")
leak = Leak()
leak.itself = leak
"""


def test_a_crash_and_the_exit_handlers_of_libraries_are_shown_but_not_how_objects_are_taken_apart(
    tmp_path: Path,
) -> None:
    (tmp_path / "tracker.py").write_text(TRACKER)
    code = (
        "from packtrain.system import fast_imports\nwith fast_imports():\n    import tracker\nraise ValueError('ours')"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(system.__file__).parents[1]}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    found = [line for line in done.stderr.splitlines() if line.startswith(("ValueError", "OSError", "the run", "nano"))]
    assert found == ["ValueError: ours", "the run is at example.org", "OSError: not sent"]
