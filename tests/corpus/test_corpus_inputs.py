"""Hostile configs, arguments and environments: what is wrong before anything trains (case.py has what is asked of each)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.case import Case, check

CASES = [
    Case(
        name="plan: a config that is a folder",
        arguments=("plan", "c.yaml"),
        files={"c.yaml": lambda at: at.mkdir()},
        says=("c.yaml",),
    )
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)
