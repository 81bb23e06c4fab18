"""packtrain on a real Slurm: scripts that sbatch takes, runs over two machines, sweeps, and runs that outlive their time limit.

Skipped, with the reason, where there can be no cluster (slurm.py). Real processes on two machines with a network between
them; only the GPUs are pretended, and what trains is a tiny model over gloo.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from packtrain.config.yaml_files import shipped
from tests.cluster.slurm import Slurm, slurm, tail
from tests.cluster.small_launch import ROOT
from tests.cluster.test_foreign_launches import WORKER
from tests.cluster.test_two_hosts_env import NO_TORCH
from tests.cluster.two_hosts import Running
from tests.train import running
from tests.train.running import base_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="pretended GPUs would be taken for real ones"),
]

DEEPSPEED = find_spec("deepspeed") is not None and shutil.which("ninja") is not None
STRATEGY = "zero3" if DEEPSPEED else "fsdp2"  # that of test_two_hosts.py is the other one
STEPS = 60
# The model is too small to be still at work when the time limit comes near.
SLOW_STEPS = """
import pathlib, time
opened = pathlib.Path.open
def open_slowly(self, *arguments, **options):
    if self.name == "metrics.jsonl" and arguments[:1] == ("a",):
        time.sleep(3)
    return opened(self, *arguments, **options)
pathlib.Path.open = open_slowly
"""
WAITS = ("PENDING", "CONFIGURING", "RUNNING")
SLOW_AT_FIRST = 'if [ -z "$SLURM_RESTART_COUNT" ]; then export PYTHONPATH="$PWD/slow:$PYTHONPATH"; fi'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as up:
        yield up


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that jobs are submitted from, with data and a config of one process."""
    folder = tmp_path_factory.mktemp("home of a user")
    (folder / "slow").mkdir()
    (folder / "slow" / "sitecustomize.py").write_text(SLOW_STEPS)
    write(folder, "run.yaml")
    return folder


def write(home: Path, name: str, **groups: dict[str, Any]) -> None:
    one = {"nodes": 1, "gpus_per_node": 1, "sbatch": ["--cpus-per-task=2", "--mem=100"]}
    groups["topology"] = {**one, **groups.get("topology", {})}
    config = base_config(home, **{"trainer": {"max_steps": STEPS}, **groups})
    (home / name).write_text(yaml.safe_dump(config))


def packtrain(cluster: Slurm, home: Path, *arguments: str, expect: int = 0):
    return cluster.run(sys.executable, "-m", "packtrain", *arguments, cwd=home, expect=expect)


def submit(cluster: Slurm, home: Path, config: str, *overrides: str) -> dict[str, Any]:
    return json.loads(packtrain(cluster, home, "sbatch", "sft", config, *overrides, "--submit", "--json").stdout)


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def weights(run: Path) -> dict[str, Any]:
    return load_file(run / "final" / "model.safetensors")


def done(cluster: Slurm, number: str, log: str) -> dict[str, str]:
    job = cluster.wait(number)
    assert job["JobState"] == "COMPLETED", tail(Path(log))
    return job


