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

from packtrain.launch.attempt import RunLock
from packtrain.run_folder import RunFolder
from tests.ports import free_port
from tests.train.forked import ENVIRONMENT
from tests.train.running import Run, base_config, train
from tests.waiting import until

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
    until(lambda: [*(folder / "run/checkpoints").glob("step-*")] or run.poll() is not None, LONG_S)
    assert run.poll() is None, run.communicate()[0]


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
    until(lambda: not launchers(), 60, launchers)


def ended(run: subprocess.Popen[str], code: int, *said: str, limit_s: float = LONG_S) -> str:
    """Wait until a command ends with this code; return its output, which has each text."""
    text, _ = run.communicate(timeout=limit_s)
    assert run.returncode == code and [one for one in said if one not in text] == [], text
    return text


def train_for_long(cluster: Cluster, folder: Path, *overrides: str, **trainer: object) -> subprocess.Popen[str]:
    """A run that has come to its first checkpoint, and not to its end."""
    run = cluster.begin(prepared(folder, max_steps=100_000, **trainer), *overrides)
    wait_for_checkpoint(run, folder)
    return run


def test_workers_of_two_machines_train_as_one_process_does(cluster: Cluster, tmp_path: Path, alone: Run) -> None:
    ended(cluster.begin(prepared(tmp_path)), 0, "step 40/40", "4 processes")
    assert Run(tmp_path / "run").losses == pytest.approx(alone.losses, rel=1e-5)
    assert_nothing_left()


@pytest.mark.parametrize("killed", ["a process", "a worker of Ray", "a raylet"])
def test_the_job_is_started_again_from_its_checkpoint(cluster, tmp_path, alone, killed):
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
    ended(run, 0, "resuming from step-")
    assert Run(tmp_path / "run").losses == pytest.approx(alone.losses, rel=1e-5)
    assert_nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_a_checkpoint(cluster: Cluster, tmp_path: Path, number: int, code: int) -> None:
    run = train_for_long(cluster, tmp_path, restarts=2)
    os.kill(run.pid, number)
    ended(run, code, "the same command goes on from")
    assert Run(tmp_path / "run").summary["status"] == "stopped"
    assert_nothing_left()


def test_what_no_new_start_mends_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    (prepared(tmp_path, restarts=3) / "data.jsonl").write_text('{"messages": 3}\n')
    assert ended(cluster.begin(tmp_path), 2).count("data.jsonl:1") == 1


def test_a_lost_worker_without_restarts_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    run = train_for_long(cluster, tmp_path, "topology.nodes=1")  # two of the processes on a machine
    (launchers()[0].parent() or run).kill()
    ended(run, 4, "a worker of Ray was lost")
    assert_nothing_left()


def test_a_run_folder_in_use_ends_all_processes(cluster: Cluster, tmp_path: Path) -> None:
    folder = RunFolder(prepared(tmp_path) / "run")
    folder.logs.mkdir(parents=True)
    folder.mark.touch()
    with RunLock() as lock:  # which rank 0 alone looks at, while the other waits for it
        lock.take(folder.root)
        said = ended(cluster.begin(tmp_path, "topology.nodes=1"), 2, limit_s=150)
    assert said.count("trainer.output_dir") == 1, said
    assert_nothing_left()


def test_a_signal_while_workers_are_placed(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.begin(prepared(tmp_path), "topology.gpus_per_node=64")
    assert run.stdout is not None and "waiting for Ray to reserve machines of 2 × 64 CPUs" in run.stdout.readline()
    run.send_signal(signal.SIGTERM)
    ended(run, 143, "stopped by SIGTERM", limit_s=30)


def test_a_killed_command_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    run = train_for_long(cluster, tmp_path)
    run.kill()
    run.communicate(timeout=LONG_S)
    assert_nothing_left()


def test_a_run_folder_in_a_copy_that_ray_deletes_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "working_dir_files/_ray_pkg_1"
    folder.mkdir(parents=True)
    ended(cluster.begin(prepared(folder), "trainer.output_dir=run"), 2, "[folder-not-shared]")


def test_a_cluster_that_has_too_little_or_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.begin(prepared(tmp_path), "topology.gpus_per_node=64", "topology.join_timeout=15")
    ended(run, 4, "Ray has not reserved machines of 2 × 64 CPUs after 15")
    try:
        for nobody in (f"127.0.0.1:{free_port()}", "http://127.0.0.1:8265"):  # as ray job submit wants it
            cluster.env["RAY_ADDRESS"] = nobody
            ended(cluster.begin(tmp_path), 2, "[no-ray-cluster]")
    finally:
        cluster.env["RAY_ADDRESS"] = cluster.address
    assert shutil.which(RAY)


def test_a_cluster_that_is_lost_ends_the_command(tmp_path: Path) -> None:
    own = Cluster()
    try:
        run = train_for_long(own, tmp_path)
    finally:
        own.stop()
    ended(run, 4, "[ray-lost]")
    assert_nothing_left()
