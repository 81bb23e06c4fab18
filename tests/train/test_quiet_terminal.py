"""The terminal of a run shows lines of packtrain. Libraries write into the log; a bug shows their words, too."""

from __future__ import annotations

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
