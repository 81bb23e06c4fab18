"""Stopped at any moment and started again, a run ends with bitwise the same weights (CPU); also with its copy in a bucket."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import date
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from here import run_here, train_here
from running import ENVIRONMENT, Run, after, assert_same_bits, base_config, packtrain, train, written

from packtrain.config.compose import load_config
from packtrain.data.tokens.chat_template import CHATML
from packtrain.diagnose.doctor import examine
from packtrain.errors import Problem, UserError
from packtrain.mirror import Mirror
from packtrain.plan.origin import check_length
from packtrain.run_folder import RunFolder
from packtrain.system import listening
from packtrain.train.checkpoint import state as checkpoint_state
from packtrain.train.checkpoint.folder import complete
from packtrain.train.loop import StepTrainer
from packtrain.train.run_state import StopRequest
from tests.ports import free_port
from tests.train import forked

DROPOUT = {"attention_dropout": 0.1}  # so that a lost random state would show


def config_of(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    config = base_config(folder, trainer={"max_steps": 9, "checkpoint_every": 3, **groups.pop("trainer", {})}, **groups)
    config["model"]["config"] = {**config["model"]["config"], **DROPOUT}
    return config


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("resume")
    return folder, train(folder, config_of(folder), name="unbroken")


def test_lines_are_means_since_the_last_one_and_a_run_that_goes_on_writes_the_same(
    unbroken: tuple[Path, Run], tmp_path: Path
) -> None:
    folder, each_step = unbroken
    config = config_of(folder, trainer={"log_every": 4, "keep_checkpoints": None})
    run = run_here(tmp_path, config)
    ends = [1, 3, 4, 6, 8, 9]  # the first and the last, every fourth, those of checkpoints
    assert [line["step"] for line in run.steps] == ends
    means = [np.mean(each_step.losses[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    assert run.losses == pytest.approx(means, rel=1e-6)
    assert run_here(tmp_path, config, run.resume(6), name="on").losses == run.losses[4:]


def test_a_run_that_goes_on_on_another_day_has_the_date_of_its_beginning(tmp_path, monkeypatch):
    """By the checkpoint, also where the tokenised rows of the first day are gone."""
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %B %Y') }}" + CHATML)
    config = config_of(tmp_path, trainer={"max_steps": 1, "checkpoint_every": 1})
    config["data"]["chat_template"] = str(tmp_path / "dated.jinja")
    again = [f"trainer.resume={tmp_path}/7/checkpoints/step-000001", "trainer.max_steps=2"]
    for day, overrides in ((7, []), (8, [*again, f"data.cache_dir={tmp_path}/other"])):
        monkeypatch.setattr("packtrain.train.run.date", SimpleNamespace(today=lambda day=day: date(2026, 11, day)))
        run = run_here(tmp_path, config, *overrides, name=str(day))
    origin = json.loads((run.folder / "checkpoints/step-000002/origin.json").read_text())
    assert len(run.losses) == 1 and origin["data.day"] == "2026-11-07"
    monkeypatch.setattr("packtrain.train.run.origin_in", lambda checkpoint: {})
    with pytest.raises(UserError, match=r"data\.train"):  # by another date the rows are others
        run_here(tmp_path, config, *again, name="9")


def start(folder: Path, config: dict[str, Any], name: str, processes: int = 1) -> tuple[list[BaseProcess], Path]:
    """Starts the ranks of a run, and comes back when it has a checkpoint; the file is what rank 0 says."""
    path = written(folder, {**config, "trainer": {**config["trainer"], "output_dir": str(folder / name)}}, name)
    said = [folder / f"{name}-{rank}.said" for rank in range(processes)]
    variables = forked.told_by_torchrun(processes) if processes > 1 else [{}]
    given = [({**ENVIRONMENT, **own}, folder, [file, file]) for own, file in zip(variables, said, strict=True)]
    ranks = [forked.start(("sft", path), *one) for one in given]
    limit = time.monotonic() + 600
    while not any((folder / name / "checkpoints").glob("step-*")):  # an old one gives way to a newer one
        assert time.monotonic() < limit and all(one.is_alive() for one in ranks), said[0].read_text()
        time.sleep(0.01)
    return ranks, said[0]


def ends(ranks: list[BaseProcess]) -> list[int | None]:
    for one in ranks:
        one.join(300)
    return [one.exitcode for one in ranks]


@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_killed_and_resumed_gives_bitwise_the_same_weights(tmp_path: Path, processes: int) -> None:
    # three from step 2 or 4 on: in step 4 one of them alone has a document
    trainer = {"deterministic": True, "checkpoint_every": 2} if processes == 3 else {}
    config = config_of(tmp_path, trainer=trainer)
    expected = train(tmp_path, config, name="unbroken", processes=processes)
    ranks, _ = start(tmp_path, config, "killed", processes)
    for rank in ranks:
        rank.kill()
    assert ends(ranks) == [-signal.SIGKILL] * processes
    assert not (tmp_path / "killed" / "final").exists(), "it was killed too late"
    resumed = train(tmp_path, config, name="killed", processes=processes)
    assert_same_bits(resumed, expected)
    assert (resumed.summary["steps"], resumed.summary["tokens"]) == (9, expected.summary["tokens"])


@pytest.mark.sample(without=("15-143-2",))
@pytest.mark.parametrize(("number", "code", "processes"), [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 2)])
def test_a_signal_ends_the_run_after_a_checkpoint_that_it_goes_on_from(
    unbroken: tuple[Path, Run], number: int, code: int, processes: int
) -> None:
    folder, _ = unbroken
    name = f"signal-{number}-{processes}"
    config = config_of(folder, trainer={"max_steps": 100_000, "keep_checkpoints": 1})
    ranks, said = start(folder, config, name, processes)
    os.kill(ranks[-1].pid or 0, number)  # from there all stop after the same step
    assert ends(ranks) == [code] * processes, said.read_text()
    run = Run(folder / name)
    assert run.summary["status"] == "stopped"
    stopped_at = run.summary["steps"]
    assert (run.checkpoint(stopped_at) / "manifest.json").exists()
    resumed = train(folder, config, f"trainer.max_steps={stopped_at + 2}", name=name, processes=processes)
    assert [line["step"] for line in resumed.steps] == list(range(1, stopped_at + 3))


@pytest.mark.parametrize(("steps", "code"), [(1, 0), (2, 128 + signal.SIGTERM)])
def test_a_signal_in_the_last_step_lets_the_run_come_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, code: int
) -> None:
    def sent_in_step_1(self: StopRequest) -> None:
        self.signal = signal.SIGTERM

    monkeypatch.setattr(StopRequest, "listen", sent_in_step_1)
    run = run_here(tmp_path, base_config(tmp_path, trainer={"max_steps": steps}), expect=code)
    assert run.summary["status"] == ("stopped" if code else "done") and run.summary["steps"] == 1
    assert (run.folder / "final").exists() != bool(code) and run.kept == ["step-000001"]


@pytest.mark.parametrize(
    ("every", "number", "times", "said"),
    [
        (None, signal.SIGINT, 1, "finishing step 2; again stops now, without a checkpoint"),
        (1, signal.SIGINT, 1, "finishing step 2; again stops now, from checkpoint 1"),
        (None, signal.SIGTERM, 1, "finishing step 2, after SIGTERM"),
        (1, signal.SIGINT, 2, "stopped by SIGINT after step 1; the same command goes on from there"),
    ],
)
def test_a_signal_is_answered_within_the_step_and_a_second_ctrl_c_stops_there(
    every: int | None, number: int, times: int, said: str, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    log = tmp_path / "run/logs/rank-00000.log"

    def send(self: StepTrainer, *_: Any) -> None:
        if self.state.step == 1:
            self.writer.wait()
            for _ in range(times):
                signal.raise_signal(number)
                while "finishing step 2" not in log.read_text():  # not at the end of the step
                    time.sleep(0.01)

    monkeypatch.setattr(StepTrainer, "forward_and_backward", after(send, StepTrainer.forward_and_backward))
    config = base_config(tmp_path, trainer={"max_steps": 9, "checkpoint_every": every})
    with listening(lambda _: None), nullcontext() if times == 1 else pytest.raises(KeyboardInterrupt):
        run_here(tmp_path, config, expect=128 + number)
    folder = RunFolder(tmp_path / "run")
    shown = capfd.readouterr()
    assert shown.out.count(said) == 1 and "Exception" not in shown.err
    steps = 2 if times == 1 else 1
    assert (folder.status(), Run(folder.root).summary["steps"]) == ("stopped", steps)
    finding = examine(folder, over=True)
    assert (finding.status, list(finding.lines)) == ("stopped", [f"this run is stopped after step {steps}"])


@pytest.mark.parametrize(("grace", "newest"), [(1, 2), (60, 3)])
def test_a_checkpoint_that_would_take_longer_than_the_grace_time_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace: int, newest: int
) -> None:
    def listen(self: StopRequest) -> None:
        monkeypatch.setattr(self, "counts", lambda: [0, int(self.steps_left() == 0)])

    asked_twice_a_step = iter([1] * 5)
    monkeypatch.setattr(StopRequest, "listen", listen)
    monkeypatch.setattr(StopRequest, "steps_left", lambda self: next(asked_twice_a_step, 0), raising=False)
    slowly = after(lambda *_: time.sleep(1.2), complete)
    monkeypatch.setattr("packtrain.train.checkpoint.state.complete", slowly)
    trainer = {"max_steps": 9, "checkpoint_every": 2}
    run = run_here(tmp_path, base_config(tmp_path, trainer=trainer, topology={"grace": grace}), expect=143)
    assert run.summary["status"] == "stopped" and run.summary["steps"] == 3
    assert run.kept[-1] == f"step-{newest:06d}"
    assert ("after SIGTERM are left (topology.grace); the newest is that of step 2" in run.log) == (newest == 2)


def killed(folder: Path, name: str, *overrides: str) -> Run:
    """A run as if it had been killed just before its end."""
    run = train(folder, config_of(folder), *overrides, name=name)
    (run.folder / "summary.json").unlink()
    return run


def test_a_damaged_checkpoint_is_passed_over_and_said(unbroken: tuple[Path, Run]) -> None:
    folder, expected = unbroken
    run = killed(folder, "damaged")
    newest = run.checkpoint(9)
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (newest / "model.safetensors").write_bytes(weights)
    output = packtrain("sft", str(folder / "damaged.yaml")).stdout
    assert "step-000009 is passed over: model.safetensors is not as it was written" in output
    assert "resuming from step-000006" in output
    assert_same_bits(run, expected)


def refused(folder: Path, name: str, *changes: str) -> list[Problem]:
    """The problems of a run that goes on from folder/name with these changes."""
    with pytest.raises(UserError) as caught:
        train_here(load_config(str(folder / f"{name}.yaml"), [*changes]), folder / name)
    return caught.value.problems


def test_what_would_change_the_course_is_refused_key_by_key(unbroken: tuple[Path, Run]) -> None:
    folder, _ = unbroken
    killed(folder, "changed", "trainer.max_steps=3")
    free = ["trainer.log_every=2", "data.eval=null"]
    changes = ["trainer.seed=1", "data.max_length=30", "optim.learning_rate=0.5", "model.config.attention_dropout=0.5"]
    early, later = ["optim.learning_rate", "trainer.seed"], ["data.train", "model.config.attention_dropout"]
    result = packtrain("sft", str(folder / "changed.yaml"), *changes, *free, expect=2)
    assert all(f"{key}: the checkpoint step-000003 " in result.stderr for key in early)
    assert result.stderr.count("[changed-since-checkpoint]") == len(early)
    assert f"'trainer.resume_despite=[{','.join(early)}]'" in result.stderr and "log_every" not in result.stderr
    listed = f"trainer.resume_despite=[{','.join(early)}]"  # what shows only when data and model are loaded
    problems = refused(folder, "changed", *changes, *free, listed)
    assert {one.where for one in problems} == {*later}
    assert f"'trainer.resume_despite=[{','.join([*later, *early])}]'" in problems[-1].fix
    problems = refused(folder, "changed", "peft=lora")
    assert "peft.kind" in [one.where for one in problems] and not any("resume_despite" in one.fix for one in problems)


def test_listed_changes_take_effect_and_are_said(unbroken: tuple[Path, Run]) -> None:
    folder, expected = unbroken
    run = killed(folder, "despite", "trainer.max_steps=6")
    changes = ["optim.learning_rate=1e-12", "optim.schedule=linear", "optim.max_grad_norm=0.25", "trainer.log_every=3"]
    names = "optim.learning_rate, optim.schedule, optim.max_grad_norm, trainer.epochs"
    said = packtrain("sft", str(folder / "despite.yaml"), *changes, f"trainer.resume_despite=[{names}]").stdout
    for change in ("optim.learning_rate 0.001 → 1e-12", "→ 9 steps", "step-000006", "trainer.log_every 1 → 3"):
        assert change in said
    assert run.losses[:6] == expected.losses[:6]
    assert run.steps[-1]["lr"] == pytest.approx(1e-12 * (9 - 8) / 9)
    before, after = run.weights("checkpoints/step-000006"), run.weights()
    assert all(torch.allclose(before[name], after[name], atol=1e-9) for name in after), "the old rate was used"


def test_another_length_is_refused_where_the_learning_rate_depends_on_it(unbroken: tuple[Path, Run]) -> None:
    folder, _ = unbroken
    killed(folder, "length", "optim.schedule=cosine", "trainer.max_steps=3")
    longer = ["optim.schedule=cosine", "trainer.max_steps=6"]
    (problem,) = refused(folder, "length", *longer)
    assert problem.where == "trainer.max_steps"
    check_length(folder / "step-000003", 3, 3)
    with pytest.raises(UserError, match=r"step-000003 is of step 3.* 2 \[ends-before-checkpoint\]"):
        check_length(folder / "step-000003", 3, 2)
    config = load_config(str(folder / "length.yaml"), [*longer, "trainer.resume_despite=[trainer.max_steps]"])
    rates = [line["lr"] for line in train_here(config, folder / "length").steps]
    assert rates[3:] == pytest.approx([1e-3 * (1 + math.cos(math.pi * step / 6)) / 2 for step in (3, 4, 5)])


def test_a_finished_run_is_moved_aside_and_never_overwritten(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 1})
    first = train(tmp_path, config, name="again")
    losses = first.losses
    kept = {name: (first.folder / name).read_bytes() for name in ("config.yaml", "plan.json", "env.json")}
    train(tmp_path, config, "+model.config.hiden_size=3", name="again", expect=2)
    assert Run(tmp_path / "again").losses == losses and not (tmp_path / "again.1").exists()
    assert {name: (first.folder / name).read_bytes() for name in kept} == kept
    train(tmp_path, config, "trainer.max_steps=2", name="again", processes=2)
    assert "ready" in (tmp_path / "again" / "logs" / "rank-00001.log").read_text()
    assert len(Run(tmp_path / "again").losses) == 2
    assert Run(tmp_path / "again.1").losses == losses
    assert Run(tmp_path / "again.1").summary["status"] == "done"


def test_a_killed_run_without_a_checkpoint_is_kept_when_another_begins(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 2})
    run = train(tmp_path, config)
    (run.folder / "summary.json").unlink()  # as if it had been killed before its end
    shutil.rmtree(run.folder / "final")
    (run.folder / "notes.md").write_text("the user's\n")
    kept = {name: (run.folder / name).read_bytes() for name in ("metrics.jsonl", "config.yaml", "plan.json")}
    again = train(tmp_path, config, "trainer.max_steps=1")
    assert {name: (tmp_path / "run.1" / name).read_bytes() for name in kept} == kept
    assert [line["step"] for line in again.steps] == [1] and (again.folder / "notes.md").exists()
    assert "run held an earlier run: now in " in again.log


def test_checkpoints_that_the_run_did_not_make_are_not_removed(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 2, "checkpoint_every": 1, "keep_checkpoints": 1})
    run = train(tmp_path, config)
    (run.folder / "summary.json").unlink()
    checkpoints = run.folder / "checkpoints"
    another = shutil.copytree(checkpoints / "step-000002", checkpoints / "step-000001")
    (another / "origin.json").write_text(json.dumps({"trainer.seed": 7}))
    (checkpoints / "step-000003").mkdir()  # without a manifest
    (checkpoints / "step-000003" / "mine").write_text("the user's\n")
    longer = train(tmp_path, config, "trainer.max_steps=3")
    assert [line["step"] for line in longer.steps] == [1, 2, 3]
    names = {path.name for path in checkpoints.iterdir()}
    (aside,) = names - {"step-000001", "step-000003"}
    assert (checkpoints / aside / "mine").read_text() == "the user's\n" and (another / "model.safetensors").exists()
    assert (tmp_path / "run.1" / "final" / "model.safetensors").exists() and (longer.folder / "final").exists()
    (kept,) = longer.folder.glob("logs/*-config.yaml")  # the config that the new one has replaced
    assert "max_steps: 2" in kept.read_text()


SECRET = "0123456789abcdefWonderful"


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """A server with the bucket `runs`, and the variables by which it is reached."""
    import boto3

    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    env = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_MAX_ATTEMPTS": "1"}
    env |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    secrets = {"aws_access_key_id": "someone", "aws_secret_access_key": SECRET}
    client = boto3.client("s3", endpoint_url=env["AWS_ENDPOINT_URL"], region_name="us-east-1", **secrets)
    until = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket="runs")
            break
        except Exception:
            assert time.monotonic() < until
            time.sleep(0.3)
    yield server, env
    server.kill()


def killed_once_copied(*given: Any) -> None:
    """The command, which waits after its first checkpoint until that is in the bucket, and is killed."""
    copied, copy, complete = threading.Event(), Mirror._copy_checkpoint, checkpoint_state.complete

    def copy_and_tell(self: Mirror, step: int, checkpoint: Path) -> None:
        copy(self, step, checkpoint)
        copied.set()

    def last(staging: Path, target: Path) -> None:
        complete(staging, target)
        assert copied.wait(100)
        os.kill(os.getpid(), signal.SIGKILL)

    Mirror._copy_checkpoint, checkpoint_state.complete = copy_and_tell, last
    forked.run(*given)


def test_a_killed_run_goes_on_bit_for_bit_on_a_fresh_machine(bucket: Any, tmp_path: Path) -> None:
    _, env = bucket
    config = base_config(tmp_path, trainer={"checkpoint_every": 2, "max_steps": 6})
    unbroken = train(tmp_path, config, name="unbroken")
    config["trainer"]["mirror"] = "s3://runs/some/where"
    file = written(tmp_path, config)
    packtrain("sft", file, f"trainer.output_dir={tmp_path}/one", env=env, begin=killed_once_copied, expect=-9)
    import s3fs

    system = s3fs.S3FileSystem(key="someone", secret=SECRET, endpoint_url=env["AWS_ENDPOINT_URL"])
    done = packtrain("sft", file, f"trainer.output_dir={tmp_path}/two", env=env)
    assert "resuming from step-" in done.stdout and "getting step-" in done.stderr
    assert_same_bits(resumed := Run(tmp_path / "two"), unbroken)
    assert [line["step"] for line in resumed.steps] == list(range(1, 7))
    there = {name.removeprefix("runs/some/where/") for name in system.find("runs/some/where", refresh=True)}
    assert {"final/model.safetensors", "summary.json", "report.html", "metrics.jsonl"} <= there
    kept = {name.split("/")[1] for name in there if name.startswith("checkpoints/")}
    assert kept == {"step-000004", "step-000006"}
    packtrain("report", "s3://runs/some/where", "-o", str(tmp_path / "page.html"), env=env)
    assert "<title>where" in (tmp_path / "page.html").read_text()
    files = [path for path in (tmp_path / "two").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.exhaustive
def test_a_bucket_that_goes_away_in_the_middle_costs_a_warning(bucket: Any, tmp_path: Path) -> None:
    import s3fs

    server, env = bucket
    system = s3fs.S3FileSystem(key="someone", secret=SECRET, endpoint_url=env["AWS_ENDPOINT_URL"])
    config = base_config(tmp_path, trainer={"checkpoint_every": 2, "max_steps": 60, "mirror": "s3://runs/other"})
    command = [
        sys.executable,
        "-m",
        "packtrain",
        "sft",
        written(tmp_path, config),
        f"trainer.output_dir={tmp_path}/four",
    ]
    run = subprocess.Popen(command, env={**forked.ENVIRONMENT, **env}, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not system.exists("runs/other/metrics.jsonl"):
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.1)
        system.invalidate_cache()
    os.kill(server.pid, signal.SIGKILL)
    _, said = run.communicate(timeout=200)
    assert run.returncode == 0 and (tmp_path / "four" / "final" / "model.safetensors").exists()
    assert "s3://runs/other failed and is tried again" in said and "has not all of the run" in said
    assert SECRET not in said


SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "crash.py"


@pytest.mark.exhaustive  # tests/train/test_resume.py kills three processes
@pytest.mark.skipif(
    not shutil.which("cc") or sys.platform != "linux", reason="what counts system calls is compiled with cc"
)
@pytest.mark.parametrize(
    ("arguments", "killed"),
    [(["--setups", "sft full 1"], 10), pytest.param([], 11, marks=pytest.mark.exhaustive)],
    ids=["one process", "two processes, too"],
)
def test_whoever_is_killed_anywhere_comes_to_the_same_end(arguments: list[str], killed: int) -> None:
    command = [sys.executable, str(SCRIPT), "--short", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert "| as it resumes, killed again | 1 |" in done.stdout and f"{killed} came to the same end" in done.stdout
