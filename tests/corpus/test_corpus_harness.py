"""The corpus can fail: each thing that it asks of a case is broken once here, and named."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.corpus.case import Case, check


def print_a_secret() -> None:
    print("the key is hunter2hunter2", file=sys.stderr)


def write_a_secret() -> None:
    Path("run").mkdir()
    Path("run/log").write_text("hunter2hunter2")


def lose_a_file() -> None:
    os.remove("notes.txt")


def change_a_file() -> None:
    Path("notes.txt").write_text("changed")


def write_beside() -> None:
    Path("stray").write_text("")


def fail() -> None:
    raise RuntimeError("a bug")


def compute() -> None:
    until = time.process_time() + 60
    while time.process_time() < until:
        pass


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (print_a_secret, "a secret is in stderr"),
        (write_a_secret, "a secret is in run/log"),
        (lose_a_file, "notes.txt was lost"),
        (change_a_file, "notes.txt was changed"),
        (write_beside, "stray was made"),
        (fail, "a traceback"),
        (compute, "it did not end within 1 s"),
    ],
)
def test_what_a_case_must_not_do_is_told(begin, said: str, tmp_path: Path) -> None:
    files = {"notes.txt": "mine", "c.yaml": "optim: {beta1: x}"}
    planted = {"begin": begin, "secrets": ("hunter2hunter2",), "limit_s": 1}
    case = Case(name="planted", arguments=("plan", "c.yaml"), files=files, **planted)
    with pytest.raises(AssertionError) as failure:
        check(case, tmp_path)
    assert said in str(failure.value)
    assert "$ packtrain plan c.yaml" in str(failure.value)


def test_a_case_may_expect_another_end(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 2, not 0"):
        check(Case(name="planted", arguments=("plan", "none.yaml"), expect=(0,)), tmp_path)
    with pytest.raises(AssertionError, match="it does not say 'no such thing'"):
        check(Case(name="planted", arguments=("plan", "none.yaml"), says=("no such thing",)), tmp_path / "again")
