"""The plan for 64 machines with 8 GPUs each under ZeRO-3, as a file: a change of it is a change of what people run.

`python tests/unit/plan/test_launch_golden.py` writes it anew.
"""

from __future__ import annotations

import json
from pathlib import Path

from packtrain.config.schema import Batch, Data, Model, Optim, RunConfig, Strategy, Topology, Trainer
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.surroundings import Surroundings

GOLDEN = Path(__file__).with_name("golden") / "plan-64x8-zero3.json"


def planned() -> dict:
    config = RunConfig(
        model=Model(path="org/model", dtype="bfloat16"),
        data=Data(train="data.jsonl", max_length=8192),
        batch=Batch(tokens_per_step=4_194_304, tokens_per_device=8192),
        optim=Optim(learning_rate=1e-5, max_grad_norm=1.0),
        trainer=Trainer(output_dir="runs/large", max_steps=1000, gradient_checkpointing=True),
        strategy=Strategy(name="zero3"),
        topology=Topology(kind="manual", nodes=64, gpus_per_node=8, main_address="node-000", node_rank=0),
    )
    surroundings = Surroundings(
        gpus=8, driver=True, cpus=128, host="node-000", python="python", accelerate="accelerate"
    )
    return json.loads(json.dumps(plan_launch(config, surroundings).to_json()))


def split(plan: dict) -> tuple[dict, list[dict]]:
    """The plan with the first machine's command alone, and the commands of all machines."""
    commands = plan["commands"]
    return {**plan, "commands": commands[:1]}, commands


def test_the_plan_of_64_machines_is_the_one_in_the_file() -> None:
    plan, commands = split(planned())
    assert plan == json.loads(GOLDEN.read_text())
    rank = commands[0]["argv"].index("--machine_rank") + 1
    for node, command in enumerate(commands):
        expected = json.loads(json.dumps(commands[0]))
        expected["node"], expected["argv"][rank] = node, str(node)
        assert command == expected
    assert len(commands) == 64


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(split(planned())[0], indent=1) + "\n")
