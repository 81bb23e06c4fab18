"""Runs on two network hosts: a healthy one, and every way in which the usual launchers hang or train something else in silence.

Each fault: what the user is told, with which exit code, how soon, and that nothing is left running. The rendezvous comes
before torch is imported; for faults while training, small workers stand in for packtrain.train (small_launch.py).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.cluster.small_launch import ROOT
from tests.cluster.two_hosts import ADDRESSES, ENDED_S, INTERFACE, LONG_S, Running, TwoHosts, both
from tests.train.running import Run, base_config, train

JOIN_S = 12
START_S = 2 * 25  # twice what is promised, for the imports of several launchers at once on a busy machine
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
def hosts(made: TwoHosts) -> Iterator[TwoHosts]:
    yield made
    made.heal()
    made.assert_empty()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepared(tmp_path)


def prepared(folder: Path) -> Path:
    """A folder with the config of two machines, and the small workers."""
    (folder / "worker.py").write_text(WORKER)
    topology = {"kind": "manual", "nodes": 2, "gpus_per_node": 2, "main_address": "n1", "main_port": 29500}
    config = base_config(
        folder,
        batch={"examples_per_step": 8, "tokens_per_device": 256},
        trainer={"max_steps": 6},
        topology={**topology, "join_timeout": JOIN_S},
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


def sft(hosts: TwoHosts, host: int, folder: Path, *overrides: str, node: int | None = None, **env: str) -> Running:
    given = ("run.yaml", f"topology.node_rank={host - 1 if node is None else node}", *overrides)
    return hosts.start(host, "-m", "packtrain", "sft", *given, cwd=folder, env=env)


def small(hosts: TwoHosts, folder: Path, *overrides: str, **env: str) -> tuple[Running, Running]:
    """Both machines of a run of small workers, one process on each, started in the wrong order."""
    program, env = ("-m", "tests.cluster.small_launch"), {"PYTHONPATH": str(ROOT), **env}
    given = ("topology.gpus_per_node=1", *overrides)
    second = hosts.start(2, *program, "topology.node_rank=1", *given, cwd=folder, env=env)
    first = hosts.start(1, *program, "topology.node_rank=0", *given, cwd=folder, env=env)
    return first, second


def training(first: Running, folder: Path) -> None:
    """Waits until the small workers train."""
    first.until("training")
    end = time.monotonic() + LONG_S
    while "training" not in (folder / "run/logs/rank-00001.log").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def alone(made: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run by one process."""
    folder = prepared(tmp_path_factory.mktemp("alone"))
    config = yaml.safe_load((folder / "run.yaml").read_text())
    del config["topology"]
    return train(folder, config)


@pytest.mark.slow
def test_two_machines_train_as_one_process_does_by_fsdp2(hosts: TwoHosts, folder: Path, alone: Run) -> None:
    """From nothing, as a user starts it, on hosts whose own names are loopback addresses, as Debian writes them.

    test_run_faults.py has ddp with several processes on each, test_slurm.py ZeRO.
    """
    for host in (1, 2):
        hosts.name_resolves(host, f"n{host}", "127.0.1.1")
    second, first = (sft(hosts, host, folder, "strategy=fsdp2", "topology.gpus_per_node=1") for host in (2, 1))
    assert both([first, second], 400) == [0, 0], first.text + second.text
    hosts.assert_empty()
    together = Run(folder / "run")
    assert together.losses == pytest.approx(alone.losses, rel=1e-5)
    expected = alone.weights()
    assert all((weights - expected[name]).abs().max() < 1e-5 for name, weights in together.weights().items())
    assert "step 1/6" in first.text
    assert "step" not in second.text