@pytest.fixture(scope="module")
def tasks(cluster: Slurm, home: Path) -> Running:
    """A step with a task for each of four ranks, one of which meets the others in another operation."""
    folder = home / "tasks"
    folder.mkdir()
    (folder / "worker.py").write_text(WORKER)
    machines = {"nodes": 2, "gpus_per_node": 2, "step_timeout": 10}
    write(folder, "run.yaml", trainer={"output_dir": "out"}, topology=machines)
    step = ("srun", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", sys.executable, "worker.py")
    return cluster.start("env", f"PYTHONPATH={ROOT}", "FAULT=apart", *step, cwd=folder)


@pytest.fixture(scope="module", autouse=True)
def jobs(cluster: Slurm, home: Path) -> dict[str, dict[str, Any]]:
    """Two jobs: an array of two learning rates, and a run with a broken row."""
    (home / "bad.jsonl").write_text('{"messages": 3}\n')
    swept = ["optim.learning_rate=1e-3,2e-3", "trainer.output_dir=runs/sweep", "-m"]
    return {
        "sweep": submit(cluster, home, "run.yaml", *swept),
        "bad": submit(cluster, home, "run.yaml", "data.train=bad.jsonl", "trainer.output_dir=runs/bad"),
    }


@pytest.fixture(scope="module")
def sweep(cluster: Slurm, jobs: dict[str, dict[str, Any]]) -> list[Path]:
    """The run folders of the array, at its end."""
    told = jobs["sweep"]
    for number, run in enumerate(told["runs"]):
        done(cluster, f"{told['job_id']}_{number}", run["log"])
    return [Path(run["output_dir"]) for run in told["runs"]]


@pytest.mark.parametrize("template", sorted(shipped("slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_sbatch_would_take_each_template(template: Path, cluster: Slurm, home: Path) -> None:
    assert "to start at" in cluster.run("sbatch", "--test-only", str(template), "run.yaml", cwd=home).stderr


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["topology.nodes=2", "topology.gpus_per_node=8", "topology.requeue=true", "topology.time=10:00"],
        ["trainer.seed=range(0,3)", "-m", "topology.sbatch=['--qos=normal','-A me','--partition debug']"],
        [
            "topology.command='--container-image=image packtrain'",
            "topology.sbatch=['--exclude=n2 --mail-type=END','--job-name=\"a #job\"','--gpus-per-node=1']",
        ],
        ["topology.sbatch=['--gres=none']", "trainer.output_dir='runs/a \"b\" #c 50%'", "topology.signal_before=300"],
    ],
)
def test_sbatch_would_take_each_generated_script(given: list[str], cluster: Slurm, home: Path) -> None:
    running.packtrain("sbatch", "sft", "run.yaml", *given, "-o", "job.sbatch", cwd=home)  # needs no cluster
    assert "to start at" in cluster.run("sbatch", "--test-only", "job.sbatch", cwd=home).stderr


@pytest.mark.parametrize(
    "given",
    ["topology.sbatch=['--partition=nowhere']", "topology.gpus_per_node=9", "topology.sbatch=['--no-such-flag']"],
)
def test_what_the_cluster_does_not_have_is_refused(given: str, cluster: Slurm, home: Path) -> None:
    refused = packtrain(cluster, home, "sbatch", "sft", "run.yaml", given, "--submit", expect=2)
    assert "topology" in refused.stderr and "[sbatch-refused]" in refused.stderr


def test_an_array_runs_every_point_of_a_sweep_in_its_own_folder(sweep: list[Path]) -> None:
    assert [run.name for run in sweep] == ["optim.learning_rate=0.001", "optim.learning_rate=0.002"]
    first, second = (losses(run) for run in sweep)
    assert len(first) == len(second) == STEPS
    assert first[0] == second[0] and first[1:10] != second[1:10]


def test_a_failing_run_ends_the_job_with_its_exit_code_and_its_words_in_the_log(cluster, jobs):
    job, log = cluster.wait(jobs["bad"]["job_id"]), Path(jobs["bad"]["log"])
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0"), tail(log)
    assert "bad.jsonl" in "\n".join(log.read_text().splitlines()[-10:])


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_job_stopped_before_the_time_limit_comes_back_and_ends_as_one_process(nodes, cluster, home, sweep):
    machines = {"nodes": nodes, "gpus_per_node": 1, "requeue": True, "time": "30:00", "signal_before": 300}
    write(home, "long.yaml", topology={**machines, "setup": [SLOW_AT_FIRST]})
    strategy = STRATEGY if nodes > 1 else "ddp"
    told = submit(cluster, home, "long.yaml", f"strategy={strategy}", f"trainer.output_dir='runs/on {nodes}'")
    number, run, log = told["job_id"], Path(told["output_dir"]), Path(told["log"])
    job = cluster.until(number, lambda job: (run / "metrics.jsonl").exists() or job["JobState"] == "FAILED")
    hours, minutes, seconds = map(int, job["RunTime"].split(":"))
    # near enough for the signal when Slurm looks next, which it does every 30 s, and not past for two minutes
    limit = hours * 60 + minutes + -(-(seconds + 120) // 60)
    cluster.run("scontrol", "update", f"JobId={number}", f"TimeLimit={limit}")
    cluster.until(number, lambda job: any((run / "checkpoints").glob("step-*")) or job["JobState"] not in WAITS)
    # or it would be near its limit when it comes back
    longer = ("scontrol", "update", f"JobId={number}", "TimeLimit=30")
    cluster.run(*longer, expect=None)  # refused where it is at its end already
    over = ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT")
    job = cluster.until(number, lambda job: job["Restarts"] == "1" or job["JobState"] in over)
    assert job["Restarts"] == "1", tail(log)
    cluster.run(*longer)
    (kept,) = (int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
    assert 0 < kept < STEPS and "asks Slurm to start this job again" in log.read_text()
    done(cluster, number, told["log"])
    assert losses(run) == pytest.approx(losses(sweep[0]), rel=1e-5)
    mine, theirs = weights(run), weights(sweep[0])
    assert all((mine[name] - theirs[name]).abs().max() < 1e-5 for name in theirs)
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["num_processes"], plan["nodes"], plan["gpus_per_node"]) == (nodes, nodes, 1)


@pytest.mark.exhaustive
def test_a_job_that_loses_a_machine_goes_on_with_the_other(cluster: Slurm, home: Path, sweep: list[Path]) -> None:
    machines = {"nodes": 2, "gpus_per_node": 1, "min_nodes": 1, "step_timeout": 20}
    machines["setup"] = ['export PYTHONPATH="$PWD/slow:$PYTHONPATH"']
    write(home, "lost.yaml", topology=machines, trainer={"max_steps": STEPS, "checkpoint_every": 2, "restarts": 1})
    told = submit(cluster, home, "lost.yaml", "trainer.output_dir=runs/lost")
    number, run, log = told["job_id"], Path(told["output_dir"]), Path(told["log"])
    cluster.until(number, lambda job: any((run / "checkpoints").glob("step-*")) or job["JobState"] not in WAITS)
    (home / "slow" / "sitecustomize.py").write_text("")  # what is started from now on is quick
    try:
        cluster.lose(2)
        done(cluster, number, told["log"])
    finally:
        cluster.give_back(2)
        (home / "slow" / "sitecustomize.py").write_text(SLOW_STEPS)
    summary = json.loads((run / "summary.json").read_text())
    (one,) = summary["restarts"]
    assert one["machines"] == ["n1"] and one["step"] > 0 and "n2 was lost" in one["why"][0], tail(log)
    assert losses(run) == pytest.approx(losses(sweep[0]), rel=1e-5)
    assert "restart 1 of 1, from the checkpoint of step" in log.read_text()


@pytest.mark.exhaustive
def test_a_job_that_loses_its_first_machine_comes_back(cluster: Slurm, home: Path) -> None:
    """Where no other number of machines will do: with --no-kill Slurm keeps the job, without its script."""
    wait = '[ -n "$SLURM_RESTART_COUNT" ] || sleep 600'
    write(home, "first.yaml", topology={"nodes": 2, "gpus_per_node": 1, "requeue": True, "setup": [wait]})
    told = submit(cluster, home, "first.yaml", "trainer.output_dir=runs/first")
    cluster.until(told["job_id"], lambda job: job["JobState"] == "RUNNING")
    cluster.lose(1)
    cluster.give_back(1)
    job = done(cluster, told["job_id"], told["log"])
    assert job["Restarts"] == "1" and len(losses(Path(told["output_dir"]))) == STEPS


def test_a_step_with_a_task_for_each_rank_is_ended_with_one_diagnosis_over_all_machines(tasks, home):
    assert tasks.wait() == 4, tasks.text
    assert "rank 1 on n1 " in tasks.text and "waits in gloo:broadcast number 4" in tasks.text
    assert "ranks 0, 2 and 3 on n1 and n2 wait in gloo:all_reduce number 4" in tasks.text
    assert tasks.text.count("likely cause: different ranks are in different collective operations") == 1
    assert (home / "tasks/out/logs/diagnosis.txt").read_text().startswith("rank 1 on n1 ")


def test_a_job_that_is_cancelled_does_not_come_back(cluster: Slurm, home: Path) -> None:
    write(home, "cancelled.yaml", topology={"requeue": True, "setup": ["sleep 600"]})
    told = submit(cluster, home, "cancelled.yaml", "trainer.output_dir=runs/cancelled")
    cluster.until(told["job_id"], lambda job: job["JobState"] == "RUNNING")
    cluster.run("scancel", told["job_id"])
    job = cluster.wait(told["job_id"])
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")


def test_one_command_in_an_allocation_compares_all_of_its_machines(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(NO_TORCH)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(base_config(tmp_path, topology={"gpus_per_node": 1})))
    command = [sys.executable, "-m", "packtrain", "env", "run.yaml", "--cluster", "--json"]
    with_paths = ["env", f"PYTHONPATH={tmp_path}", *command]
    done = cluster.run("salloc", "--nodes=2", "--cpus-per-task=2", *with_paths, cwd=tmp_path, expect=None)
    found = json.loads(done.stdout)
    assert set(found["nodes"]) == {"n1", "n2"} and found["missing"] == [], done.stderr
    assert found["all_reduce"]["status"] == "skipped" and "torch takes seconds" in found["all_reduce"]["found"]
    assert not [one for one in found["differences"] if one["status"] == "fail"], found["differences"]
    failed = [one["name"] for one in found["checks"] if one["status"] == "fail"]
    assert done.returncode == (3 if failed else 0), (failed, done.stderr)
