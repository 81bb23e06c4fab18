"""What fails for a reason that may pass is tried again, counted and reported; all else is raised at once."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from packtrain.monitor import retries


def answer(status: int) -> Exception:
    error: Any = ValueError("as libraries wrap it")
    error.response = SimpleNamespace(status_code=status)
    return error


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (FileNotFoundError(2, "x"), 1),
        (ValueError("x"), 1),
        (answer(404), 1),
        (answer(503), 3),
        (TimeoutError("x"), 3),
        (OSError(errno.ESTALE, "Stale file handle"), 3),
    ],
    ids=repr,
)
def test_only_what_may_pass_is_tried_again_and_raised_in_the_end(
    error: Exception, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    monkeypatch.setattr(retries, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(retries, "listeners", [reports.append])
    retries.counted.clear()
    tried: list[int] = []

    def fail() -> Any:
        tried.append(1)
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("a library's own") from cause

    with pytest.raises(RuntimeError):
        retries.patiently("hub", "a file", fail)
    assert len(tried) == attempts and retries.counted["hub"] == len(reports) == attempts - 1
    assert all(report.startswith("a file: a library's own; trying again in ") for report in reports)


def test_what_comes_back_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PAUSES_S", (0.0,))
    errors = [TimeoutError()]
    assert (
        retries.patiently("storage", "a folder", lambda: 7 if not errors else (_ for _ in ()).throw(errors.pop())) == 7
    )
