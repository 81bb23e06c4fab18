"""The config that `packtrain init` writes trains as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.forked import command
from tests.train.tiny_models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("starter-runs")
    save_model(made / "a model")
    asked = [f"What is {n}?" for n in range(8)]
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": f"{text} Yes."}] for text in asked]
    rows = {"sft": [{"messages": chat} for chat in chats]}
    rows["dpo"] = [{"prompt": text, "chosen": " Yes.", "rejected": " No, not that."} for text in asked]
    for verb, own in rows.items():
        (made / f"{verb}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return made


@pytest.mark.parametrize(("verb", "steps"), [("sft", 4), ("dpo", 2)])
def test_the_written_config_trains_as_it_is(folder: Path, verb: str, steps: int) -> None:
    environment = {"PACKTRAIN_CACHE": str(folder / "cache")}
    written = command("init", "--data", f"{verb}.jsonl", "--model", "a model", cwd=folder, env=environment)
    assert written.returncode == 0, written.stderr
    trained = command(verb, f"{verb}.yaml", cwd=folder, env=environment)
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((folder / "runs" / verb / "summary.json").read_text())
    assert summary["steps"] == steps
    assert (folder / "runs" / verb / "final" / "model.safetensors").is_file()
