"""Runs with a copy in a bucket of a real S3 server (moto's): killed, they go on elsewhere; whatever becomes of the bucket, they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import Run, assert_same_bits, base_config, packtrain, train

from packtrain.mirror import Mirror
from packtrain.train.checkpoint import state as checkpoint_state
from tests.ports import free_port
from tests.train import forked

SECRET = "0123456789abcdefWonderful"


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """A server with the bucket `runs`, and the variables by which it is reached."""
    import boto3

    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    env = {
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    client = boto3.client(
        "s3",
        endpoint_url=env["AWS_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id="someone",
        aws_secret_access_key=SECRET,
    )
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


def test_a_killed_run_goes_on_bit_for_bit_on_a_fresh_machine(
    bucket: tuple[subprocess.Popen[bytes], dict[str, str]], tmp_path: Path
) -> None:
    _, env = bucket
    config = base_config(tmp_path, trainer={"checkpoint_every": 2, "max_steps": 6})
    unbroken = train(tmp_path, config, name="unbroken")
    config["trainer"]["mirror"] = "s3://runs/some/where"
    file = tmp_path / "mirrored.yaml"
    file.write_text(yaml.safe_dump(config))
    packtrain("sft", str(file), f"trainer.output_dir={tmp_path}/one", env=env, begin=killed_once_copied, expect=-9)
    import s3fs

    system = s3fs.S3FileSystem(key="someone", secret=SECRET, endpoint_url=env["AWS_ENDPOINT_URL"])
    done = packtrain("sft", str(file), f"trainer.output_dir={tmp_path}/two", env=env)
    assert "resuming from step-" in done.stdout and "getting step-" in done.stderr
    assert_same_bits(resumed := Run(tmp_path / "two"), unbroken)
    assert [line["step"] for line in resumed.steps] == list(range(1, 7))
    there = {name.removeprefix("runs/some/where/") for name in system.find("runs/some/where", refresh=True)}
    assert {"final/model.safetensors", "summary.json", "report.html", "metrics.jsonl"} <= there
    kept = {name.split("/")[1] for name in there if name.startswith("checkpoints/")}
    assert kept == {"step-000004", "step-000006"}
    packtrain("report", "s3://runs/some/where", "-o", str(tmp_path / "page.html"), env=env)
    assert "<title>where" in (tmp_path / "page.html").read_text()
    written = [path for path in (tmp_path / "two").rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


@pytest.mark.exhaustive
def test_a_bucket_that_goes_away_in_the_middle_costs_a_warning(
    bucket: tuple[subprocess.Popen[bytes], dict[str, str]], tmp_path: Path
) -> None:
    import s3fs

    server, env = bucket
    system = s3fs.S3FileSystem(key="someone", secret=SECRET, endpoint_url=env["AWS_ENDPOINT_URL"])
    config = base_config(tmp_path, trainer={"checkpoint_every": 2, "max_steps": 60, "mirror": "s3://runs/other"})
    (file := tmp_path / "mirrored.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "packtrain", "sft", str(file), f"trainer.output_dir={tmp_path}/four"]
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
