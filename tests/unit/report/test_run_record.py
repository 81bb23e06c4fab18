"""What is read of a run folder, in every state that one can be in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packtrain.errors import UserError
from packtrain.launch.attempt import locked
from packtrain.report.page import page
from packtrain.report.run_record import harmless, read_run
from packtrain.run_folder import RunFolder
from tests.unit.report.run_folders import FACTS, leave_run


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "mine")
    (folder.checkpoints / "step-000010").mkdir(parents=True)
    (folder.checkpoints / "step-000010" / "weights").write_bytes(b"x" * 1000)
    (folder.checkpoints / ".step-000020.partial").mkdir()
    folder.final.mkdir()
    run = read_run(folder)
    assert (run.name, run.status, run.said, run.later, run.started) == ("mine", "done", [], [], "2026-03-01 10:00")
    assert run.facts == FACTS
    assert [(one.name, one.step, one.size_bytes) for one in run.results] == [
        ("checkpoints/step-000010", 10, 1000),
        ("final", None, 0),
    ]
    assert {one.key: one.value for one in run.settings if one.changed}["trainer.max_steps"] == "30"
    assert [one.key for one in run.settings if not one.changed] == ["trainer.log_every"]


def test_a_failed_run_has_the_words_of_its_diagnosis(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", status=None)
    (folder.logs / "diagnosis.txt").write_text("rank 1 on n0 is stopped\n  HF_TOKEN=hf_AbCdEfGhIjKlMnOp\n")
    run = read_run(folder)
    assert run.status == "failed" and run.said == ["rank 1 on n0 is stopped", "  HF_TOKEN=***"]


def test_a_run_that_goes_on_is_running_and_over_when_its_own_process_says_so(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", status="stopped")
    with locked(folder.root):
        assert read_run(folder).status == "running"
        assert read_run(folder, over=True).status == "stopped"


def test_an_attempt_that_did_not_begin_is_told_beside_the_earlier_run(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run")
    folder.attempt.root.mkdir()
    folder.attempt.config.write_text("data: {train: other.jsonl}\n")
    run = read_run(folder)
    assert run.status == "done" and run.later and run.setting("data.train") == "chats.jsonl"


def test_of_a_first_attempt_that_did_not_begin_its_config_is_shown(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.attempt.root.mkdir(parents=True)
    folder.mark.touch()
    folder.attempt.config.write_text("data: {train: other.jsonl}\n")
    run = read_run(folder)
    assert run.status == "failed" and run.setting("data.train") == "other.jsonl"


@pytest.mark.parametrize(
    "broken", ["", "{", "[1, 2]", "null", '"text"', '{"answers": 3, "rank_seconds": [1], "status": 5, "facts": 1}']
)
def test_half_written_files_are_left_out(tmp_path: Path, broken: str) -> None:
    folder = leave_run(tmp_path / "run")
    for file in (folder.summary, folder.plan, folder.environment, folder.config, folder.data, folder.facts):
        file.write_text(broken)
    assert len(read_run(folder).metrics.steps) == 34


def test_a_folder_that_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_run(RunFolder(tmp_path / "none"))
    (tmp_path / "config.yaml").write_text("mine: 1")
    (tmp_path / "logs").mkdir()
    with pytest.raises(UserError, match="no run of packtrain"):
        read_run(RunFolder(tmp_path))
    (tmp_path / ".packtrain").touch()
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "logs" / "slurm-7.out").touch()
    with pytest.raises(UserError, match="no run has begun here yet"):
        read_run(RunFolder(tmp_path))


def test_metrics_alone_are_shown_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    run = read_run(RunFolder(tmp_path))
    assert run.status == "unknown" and len(run.metrics.steps) == 1
    assert "What is known of this run" in page([run])


def test_secrets_do_not_get_into_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "swordfish-99")
    config = {
        "tracking": {"wandb_token": "abc123def"},
        "data": {"train": "https://me:pass1@hub/x", "eval": "swordfish-99"},
    }
    folder = leave_run(tmp_path / "run", config=config, answers=[{"prompt": "swordfish-99", "before": "", "after": ""}])
    said = json.dumps([[(one.key, one.value) for one in read_run(folder).settings], read_run(folder).summary])
    assert not [secret for secret in ("abc123def", "pass1", "swordfish") if secret in said]


def test_counts_of_tokens_in_the_description_of_data_are_no_secrets(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run")
    folder.data.write_text(json.dumps({"cut_tokens": 7, "shown": [{"text": "my hf_AbCdEfGhIjKlMnOp"}]}))
    assert read_run(folder).data == {"cut_tokens": 7, "shown": [{"text": "my ***"}]}


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert harmless("a\x1b[31mred\x00\x7f") == "a␛[31mred␀␡"
    assert harmless({"\u202eevil": ["\ud800", "tab\tline\n", "ünï – 漢字 🙂"]}) == {
        "⟨U+202E⟩evil": ["⟨U+D800⟩", "tab\tline\n", "ünï – 漢字 🙂"]
    }


def test_restarts_are_read_of_whatever_shape_they_are(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run")
    one = {"when": "2026-03-01 10:00:00", "step": 20, "why": ["rank 1 was killed", "  cause"], "machines": ["n1", "n2"]}
    folder.restarted.write_text(json.dumps([one, {"why": 3}, "?"]))
    first, second = read_run(folder).restarts
    assert (first["step"], first["machines"], first["why"]) == (20, "n1, n2", one["why"])
    assert (second["machines"], second["why"]) == ("", [])
    assert '<h2 id="restarts">Restarts</h2>' in page([read_run(folder)])
