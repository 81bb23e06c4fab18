"""packtrain on a machine with GPUs, from the command to the weights: flash is taken, and training is that of a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from answer_runs import labelled, preferences
from running import Run, base_config, conversations, train, write_jsonl

FLASH = "flash (torch's varlen_attn"
ROUNDING = 1e-2
"""How far losses in bfloat16 may be from those in float32 (of about 7)."""
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    """A few steps of some rows each, an evaluation, checkpoints and answers to a sample."""
    checkpoints = {"checkpoint_every": 2, "keep_checkpoints": 9, "eval_every": 2}
    trainer = {"max_steps": STEPS, "samples": ["Say backwards: river stone"], **checkpoints}
    return base_config(folder, data={"eval": 0.2}, trainer=trainer)


@pytest.fixture(scope="module")
def on_cpu(folder: Path, config: dict[str, Any]) -> Run:
    return train(folder, config, name="cpu")


@pytest.fixture(scope="module")
def on_gpu(gpus, folder: Path, config: dict[str, Any]) -> Run:
    return gpus.train(folder, config, name="gpu")


def of_objective(folder: Path, verb: str, **groups: dict[str, Any]) -> dict[str, Any]:
    """Two steps of that objective, and an evaluation."""
    rows = {"sft": conversations(14), "kto": labelled(14, 0)}.get(verb) or preferences(14, 0)
    data = {"train": str(write_jsonl(folder / f"{verb}.jsonl", rows)), "eval": 0.2, "max_length": 92}
    groups = {"trainer": {"max_steps": 2}, **groups}
    return base_config(folder, data=data, batch={"tokens_per_device": 256}, **groups)


def assert_trained(run: Run, like: Run, by: float = ROUNDING) -> None:
    assert run.summary["status"] == "done" and run.losses == pytest.approx(like.losses, rel=by)
    held_out, expected = ([line["eval_loss"] for line in one.evals] for one in (run, like))
    assert held_out == pytest.approx(expected, rel=by)


def test_flash_is_taken_proved_and_trains_as_the_cpu_in_float32(on_gpu: Run, on_cpu: Run) -> None:
    assert on_gpu.summary["attention"].startswith(FLASH) and on_cpu.summary["attention"].startswith("segmented")
    proof = on_gpu.summary["verify"]
    assert proof["verdict"] == "exact" and proof["backend"] == "flash" and proof["control"] > proof["tolerance"]
    assert_trained(on_gpu, on_cpu)
    assert on_gpu.summary["answers"] and on_gpu.summary["checkpoints"]["failed"] == []


def test_a_faster_model_is_taken_by_proof_and_said_to_be(on_gpu: Run) -> None:
    changes = on_gpu.summary["changes"]
    assert changes["residual"].startswith("stream in bfloat16 (loss off by ")
    assert changes["kernels"].endswith("liger-kernel is not installed: pip install 'packtrain[liger]'")
    assert "residual   stream in bfloat16 (loss off by" in on_gpu.log
    assert "recompute  none (auto: all fits)" in on_gpu.log


@pytest.mark.exhaustive
@pytest.mark.skipif(not find_spec("liger_kernel"), reason="no liger-kernel: pip install -e '.[liger]'")
def test_ligers_kernels_train_as_the_model_does(gpus, folder: Path, config: dict[str, Any]) -> None:
    """In Triton's interpreter, which a process has from its start or not: so it is none that is forked."""
    short = {"data": {**config["data"], "max_length": 60, "eval": None}, "trainer": {"max_steps": 1}}
    short |= {"batch": {"examples_per_step": 2, "tokens_per_device": 64}}
    plain = gpus.train(folder, {**config, **short}, "model.kernels=none", name="no-liger")
    command = [sys.executable, "tests/standin/gpus.py", "1", sys.executable, "-m", "packtrain", "sft"]
    command += [str(folder / "no-liger.yaml"), "model.kernels=liger", f"trainer.output_dir={folder / 'liger'}"]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=900)
    run = Run(folder / "liger")
    assert run.summary["changes"]["kernels"].startswith(
        "norms, rotation and activations by Liger's kernels (loss off by"
    )
    assert run.losses == pytest.approx(plain.losses, rel=ROUNDING)


