"""What is no whole checkpoint is named and passed over, whatever it is; and which lines of metrics.jsonl a checkpoint stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.train.checkpoint import folder as checkpoint_folder
from packtrain.train.checkpoint.folder import complete, find_resume, folder_of, prune, set_aside, staging_of
from packtrain.train.log.metrics import MetricsFile
from packtrain.train.run_state import RunState

ORIGIN = {"trainer.seed": 0, "strategy.name": "ddp", "the number of processes": 1}


def checkpoints_in(root: Path, *steps: int) -> Path:
    for step in steps:
        staging = staging_of(root / "checkpoints", step)
        (staging / "shards").mkdir(parents=True)
        (staging / "shards" / "one").write_text(f"weights of {step}")
        (staging / "origin.json").write_text(json.dumps(ORIGIN))
        (staging / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        complete(staging, folder_of(root / "checkpoints", step))
    return root / "checkpoints"


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.glob("step-*"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"a": 1}', '{"a": {"bytes": "x", "blake2b": ""}}', "[" * 100_000])
def test_another_manifest_is_named_and_the_checkpoint_before_is_taken(tmp_path: Path, text: str) -> None:
    checkpoints = checkpoints_in(tmp_path, 2, 4)
    (checkpoints / "step-000004" / "manifest.json").write_text(text)
    found, remarks = find_resume("auto", checkpoints)
    assert found == checkpoints / "step-000002"
    assert len(remarks) == 1 and "step-000004" in remarks[0] and "manifest.json" in remarks[0]


def test_a_checkpoint_without_a_manifest_is_named_set_aside_and_never_removed(tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path, 1, 2, 3, 4)
    for step in (1, 4):
        (folder_of(checkpoints, step) / "manifest.json").unlink()
    found, remarks = find_resume("auto", checkpoints)
    assert found == checkpoints / "step-000003" and "step-000004" in remarks[0]
    (aside,) = set_aside(checkpoints, 3)
    assert "step-000004" in aside and "aside-" in aside
    prune(checkpoints, 1, None, ORIGIN)
    assert names(checkpoints) == ["step-000001", "step-000003"]


@pytest.mark.parametrize(
    ("file", "text"), [("scores.json", "mine"), *(("origin.json", one) for one in ("[]", "{", '{"trainer.seed": 1}'))]
)
def test_an_old_checkpoint_with_a_file_of_someone_or_another_origin_stays(tmp_path: Path, file: str, text: str) -> None:
    checkpoints = checkpoints_in(tmp_path, 2, 4, 6, 8)
    (folder_of(checkpoints, 4) / file).write_text(text)
    prune(checkpoints, 1, None, ORIGIN)
    assert names(checkpoints) == ["step-000004", "step-000008"]


def test_a_kill_between_two_files_of_an_old_checkpoint_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = checkpoints_in(tmp_path, 2, 4)

    def killed(folder: Path, **_: Any) -> None:
        if folder.exists():
            (folder / "origin.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", killed)
        prune(checkpoints, 1, None, ORIGIN)
    assert find_resume("auto", checkpoints) == (checkpoints / "step-000004", [])
    set_aside(checkpoints, 4)  # as the next run begins
    assert [path.name for path in checkpoints.iterdir()] == ["step-000004"]


def test_the_lines_that_a_checkpoint_stands_for_are_synced_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    made: list[str] = []
    monkeypatch.setattr(checkpoint_folder, "sync", lambda path: made.append(path.name))
    monkeypatch.setattr(checkpoint_folder, "publish", lambda staging, target: made.append(target.name))
    checkpoints_in(tmp_path, 2)
    assert made == ["metrics.jsonl", tmp_path.name, "step-000002"]


@pytest.mark.parametrize("known", [True, False])
def test_an_evaluation_that_the_checkpoint_does_not_know_of_is_not_there_twice(tmp_path: Path, known: bool) -> None:
    lines = [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]
    lines.insert(2, {"step": 2, "eval_loss": 0.4})
    (file := tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + '{"step": 4')
    history = lines[: 3 if known else 2]
    MetricsFile(file).train_begin(RunState(step=2, lines=history))
    assert [json.loads(line) for line in file.read_text().splitlines()] == history


@pytest.mark.parametrize(
    "left", [b"\xff\x00\xfe\n", b'{"step": 1, "seconds": "x"}\n', b'{"step": 1, "seconds": 1e999}\n']
)
def test_what_a_loss_of_power_left_in_the_metrics_ends_no_run(tmp_path: Path, left: bytes) -> None:
    (file := tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 1.0, "seconds": 2}\n' + left)
    callback, state = MetricsFile(file), RunState(step=1)
    callback.train_begin(state)
    callback.log(state, {"loss": 2.0})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[-1]["loss"] == 2.0 and abs(lines[-1]["seconds"]) < 60
