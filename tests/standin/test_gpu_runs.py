"""packtrain on a machine with GPUs, from the command to the weights: flash is taken, and training is that of a CPU; its other commands."""

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
from answer_runs import of_objective as of_rows
from running import Run, assert_same_bits, base_config, conversations, packtrain, train, write_jsonl, written

from packtrain.config.compose import load_config
from packtrain.plan.fit import GIB, Memory
from packtrain.plan.memory import STASHED, estimate
from tests.standin import checks
from tests.standin import gpus as standin

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
    groups = {"trainer": {"max_steps": 2}, "batch": {"tokens_per_device": 256}, **groups}
    return of_rows(folder, verb, data={"eval": 0.2}, **groups)


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
    assert changes["linears"].startswith("gradients of inputs added up in the products (loss off by ")
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
    said = "norms, rotation and activations by Liger's kernels (loss off by"
    assert run.summary["changes"]["kernels"].startswith(said)
    said = "sums of the stream and their norms by one of Liger's kernels (loss off by"
    assert run.summary["changes"]["sums"].startswith(said)
    assert run.losses == pytest.approx(plain.losses, rel=ROUNDING)


def test_in_float32_losses_and_weights_are_those_of_the_cpu(
    gpus, folder: Path, config: dict[str, Any], on_cpu: Run
) -> None:
    run = gpus.train(folder, config, "trainer.mixed_precision=no", name="float32")
    assert_trained(run, on_cpu, 1e-4)
    for name, weight in on_cpu.weights().items():
        torch.testing.assert_close(run.weights()[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_two_ranks_add_gradients_in_products_and_train_as_without(
    gpus, folder: Path, config: dict[str, Any], strategy: str
) -> None:
    given = (f"strategy={strategy}", "trainer.mixed_precision=no", "data.eval=null", "trainer.samples=[]")
    plain, run = (
        gpus.train(folder, config, *given, f"model.kernels={kind}", name=f"{kind}-{strategy}", devices=2, ranks=2)
        for kind in ("none", "auto")
    )
    said = "as the model comes" if strategy == "zero3" else "gradients of inputs added up in the products (loss off by"
    assert run.summary["changes"]["linears"].startswith(said) and "linears" not in plain.summary["changes"]
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)


def test_a_killed_run_goes_on_with_its_kernel_where_another_one_is_faster_now(gpus, tmp_path: Path) -> None:
    """Bit for bit, as if it had never ended. A run that does not resume takes the faster one, which rounds differently."""
    trainer = {"max_steps": 3, "checkpoint_every": 1, "keep_checkpoints": None}
    config = base_config(tmp_path, trainer=trainer)
    first, second = "torch's varlen_attn", "FlashAttention 3"

    def run(name: str, fastest: str, *changes: str, killed: int = 0) -> Run:
        path = written(tmp_path, {**config, "trainer": {**trainer, "output_dir": str(tmp_path / name)}}, name)
        asked = {"ARGUMENTS": " ".join(["sft", path, *changes]), "FASTEST": fastest, "KILLED": str(killed)}
        gpus.call(checks.trains_by_the_fastest, env=asked, expect=-9 if killed else 0)
        return Run(tmp_path / name)

    whole = run("whole", first)
    killed = run("killed", first, killed=3)
    assert killed.kept == ["step-000001", "step-000002"]
    again = run("killed", second)
    assert "resuming from step-000002" in again.log and "another kernel" not in again.log
    for one in (whole, again):
        assert one.summary["attention"].startswith(f"flash ({first}")
    assert_same_bits(again, whole)
    anew = run("killed", second, "trainer.resume=never")
    assert anew.summary["attention"].startswith(f"flash ({second}")
    assert anew.losses == pytest.approx(whole.losses, rel=ROUNDING) and anew.losses != whole.losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload"])
def test_two_ranks_resume_bit_for_bit(gpus, folder: Path, config: dict[str, Any], strategy: str) -> None:
    how: dict[str, Any] = {"devices": 2, "ranks": 2}
    whole = gpus.train(folder, config, f"strategy={strategy}", name=f"whole-{strategy}", **how)
    run = gpus.train(folder, config, f"strategy={strategy}", whole.resume(2), name=f"again-{strategy}", **how)
    if strategy != "zero3_offload":
        return assert_same_bits(run, whole, after=2)
    # DeepSpeed's AdamW on the host multiplies powers of its betas up; after a resume it takes pow
    assert run.losses == pytest.approx(whole.losses[2:], rel=1e-5)


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
        row["messages"][1:] = [{"role": "assistant", "content": "Zxq! 48-07; Jvkp? (91:36) WBHF\n" * 3}]
    data = {"train": str(write_jsonl(folder / "unlike.jsonl", rows)), "shuffle": False}
    jumps = {"on_spike": "rollback", "spike_factor": 1.3, "log_every": 12, "checkpoint_every": 2, "max_steps": 14}
    config = base_config(folder, data=data, trainer=jumps, optim={"learning_rate": 0.02, "schedule": "constant"})
    run = gpus.train(folder, config, name="back")
    assert (
        "rollback" in [line["action"] for line in run.spikes]
        and run.steps[-1]["step"] == 14
        and run.steps[-1]["mfu"] > 0
    )


@pytest.mark.exhaustive  # CI has the recipe for LoRA
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("verb", "strategy"), [("dpo", "fsdp2"), ("sft", "ddp"), ("kto", "zero2")])
def test_adapters_train_as_on_the_cpu(gpus, folder: Path, verb: str, strategy: str, devices: int) -> None:
    """The reference of dpo and kto is the model with its adapters off. The first step is for the matrices that begin as zeros."""
    groups: Any = {"peft": {"kind": "lora", "r": 4}, "optim": {"learning_rate": 1e-2}, "trainer": {"max_steps": 3}}
    config = of_objective(folder, verb, **groups)
    name = f"lora-{verb}-{strategy}-{devices}"
    run = gpus.train(folder, config, f"strategy={strategy}", verb=verb, name=name, devices=devices, ranks=devices)
    assert run.summary["attention"].startswith(FLASH)
    assert_trained(run, train(folder, config, command=verb, name=f"{name}-cpu"))
    assert abs(run.losses[2] / run.losses[0] - 1) > 1.5 * ROUNDING


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_train_as_one_while_torch_compares_their_collectives(
    gpus, folder: Path, config: dict[str, Any], on_gpu: Run, strategy: str
) -> None:
    how: dict[str, Any] = {"devices": 2, "ranks": 2, "env": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}
    run = gpus.train(folder, config, f"strategy={strategy}", name=f"detail-{strategy}", **how)
    assert_trained(run, on_gpu)
    written, alone = ([one["before"] for one in each.summary["answers"]] for each in (run, on_gpu))
    assert written == alone and all(written)  # by greedy decoding, of weights that are still the same


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp2"])
def test_recomputed_activations_change_no_bit(gpus, folder: Path, config: dict[str, Any], strategy: str) -> None:
    how, given = {"devices": 2, "ranks": 2}, (f"strategy={strategy}",)
    kept, recomputed = (
        gpus.train(folder, config, *given, f"trainer.gradient_checkpointing={one}", name=f"{one}-{strategy}", **how)
        for one in ("none", "full")
    )
    assert_same_bits(recomputed, kept)


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
    again = gpus.train(folder, config, "trainer.mixed_precision=auto", run.resume(2), name="fp8-again")
    assert "fp8" in again.summary["changes"]
    assert_same_bits(again, run, after=2)


