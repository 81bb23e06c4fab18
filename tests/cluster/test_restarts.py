"""trainer.restarts: what was killed, on one machine or two, is started again by the launchers that live."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from tests.cluster.small_launch import ROOT, SMALL, at_work
from tests.cluster.test_stalls import CONFIG
from tests.cluster.two_hosts import LONG_S, Running, TwoHosts, both
from tests.train.running import Run, base_config, train
from tests.waiting import until

STEPS = 20
CHANGES = {
    "fewer": ["topology.min_nodes=1", "topology.gpus_per_node=2"],
    "first": ["topology.min_nodes=1", "topology.gpus_per_node=2"],
    "link": [
        *("topology.min_nodes=1", "topology.gpus_per_node=2", "topology.step_timeout=10", "topology.join_timeout=8"),
        "trainer.max_steps=3000",
    ],
}
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
    for step in range(begun + 1, config["trainer"]["max_steps"] + 1):
        group.heartbeat.enter("backward", step=step)
        stopped = group.all_reduce(float(bool(stop)))
        if rank == 0 and (step % 5 == 0 or stopped) and "FRUITLESS" not in os.environ:
            (folder.checkpoints / f"step-{step:06d}").mkdir(parents=True)
        if stopped:
            return 128 + signal.SIGTERM
        if rank == 1 and "FRUITLESS" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
    return 0

run_worker(work)
"""


def prepared(folder: Path, **topology: Any) -> Path:
    (folder / "worker.py").write_text(WORKER)
    trainer = {"restarts": 2, "checkpoint_every": 5, "max_steps": STEPS, "output_dir": "out"}
    changes = {"trainer": trainer, "topology": {**CONFIG["topology"], **topology}}
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))
    return folder


def restarts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "out/logs/restarts.json").read_text())


def reached(folder: Path, launcher: Running | None = None, step: int = 5) -> None:
    """Waits for a checkpoint, or for the launcher's end."""
    checkpoint = folder / f"out/checkpoints/step-{step:06d}"
    until(lambda: checkpoint.exists() or (launcher and launcher.process.poll() is not None))
    assert checkpoint.exists(), launcher and launcher.text


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


@pytest.mark.slow
@pytest.mark.exhaustive
def test_one_process_killed_while_it_trains_comes_to_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    """From nothing, as a user starts it: with restarts the only process is one of its own."""
    trainer = {"max_steps": 30, "checkpoint_every": 3, "keep_checkpoints": None}
    config = base_config(tmp_path, batch={"examples_per_step": 4}, trainer=trainer)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    given = ("-m", "packtrain", "sft", "run.yaml", "trainer.restarts=1", "trainer.output_dir=killed")
    process = at_work(tmp_path, *given)
    until(lambda: (tmp_path / "killed/checkpoints/step-000003").exists() or process.poll() is not None, look_s=0.02)
    (worker,) = psutil.Process(process.pid).children()
    worker.kill()
    _, stderr = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, stderr
    whole, killed = train(tmp_path, config), Run(tmp_path / "killed")
    (one,) = json.loads((tmp_path / "killed/summary.json").read_text())["restarts"]
    assert "(SIGKILL)" in one["why"][0] and one["step"] >= 3
    assert killed.losses == whole.losses and len(killed.losses) == 30
    assert all(torch.equal(weights, killed.weights()[name]) for name, weights in whole.weights().items())


def on_two_hosts(folder: Path, port: int) -> Path:
    folder.mkdir(exist_ok=True)
    machines = {"kind": "manual", "nodes": 2, "main_address": "n1", "main_port": port, "gpus_per_node": 1}
    return prepared(folder, **machines, join_timeout=60)


def machine(hosts: TwoHosts, folder: Path, number: int, *overrides: str) -> Running:
    given = (f"topology.node_rank={number}", *overrides)
    return hosts.start(number + 1, *SMALL, *given, cwd=folder, env={"PYTHONPATH": str(ROOT)})