@pytest.fixture(scope="module")
def waits(made: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Running]:
    """The faults that take their time, all at once: each with a port and a folder of its own."""
    runs = {}

    def start(name: str, host: int, number: int, *overrides: str) -> None:
        folder = prepared(tmp_path_factory.mktemp(name.replace(" ", "-")))
        runs[name] = sft(made, host, folder, f"topology.main_port={29600 + number}", *overrides)

    script = "import socket, time; held = socket.create_server(('', 29602)); print('held', flush=True); time.sleep(600)"
    runs["holder"] = made.start(1, "-c", script, cwd=tmp_path_factory.mktemp("holder"))
    start("no machine 0", 2, 0)
    start("no machine 1", 1, 1)
    runs["holder"].until("held")
    start("wrong address", 2, 4, "topology.main_address=10.88.0.99")
    start("port taken", 1, 2, AT_ONCE)
    start("port taken there", 2, 2, AT_ONCE)
    start("still no machine 0", 2, 5, AT_ONCE)
    start("still no machine 1", 1, 6, AT_ONCE)
    made.name_resolves(2, "n1", "127.0.0.1")
    start("name is loopback", 2, 3, AT_ONCE)
    made.heal()
    for name, run in runs.items():
        if name.startswith("still"):
            run.until("waiting ")
            run.process.kill()
        if name != "holder":
            run.wait()
    runs["holder"].process.kill()
    runs["holder"].wait()
    return runs


def test_a_main_machine_that_never_starts_is_named(waits: dict[str, Running]) -> None:
    run = waits["no machine 0"]
    assert (run.wait(), run.took() < START_S) == (4, True)
    refused = "connection refused"
    assert re.search(rf"waiting \d+ s for machine 0 at n1:29605: {refused}", waits["still no machine 0"].text)
    assert re.search(rf"machine 0 could not be reached at n1:29600 for \d+ s: {refused}", run.text)
    assert "topology.node_rank=0" in run.text


def test_an_address_of_nobody_is_named(waits: dict[str, Running]) -> None:
    run = waits["wrong address"]
    assert (run.wait(), run.took() < START_S) == (4, True)
    assert re.search(r"could not be reached at 10.88.0.99:29604 for \d+ s: (timed out|no route to host)", run.text)


def test_a_worker_machine_that_never_starts_is_named(waits: dict[str, Running]) -> None:
    run = waits["no machine 1"]
    assert (run.wait(), run.took() < START_S) == (4, True)
    said = waits["still no machine 1"].text
    assert re.search(r"waiting \d+ s for machine 1 \(ranks 2 and 3\): not connected; n1 is here", said)
    assert f"machine 1 (ranks 2 and 3) did not connect to n1 within {JOIN_S} s" in run.text
    assert "topology.node_rank=1" in run.text


def test_a_taken_port_is_named_with_its_holder_on_both_machines(waits: dict[str, Running]) -> None:
    here, there = waits["port taken"], waits["port taken there"]
    assert (here.wait(), there.wait()) == (3, 3)
    assert here.took() < START_S
    assert there.took() < START_S
    assert f"port 29602 is taken by process {waits['holder'].process.pid} (" in here.text
    assert "topology.main_port=29612" in here.text
    assert "at n1:29602 a program listens that does not answer" in there.text


def test_a_main_name_that_means_this_machine_itself_is_a_clear_error(waits: dict[str, Running]) -> None:
    run = waits["name is loopback"]
    assert (run.wait(), run.took() < START_S) == (3, True)
    assert "n1 is 127.0.0.1 here, an address of this machine itself, and no process listens there" in run.text
    assert "topology.main_address" in run.text
    assert "/etc/hosts" in run.text


def test_two_machines_with_number_0_are_both_told_at_once(hosts: TwoHosts, folder: Path) -> None:
    runs = [sft(hosts, host, folder, AT_ONCE, node=0) for host in (1, 2)]
    assert both(runs) == [3, 3], runs[1].text
    assert f"two machines are number 0: n1 ({ADDRESSES[0]}) and n2 ({ADDRESSES[1]})" in runs[0].text
    assert "topology.node_rank" in runs[1].text