@pytest.mark.exhaustive
def test_two_ranks_of_fsdp2_multiply_in_8_bits(gpus, folder: Path, config: dict[str, Any], on_cpu: Run) -> None:
    pytest.importorskip("torchao")
    changes = ["strategy=fsdp2", "trainer.mixed_precision=fp8"]
    run = gpus.train(folder, config, *changes, devices=2, ranks=2, name="fp8-fsdp2")
    assert "gradients by" in run.summary["changes"]["fp8"]
    assert_trained(run, on_cpu, 2e-2)


OFFLOAD = "trainer.activation_offload=true"
FULL = "trainer.gradient_checkpointing=full"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("verb", "strategy", "changes"),
    [
        *((verb, "ddp", ()) for verb in ("sft", "dpo", "kto")),
        ("sft", "ddp", ("peft=lora",)),
        ("sft", "ddp", ("trainer.tokens_per_mlp_tile=50",)),
        ("sft", "ddp", ("batch.tokens_per_device=100",)),  # several micro-batches
        *(("sft", strategy, ()) for strategy in ("fsdp2", "zero2", "zero3")),
    ],
)
def test_runs_with_inputs_on_the_host_train_the_same_bits(
    gpus, tmp_path: Path, verb: str, strategy: str, changes: tuple[str, ...]
) -> None:
    devices = 1 if verb != "sft" or "peft=lora" in changes else 2
    how: dict[str, Any] = {"verb": verb, "devices": devices, "ranks": devices}
    config = of_objective(tmp_path, verb)
    config["model"]["config"] = {**config["model"]["config"], "num_hidden_layers": STASHED + 2}
    given = (f"strategy={strategy}", FULL, "verify.preflight=false", "data.eval=null", *changes)
    kept = gpus.train(tmp_path, config, *given, name="kept", **how)
    moved = gpus.train(tmp_path, config, *given, OFFLOAD, name="moved", **how)
    assert "full (asked for), from inputs of layers in the host's memory" in moved.log
    assert (moved.losses, moved.norms) == (kept.losses, kept.norms)
    if "peft=lora" not in changes:
        assert_same_bits(moved, kept)


def test_a_plan_has_less_on_the_device_and_more_on_the_host() -> None:
    sizes = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 24, "vocab_size": 97}
    sizes |= {"intermediate_size": 96, "num_attention_heads": 4}
    given = [f"model.config.{name}={value}" for name, value in sizes.items()]
    given += ["model.init=random", "model.tokenizer=quickstart", "data.train=x", "batch.examples_per_step=4", FULL]
    plans = [estimate(load_config(None, [*given, *changes]), 1, 80 * GIB) for changes in ((), (OFFLOAD,))]
    kept, moved = (plan for plan in plans if isinstance(plan, Memory))
    inputs = 8192 * 64 * 2  # a row, computed in bfloat16
    assert (kept.activations or 0) - (moved.activations or 0) == (24 - STASHED) * inputs
    assert moved.host - kept.host == 24 * inputs


