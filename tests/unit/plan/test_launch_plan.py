"""Launch plans as tables: config and surroundings in, processes, commands and batch arithmetic out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from packtrain.config.objective import Objective
from packtrain.config.schema import Batch, Packing, RunConfig, Strategy, Topology, Trainer
from packtrain.errors import UserError
from packtrain.plan.launch_plan import LaunchPlan, plan_batch, plan_launch
from packtrain.plan.surroundings import Surroundings, visible_gpus
from packtrain.strategies.spec import STRATEGIES

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}


def plan(
    topology: dict[str, Any] | None = None,
    batch: dict[str, Any] | None = None,
    mode: Any = "packed",
    strategy: str = "ddp",
    **surroundings: Any,
) -> LaunchPlan:
    config = RunConfig(
        topology=Topology(**(topology or {})),
        batch=Batch(**(batch or {"examples_per_step": 32})),
        packing=Packing(mode=mode),
        trainer=Trainer(output_dir="runs/x"),
        strategy=Strategy(name=strategy),
    )
    return plan_launch(config, Surroundings(**{"cpus": 16, "free_port": 4321, **surroundings}))


@pytest.mark.parametrize(
    ("topology", "surroundings", "processes", "in_process"),
    [
        ({}, {}, 1, True),
        ({}, {"gpus": 1}, 1, True),
        ({}, {"gpus": 8}, 8, False),
        ({"gpus_per_node": 2}, {"gpus": 8}, 2, False),
        ({"gpus_per_node": 2}, {}, 2, False),
        ({"kind": "single"}, {"gpus": 8}, 1, True),
        ({"kind": "local"}, {"gpus": 8}, 8, False),
        ({"kind": "local"}, {"gpus": 1}, 1, True),
        ({"kind": "local", "gpus_per_node": 3}, {}, 3, False),
        ({}, {"gpus": 8, "env": TORCHRUN}, 4, True),
        ({"kind": "env"}, {"env": TORCHRUN}, 4, True),
        ({"kind": "single"}, {"env": {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}}, 1, True),
    ],
)
def test_the_topology_decides_the_processes(topology, surroundings, processes, in_process):
    made = plan(topology, **surroundings)
    assert (made.num_processes, made.nodes, made.gpus_per_node) == (processes, 1, processes)
    assert made.in_process == in_process
    assert made.reason


def test_a_run_that_may_be_started_again_is_launched_and_planned_anew_for_the_machines_that_are_left() -> None:
    four = {"kind": "manual", "nodes": 4, "gpus_per_node": 2, "main_address": "n1", "node_rank": 3, "min_nodes": 2}
    trainer = Trainer(output_dir="runs/x", restarts=1, checkpoint_every=5)
    batch = Batch(examples_per_step=32, examples_per_device=2)
    config = RunConfig(topology=Topology(**four), batch=batch, trainer=trainer)
    around = Surroundings(cpus=16, free_port=4321)
    whole, fewer = plan_launch(config, around), plan_launch(config, around, machines=(0, 3))
    assert (fewer.nodes, fewer.node, fewer.num_processes, fewer.least_nodes) == (2, 1, 4, 2)
    assert fewer.batch.examples_per_step == whole.batch.examples_per_step
    assert whole.survives_lost_machines and whole.restarts == 1
    alone = plan_launch(replace(config, topology=Topology()), around)
    assert (alone.role, alone.num_processes) == ("launch", 1)
    assert "verify" not in alone.command.argv and plan_launch(config, around, "verify").restarts == 0
    joined = plan_launch(replace(config, topology=Topology()), replace(around, env=TORCHRUN))
    assert [item.where for item in joined.obstacles] == ["trainer.restarts"]


@pytest.mark.parametrize(
    ("topology", "surroundings", "said"),
    [
        ({"kind": "env"}, {}, "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR"),
        ({}, {"env": {"WORLD_SIZE": "4"}}, "RANK, LOCAL_RANK, MASTER_ADDR"),
        ({}, {"env": {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}}, "LOCAL_RANK, MASTER_PORT"),
        ({"kind": "local", "gpus_per_node": 2}, {"env": TORCHRUN}, "one of 4 of a running launch"),
        ({"kind": "single"}, {"env": TORCHRUN}, "one of 4 of a running launch"),
        ({}, {"env": {**TORCHRUN, "RANK": "4"}}, "rank 4 of 4"),
        ({}, {"env": {**TORCHRUN, "RANK": "x"}}, "variable RANK"),
    ],
)
def test_what_the_machine_cannot_give_is_refused(topology, surroundings, said):
    with pytest.raises(UserError, match=said):
        plan(topology, **surroundings)


SHOWN, ALLOCATOR = "CUDA_VISIBLE_DEVICES", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
SHORTLY = {"GOMP_SPINCOUNT": "1000"}  # what libgomp itself takes where threads outnumber cores


@pytest.mark.parametrize(
    ("topology", "surroundings", "environment"),
    [
        ({"gpus_per_node": 3}, {}, {"OMP_NUM_THREADS": "5", **SHORTLY}),
        ({"gpus_per_node": 3}, {"env": {"OMP_NUM_THREADS": "7"}}, SHORTLY),
        ({}, {}, SHORTLY),
        ({}, {"env": {"OMP_WAIT_POLICY": "active"}}, {}),
        ({}, {"cpus": 4, "load": 2.5, "env": {"GOMP_SPINCOUNT": "7"}}, {}),
        ({"environment": {"KMP_BLOCKTIME": "1"}}, {}, {"KMP_BLOCKTIME": "1"}),
        ({}, {"env": TORCHRUN}, SHORTLY),
        ({"kind": "single"}, {"gpus": 4}, {**ALLOCATOR, SHOWN: "0"}),
        ({"kind": "single"}, {"gpus": 2, "env": {SHOWN: "5,6"}}, {**ALLOCATOR, SHOWN: "5"}),
        ({}, {"gpus": 4, "env": TORCHRUN}, ALLOCATOR),
        ({"environment": {"PYTORCH_ALLOC_CONF": ""}}, {"gpus": 1}, {"PYTORCH_ALLOC_CONF": ""}),
        ({}, {"cpus": 4, "load": 2.5}, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_processes_get_their_share_of_the_machine(topology, surroundings, environment):
    assert dict(plan(topology, **surroundings).commands[0].env) == environment


def test_the_json_has_the_promised_keys_and_rows_that_do_not_divide_over_the_processes_are_refused() -> None:
    document = json.loads(json.dumps(plan({"gpus_per_node": 2}).to_json()))
    assert list(document) == ["num_processes", "nodes", "gpus_per_node", "commands", "accelerate", "deepspeed", "batch"]
    assert list(document["commands"][0]) == ["node", "argv", "env"]
    assert document["deepspeed"] is None
    with pytest.raises(UserError, match="49152 or 73728"):
        plan({"gpus_per_node": 3}, {"tokens_per_step": 65536})


@pytest.mark.parametrize(
    ("batch", "mode", "processes", "rows", "micro_batches"),
    [
        ({"examples_per_step": 32}, "padding", 1, None, 4),
        ({"examples_per_step": 32}, "padding_free", 3, None, 2),
        ({"examples_per_step": 5, "examples_per_device": 2}, "padding", 4, None, 1),
        ({"examples_per_step": 32, "tokens_per_device": 4096}, "padding_free", 1, None, None),
        ({"examples_per_step": 32}, "packed", 2, None, None),
        ({"tokens_per_step": 65536}, "packed", 2, 8, 4),
        ({"tokens_per_step": 8192, "tokens_per_device": 2048}, "packed", 1, 4, 4),
        ({"tokens_per_step": 8192, "tokens_per_device": 2048}, "padding", 2, 4, None),
    ],
)
def test_batch_arithmetic_is_exact_where_it_can_be(batch, mode, processes, rows, micro_batches):
    made = plan({"gpus_per_node": processes}, batch, mode).batch
    assert (made.rows_per_step, made.micro_batches_per_device) == (rows, micro_batches)
    assert ("as many micro-batches as" in made.sentence()) == (micro_batches is None)


@pytest.mark.parametrize(("examples", "per_device", "processes"), [(33, 8, 2), (5, 2, 4), (64, 5, 3)])
@pytest.mark.parametrize("mode", ["padding", "padding_free"])
def test_the_predicted_accumulation_is_the_one_that_the_batches_get(mode, examples, per_device, processes):
    import numpy as np

    from packtrain.packing.balance import MicroBatchLimits, lay_out

    batch = {"examples_per_step": examples, "examples_per_device": per_device}
    predicted = plan({"gpus_per_node": processes}, batch, mode).batch.micro_batches_per_device
    lengths = np.random.default_rng(examples).integers(1, 500, examples)
    how = {"mode": mode, "attention_cost": 1e-3, "keep_order": False}
    layout = lay_out(lengths, world_size=processes, limits=MicroBatchLimits(per_device), **how)
    assert {len(micro_batches) for micro_batches in layout} == {predicted}


STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}


@pytest.mark.parametrize("name", STRATEGIES.all())
def test_deepspeed_has_every_number_from_the_config_and_nothing_to_fill_in(name: str) -> None:
    make = STRATEGIES[name].engine_settings
    assert (make is not None) == (name in STAGES)
    if make is None:
        return
    made = make("bfloat16", 0.3)
    assert "auto" not in json.dumps(made)
    assert made["gradient_clipping"] == 0.3
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (1, 1)
    assert not {"optimizer", "scheduler", "fp16"} & made.keys()
    assert made["zero_optimization"]["stage"] == STAGES[name]
    assert ("offload_param" in made["zero_optimization"]) == (name == "zero3_offload")


@pytest.mark.parametrize(
    ("name", "kind"), [("ddp", "MULTI_GPU"), *((name, "DEEPSPEED") for name in STAGES), ("fsdp2", "FSDP")]
)
def test_accelerate_is_told_the_same_in_its_yaml_and_on_its_command_line(name: str, kind: str) -> None:
    made = plan({"gpus_per_node": 2}, strategy=name)
    settings, flags = made.accelerate, made.command.argv
    assert settings["distributed_type"] == kind
    if kind == "DEEPSPEED":
        assert settings["deepspeed_config"]["deepspeed_config_file"] == "runs/x/deepspeed.json"
        assert flags[flags.index("--deepspeed_config_file") + 1] == "runs/x/deepspeed.json"
        # by its default launcher DeepSpeed trains a model per machine, and writes the environment to a file
        assert settings["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
        assert flags[flags.index("--deepspeed_multinode_launcher") + 1] == "standard"
    if kind == "FSDP":
        assert settings["fsdp_config"]["fsdp_version"] == 2
        assert {"--use_fsdp", "--fsdp_version"} <= set(flags)
    if kind == "MULTI_GPU":
        assert "--multi_gpu" in flags


def test_a_step_that_a_loss_has_to_see_as_a_whole_is_not_planned_in_parts() -> None:
    dpo = RunConfig(batch=Batch(examples_per_step=32), objective=Objective(kind="dpo", loss=["sigmoid", "aot"]))
    assert plan_batch(replace(dpo, packing=Packing(mode="packed")), 1).examples_per_step == 32
    for processes, mode, said in (
        (2, "packed", "2 processes"),
        (1, "padding", "4 micro-batches"),
        (1, "padding_free", "4 micro"),
    ):
        with pytest.raises(UserError, match=f"aot sorts all pairs of a step, which here are spread over {said}"):
            plan_batch(replace(dpo, packing=Packing(mode=mode)), processes)


def test_visible_gpus_are_counted_as_cuda_does() -> None:
    assert visible_gpus(0, "0") == 0 and visible_gpus(8, None) == 8
    for shown, visible in {"": 0, "-1": 0, "0,1": 2, "0,-1,1": 1}.items():
        assert visible_gpus(8, shown) == visible
    for shown, visible in {"0,5": 1, "GPU-a,GPU-b": 2}.items():
        assert visible_gpus(2, shown) == visible


def test_steps_and_tokens_of_the_run_are_in_the_json_where_they_need_no_data() -> None:
    for batch, max_steps, known in (
        ({"examples_per_step": 32}, 500, (500, 16000, None)),
        ({"tokens_per_step": 65536}, 500, (500, None, 32768000)),
        ({"examples_per_step": 32}, None, (None, None, None)),
    ):
        config = RunConfig(batch=Batch(**batch), trainer=Trainer(output_dir="runs/x", max_steps=max_steps))
        document = plan_launch(config, Surroundings()).batch.to_json()
        assert tuple(document[name] for name in ("steps", "examples", "tokens")) == known
