"""Runs on a real Ray of two raylets, with an address each: as one process trains, and what becomes of them when something is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from packtrain.launch.execute import RunLock
from packtrain.run_folder import RunFolder
from tests.ports import free_port
from tests.train.forked import ENVIRONMENT
from tests.train.running import Run, base_config, train

pytest.importorskip("ray", reason="no Ray: pip install -e '.[ray]'")
RAY = str(Path(sys.executable).parent / "ray")
GIVEN = ("topology=ray", "topology.nodes=2", "topology.gpus_per_node=2")
LONG_S = 300


class Cluster:
    """Two raylets with two CPUs each."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.env = {**ENVIRONMENT, "RAY_ADDRESS": self.address, "RAY_USAGE_STATS_ENABLED": "0"}
        head = ("--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false")
        self.started = [self.start("127.0.0.1", 1, *head)]
        self.add()

    def start(self, at: str, raylets: int, *given: str) -> subprocess.Popen[bytes]:
        """Starts a raylet, and waits until the cluster has so many."""
        command = [RAY, "start", "--block", *given, f"--node-ip-address={at}", "--num-cpus=2"]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started = subprocess.Popen(command, env=self.env, start_new_session=True, **streams)
        end = time.monotonic() + LONG_S
        while True:
            status = subprocess.run([RAY, "status"], env=self.env, capture_output=True, text=True)
            if f"/{2 * raylets}.0 CPU" in status.stdout:
                return started
            assert started.poll() is None and time.monotonic() < end, status
            time.sleep(0.5)

    def add(self) -> None:
        self.started.append(self.start("127.0.0.2", 2, f"--address={self.address}"))

    def stop(self) -> None:
        for started in self.started:
            with suppress(psutil.Error):
                root = psutil.Process(started.pid)
                for one in [root, *root.children(recursive=True)]:
                    with suppress(psutil.Error):
                        one.kill()

    def begin(self, folder: Path, *overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "packtrain", "sft", "run.yaml", *GIVEN, *overrides]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=folder, env=self.env, **streams)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("alone")
    return train(folder, base_config(folder, trainer={"max_steps": 40}))


def prepared(folder: Path, **trainer: object) -> Path:
    config = base_config(folder, trainer={"max_steps": 40, "checkpoint_every": 5, **trainer})
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


def wait_for_checkpoint(run: subprocess.Popen[str], folder: Path) -> None:
    end = time.monotonic() + LONG_S
    while not [*(folder / "run/checkpoints").glob("step-*")]:
        assert run.poll() is None and time.monotonic() < end, run.communicate()[0]
        time.sleep(0.05)