def test_without_a_device_it_is_refused(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"activation_offload": True, "gradient_checkpointing": "full"})
    refused = packtrain("sft", written(tmp_path, config), expect=2)
    assert "trainer.activation_offload" in refused.stderr and "[offload-on-cpu]" in refused.stderr


KERNEL = "torch's varlen_attn"


@pytest.fixture(scope="module")
def path_of_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a config."""
    folder = tmp_path_factory.mktemp("commands")
    return written(folder, base_config(folder))


def env(gpus, *arguments: str) -> str:
    """What `packtrain env` prints on a machine with two GPUs."""
    return gpus.call(checks.takes_its_time_over_env, devices=2, env={"ARGUMENTS": " ".join(arguments)}).stdout


def test_env_shows_the_gpus_and_the_kernel_that_attends(gpus, path_of_config: str) -> None:
    report = json.loads(env(gpus, path_of_config, "--json"))
    assert [device["index"] for device in report["devices"]] == [0, 1] and "H100" in report["devices"][0]["name"]
    assert report["attention"]["flash"]["available"] and KERNEL in report["attention"]["flash"]["why"]
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert {found[name] for name in ("gpu-driver", "torch", "gpus", "gpu-health", "gpu-use", "attention")} == {"ok"}
    assert "fail" not in found.values(), report["checks"]


@pytest.mark.exhaustive
def test_env_in_words(gpus, path_of_config: str) -> None:
    said = env(gpus, path_of_config)
    assert KERNEL in said and "0 failed" in said and said.count("H100 80GB") >= 2


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_verify_proves_flash(gpus, path_of_config: str, devices: int) -> None:
    changes = ["strategy=fsdp2"] if devices > 1 else []
    report = json.loads(
        gpus.packtrain("verify", path_of_config, *changes, "--json", devices=devices, ranks=devices).stdout
    )
    assert (report["verdict"], report["backend"]) == ("exact", "flash")
    isolation = report["isolation"]
    assert max(isolation["max_abs_diff_before"], isolation["max_abs_diff_after"]) <= isolation["tolerance"]


@pytest.mark.exhaustive  # it measures for seconds on end
def test_bench_measures_each_mode_with_flash(gpus, path_of_config: str) -> None:
    report = json.loads(gpus.packtrain("bench", path_of_config, "--seconds", "5", "--json").stdout)
    measured = [trial for trial in report["trials"] if trial["tokens_per_second"]]
    assert {trial["mode"] for trial in measured} == {"padding", "padding_free", "packed"}
    assert all(trial["mfu"] > 0 and trial["peak_memory"] > 0 for trial in measured)
    assert report["attention"].startswith("flash") and "H100" in report["device"] and report["precision"]
    assert set(gpus.touched()[0]) == {0} and gpus.flash_calls(0)[1]


ROOT = Path(__file__).resolve().parents[2]


def on_gpus(
    devices: int, *command: str, cwd: Path = ROOT, report: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A command on a machine with so many devices, from nothing."""
    try:
        environment = {**os.environ, **standin.variables(devices, report), "OMP_NUM_THREADS": "1"}
    except FileNotFoundError as error:
        pytest.skip(str(error))
    environment.pop("DS_ACCELERATOR", None)
    return subprocess.run([sys.executable, "-m", *command], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(["test_waits.py"], id="waits", marks=pytest.mark.exhaustive),
        # layers are compiled for real devices alone
        pytest.param(["test_models.py", "test_kernels.py", "-k", "not compiled"], marks=pytest.mark.exhaustive),
    ],
)
def test_what_holds_on_a_gpu_holds_here(tests: list[str]) -> None:
    files = [f"tests/gpu/{one}" if one.endswith(".py") else one for one in tests]
    result = on_gpus(1, "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-3000:] + result.stderr[-3000:]


def test_a_step_waits_for_nothing(gpus) -> None:
    """Of all cases that of the recipes."""
    said = gpus.call(checks.passes_tests, env={"ARGUMENTS": "tests/gpu/test_waits.py -k packed-sft"}).stdout
    assert "1 passed" in said, said


@pytest.mark.exhaustive
def test_a_launch_takes_every_gpu_of_the_machine(tmp_path: Path) -> None:
    written(tmp_path, base_config(tmp_path))
    touches = tmp_path / "touches.jsonl"
    result = on_gpus(2, "packtrain", "sft", "run.yaml", cwd=tmp_path, report=touches)
    assert result.returncode == 0, result.stdout + result.stderr
    run = Run(tmp_path / "run")
    assert "on 2 processes" in run.log
    assert run.summary["attention"].startswith("flash")
    lines = [line for line in map(json.loads, touches.read_text().splitlines()) if "device" in line]
    assert {(line["rank"], line["device"]) for line in lines} == {(0, 0), (1, 1)}
