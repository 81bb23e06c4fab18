"""Several machines as tables: what Slurm, mpirun, Kubernetes and the config say, and the plan that comes of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from packtrain.config.schema import Batch, RunConfig, Topology, Trainer
from packtrain.errors import CheckFailed, UserError
from packtrain.launch.execute import execute
from packtrain.plan.launch_plan import LaunchPlan, plan_launch
from packtrain.plan.surroundings import Surroundings, expand


def variables(text: str) -> dict[str, str]:
    """Environment variables, as a shell shows them."""
    return dict(re.findall(r"(\w+)=(\S*)", text))


JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_ON_NODE": "64"}
BATCH_SCRIPT = {**JOB, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_GPUS_ON_NODE": "8"}
STEP = "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-3] SLURM_STEP_TASKS_PER_NODE=1(x3)"
TASK = BATCH_SCRIPT | variables(f"{STEP} SLURM_NODEID=2 SLURM_PROCID=2 SLURM_LOCALID=0")
TASK_PER_GPU = {**TASK, "SLURM_STEP_TASKS_PER_NODE": "8(x3)", "SLURM_PROCID": "17", "SLURM_LOCALID": "1"}
MPI = variables(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
)
HYDRA = variables("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")  # MPICH, Intel MPI
POD = variables("KUBERNETES_SERVICE_HOST=10.0.0.1 RANK=1 WORLD_SIZE=4 MASTER_ADDR=job-master-0 MASTER_PORT=23456")
ELASTIC = variables("PET_NNODES=4 PET_NODE_RANK=3 PET_NPROC_PER_NODE=2 PET_MASTER_ADDR=job-0 PET_MASTER_PORT=999")
SKYPILOT = variables("SKYPILOT_NODE_RANK=3 SKYPILOT_NUM_NODES=4 SKYPILOT_NUM_GPUS_PER_NODE=2")
SKYPILOT["SKYPILOT_NODE_IPS"] = "job-0\njob-1\njob-2\njob-3"
DSTACK = variables("DSTACK_NODE_RANK=3 DSTACK_NODES_NUM=4 DSTACK_GPUS_PER_NODE=2 DSTACK_MASTER_NODE_IP=job-0")
TORCHRUN = variables("RANK=1 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1")


def plan(topology: dict[str, Any] | None = None, env: dict[str, str] | None = None, **surroundings: Any) -> LaunchPlan:
    config = RunConfig(
        topology=Topology(**(topology or {})), batch=Batch(examples_per_step=32), trainer=Trainer(output_dir="runs/x")
    )
    seen = Surroundings(**{"env": env or {}, "cpus": 64, "free_port": 4321, "host": "n1", **surroundings})
    return plan_launch(config, seen, "sft", ["config.yaml", "trainer.seed=1"])


def said_by(command: Any, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (3, 4), (128, 8)])
def test_every_machine_is_told_the_total_and_only_its_own_number_differs(nodes: int, per_node: int) -> None:
    made = plan({"kind": "manual", "nodes": nodes, "gpus_per_node": per_node, "main_address": "n1", "node_rank": 1})
    assert (made.num_processes, made.nodes, made.gpus_per_node) == (nodes * per_node, nodes, per_node)
    assert [command.node for command in made.commands] == list(range(nodes))
    assert [said_by(command, "--machine_rank") for command in made.commands] == [str(node) for node in range(nodes)]
    same = {"--num_machines": nodes, "--num_processes": nodes * per_node}
    for flag, value in (same | {"--main_process_ip": "n1", "--main_process_port": 29500}).items():
        assert {said_by(command, flag) for command in made.commands} == {str(value)}
    assert made.accelerate["num_processes"] == nodes * per_node
    assert made.accelerate["machine_rank"] == 1 and made.command.node == 1
    assert list(made.ranks) == list(range(per_node, 2 * per_node))
    assert not made.obstacles
    json.dumps(made.to_json())


@pytest.mark.parametrize(
    ("env", "role", "node", "processes"),
    [
        (BATCH_SCRIPT, "srun", 0, (24, 3, 8)),
        (TASK, "launch", 2, (24, 3, 8)),
        (JOB, "srun", 0, (3, 3, 1)),  # the shell that salloc leaves on the login machine
        ({**JOB, "SLURM_GPUS_PER_NODE": "a100:8"}, "srun", 0, (24, 3, 8)),
        ({**JOB, "SLURM_STEP_ID": "4294967290", "SLURM_NODEID": "0"}, "srun", 0, (3, 3, 1)),  # salloc's own step
        ({**BATCH_SCRIPT, "SLURM_JOB_NODELIST": "n1"}, "launch", 0, (8, 1, 8)),
        ({**BATCH_SCRIPT, "SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "1"}, "train", 0, (1, 1, 1)),
        ({**TASK, "SLURM_STEP_NODELIST": "n[2-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1"}, "launch", 1, (16, 2, 8)),
        (TASK_PER_GPU, "train", 0, (24, 3, 8)),
        ({**TASK, "PMI_RANK": "2", "PMI_SIZE": "3"}, "launch", 2, (24, 3, 8)),  # srun --mpi=pmi2
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["auto", "slurm"])
def test_in_a_slurm_job_its_machines_train(kind, env, role, node, processes):
    made = plan({"kind": kind}, env)
    assert (made.role, made.node) == (role, node)
    assert (made.num_processes, made.nodes, made.gpus_per_node) == processes


def test_the_batch_script_starts_one_task_on_each_machine_and_every_task_of_a_step_has_the_same_port() -> None:
    made = plan(env=BATCH_SCRIPT, python="python3")
    assert " ".join(made.srun) == (
        "srun --nodes 3 --ntasks 3 --ntasks-per-node 1 --cpus-per-task 64 --kill-on-bad-exit=0 --wait=0 "
        "python3 -m packtrain sft config.yaml trainer.seed=1"
    )
    tasks = [plan(env={**TASK, "SLURM_NODEID": str(node)}) for node in range(3)]
    assert tasks[0].commands == tasks[1].commands == tasks[2].commands
    assert [task.node for task in tasks] == [0, 1, 2]
    assert said_by(tasks[0].command, "--main_process_ip") == "n1"
    assert not any(task.srun for task in tasks)

    def port(**env: str) -> str:
        return said_by(plan(env={**TASK, **env}).command, "--main_process_port")

    ports = {port(), port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID="18"), port(SLURM_JOB_ID="18_4")}
    assert len(ports) == 4 and all(15000 <= int(item) < 25000 for item in ports)
    assert port(SLURM_NODEID="0") == port(SLURM_NODEID="1")


@pytest.mark.parametrize(("engine", "env"), [("SkyPilot", SKYPILOT), ("dstack", DSTACK)])
def test_machines_that_an_engine_has_started_know_which_they_are(engine: str, env: dict[str, str]) -> None:
    made = plan(env=env)
    assert (made.nodes, made.gpus_per_node, made.node, made.main_address) == (4, 2, 3, "job-0")
    assert made.reason.startswith("machine 3 of 4 machines, 2 processes on each") and engine in made.reason
    assert said_by(made.command, "--main_process_port") == "29500"
    names = [*env]
    alone = plan(env={**env, names[0]: "0", names[1]: "1"})
    assert (alone.nodes, alone.role) == (1, "train")
    on_cpus = plan({"gpus_per_node": 3}, {**env, names[2]: "0"})
    assert on_cpus.gpus_per_node == 3
    with pytest.raises(UserError, match=f"{names[0]} must be set"):
        plan(env={name: value for name, value in env.items() if name != names[0]})
    with pytest.raises(UserError, match=f"5, but it is 4 by {engine}'s variables"):
        plan({"nodes": 5}, env)


@pytest.mark.parametrize(("gpus", "local_rank"), [(0, "1"), (1, "0"), (8, "1")])
def test_a_task_per_gpu_gets_torch_s_variables_and_takes_the_only_gpu_that_it_sees(gpus: int, local_rank: str) -> None:
    made = plan(env=TASK_PER_GPU, gpus=gpus).command.env
    named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [made[name] for name in named] == ["17", "24", local_rank, "8", "n1"]


@pytest.mark.parametrize(
    ("topology", "env", "surroundings", "said"),
    [
        ({"nodes": 4}, BATCH_SCRIPT, {}, "4, but it is 3 by Slurm job 17: n1, n2, n3"),
        ({"gpus_per_node": 9}, BATCH_SCRIPT, {}, r"9, but Slurm job 17 has 8 GPUs on this machine \(SLURM_GPUS_ON_NODE\)"),
        ({"main_address": "login"}, BATCH_SCRIPT, {}, "login, but it is n1 by Slurm job 17: n1, n2, n3"),
        ({"node_rank": 1}, TASK, {}, r"1, but it is 2 by Slurm job 17 \(SLURM_NODEID\)"),
        ({"kind": "manual", "nodes": 2, "node_rank": 2}, {}, {}, "machine 2 of 2"),
        ({"node_rank": 1}, {}, {}, "machine 1 of 1"),
        ({}, {**TASK, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, {}, r"different numbers of tasks \('2\(x2\),1'\)"),
        ({}, {**BATCH_SCRIPT, "SLURM_GPUS_ON_NODE": "x"}, {}, "SLURM_GPUS_ON_NODE"),
        ({}, MPI, {}, "topology.main_address"),
        ({"nodes": 3}, ELASTIC, {}, "3, but it is 4 by torchrun's variables"),
        ({"gpus_per_node": 1}, ELASTIC, {}, "1, but it is 2 by torchrun's variables"),
        ({"main_address": "b"}, ELASTIC, {}, "b, but it is job-0 by torchrun's variables"),
        ({"main_address": "b"}, TORCHRUN, {}, "b, but it is a by MASTER_ADDR"),
        ({}, {"PET_NNODES": "1:4", "PET_RDZV_BACKEND": "c10d"}, {}, "PET_NODE_RANK must be set"),
        ({}, {"PMI_RANK": "1", "PMI_SIZE": "2"}, {}, "MPI_LOCALRANKID, MPI_LOCALNRANKS must be set"),
        ({}, {**TORCHRUN, "MASTER_PORT": "tcp://10.0.0.1:80"}, {}, "variable MASTER_PORT"),
        ({}, {**TORCHRUN, "MASTER_ADDR": ""}, {}, "MASTER_ADDR must be set"),
        ({"main_port": 2}, TORCHRUN, {}, "topology.main_port: 2, but it is 1 by MASTER_ADDR and MASTER_PORT"),
        ({}, {**BATCH_SCRIPT, "SLURM_JOB_NODELIST": "n[1-x]"}, {}, "SLURM_JOB_NODELIST"),
        ({"nodes": 2}, {}, {}, "topology.gpus_per_node"),
        ({"kind": "slurm"}, {}, {}, "topology.gpus_per_node"),
    ],
)  # fmt: skip
def test_a_contradiction_is_an_error_that_names_both_sources(topology, env, surroundings, said):
    with pytest.raises(UserError, match=said):
        plan(topology, env, **surroundings)


@pytest.mark.parametrize(
    ("topology", "env", "surroundings", "said"),
    [
        ({}, TASK, {"gpus": 7, "driver": True}, r"n1 shows 7 GPUs, 8 were promised \(SLURM_GPUS_ON_NODE\)"),
        ({}, TASK, {"gpus": 0, "driver": True}, "n1 shows 0 GPUs, 8 were promised"),
        ({"nodes": 2, "gpus_per_node": 2}, TORCHRUN, {}, "2 machines, 2 processes on each are asked for, but the launch has 2 machines, 1 process on each"),
        ({"nodes": 1}, TORCHRUN, {}, "1 machine, .* but the launch has 2 machines"),
        ({}, {**TORCHRUN, "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2"}, {}, "5 processes in all, 2 of them on this machine"),
        ({}, {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "MASTER_ADDR": "a"}, {}, "4 processes in all, 3 of them"),
    ],
)  # fmt: skip
def test_fewer_gpus_or_processes_than_promised_are_never_trained_with(topology, env, surroundings, said):
    with pytest.raises(CheckFailed, match=said):
        plan(topology, env, **surroundings)


@pytest.mark.parametrize("kind", ["single", "local"])
@pytest.mark.parametrize("env", [TASK, TASK_PER_GPU, TORCHRUN, {**MPI, "MASTER_ADDR": "a"}, POD, ELASTIC])
def test_no_process_of_a_launch_trains_by_itself(kind: str, env: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"\[launch-in-launch\]"):
        plan({"kind": kind, "gpus_per_node": 1}, env)


def test_a_plan_for_machines_elsewhere_is_shown_and_not_carried_out() -> None:
    for said, topology in {
        "topology.nodes": {},
        "topology.kind": {"kind": "slurm"},
        "topology.node_rank": {"kind": "manual", "main_address": "n1"},
        "topology.main_address": {"kind": "manual", "node_rank": 1},
    }.items():
        made = plan({"nodes": 4, "gpus_per_node": 8, **topology}, gpus=2)
        assert (made.num_processes, made.nodes, made.gpus_per_node) == (32, 4, 8)
        with pytest.raises(UserError, match=said):
            execute(made, RunConfig(), lambda: 0)


def test_a_pod_starts_the_processes_of_its_machine() -> None:
    for env, topology, address, port, processes, node in (
        (POD, {"gpus_per_node": 8}, "job-master-0", "23456", (32, 4, 8), 1),
        (ELASTIC, {}, "job-0", "999", (8, 4, 2), 3),
        ({**ELASTIC, "PET_NPROC_PER_NODE": "auto"}, {"gpus_per_node": 3}, "job-0", "999", (12, 4, 3), 3),
    ):
        made = plan(topology, env)
        assert (made.num_processes, made.nodes, made.gpus_per_node) == processes
        assert (made.role, made.node) == ("launch", node)
        assert said_by(made.command, "--main_process_ip") == address
        assert said_by(made.command, "--main_process_port") == port


def test_mpirun_s_processes_join_each_other() -> None:
    for env, topology, address in (
        (MPI, {"main_address": "n1"}, "n1"),
        ({**MPI, "MASTER_ADDR": "n9"}, {}, "n9"),
        ({**HYDRA, "MASTER_ADDR": "n9"}, {}, "n9"),
        ({**HYDRA, "MPI_LOCALNRANKS": "4"}, {}, "127.0.0.1"),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {}, "127.0.0.1"),
    ):
        made = plan(topology, env)
        assert made.in_process and made.num_processes == 4
        found = [made.command.env[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR")]
        assert found == ["3", "1", address]


def test_deepspeed_s_launcher_is_joined_and_a_task_that_lacks_some_of_slurm_s_variables_does_not_train_alone() -> None:
    env = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    made = plan({"nodes": 2, "gpus_per_node": 1}, {**env, "LOCAL_SIZE": "1", "CROSS_RANK": "1", "CROSS_SIZE": "2"})
    assert (made.num_processes, made.nodes, made.gpus_per_node) == (2, 2, 1)
    env = {"SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST must be set too"):
        plan(env=env)
    assert plan({"kind": "local"}, env).num_processes == 1
    # a service of Kubernetes called "master" is no launch
    assert plan(env={"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_PORT": "tcp://10.0.0.1:80"}).num_processes == 1


def test_the_gpus_that_the_config_shows_are_those_that_are_counted() -> None:
    shown = "CUDA_VISIBLE_DEVICES"
    for asked, exported, gpus, processes in (
        ("0,1", {}, 8, 2),
        (3, {}, 8, 1),
        ("6,7", {shown: "0"}, 1, 2),
        ("", {}, 8, 1),
        ("0,1", {shown: ""}, 0, 1),  # a machine without GPUs
    ):
        made = plan({"environment": {shown: asked}}, exported, gpus=gpus, driver=gpus > 0)
        assert (made.num_processes, made.command.env[shown]) == (processes, str(asked))
    one = plan({"kind": "single", "environment": {shown: "2,3"}}, gpus=8, driver=True)
    assert one.command.env[shown] == "2"


def test_slurm_s_lists_of_hosts() -> None:
    for listed, hosts in {
        "n1": "n1",
        "n[1-3]": "n1 n2 n3",
        "n[08-11,20],login": "n08 n09 n10 n11 n20 login",
        "r[1-2]n[3-4]-ib": "r1n3-ib r1n4-ib r2n3-ib r2n4-ib",
        "a-b[1],c": "a-b1 c",
    }.items():
        assert list(expand(listed)) == hosts.split()
    with pytest.raises(UserError, match=r"\[bad-host-list\]"):
        expand("n[b]")