def test_in_float32_losses_and_weights_are_those_of_the_cpu(
    gpus, folder: Path, config: dict[str, Any], on_cpu: Run
) -> None:
    run = gpus.train(folder, config, "trainer.mixed_precision=no", name="float32")
    assert_trained(run, on_cpu, 1e-4)
    for name, weight in on_cpu.weights().items():
        torch.testing.assert_close(run.weights()[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload"])
def test_two_ranks_resume_bit_for_bit(gpus, folder: Path, config: dict[str, Any], strategy: str) -> None:
    how: dict[str, Any] = {"devices": 2, "ranks": 2}
    whole = gpus.train(folder, config, f"strategy={strategy}", name=f"whole-{strategy}", **how)
    after = f"trainer.resume={whole.folder / 'checkpoints' / 'step-000002'}"
    run = gpus.train(folder, config, f"strategy={strategy}", after, name=f"again-{strategy}", **how)
    if (
        strategy == "zero3_offload"
    ):  # DeepSpeed's AdamW on the host multiplies powers of its betas up; after a resume it takes pow
        assert run.losses == pytest.approx(whole.losses[2:], rel=1e-5)
        return
    assert run.losses == whole.losses[2:]
    assert all(run.weights()[name].equal(weight) for name, weight in whole.weights().items())


@pytest.mark.exhaustive  # the recipe for LoRA does so as well
def test_one_process_stays_on_one_of_several_gpus(gpus, folder: Path, config: dict[str, Any], on_gpu: Run) -> None:
    """transformers would split each batch over both."""
    run = gpus.train(folder, config, "topology=single", devices=2, name="one-of-two")
    assert run.losses == on_gpu.losses and set(gpus.touched()[0]) == {0}


@pytest.mark.exhaustive
def test_where_memory_cannot_be_pinned_checkpoints_are_written_all_the_same(
    gpus, folder: Path, config: dict[str, Any], on_gpu: Run
) -> None:
    """Refused in the main thread, whose next kernel would end for it: the first checkpoint comes before there are copies."""
    changes = ["trainer.checkpoint_every=1", f"trainer.output_dir={folder / 'unpinned'}"]
    said = gpus.packtrain("sft", str(folder / "gpu.yaml"), *changes, env={"STANDIN_PINS": "0"})
    run = Run(folder / "unpinned")
    assert run.summary["checkpoints"] == {"written": STEPS, "newest": STEPS, "failed": []}
    assert run.losses == on_gpu.losses and (said.stdout + said.stderr).count("not pinned") == 1


@pytest.mark.exhaustive  # tests/train/test_spikes.py does so on the CPU, without figures of the peak
def test_a_run_goes_back_to_before_the_steps_since_the_last_line(gpus, folder: Path) -> None:
    """With figures of the GPU's peak, which are made over the steps since then. The tenth step has answers unlike all before."""
    rows = conversations(14 * 7)
    for row in rows[9 * 7 : 10 * 7]:
        row["messages"] = [
            *row["messages"][:1],
            {"role": "assistant", "content": "Zxq! 48-07; Jvkp? (91:36) WBHF\n" * 3},
        ]
    data = {"train": str(write_jsonl(folder / "unlike.jsonl", rows)), "shuffle": False}
    jumps = {"on_spike": "rollback", "spike_factor": 1.3, "log_every": 12, "checkpoint_every": 2, "max_steps": 14}
    config = base_config(folder, data=data, trainer=jumps, optim={"learning_rate": 0.02, "schedule": "constant"})
    run = gpus.train(folder, config, name="back")
    actions = [json.loads(line)["action"] for line in (run.folder / "spikes.jsonl").read_text().splitlines()]
    assert "rollback" in actions and run.steps[-1]["step"] == 14 and run.steps[-1]["mfu"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_train_as_one_each_on_its_own_gpu(
    gpus, folder: Path, config: dict[str, Any], on_gpu: Run, strategy: str
) -> None:
    run = gpus.train(folder, config, f"strategy={strategy}", devices=2, ranks=2, name=strategy)
    assert run.summary["attention"].startswith(FLASH)
    assert_trained(run, on_gpu)
    written, alone = ([one["before"] for one in each.summary["answers"]] for each in (run, on_gpu))
    assert written == alone and all(written)  # by greedy decoding, of weights that are still the same
    touched = gpus.touched()
    assert {rank: set(devices) for rank, devices in touched.items()} == {0: {0}, 1: {1}}, touched


@pytest.mark.parametrize(
    ("verb", "strategy", "devices"),
    [
        pytest.param(*one, marks=pytest.mark.exhaustive)  # CI has the recipe for LoRA
        for one in [
            ("dpo", "fsdp2", 2),
            ("sft", "ddp", 1),
            ("sft", "zero2", 2),
            ("sft", "fsdp2", 1),
            ("dpo", "ddp", 1),
            ("kto", "zero2", 2),
        ]
    ],
)
def test_adapters_train_as_on_the_cpu(gpus, folder: Path, verb: str, strategy: str, devices: int) -> None:
    """The reference of dpo and kto is the model with its adapters off. The first step is for the matrices that begin as zeros."""
    config = of_objective(
        folder, verb, peft={"kind": "lora", "r": 4}, optim={"learning_rate": 1e-2}, trainer={"max_steps": 3}
    )
    name = f"lora-{verb}-{strategy}-{devices}"
    run = gpus.train(folder, config, f"strategy={strategy}", verb=verb, name=name, devices=devices, ranks=devices)
    assert run.summary["attention"].startswith(FLASH)
    assert_trained(run, train(folder, config, command=verb, name=f"{name}-cpu"))
    assert abs(run.losses[2] / run.losses[0] - 1) > 1.5 * ROUNDING


@pytest.mark.exhaustive
def test_ranks_train_alike_while_torch_compares_their_collectives(
    gpus, folder: Path, config: dict[str, Any], on_gpu: Run
) -> None:
    how: dict[str, Any] = {"devices": 2, "ranks": 2, "env": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}
    assert_trained(gpus.train(folder, config, "strategy=fsdp2", name="detail", **how), on_gpu)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp2"])
def test_recomputed_activations_change_no_bit(gpus, folder: Path, config: dict[str, Any], strategy: str) -> None:
    how: dict[str, Any] = {"devices": 2, "ranks": 2}
    kept, recomputed = (
        gpus.train(
            folder,
            config,
            f"strategy={strategy}",
            f"trainer.gradient_checkpointing={one}",
            name=f"{one}-{strategy}",
            **how,
        )
        for one in ("none", "full")
    )
    assert recomputed.losses == kept.losses
    assert all(recomputed.weights()[name].equal(weight) for name, weight in kept.weights().items())


@pytest.mark.exhaustive
def test_the_recipe_for_lora_on_one_gpu(gpus, folder: Path, config: dict[str, Any]) -> None:
    path, answers = folder / "lora.yaml", folder / "lora"
    tiny = {**config, "trainer": {**config["trainer"], "output_dir": str(answers)}, "optim": {"learning_rate": 1e-3}}
    recipe = yaml.safe_load(Path("recipes/lora-1gpu.yaml").read_text())
    merged = {group: {**recipe.get(group, {}), **tiny.get(group, {})} for group in {**recipe, **tiny}}
    del merged["model"]["path"], merged["trainer"]["epochs"]
    path.write_text(yaml.safe_dump(merged))
    gpus.packtrain("sft", str(path), devices=2)
    run = Run(answers)
    assert run.summary["attention"].startswith(FLASH) and run.losses[-1] < run.losses[0]
    assert (answers / "final-merged" / "model.safetensors").exists() and set(gpus.touched()[0]) == {0}


@pytest.mark.exhaustive  # two runs; tests/train/test_float8.py has the products themselves
def test_products_in_8_bits_are_proved_and_train_as_bfloat16_and_resume_bit_for_bit(
    gpus, folder: Path, config: dict[str, Any], on_gpu: Run
) -> None:
    """On rows of any length; what torchao adds to a model is in no file."""
    pytest.importorskip("torchao")
    run = gpus.train(folder, config, "trainer.mixed_precision=fp8", name="fp8")
    assert "8 bits" in run.summary["changes"]["fp8"] and "gradients by" in run.summary["changes"]["fp8"]
    assert_trained(run, on_gpu, 2e-2)
    assert run.losses != on_gpu.losses and set(run.weights()) == set(on_gpu.weights())
    after = f"trainer.resume={run.folder / 'checkpoints' / 'step-000002'}"
    again = gpus.train(folder, config, "trainer.mixed_precision=auto", after, name="fp8-again")
    assert again.losses == run.losses[2:] and "fp8" in again.summary["changes"]
    assert all(again.weights()[name].equal(weight) for name, weight in run.weights().items())


@pytest.mark.exhaustive
def test_two_ranks_of_fsdp2_multiply_in_8_bits(gpus, folder: Path, config: dict[str, Any], on_cpu: Run) -> None:
    pytest.importorskip("torchao")
    changes = ["strategy=fsdp2", "trainer.mixed_precision=fp8"]
    run = gpus.train(folder, config, *changes, devices=2, ranks=2, name="fp8-fsdp2")
    assert "gradients by" in run.summary["changes"]["fp8"]
    assert_trained(run, on_cpu, 2e-2)
