"""trainer.restarts: what was killed, on one machine or two, is started again by the launchers that live."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.small_launch import ROOT, SMALL, at_work
from tests.cluster.test_stalls import CONFIG
from tests.cluster.two_hosts import LONG_S, Running, TwoHosts, both

STEPS = 40
WORKER = """
import os, signal, sys, time
from pathlib import Path
import yaml
from packtrain.launch.worker import run_worker
from packtrain.run_folder import RunFolder
from tests.cluster.small_group import Group

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
config = yaml.safe_load(Path(sys.argv[-1]).read_text())
folder = RunFolder(Path(config["trainer"]["output_dir"]))
Path(f"pid-{rank}").write_text(str(os.getpid()))

def newest():
    return max((int(one.name[5:]) for one in folder.checkpoints.glob("step-*")), default=0)

def work():
    group, stop = Group(), []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    begun = newest()
    group.all_reduce(0.0)
    if rank == 0:
        folder.attempt.root.rename(f"begun-{time.time()}-{begun}")
        print("training", world, config["trainer"]["resume"], "from", begun, flush=True)
    for step in range(begun + 1, STEPS + 1):
        group.heartbeat.enter("backward", step=step)
        if group.all_reduce(float(bool(stop))):
            return 128 + signal.SIGTERM
        if rank == 0 and step % 5 == 0 and "FRUITLESS" not in os.environ:
            (folder.checkpoints / f"step-{step:06d}").mkdir(parents=True)
        if rank == 1 and "FRUITLESS" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
    return 0

run_worker(work)
""".replace("STEPS", str(STEPS))


def prepared(folder: Path, **topology: Any) -> Path:
    (folder / "worker.py").write_text(WORKER)
    trainer = {"restarts": 2, "checkpoint_every": 5, "max_steps": STEPS, "output_dir": "out"}
    changes = {"trainer": trainer, "topology": {**CONFIG["topology"], **topology}}
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))
    return folder


def restarts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "out/logs/restarts.json").read_text())


def reached(folder: Path, launcher: Running | None = None) -> None:
    """Waits for the first checkpoint."""
    end = time.monotonic() + LONG_S
    while not (folder / "out/checkpoints/step-000005").exists():
        assert time.monotonic() < end and (launcher is None or launcher.process.poll() is None), (
            launcher and launcher.text
        )
        time.sleep(0.05)


def kill(folder: Path, rank: int) -> None:
    os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)


def test_a_killed_rank_is_started_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    process = at_work(folder, *SMALL, "trainer.resume=never")
    reached(folder)
    kill(folder, 1)
    stdout, stderr = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, stderr
    (one,) = restarts(folder)
    assert one["step"] >= 5 and one["step"] % 5 == 0
    assert stdout == f"training 2 never from 0\ntraining 2 auto from {one['step']}\n"
    assert "rank 1 on " in one["why"][0] and "(SIGKILL)" in one["why"][0] and one["machines"]
    assert f"restart 1 of 2, from the checkpoint of step {one['step']}" in stderr


def test_restarts_that_bring_no_new_checkpoint_end_the_run_with_its_diagnosis(tmp_path: Path) -> None:
    process = at_work(prepared(tmp_path), *SMALL, "trainer.restarts=9", FRUITLESS="yes")
    stdout, stderr = process.communicate(timeout=LONG_S)
    assert process.returncode == 4, stderr
    assert stdout == "training 2 auto from 0\n" * 3
    assert stderr.count("(SIGKILL)") == 3
    assert "not started again: 2 restarts in a row have brought no new checkpoint" in stderr.splitlines()[-1]


@pytest.fixture
def hosts(made: TwoHosts) -> Iterator[TwoHosts]:
    yield made
    made.heal()
    made.assert_empty()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepared(tmp_path, kind="manual", nodes=2, main_address="n1", main_port=29500, join_timeout=60)


def machine(hosts: TwoHosts, folder: Path, number: int, *overrides: str) -> Running:
    given = (f"topology.node_rank={number}", *overrides)
    return hosts.start(number + 1, *SMALL, *given, cwd=folder, env={"PYTHONPATH": str(ROOT)})


def test_a_lost_machine_is_done_without_where_min_nodes_allows_it(hosts: TwoHosts, folder: Path) -> None:
    first, second = (machine(hosts, folder, number, "topology.min_nodes=1") for number in (0, 1))
    reached(folder, first)
    os.kill(second.process.pid, signal.SIGKILL)
    assert first.wait() == 0, first.text
    (one,) = restarts(folder)
    assert one["machines"] == ["n1"] and "n2 was lost" in "".join(one["why"])
    assert f"training 2 auto from {one['step']}\n" in first.text
    (begun,) = folder.glob(f"begun-*-{one['step']}")
    plan = json.loads((begun / "plan.json").read_text())
    assert (plan["nodes"], plan["num_processes"]) == (1, 2)


def test_without_min_nodes_the_lost_machine_is_waited_for(hosts: TwoHosts, folder: Path) -> None:
    first, second = (machine(hosts, folder, number) for number in (0, 1))
    reached(folder, first)
    os.kill(second.process.pid, signal.SIGKILL)
    again = machine(hosts, folder, 1)  # before the first machine has noticed
    assert both([first, again]) == [0, 0], first.text + again.text
    (one,) = restarts(folder)
    assert one["machines"] == ["n1", "n2"] and f"training 4 auto from {one['step']}\n" in first.text


def test_a_lost_first_machine_is_waited_for_by_the_others(hosts: TwoHosts, folder: Path) -> None:
    first, second = (machine(hosts, folder, number) for number in (0, 1))
    reached(folder, first)
    os.kill(first.process.pid, signal.SIGKILL)
    again = machine(hosts, folder, 0)
    assert both([again, second]) == [0, 0], again.text + second.text
    assert "n1 was lost" in second.text and "training 4 auto from 5" in again.text


def test_a_machine_without_a_link_is_lost_and_does_not_train_on_alone(hosts: TwoHosts, folder: Path) -> None:
    given = ("topology.min_nodes=1", "topology.step_timeout=10", "topology.join_timeout=5")
    first, second = (machine(hosts, folder, number, *given) for number in (0, 1))
    reached(folder, first)
    hosts.cut()
    assert both([first, second]) == [0, 4], first.text + second.text
    assert [one["machines"] for one in restarts(folder)] == [["n1"]]
    assert "could not be reached" in second.text