def killed(launcher: Running, folder: Path) -> None:
    reached(folder, launcher)
    os.kill(launcher.process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["zero2", "fsdp2"])
def test_a_run_that_goes_on_with_fewer_machines_comes_to_the_losses_of_one_process(hosts, tmp_path, strategy):
    """As a user starts it, with a real model."""
    if strategy == "zero2":
        pytest.importorskip("deepspeed")
    config = base_config(tmp_path, trainer={"max_steps": 40})
    machines = {"kind": "manual", "nodes": 2, "min_nodes": 1, "main_address": "n1", "gpus_per_node": 1}
    trainer = {"restarts": 1, "checkpoint_every": 3, "output_dir": "out"}
    changes = {"trainer": {**config["trainer"], **trainer}, "topology": machines, "strategy": strategy}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**config, **changes}))
    given = ("-m", "packtrain", "sft", "run.yaml")
    runs = [hosts.start(host, *given, f"topology.node_rank={host - 1}", cwd=tmp_path) for host in (1, 2)]
    reached(tmp_path, runs[0], 3)
    runs[1].process.kill()
    assert runs[0].wait() == 0, runs[0].text
    (one,) = restarts(tmp_path)
    assert one["machines"] == ["n1"] and 3 <= one["step"] < 40
    whole, shrunk = train(tmp_path, config), Run(tmp_path / "out")
    assert shrunk.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_lost_machine_is_done_without_or_waited_for_unless_it_is_machine_0(hosts: TwoHosts, tmp_path: Path) -> None:
    """Four runs at once, most of whose time is waiting: the second machine is lost, with min_nodes and without, and the first."""
    names = ("fewer", "second", "first", "link")
    folders = [on_two_hosts(tmp_path / name, 29500 + 10 * at) for at, name in enumerate(names)]
    fewer, second, first, link = folders
    runs = {one: [machine(hosts, one, number, *CHANGES.get(one.name, ())) for number in (0, 1)] for one in folders}
    killed(runs[fewer][1], fewer)
    killed(runs[second][1], second)
    killed(runs[first][0], first)
    assert runs[fewer][0].wait() == 0, runs[fewer][0].text
    (one,) = restarts(fewer)
    assert one["machines"] == ["n1"] and "n2 was lost" in "".join(one["why"])
    assert f"training 2 auto from {one['step']}\n" in runs[fewer][0].text
    (begun,) = fewer.glob(f"begun-*-{one['step']}")
    plan = json.loads((begun / "plan.json").read_text())
    assert (plan["nodes"], plan["num_processes"]) == (1, 2)

    runs[second][0].until("for machine 1 (rank 1) to connect")
    runs[second][1] = machine(hosts, second, 1)
    assert both(runs[second]) == [0, 0], "".join(one.text for one in runs[second])
    (one,) = restarts(second)
    assert one["machines"] == ["n1", "n2"] and f"training 2 auto from {one['step']}\n" in runs[second][0].text

    # nobody takes the place of machine 0, though min_nodes=1; the same commands go on
    assert runs[first][1].wait() == 4
    assert "n1 was lost: its launcher ended; it is machine 0, without which the run ends" in runs[first][1].text
    runs[first] = [machine(hosts, first, number, *CHANGES["first"]) for number in (0, 1)]
    assert both(runs[first]) == [0, 0], "".join(one.text for one in runs[first])
    assert "training 4 auto from " in runs[first][0].text and "from 0" not in runs[first][0].text

    # the fourth, at last, by its link: who comes back is not taken up, and a signal is no failure
    hosts.cut()
    runs[link][0].until("training 2 auto")
    assert runs[link][1].wait() == 4
    assert "it is machine 0, without which the run ends" in runs[link][1].text
    hosts.heal()
    back = machine(hosts, link, 1, *CHANGES["link"])
    assert back.wait() == 4 and "[run-has-started]" in back.text, back.text
    runs[link][0].process.send_signal(signal.SIGTERM)
    assert runs[link][0].wait() == 143, runs[link][0].text
    assert [one["machines"] for one in restarts(link)] == [["n1"]]