def test_machines_that_count_differently_are_told_at_once(hosts: TwoHosts, folder: Path) -> None:
    runs = [sft(hosts, 1, folder, AT_ONCE), sft(hosts, 2, folder, AT_ONCE, "topology.gpus_per_node=1")]
    assert both(runs) == [3, 3]
    assert all("do not have the same number of processes (n1: 2, n2: 1)" in run.text for run in runs)


def test_one_machine_each_is_refused_where_they_are_numbered(hosts: TwoHosts, folder: Path) -> None:
    run = sft(hosts, 2, folder, "topology.nodes=1")
    assert run.wait() == 2
    assert "machine 1 of 1" in run.text
    assert "topology.node_rank" in run.text


def test_two_runs_on_two_machines_do_not_share_a_folder(hosts: TwoHosts, folder: Path) -> None:
    config = yaml.safe_load((folder / "run.yaml").read_text())
    del config["topology"]
    (folder / "alone.yaml").write_text(yaml.safe_dump(config))
    alone = ("-m", "packtrain", "sft", "alone.yaml")
    first = hosts.start(1, *alone, cwd=folder)
    end = time.monotonic() + 60
    while not (folder / "run/logs/lock").exists():
        assert time.monotonic() < end, first.text
        time.sleep(0.05)
    second = hosts.start(2, *alone, cwd=folder)
    assert second.wait() == 2
    assert "a run of another machine is going on in" in second.text
    first.process.kill()
    first.wait()


def test_machines_with_another_config_or_package_are_told_which_key_and_version(hosts: TwoHosts, folder: Path) -> None:
    other = folder / "packages/trl-0.1.2.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.1.2\n")
    runs = [
        sft(hosts, 1, folder),
        sft(hosts, 2, folder, "optim.learning_rate=0.5", PYTHONPATH=str(other.parent)),
    ]
    assert both(runs) == [3, 3]
    assert all("optim.learning_rate: n2 has 0.5; n1 has 0.001" in run.text for run in runs)
    assert all(f"trl: n2 has 0.1.2; n1 has {version('trl')}" in run.text for run in runs)


def test_machines_with_another_number_of_gpus_are_told_at_once(hosts: TwoHosts, folder: Path) -> None:
    smi = folder / "bin/nvidia-smi"  # of a machine with two GPUs
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 81559; echo 81559\n")
    smi.chmod(0o755)
    path, visible = f"{smi.parent}:{os.environ['PATH']}", {1: "0,1", 2: "0"}
    by_gpus = ("topology.gpus_per_node=null",)
    by_number = ("topology.gpus_per_node=2", "topology.main_port=29510", "trainer.output_dir=other")
    runs = [
        sft(hosts, host, folder, *given, PATH=path, CUDA_VISIBLE_DEVICES=gpus)
        for given in (by_gpus, by_number)
        for host, gpus in visible.items()
    ]
    assert both(runs) == [3] * 4, [run.text for run in runs]
    assert all("do not have the same number of GPUs (n1: 2, n2: 1)" in run.text for run in runs[:2])
    assert all("2 GPUs on each machine are needed, but some have fewer (n2: 1)" in run.text for run in runs[2:])
    assert all("Set topology.gpus_per_node=1 on every machine" in run.text for run in runs)


def test_a_foreign_launch_with_the_number_of_one_machine_is_refused(hosts: TwoHosts, folder: Path) -> None:
    common = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "2", "--num_processes", "2"]
    common += ["--main_process_ip", "n1", "--main_process_port", "29520", "--same_network"]
    common += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    script = ["-m", "packtrain", "sft", "run.yaml", "topology=env", "topology.nodes=2", "topology.gpus_per_node=2"]
    runs = [hosts.start(host, *common, "--machine_rank", str(host - 1), *script, cwd=folder) for host in (1, 2)]
    assert 0 not in both(runs)
    assert all("but the launch has 2 machines, 1 process on each" in run.text for run in runs)
    assert all("exitcode  : 3" in run.text for run in runs)  # torchrun's own is 1 for everything
    assert not (folder / "run/metrics.jsonl").exists()


