"""Rows with wrong answers are a run's hardest, and the next run leaves them out."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from command_line import packtrain
from here import run_here
from running import base_config, written

WORDS = (
    "apple bread milk cheese honey lemon onion rice salt tea river stone cloud storm field tree leaf seed lamp chair"
)


def plant(file: Path, rows: int, wrong: int, keys: int, seed: int) -> set[str]:
    """Write `keys` questions with one answer each. Return the places of the `wrong` rows."""
    rng, words = random.Random(seed), WORDS.split()[:keys]
    planted, lines = {*rng.sample(range(rows), wrong)}, list[str]()
    for number in range(rows):
        key = rng.randrange(keys)
        answer = (key + (rng.randrange(1, keys) if number in planted else 0)) % keys
        lines.append(json.dumps({"prompt": f"{words[key]} {rng.randrange(10**4)}?", "completion": f" {words[answer]}"}))
    file.write_text("\n".join(lines))
    return {f"{file}:{number + 1}" for number in planted}


@pytest.mark.parametrize(
    ("rows", "wrong", "keys", "epochs"), [(240, 8, 6, 3), pytest.param(1000, 30, 20, 4, marks=pytest.mark.exhaustive)]
)
def test_planted_rows_are_the_hardest_and_are_left_out(
    tmp_path: Path, rows: int, wrong: int, keys: int, epochs: int
) -> None:
    planted = plant(tmp_path / "facts.jsonl", rows, wrong, keys, seed=0)
    config: dict[str, Any] = base_config(
        tmp_path,
        data={"train": str(tmp_path / "facts.jsonl"), "max_length": 32},
        batch={"examples_per_step": rows // 20, "tokens_per_device": 512},
        optim={"learning_rate": 3e-3},
        trainer={"max_steps": None, "epochs": epochs, "log_every": 10},
    )
    run = run_here(tmp_path, config)
    arguments = ["inspect", written(tmp_path, config), "--ledger", str(run.folder), "--top", str(wrong)]
    done = packtrain(*arguments, "--json", "--write", "bad.txt", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [row["row"] for row in json.loads(done.stdout)["rows"]]
    precision = len(planted & {*found}) / wrong
    print(f"precision at {wrong}: {precision:.3f}")
    assert precision >= 0.8
    assert (tmp_path / "bad.txt").read_text().splitlines() == found
    config["trainer"] |= {"epochs": 1, "max_steps": 1}
    config["data"]["leave_out"] = str(tmp_path / "bad.txt")
    data = run_here(tmp_path, config, name="again").summary["data"]
    assert (data["rows"], data["kept"], data["dropped"]) == (rows, rows - wrong, {"left out": wrong})
