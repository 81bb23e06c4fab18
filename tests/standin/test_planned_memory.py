"""Planned memory against the peak of the bytes of a run's tensors on stand-in GPUs.

metrics.jsonl has the peak of the whole run, with proofs and the trial of the largest micro-batch before step 1.
Documents are as long as `data.max_length` allows, so that each micro-batch is as full as a plan must assume. The model has four
layers and a small vocabulary: weights, optimizer, activations and the output head are each a share that shows. For kernels that a
CPU computes in steps (attention, Triton's for the output head), only the results count. DeepSpeed's buckets, up to 380 MiB for any
model, are taken out of both sides. Gradients that FSDP2 keeps whole for one exchange a step are not added: on two ranks they are no
more than the shares and buffers that do not exist meanwhile. CUDA's allocator also rounds up (512 bytes a tensor) and cannot use
all of its memory; that is not counted.

Other settings have documents of 40 to 250 tokens, four or eight a step, so rows are never full. There the plan knows the largest
micro-batch, as in a run. One setting has Liger's kernels, in Triton's interpreter.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from running import WORDS, Run, base_config, write_jsonl

from packtrain.config.compose import load_config
from packtrain.config.schema import RunConfig
from packtrain.plan.fit import GIB, Memory
from packtrain.plan.memory import Found, estimate, fullest
from packtrain.strategies.deepspeed.spec import BUCKET

SIZES = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096}
LENGTH = 256
MASTERS, LORA = "model.dtype=bfloat16", "peft=lora"
FULL = "trainer.gradient_checkpointing=full"
PADDED = ("packing.mode=padding", "batch.examples_per_device=2", "batch.tokens_per_device=null")
SETTINGS = {  # verb, processes, changes
    "sft": ("sft", 1),
    "sft masters": ("sft", 1, MASTERS),
    "sft full": ("sft", 1, FULL),
    "sft tiles": ("sft", 1, "trainer.tokens_per_mlp_tile=64"),
    "sft tiles full": ("sft", 1, FULL, "trainer.tokens_per_mlp_tile=64"),
    "sft offload full": ("sft", 1, FULL, "trainer.activation_offload=true"),
    "sft masters full": ("sft", 1, MASTERS, FULL),
    "sft selective": ("sft", 1, "trainer.gradient_checkpointing=selective"),
    "sft masters every_2": ("sft", 1, MASTERS, "trainer.gradient_checkpointing=every_2"),
    "sft lora selective": ("sft", 1, LORA, MASTERS, "trainer.gradient_checkpointing=selective"),
    "sft float32": ("sft", 1, "trainer.mixed_precision=no"),
    "sft padded": ("sft", 1, *PADDED),
    "sft lora": ("sft", 1, LORA, MASTERS),
    "sft lora full": ("sft", 1, LORA, MASTERS, FULL),
    "dpo": ("dpo", 1),
    "dpo lora full": ("dpo", 1, LORA, MASTERS, FULL),
    "dpo lora float32 full": ("dpo", 1, LORA, FULL),
    "kto": ("kto", 1, MASTERS),
    "reward": ("reward", 1),
    "ddp": ("sft", 2),
    "zero1": ("sft", 2, "strategy=zero1", MASTERS),
    "zero2": ("sft", 2, "strategy=zero2"),
    "zero2-masters full": ("sft", 2, "strategy=zero2", MASTERS, FULL),
    "zero3": ("sft", 2, "strategy=zero3", FULL),
    "fsdp2": ("sft", 2, "strategy=fsdp2"),
    "fsdp2 masters full": ("sft", 2, "strategy=fsdp2", MASTERS, FULL),
    "fsdp2 dpo": ("dpo", 2, "strategy=fsdp2"),
}
QWEN3 = ("model.config.model_type=qwen3", "model.config.head_dim=32")
NOT_FULL = {
    "sft": SETTINGS["sft"],
    "sft masters": SETTINGS["sft masters"],
    "sft full": SETTINGS["sft full"],
    "sft selective": SETTINGS["sft selective"],
    "sft float32": SETTINGS["sft float32"],
    "sft padded": SETTINGS["sft padded"],
    "sft lora": SETTINGS["sft lora"],
    "sft qwen3": ("sft", 1, *QWEN3),
    "sft qwen2 masters": ("sft", 1, MASTERS, "model.config.model_type=qwen2"),
    "dpo": SETTINGS["dpo"],
    "dpo qwen3 masters": ("dpo", 1, MASTERS, *QWEN3),
    "kto": SETTINGS["kto"],
    "reward": SETTINGS["reward"],
    "ddp": SETTINGS["ddp"],
    "fsdp2": SETTINGS["fsdp2"],
}
FIXED = {"zero2": 2 * 4 * BUCKET, "zero2-masters": 2 * 2 * BUCKET, "zero3": 4 * BUCKET}  # bytes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each objective a file of documents longer than LENGTH."""
    return written_to(tmp_path_factory.mktemp("data"), 400, 400)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a file of shorter documents for each objective."""
    return written_to(tmp_path_factory.mktemp("short"), 5, 35)


def written_to(folder: Path, least: int, most: int) -> dict[str, Path]:
    rng = random.Random(0)

    def said(role: str, words: int) -> list[dict[str, str]]:
        return [{"role": role, "content": " ".join(rng.choices(WORDS, k=words))}]

    def pair() -> dict[str, Any]:
        chosen, rejected = (said("assistant", rng.randint(least, most)) for _ in range(2))
        return {"prompt": said("user", 1), "chosen": chosen, "rejected": rejected}

    pairs = [pair() for _ in range(16)]
    documents: dict[str, list[dict]] = {
        "sft": [{"messages": one["prompt"] + one["chosen"]} for one in pairs],
        "dpo": pairs,
        "kto": [
            {"prompt": one["prompt"], "completion": one["chosen"], "label": n % 2 > 0} for n, one in enumerate(pairs)
        ],
        "reward": pairs,
    }
    return {verb: write_jsonl(folder / f"{verb}.jsonl", rows) for verb, rows in documents.items()}


def planned_and_counted(
    gpus, data: dict[str, Path], folder: Path, name: str, *, partly: bool = False
) -> tuple[int, int]:
    """Return planned and counted bytes. `partly`: rows are not full, and the plan knows the largest micro-batch."""
    verb, processes, *changes = (NOT_FULL if partly else SETTINGS)[name]
    arguments = [
        *(f"model.config.{key}={value}" for key, value in SIZES.items()),
        *("model.init=random", "model.tokenizer=quickstart", f"data.train={data[verb]}", f"data.cache_dir={folder}"),
        *(f"data.max_length={LENGTH}", f"batch.examples_per_step={8 if processes == 2 else 4}", "trainer.max_steps=2"),
        *(f"batch.tokens_per_device={2048 if partly else 512}", f"trainer.output_dir={folder / 'run'}", *changes),
    ]
    (empty := folder / "run.yaml").write_text("{}\n")
    gpus.packtrain(verb, str(empty), *arguments, devices=processes, ranks=processes)
    run = Run(folder / "run")
    counted = max(line.get("memory_bytes", 0) for line in run.lines)
    slots = int(re.findall(r"the largest micro-batch has ([\d,]+) token slots", run.log)[-1].replace(",", ""))
    config, found = (
        load_config(None, [*arguments, f"objective.kind={verb}"]),
        Found(slots if partly else None, fused=False),
    )
    planned = estimate(config, processes, 80 * GIB, found=found)
    assert isinstance(planned, Memory)
    assert (slots < 0.9 * planned_slots(config)) == partly
    fixed = FIXED.get(name.split()[0], 0)
    total, counted = planned.total - fixed, counted - fixed
    said = f"{total / 2**20:7.1f} MiB, counted {counted / 2**20:7.1f}: {total / counted:.3f}"
    print(f"{name:20} planned for {slots} of {planned_slots(config)} slots {said}   {planned}")
    return total, counted


def planned_slots(config: RunConfig) -> int:
    """Return the token slots of the fullest micro-batch that the config allows."""
    batch = fullest(config, 4, gpu=True)
    assert batch is not None
    return batch.tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SETTINGS)
def test_a_plan_is_within_a_tenth_of_what_a_run_takes(gpus, data: dict[str, Path], tmp_path: Path, name: str) -> None:
    planned, counted = planned_and_counted(gpus, data, tmp_path, name)
    assert planned == pytest.approx(counted, rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NOT_FULL)
def test_a_run_that_knows_its_rows_plans_within_a_tenth(
    gpus, short: dict[str, Path], tmp_path: Path, name: str
) -> None:
    planned, counted = planned_and_counted(gpus, short, tmp_path, name, partly=True)
    assert planned == pytest.approx(counted, rel=0.1)


@pytest.mark.exhaustive
def test_a_gpu_that_has_less_than_planned_makes_a_run_recompute(gpus, data: dict[str, Path], tmp_path: Path) -> None:
    """It recomputes more until the largest micro-batch fits, and then trains as if the config had asked for that."""
    config = base_config(tmp_path, trainer={"max_steps": 2})
    config["model"] = {"init": "random", "tokenizer": "quickstart", "config": {**SIZES, "num_hidden_layers": 8}}
    config["data"] = {"train": str(data["sft"]), "max_length": LENGTH, "cache_dir": str(tmp_path)}
    config["batch"] = {"examples_per_step": 4, "tokens_per_device": 1024}
    peaks: dict[str, int] = {}
    runs: dict[str, Run] = {}
    for policy in ("none", "every_4", "selective"):
        runs[policy] = gpus.train(tmp_path, config, f"trainer.gradient_checkpointing={policy}", name=policy)
        peaks[policy] = max(line.get("memory_bytes", 0) for line in runs[policy].lines)
    limit = (peaks["selective"] + peaks["every_4"]) / 2 / 2**20
    run = gpus.train(tmp_path, config, name="auto", env={"STANDIN_LIMIT_MIB": str(limit)})
    assert "recompute  none (auto: all fits)" in run.log and "Tried to allocate" in run.log
    taken = run.summary["changes"]["recompute"].split()[0]
    assert taken in ("every_3", "selective")
    assert run.losses == runs["selective"].losses == runs["none"].losses
    assert max(line.get("memory_bytes", 0) for line in run.lines) <= limit * 2**20
