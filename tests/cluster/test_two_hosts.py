"""Runs on two network hosts: a healthy one, and every way in which the usual launchers hang or train something else in silence.

Each fault: what the user is told, with which exit code, how soon, and that nothing is left running. The rendezvous comes
before torch is imported; for faults while training, small workers stand in for packtrain.train (small_launch.py).
"""

from __future__ import annotations

import os
import re
import signal
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.cluster.small_launch import BY_TORCHRUN, ROOT, SMALL
from tests.cluster.two_hosts import ENDED_S, LONG_S, Running, TwoHosts, both
from tests.train.running import Run, base_config, train
from tests.waiting import until

JOIN_S = 12
AT_ONCE = "topology.join_timeout=600"  # who waits for it is not heard of again
PROMISED_S = 60
WORKER = """
import os, signal, time
from pathlib import Path
from packtrain.errors import UserError
from packtrain.launch.worker import run_worker
from tests.cluster.small_group import Group

rank = int(os.environ["RANK"])
Path(f"pid-{rank}").write_text(str(os.getpid()))

def work():
    group, stop = Group(), []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.append(number))
    for step in range(10**6):
        group.heartbeat.enter("backward", step=step)
        done = group.all_reduce(float(bool(stop)))
        if step == 3:
            print("training", flush=True)
            if rank == 1 and "FAILS" in os.environ:
                raise UserError("bad data")
        if done:
            print("checkpoint", flush=True)
            return 128 + signal.SIGTERM
        time.sleep(0.02)

run_worker(work)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepared(tmp_path)


def prepared(folder: Path) -> Path:
    """A folder with the config of two machines, and the small workers."""
    (folder / "worker.py").write_text(WORKER)
    topology = {"kind": "manual", "nodes": 2, "gpus_per_node": 2, "main_address": "n1", "main_port": 29500}
    groups = {"topology": {**topology, "join_timeout": JOIN_S}, "trainer": {"max_steps": 6}}
    config = base_config(folder, batch={"examples_per_step": 8, "tokens_per_device": 256}, **groups)
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


def sft(hosts: TwoHosts, host: int, folder: Path, *overrides: str, node: int | None = None, **env: str) -> Running:
    given = ("run.yaml", f"topology.node_rank={host - 1 if node is None else node}", *overrides)
    return hosts.start(host, "-m", "packtrain", "sft", *given, cwd=folder, env=env)


def small(
    hosts: TwoHosts, folder: Path, *overrides: str, program: tuple[str, ...] = SMALL, **env: str
) -> tuple[Running, Running]:
    """Both machines of a run of small workers, one process on each, started in the wrong order."""
    env = {"PYTHONPATH": str(ROOT), **env}
    given = ("topology.gpus_per_node=1", *overrides)
    second = hosts.start(2, *program, "topology.node_rank=1", *given, cwd=folder, env=env)
    first = hosts.start(1, *program, "topology.node_rank=0", *given, cwd=folder, env=env)
    return first, second


def training(first: Running, folder: Path) -> None:
    """Waits until the small workers train."""
    first.until("training")
    until(lambda: "training" in (folder / "run/logs/rank-00001.log").read_text())


@pytest.fixture(scope="module")
def alone(made: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run by one process."""
    folder = prepared(tmp_path_factory.mktemp("alone"))
    config = yaml.safe_load((folder / "run.yaml").read_text())
    del config["topology"]
    return train(folder, config)


@pytest.mark.slow
def test_two_machines_train_as_one_process_does_by_fsdp2(hosts: TwoHosts, folder: Path, alone: Run) -> None:
    """With two processes on each, from nothing, as a user starts it, on hosts whose own names are loopback addresses, as Debian
    writes them. test_slurm.py has ZeRO."""
    for host in (1, 2):
        hosts.name_resolves(host, f"n{host}", "127.0.1.1")
    second, first = (sft(hosts, host, folder, "strategy=fsdp2") for host in (2, 1))
    assert both([first, second], 400) == [0, 0], first.text + second.text
    hosts.assert_empty()
    together = Run(folder / "run")
    assert together.losses == pytest.approx(alone.losses, rel=1e-5)
    expected = alone.weights()
    assert all((weights - expected[name]).abs().max() < 1e-5 for name, weights in together.weights().items())
    assert "step 1/6" in first.text
    assert "step" not in second.text


