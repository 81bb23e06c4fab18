"""What is read of a run folder, in every state that one can be in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packtrain.errors import UserError
from packtrain.launch.attempt import RunLock
from packtrain.report.page import page
from packtrain.report.run_record import read_metrics, read_run
from packtrain.run_folder import RunFolder
from tests.unit.report.run_folders import FACTS, leave_run


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "mine")
    (folder.checkpoints / "step-000010").mkdir(parents=True)
    (folder.checkpoints / "step-000010" / "weights").write_bytes(b"x" * 1000)
    (folder.checkpoints / ".step-000020.partial").mkdir()
    folder.final.mkdir()
    run = read_run(folder)
    assert (run.name, run.status, run.why, run.later, run.started) == ("mine", "done", [], [], "2026-03-01 10:00")
    assert run.facts == FACTS
    assert run.results == [("checkpoints/step-000010", 1000), ("final", 0)]
    assert run.settings["trainer.max_steps"][0] == "30" and run.settings["trainer.log_every"] == ("1", "10")


def test_a_failed_run_has_the_words_of_its_diagnosis(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", status=None)
    (folder.logs / "diagnosis.txt").write_text("rank 1 on n0 is stopped\n  HF_TOKEN=hf_AbCdEfGhIjKlMnOp\n")
    run = read_run(folder)
    assert run.status == "failed" and run.why == ["rank 1 on n0 is stopped", "  HF_TOKEN=***"]


def test_a_run_that_goes_on_is_running_and_over_when_its_own_process_says_so(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", status="stopped")
    with RunLock() as lock:
        lock.take(folder.root)
        assert read_run(folder).status == "running"
        assert read_run(folder, over=True).status == "stopped"


def test_an_attempt_that_did_not_begin_is_shown_beside_the_earlier_run(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run")
    folder.attempt.root.mkdir()
    folder.attempt.config.write_text("data: {train: other.jsonl}\n")
    run = read_run(folder)
    assert run.status == "done" and run.later and run.settings["data.train"][0] == "chats.jsonl"


@pytest.mark.parametrize(
    "broken", ["", "{", "[1, 2]", "null", '"text"', '{"answers": 3, "rank_seconds": [1], "status": 5, "facts": 1}']
)
def test_half_written_files_are_left_out(tmp_path: Path, broken: str) -> None:
    folder = leave_run(tmp_path / "run")
    for file in (folder.summary, folder.plan, folder.environment, folder.config, folder.data, folder.facts):
        file.write_text(broken)
    assert len(read_run(folder).metrics.steps) == 34
    folder.data.write_text('{"rows": [], "documents": "many"}')
    assert "cannot be shown" in page([read_run(folder)])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\[no-run\]"):
        read_run(RunFolder(tmp_path / "none"))
    (tmp_path / "logs").mkdir()
    with pytest.raises(UserError, match=r"\[no-run\]"):
        read_run(RunFolder(tmp_path))


def test_secrets_do_not_get_into_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "swordfish-99")
    data = {"train": "https://me:pass1@hub/x", "eval": "swordfish-99"}
    config = {"tracking": {"wandb_token": "abc123def"}, "data": data}
    folder = leave_run(tmp_path / "run", config=config, answers=[{"prompt": "swordfish-99", "before": "", "after": ""}])
    folder.data.write_text(json.dumps({"cut_tokens": 7, "shown": [{"text": "my hf_AbCdEfGhIjKlMnOp"}]}))
    run = read_run(folder)
    shown = json.dumps([run.settings, run.summary])
    assert not [secret for secret in ("abc123def", "pass1", "swordfish") if secret in shown]
    assert run.data == {"cut_tokens": 7, "shown": [{"text": "my ***"}]}  # a count of tokens is no secret


def test_restarts_are_read_of_whatever_shape_they_are(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run")
    whole = {"when": "10:00", "step": 20, "why": ["rank 1 was killed", "  cause"], "machines": ["n1", "n2"]}
    folder.restarted.write_text(json.dumps([whole, {"why": 3}, "?"]))
    first, second = read_run(folder).restarts
    assert (first["step"], first["machines"], first["why"]) == (20, "n1, n2", whole["why"])
    assert (second["machines"], second["why"]) == ("", [])
    assert '<h2 id="restarts">Restarts</h2>' in page([read_run(folder)])


def written(folder: Path, *lines: str | dict, end: str = "\n") -> Path:
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
    return file


def test_what_is_no_line_of_a_run_is_skipped_and_counted(tmp_path: Path) -> None:
    bad = ['{"step": 2, "loss": 1.', "", "[1]", "nonsense", '{"loss": 3}']
    bad += ['{"step": null}', '{"step": -1}', '{"step": "7"}']
    good = [{"step": 3, "loss": "high"}, {"step": 4, "loss": 2, "deep": {"a": [1]}}, {"step": 5, "loss": float("nan")}]
    good += [{"step": 6, "loss": float("inf")}, {"step": 7, "loss": True}, {"step": 8, "loss": 10**400}]
    file = written(tmp_path, {"step": 1, "loss": 4.0}, *bad, *good, end="")
    file.write_bytes(file.read_bytes() + b'\n{"step": 9, "lo\xff')
    metrics = read_metrics(file)
    assert metrics.steps.tolist() == [1, 3, 4, 5, 6, 7, 8]
    assert metrics.points("loss")[1].tolist() == [4, 2]
    assert metrics.skipped == 8  # an empty line is none


def test_of_steps_that_a_resumed_run_took_again_the_later_lines_count(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1} for step in range(1, 8)] + [{"step": step, "loss": 2} for step in range(4, 10)]
    metrics = read_metrics(written(tmp_path, *lines))
    assert metrics.steps.tolist() == [*range(1, 10)]
    assert metrics.points("loss")[1].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 2] and metrics.skipped == 4
