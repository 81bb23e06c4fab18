"""The terminal of a run shows lines of packtrain. Libraries write into the log; a bug shows their words, too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template

import pytest

from packtrain import system
from packtrain.errors import report_error
from tests.train import forked
from tests.train.running import base_config, packtrain, written

NOISY = """
import logging, os, sys, warnings
def be_noisy(when):
    warnings.warn(f"noise, warned {when}")
    logging.getLogger(__name__).warning(f"noise, logged {when}")
    logging.warning(f"noise, logged by the root {when}")
print("noise, printed")
os.write(2, b"noise, written\\n")
be_noisy("at the import")
$end
config = {}
def init(**given):
    be_noisy("in the run")
    return sys.modules[__name__]
def log(*given, **named): pass
finish = log
"""
LIBRARY = ("printed", "written")
ANY_TIME = ("warned", "logged", "logged by the root")


def beside(arguments: tuple[str, ...], environment: Mapping[str, str], cwd: Path, outputs: list[Path]) -> None:
    """Run the command with the modules in its folder."""
    sys.path.insert(0, str(cwd))
    forked.run(arguments, environment, cwd, outputs)


def noisy_run(folder: Path, end: str, expect: int) -> subprocess.CompletedProcess[str]:
    (folder / "trackio.py").write_text(Template(NOISY).substitute(end=end))
    config = base_config(folder, trainer={"max_steps": 2}, tracking={"report_to": ["trackio"]})
    return packtrain("sft", written(folder, config), cwd=folder, expect=expect, begin=beside)


def test_what_a_library_says_goes_into_the_log(tmp_path: Path) -> None:
    done = noisy_run(tmp_path, end="", expect=0)
    assert "noise" not in done.stdout and done.stderr == ""
    log = (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    said = {*LIBRARY, *(f"{how} {when}" for how in ANY_TIME for when in ("at the import", "in the run"))}
    assert {line.partition("noise, ")[2] for line in log.splitlines() if "noise, " in line} == said


def test_what_a_library_says_before_it_breaks_is_shown(tmp_path: Path) -> None:
    done = noisy_run(tmp_path, end="raise OSError('broken')", expect=2)
    said = {*LIBRARY, *(f"{how} at the import" for how in ANY_TIME)}
    assert {line.partition("noise, ")[2] for line in done.stderr.splitlines() if "noise, " in line} == said
    assert "broken" in done.stderr and "tracker-unusable" in done.stderr


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
