"""Checkpoints are written while training goes on; a disk that does not take one costs that one; what is no whole one is passed over."""

from __future__ import annotations

import json
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from here import loaded, train_here
from running import Run, after, assert_same_bits, base_config, packtrain, train, written

from packtrain.monitor import heartbeat
from packtrain.train.checkpoint import folder as checkpoint_folder
from packtrain.train.checkpoint import state, writer
from packtrain.train.checkpoint.folder import complete, find_resume, folder_of, prune, set_aside, staging_of
from packtrain.train.log.metrics import MetricsFile
from packtrain.train.loop import StepTrainer
from packtrain.train.run_state import RunState
from tests.train import forked

EVERY_2: dict[str, Any] = {"max_steps": 6, "checkpoint_every": 2, "keep_checkpoints": None}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("unbroken")
    return train(folder, base_config(folder, trainer=EVERY_2))


def config_in(folder: Path, **trainer: Any) -> Any:
    return loaded(folder, base_config(folder, trainer={**EVERY_2, **trainer}))


def test_steps_go_on_while_a_checkpoint_is_written_and_it_is_of_its_step(
    unbroken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, own = threading.Event(), StepTrainer.forward_and_backward

    def two_more_steps(_: Path, target: Path) -> None:
        assert target.name != "step-000002" or trained.wait(60), "training waits for the write"

    monkeypatch.setattr(state, "complete", after(two_more_steps, state.complete))
    next_checkpoint = after(lambda self, *_: self.state.step == 3 and trained.set(), own)
    monkeypatch.setattr(StepTrainer, "forward_and_backward", next_checkpoint)
    run = train_here(config_in(tmp_path), tmp_path / "run")
    assert run.summary["checkpoints"] == {"written": 3, "newest": 6, "failed": []}
    assert run.kept == ["step-000002", "step-000004", "step-000006"]
    for step in (2, 4, 6):
        assert_same_bits(run, unbroken, f"checkpoints/step-{step:06d}/model.safetensors")
        states = [one.states(step)["state"] for one in (run, unbroken)]
        assert all(torch.equal(states[0][key]["exp_avg"], one["exp_avg"]) for key, one in states[1].items())


def test_without_memory_for_a_copy_steps_wait_and_the_run_says_so(
    unbroken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "free_memory", lambda: 1000)
    run = train_here(config_in(tmp_path), tmp_path / "run")
    assert run.summary["checkpoints"]["written"] == 3
    assert run.log.count("no room for a copy") == 1
    assert_same_bits(run, unbroken, "checkpoints/step-000004/model.safetensors")


def with_small_files(*given: Any) -> None:
    """The command where no file may be larger than the weights and a little."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(given[1]["MAX_BYTES"]),) * 2)
    forked.run(*given)


@pytest.mark.sample(without=("ddp-1",))
@pytest.mark.parametrize(("strategy", "processes"), [("ddp", 1), ("fsdp2", 2)])
def test_a_disk_that_does_not_take_a_checkpoint_costs_no_training(
    unbroken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, processes: int
) -> None:
    weights = (unbroken.folder / "final" / "model.safetensors").stat().st_size
    monkeypatch.setitem(forked.ENVIRONMENT, "MAX_BYTES", str(weights * 5 // 4))  # the optimizer's state is larger
    config = base_config(tmp_path, trainer=EVERY_2)
    run = train(tmp_path, config, f"strategy={strategy}", processes=processes, begin=with_small_files)
    assert run.losses == pytest.approx(unbroken.losses, rel=1e-5)
    outcome = run.summary["checkpoints"]
    assert outcome["written"] == 0 and [one["step"] for one in outcome["failed"]] == [2, 4, 6]
    assert run.log.count("was not written") == 3 and run.kept == []


def test_a_full_disk_is_seen_before_a_checkpoint_is_begun_and_the_last_good_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = shutil.disk_usage, []

    def full_at_times(path: Any) -> Any:
        asked.append(path)  # before step 1, and before each of three checkpoints
        return real(path) if len(asked) in (2, 4) else real(path)._replace(free=1000)

    monkeypatch.setattr(state.shutil, "disk_usage", full_at_times)
    run = train_here(config_in(tmp_path, keep_checkpoints=2, max_steps=5), tmp_path / "run")
    assert run.summary["status"] == "done" and run.kept == ["step-000002", "step-000005"]
    (failed,) = run.summary["checkpoints"]["failed"]
    assert failed["step"] == 4 and "the disk has 1,000 bytes left" in failed["why"]
    assert "no room for 3 checkpoints of" in run.log  # at once: those that are kept, and the new one, of the last step
    assert "the checkpoint of step 4 was not written" in run.log and "that of step 2. Training goes on" in run.log


def test_what_a_killed_run_had_no_time_to_remove_is_removed_as_it_goes_on(tmp_path: Path) -> None:
    run = train_here(config_in(tmp_path), tmp_path / "run")
    (run.folder / "summary.json").unlink()  # as if it had been killed just before its end
    assert len(run.kept) == 3
    assert train_here(config_in(tmp_path, keep_checkpoints=1), tmp_path / "run").kept == ["step-000006"]


def test_a_full_disk_costs_lines_of_metrics_with_one_warning_and_leaves_no_half_ones(tmp_path: Path) -> None:
    said, before = list[str](), resource.getrlimit(resource.RLIMIT_FSIZE)
    file, state = MetricsFile(path := tmp_path / "metrics.jsonl", said.append), RunState()

    def log(loss: float, most: int | None = None) -> list[float]:
        """Logs a line, where the file may have so many bytes; returns the losses that are in it."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if most is None else most, before[1]))
        file.log(state, {"loss": loss})
        return [json.loads(line)["loss"] for line in path.read_text().splitlines()]

    try:
        assert log(1.0) == [1.0]
        size = path.stat().st_size
        assert log(2.0, size + 5) == log(3.0, size + 5) == [1.0]
        assert "metrics.jsonl" in said[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert log(4.0) == [1.0, 4.0] and len(said) == 1


def test_a_final_model_that_cannot_be_written_ends_with_2_and_the_checkpoint_kept(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 2, "checkpoint_every": 2})
    result = packtrain("sft", written(tmp_path, config), begin=with_a_full_disk_at_the_end, expect=2)
    assert "cannot write" in result.stderr and "complete checkpoints are kept" in result.stderr
    assert Run(tmp_path / "run").kept == ["step-000002"]
    assert train(tmp_path, config).summary["status"] == "done"


def with_a_full_disk_at_the_end(*given: Any) -> None:
    from packtrain.train import results

    limit = lambda *_, **__: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # noqa: E731
    results.save_final = after(limit, results.save_final)
    forked.run(*given)


def with_a_stalled_disk(*given: Any) -> None:
    """The command, whose checkpoints may take no longer than a step."""
    heartbeat._CHECKPOINT_STEPS = 1
    state.complete = lambda *_: time.sleep(1000)
    forked.run(*given)


def test_a_write_that_never_returns_ends_the_run_with_a_diagnosis(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer=EVERY_2, topology={"step_timeout": 10})
    result = packtrain("sft", written(tmp_path, config), begin=with_a_stalled_disk, expect=4)
    said, _, _, call = result.stderr.splitlines()[:4]
    assert "checkpoint after step 4" in said and call.endswith("in wait"), call
    assert "topology.step_timeout" in result.stderr
    assert (tmp_path / "run" / "logs" / "diagnosis.txt").read_text() == result.stderr


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