def test_machines_with_another_config_or_package_are_told_which_key_and_version(hosts: TwoHosts, folder: Path) -> None:
    other = folder / "packages/trl-0.1.2.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.1.2\n")
    odd = sft(hosts, 2, folder, "optim.learning_rate=0.5", PYTHONPATH=f"{other.parent}:{ROOT}")
    runs = [sft(hosts, 1, folder), odd]
    assert both(runs) == [3, 3]
    assert all("optim.learning_rate: n2 has 0.5; n1 has 0.001" in run.text for run in runs)
    assert all(f"trl: n2 has 0.1.2; n1 has {version('trl')}" in run.text for run in runs)


FAULTS = {
    "link lost": (4, PROMISED_S, r"rank 0 on n1 waits? .*step \d+\n  likely cause: the machine is"),
    "raising": (2, ENDED_S, r"n2, rank 1 failed \(exit code 2\): see .*rank-00001.log(.*\n)*.*n2, rank 1:   bad data"),
    "launcher killed": (4, ENDED_S, "n2 was lost"),
    "stopped": (4, PROMISED_S, r"rank 1 on n2 .*SIGSTOP|rank 1 on n2 .*stopped"),
}
"""Of the second machine: the exit code of both, after how long, and what the first says."""


@pytest.mark.sample(without=("launcher killed", "stopped"))  # test_stalls.py has these on one machine
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_second_machine_is_named_on_the_first_and_ends_both(fault, hosts, folder):
    code, limit_s, said = FAULTS[fault]
    overrides = ["topology.step_timeout=10"] if fault == "link lost" else []
    first, second = small(hosts, folder, *overrides, **({"FAILS": "yes"} if fault == "raising" else {}))
    training(first, folder)
    if fault == "link lost":
        hosts.cut()
    elif fault == "launcher killed":
        os.kill(second.process.pid, signal.SIGKILL)
    elif fault == "stopped":
        os.kill(int((folder / "pid-1").read_text()), signal.SIGSTOP)
    since = time.monotonic()
    assert both([first, second]) == [code, -signal.SIGKILL if fault == "launcher killed" else code]
    assert time.monotonic() - since < limit_s
    assert re.search(said, first.text), first.text
    if fault == "link lost":  # each side names the other
        assert "n2 was lost" in first.text and "n1 was lost" in second.text
        assert [run.text.count("likely cause") for run in (first, second)] == [1, 1]
    if fault == "stopped":
        assert (folder / "run/logs/diagnosis.txt").read_text() in first.text


@pytest.mark.parametrize(("asked", "program"), [(0, SMALL), (1, BY_TORCHRUN)], ids=["first", "second"])
def test_a_signal_to_one_launcher_stops_both_machines_in_order(hosts, folder, asked, program):
    runs = small(hosts, folder, program=program)
    training(runs[0], folder)
    runs[asked].process.send_signal(signal.SIGTERM)
    assert both(runs) == [143, 143]
    assert f"stopping: n{asked + 1} received SIGTERM" in runs[1 - asked].text
    assert "checkpoint" in runs[0].text
    assert "checkpoint" in (folder / "run/logs/rank-00001.log").read_text()


STALLS = """
    while True:
        group.heartbeat.enter("data", step=4)
        group.heartbeat.usual_s = 0.01
        if rank == 1: time.sleep(1000)
        group.heartbeat.enter("backward")
        group.all_reduce()
"""


def test_doctor_on_another_machine_names_the_rank_and_shows_what_all_are_doing(hosts: TwoHosts, folder: Path) -> None:
    worker = WORKER.replace("    for step in range(10**6):\n", f"{STALLS}    for step in ():\n")
    (folder / "worker.py").write_text(worker)
    runs = small(hosts, folder, "topology.step_timeout=600")
    said, end = "", time.monotonic() + LONG_S
    while "likely cause: reading the data" not in said or said.count("it does not answer"):
        assert time.monotonic() < end, said
        time.sleep(1)  # each look is a process
        doctor = hosts.start(2, "-m", "packtrain", "doctor", "run", "--stacks", cwd=folder)
        code, said = doctor.wait(), doctor.text
    assert code == 4
    assert "rank 1 on n2" in said and "rank 0 on n1 waits in gloo:all_reduce number 1" in said
    for rank in (0, 1):
        assert "in work" in said.partition(f"stack of rank {rank} on n{rank + 1}")[2]
    assert [run.process.poll() for run in runs] == [None, None]  # they go on
    for run in runs:
        run.process.kill()
        run.wait()