def launchers() -> list[psutil.Process]:
    """Those of packtrain that Ray's workers have started."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if any("packtrain-ray-" in word for word in one.cmdline()):
                found.append(one)
    return sorted(found, key=psutil.Process.create_time)


def rank(number: int) -> psutil.Process:
    for one in (child for launcher in launchers() for child in launcher.children(recursive=True)):
        with suppress(psutil.Error):
            if one.environ().get("RANK") == str(number):
                return one
    raise LookupError(number)


def assert_nothing_left() -> None:
    end = time.monotonic() + 60
    while left := launchers():
        assert time.monotonic() < end, left
        time.sleep(0.2)


def test_workers_of_two_machines_train_as_one_process_does(cluster: Cluster, tmp_path: Path, alone: Run) -> None:
    run = cluster.begin(prepared(tmp_path))
    said, _ = run.communicate(timeout=LONG_S)
    assert run.returncode == 0, said
    assert Run(tmp_path / "run").losses == pytest.approx(alone.losses, rel=1e-5)
    assert "step 40/40" in said and "4 processes" in said
    assert_nothing_left()


@pytest.mark.parametrize("killed", ["a process", "a worker of Ray", "a raylet"])
def test_the_job_is_started_again_from_its_checkpoint(
    cluster: Cluster, tmp_path: Path, alone: Run, killed: str
) -> None:
    run = cluster.begin(prepared(tmp_path, max_steps=40, restarts=2), "topology.join_timeout=200")
    wait_for_checkpoint(run, tmp_path)
    process = rank(3)
    if killed == "a raylet":  # not that of the launcher
        raylets = [one for process in launchers() for one in process.parents() if "raylet" in one.name()]
        raylet = next(one for one in raylets if any("127.0.0.2" in word for word in one.cmdline()))
        for one in [raylet, *raylet.children(recursive=True)]:
            one.kill()
        cluster.add()
    else:
        (process if killed == "a process" else launchers()[-1].parent() or process).kill()
    said, _ = run.communicate(timeout=LONG_S)
    assert run.returncode == 0 and "resuming from step-" in said, said
    assert Run(tmp_path / "run").losses == pytest.approx(alone.losses, rel=1e-5)
    assert_nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_a_checkpoint(cluster: Cluster, tmp_path: Path, number: int, code: int) -> None:
    run = cluster.begin(prepared(tmp_path, max_steps=100_000, restarts=2))
    wait_for_checkpoint(run, tmp_path)
    os.kill(run.pid, number)
    said, _ = run.communicate(timeout=LONG_S)
    assert run.returncode == code and "the same command goes on from" in said, said
    assert Run(tmp_path / "run").summary["status"] == "stopped"
    assert_nothing_left()


def test_what_no_new_start_mends_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    (prepared(tmp_path, restarts=3) / "data.jsonl").write_text('{"messages": 3}\n')
    run = cluster.begin(tmp_path)
    said, _ = run.communicate(timeout=LONG_S)
    assert run.returncode == 2 and said.count("data.jsonl:1") == 1, said


def test_a_lost_worker_without_restarts_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.begin(prepared(tmp_path, max_steps=100_000), "topology.nodes=1")  # two of the processes on a machine
    wait_for_checkpoint(run, tmp_path)
    (launchers()[0].parent() or run).kill()
    said, _ = run.communicate(timeout=LONG_S)
    assert run.returncode == 4 and "a worker of Ray was lost" in said, said
    assert_nothing_left()


def test_a_run_folder_in_use_ends_all_processes(cluster: Cluster, tmp_path: Path) -> None:
    folder = RunFolder(prepared(tmp_path) / "run")
    folder.logs.mkdir(parents=True)
    folder.mark.touch()
    with RunLock() as lock:  # which rank 0 alone looks at, while the other waits for it
        lock.take(folder.root)
        run = cluster.begin(tmp_path, "topology.nodes=1")
        said, _ = run.communicate(timeout=150)
    assert run.returncode == 2 and said.count("trainer.output_dir") == 1, said
    assert_nothing_left()


def test_a_signal_while_workers_are_placed(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.begin(prepared(tmp_path), "topology.gpus_per_node=64")
    assert run.stdout is not None and "waiting for Ray to reserve machines of 2 × 64 CPUs" in run.stdout.readline()
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=30)
    assert run.returncode == 143 and "stopped by SIGTERM" in said, said


def test_a_killed_command_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.begin(prepared(tmp_path, max_steps=100_000))
    wait_for_checkpoint(run, tmp_path)
    run.kill()
    run.communicate(timeout=LONG_S)
    assert_nothing_left()


def test_a_run_folder_in_a_copy_that_ray_deletes_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "working_dir_files/_ray_pkg_1"
    folder.mkdir(parents=True)
    run = cluster.begin(prepared(folder), "trainer.output_dir=run")
    said, _ = run.communicate(timeout=LONG_S)
    assert run.returncode == 2 and "which Ray deletes" in said, said


def test_a_cluster_that_has_too_little_or_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.begin(prepared(tmp_path), "topology.gpus_per_node=64", "topology.join_timeout=15")
    said, _ = run.communicate(timeout=LONG_S)
    assert run.returncode == 4 and "Ray has not reserved machines of 2 × 64 CPUs after 15" in said, said
    cluster.env["RAY_ADDRESS"] = f"127.0.0.1:{free_port()}"
    try:
        run = cluster.begin(tmp_path)
        said, _ = run.communicate(timeout=LONG_S)
        assert run.returncode == 2 and "no Ray cluster is found" in said, said
        cluster.env["RAY_ADDRESS"] = "http://127.0.0.1:8265"  # as ray job submit wants it
        run = cluster.begin(tmp_path)
        said, _ = run.communicate(timeout=LONG_S)
    finally:
        cluster.env["RAY_ADDRESS"] = cluster.address
    assert run.returncode == 2 and "no Ray cluster is found" in said, said
    assert shutil.which(RAY)


def test_a_cluster_that_is_lost_ends_the_command(tmp_path: Path) -> None:
    own = Cluster()
    try:
        run = own.begin(prepared(tmp_path, max_steps=100_000))
        wait_for_checkpoint(run, tmp_path)
    finally:
        own.stop()
    said, _ = run.communicate(timeout=LONG_S)
    assert run.returncode == 4 and "the Ray cluster no longer answers" in said, said
    assert_nothing_left()
