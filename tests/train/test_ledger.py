"""ledger.jsonl has the loss of each document, each time that it is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from here import run_here
from running import Run, base_config


def lines_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]


def test_the_lines_of_a_step_have_its_mean_loss(tmp_path: Path) -> None:
    run = run_here(tmp_path, base_config(tmp_path))
    lines = lines_of(run)
    print(lines[:3])
    for step, loss in enumerate(run.losses, 1):
        own = [line for line in lines if line["step"] == step]
        tokens = sum(line["tokens"] for line in own)
        assert sum(line["tokens"] * line["loss"] for line in own) / tokens == pytest.approx(loss, abs=1e-6)