def test_a_lost_link_is_named_on_both_sides_long_before_the_time_limit(hosts: TwoHosts, folder: Path) -> None:
    runs = small(hosts, folder, "topology.step_timeout=10")
    training(runs[0], folder)
    hosts.cut()
    cut = time.monotonic()
    assert both(runs) == [4, 4]
    assert time.monotonic() - cut < PROMISED_S
    for run, here, lost in ((runs[0], "n1", "n2"), (runs[1], "n2", "n1")):
        assert f"{lost} was lost: silent for" in run.text
        waits = rf"rank 0 on {here} waits? .*the backward pass of step \d+\n  likely cause: the machine is"
        assert here == "n2" or re.search(waits, run.text)  # machine 0 alone knows of the ranks
        assert run.text.count("likely cause") == 1 and "→ look whether the machine is up" in run.text


def test_a_failing_process_ends_the_other_machine_with_its_code_and_its_words(hosts: TwoHosts, folder: Path) -> None:
    runs = small(hosts, folder, FAILS="yes")
    training(runs[0], folder)
    failed = time.monotonic()
    assert both(runs) == [2, 2]
    assert time.monotonic() - failed < ENDED_S
    assert re.search(r"n2, rank 1 failed \(exit code 2\): see .*run/logs/rank-00001.log", runs[0].text)
    assert "n2, rank 1:   bad data" in runs[0].text


def test_a_killed_process_is_named_and_the_others_end_at_once(hosts: TwoHosts, folder: Path) -> None:
    runs = small(hosts, folder)
    training(runs[0], folder)
    os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
    killed = time.monotonic()
    assert both(runs) == [4, 4]
    assert time.monotonic() - killed < ENDED_S
    assert re.search(r"(rank 1 on n2 .*|n2, rank 1) ended without an error message", runs[0].text)


def test_a_killed_launcher_leaves_nothing_behind_and_is_named(hosts: TwoHosts, folder: Path) -> None:
    runs = small(hosts, folder)
    training(runs[0], folder)
    os.kill(runs[1].process.pid, signal.SIGKILL)
    killed = time.monotonic()
    assert runs[0].wait() == 4
    assert time.monotonic() - killed < ENDED_S
    assert "n2 was lost" in runs[0].text


def test_a_stopped_process_is_named_within_the_time_limit(hosts: TwoHosts, folder: Path) -> None:
    runs = small(hosts, folder)
    training(runs[0], folder)
    os.kill(int((folder / "pid-1").read_text()), signal.SIGSTOP)
    stopped = time.monotonic()
    assert both(runs) == [4, 4]
    assert time.monotonic() - stopped < PROMISED_S
    assert re.search(r"rank 1 on n2 .*is stopped.*\n(  .*\n)*  ranks? .*on n1 waits? .*of step \d+\n", runs[0].text)
    assert (folder / "run/logs/diagnosis.txt").read_text() in runs[0].text


def test_a_network_interface_that_is_not_there_is_named_with_those_that_are(hosts: TwoHosts, folder: Path) -> None:
    runs = [sft(hosts, host, folder, AT_ONCE, "+topology.environment.GLOO_SOCKET_IFNAME=ib0") for host in (1, 2)]
    assert both(runs) == [3, 3]
    assert all("GLOO_SOCKET_IFNAME" in run.text and "ib0" in run.text and INTERFACE in run.text for run in runs)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_launcher_stops_both_machines_in_order(hosts: TwoHosts, folder: Path, asked: int) -> None:
    runs = small(hosts, folder)
    training(runs[0], folder)
    runs[asked].process.send_signal(signal.SIGTERM)
    assert both(runs) == [143, 143]
    assert f"stop asked by SIGTERM on n{asked + 1}" in runs[1 - asked].text
    assert "checkpoint" in runs[0].text
    assert "checkpoint" in (folder / "run/logs/rank-00001.log").read_text()
