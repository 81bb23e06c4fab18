"""A run whose data teaches nothing, or never to stop, says so at its start; another one does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from here import train_here
from running import base_config, conversations, write_jsonl

from packtrain.config.compose import load_config

ENDLESS, UNTRAINED = "train no end of an answer", "rows have nothing to train"


def start_of(folder: Path, rows: list[dict]) -> str:
    """The log of a step on these rows."""
    write_jsonl(folder / "data.jsonl", rows)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(base_config(folder, trainer={"max_steps": 1})))
    run = train_here(load_config(str(path), []), folder / "run")
    return (run.folder / "logs" / "rank-00000.log").read_text()


@pytest.mark.parametrize("fault", ["none", "endless", "untrained"])
def test_data_that_cannot_be_learned_from_is_warned_of(tmp_path: Path, fault: str) -> None:
    rows = conversations(9)
    if fault == "endless":
        rows = [{"input_ids": list(range(40, 60 + row))} for row in range(9)]
    elif fault == "untrained":
        for row in rows[:6]:
            for message in row["messages"]:
                message |= {"weight": 0} if message["role"] == "assistant" else {}
    log = start_of(tmp_path, rows)
    assert (ENDLESS in log, UNTRAINED in log) == (fault == "endless", fault == "untrained")
    assert ("packtrain inspect shows which" in log) == (fault != "none")
