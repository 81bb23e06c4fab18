"""However weights, gradients and optimizer are spread over processes, the training is the same."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_runs import preferences
from running import LLAMA, Run, assert_same_bits, base_config, conversations, train, write_jsonl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packtrain.errors import CheckFailed
from packtrain.model.precision import compute_in
from packtrain.model.spread import Ranks, open_strategy
from packtrain.objectives.spec import OBJECTIVES
from packtrain.plan.memory import GIB, Memory
from packtrain.strategies.spec import DEFAULT, STRATEGIES
from packtrain.train import run as training
from packtrain.train.engine import check_spread
from packtrain.train.loop import StepTrainer
from packtrain.train.preflight import choose_on_all_ranks
from tests.train import forked, host_adam

NEEDS_DEEPSPEED = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="DeepSpeed is not installed")
ZERO2, ZERO3 = (pytest.param(name, marks=NEEDS_DEEPSPEED) for name in ("zero2", "zero3"))
ZERO1, ALSO_ZERO2, ALSO_ZERO3 = (
    pytest.param(name, marks=[NEEDS_DEEPSPEED, pytest.mark.exhaustive]) for name in ("zero1", "zero2", "zero3")
)  # of the first tests/train/test_elastic.py has one, too
OFFLOAD = pytest.param("zero3_offload", marks=[NEEDS_DEEPSPEED, pytest.mark.exhaustive])
MODEL = {**LLAMA, "hidden_size": 128, "intermediate_size": 256}  # weights that ZeRO-3 does not keep whole
MODEL_ARGUMENTS = {name: value for name, value in MODEL.items() if name != "model_type"} | {"vocab_size": 50}
STEPS, CHECKPOINT = 5, 3  # of 7, 7, 7, 1 and 7 documents: in step 4 one process has none


def config_of(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """Steps of several micro-batches, their gradients clipped, with evaluations, checkpoints and answers."""
    trainer = {"max_steps": STEPS, "checkpoint_every": CHECKPOINT, "keep_checkpoints": None}
    trainer |= {"eval_every": 4, "samples": ["river stone"]}
    config = base_config(folder, trainer={**trainer, **groups.pop("trainer", {})}, **groups)
    config["optim"] |= {"schedule": "linear", "warmup_steps": 2, "max_grad_norm": 0.5}
    config["data"] |= {"eval": str(folder / "eval.jsonl")}
    if config["model"]["init"] == "random":
        config["model"]["config"] = MODEL
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strategies")
    write_jsonl(folder / "eval.jsonl", conversations(5, seed=1))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Run:
    """One process."""
    return train(folder, config_of(folder), name="alone")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    """Runs of two processes by strategy, once they are made."""
    return {}


def run_of(runs: dict[str, Run], folder: Path, name: str) -> Run:
    if name not in runs:
        begin = host_adam.run if name == "zero3_offload" else None
        runs[name] = train(folder, config_of(folder), f"strategy={name}", name=name, processes=2, begin=begin)
    return runs[name]


def assert_same_training(run: Run, expected: Run, *, file: str = "final/model.safetensors") -> None:
    assert [line["examples"] for line in run.steps] == [line["examples"] for line in expected.steps]
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    norms = [line["grad_norm"] for line in expected.steps]
    assert [line["grad_norm"] for line in run.steps] == pytest.approx(norms, rel=1e-4)
    assert [line["lr"] for line in run.steps] == [line["lr"] for line in expected.steps]
    evals = [line["eval_loss"] for line in expected.evals]
    assert [line["eval_loss"] for line in run.evals] == pytest.approx(evals, rel=1e-5)
    ours, theirs = load_file(run.folder / file), load_file(expected.folder / file)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert (weight - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name


@pytest.mark.parametrize("name", [ZERO1, ZERO2, ZERO3, OFFLOAD, "fsdp2"])
def test_each_strategy_trains_as_one_process_does(runs: dict[str, Run], folder: Path, alone: Run, name: str) -> None:
    run = run_of(runs, folder, name)
    assert_same_training(run, alone)
    assert min(line["grad_norm"] for line in run.steps) > 0.5, "nothing was clipped"
    _, mismatches = AutoModelForCausalLM.from_pretrained(run.folder / "final", output_loading_info=True)
    assert not any(mismatches.values())
    assert len(run.summary["answers"]) == len(alone.summary["answers"]) == 1


def counting(*given: Any) -> None:
    """The command; rank 0 writes what FSDP2 gathers and reduces in step 2."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

    calls: Counter[str] = Counter()

    def counted(name: str, do: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return do(*args, **kwargs)

        return call

    for name in ("foreach_all_gather", "foreach_reduce"):
        setattr(fsdp, name, counted(name, getattr(fsdp, name)))
    begin, end = StepTrainer.next_batches, StepTrainer.update

    def next_batches(self: StepTrainer, *args: Any) -> Any:
        calls.clear()
        batches = begin(self, *args)
        calls["micro-batches"] = len(batches)
        return batches

    def update(self: StepTrainer, *args: Any) -> Any:
        if self.state.step == 1 and self.accelerator.is_main_process:
            Path(self.settings.checkpoints.parent, "calls.json").write_text(json.dumps(calls))
        return end(self, *args)

    StepTrainer.next_batches, StepTrainer.update = next_batches, update
    forked.run(*given)


def exchanging_once(*given: Any) -> None:
    """The same, of a plan that has memory for whole gradients."""
    sizes = dict.fromkeys(("parameters", "trained", "weights", "gradients", "optimizer", "buffers", "activations"), 0)
    memory = Memory(**sizes, accumulated=0, device=80 * GIB)
    training.plan_memory = lambda _: memory
    counting(*given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mixed", ["no", pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_under_fsdp2_gradients_are_exchanged_once_a_step_where_they_fit(folder: Path, mixed: str) -> None:
    config = config_of(folder, packing={"mode": "padding"}, batch={"tokens_per_device": None, "examples_per_device": 1})
    config["model"]["config"] = {**MODEL, "tie_word_embeddings": False}
    found, made = [], []
    for name, begin in (("each", counting), ("once", exchanging_once)):
        overrides = ["strategy=fsdp2", f"trainer.mixed_precision={mixed}"]
        found.append(train(folder, config, *overrides, name=f"{name}-{mixed}", processes=2, begin=begin))
        made.append(json.loads((found[-1].folder / "calls.json").read_text()))
    each, once = made
    # of each micro-batch: two layers and the rest in both passes, the embedding in the forward pass alone
    assert each == {"micro-batches": 4, "foreach_all_gather": 4 * 7, "foreach_reduce": 4 * 4}
    assert once == {**each, "foreach_reduce": 4}
    assert_same_training(found[1], found[0])
    near = 1e-6 if mixed == "no" else 1e-3
    assert found[1].losses == pytest.approx(found[0].losses, rel=near)
    norms = [line["grad_norm"] for line in found[0].steps]
    assert [line["grad_norm"] for line in found[1].steps] == pytest.approx(norms, rel=near)


@pytest.mark.parametrize("name", [ALSO_ZERO2, ALSO_ZERO3, "fsdp2"])  # ddp: test_resume.py
def test_a_killed_run_goes_on_bitwise_the_same(runs: dict[str, Run], folder: Path, name: str) -> None:
    expected = run_of(runs, folder, name)
    run = train(folder, config_of(folder), f"strategy={name}", name=cut(expected, f"{name}-resumed"), processes=2)
    assert_same_bits(run, expected)


def cut(run: Run, name: str) -> str:
    """A copy of the folder as if the run had been killed after its first checkpoint."""
    place = run.folder.with_name(name)
    shutil.copytree(run.folder, place)
    shutil.rmtree(place / "final")
    (place / "summary.json").unlink()
    for checkpoint in (place / "checkpoints").glob("step-*"):
        if checkpoint.name != f"step-{CHECKPOINT:06d}":
            shutil.rmtree(checkpoint)
    return name


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Run:
    return train(folder, config_of(folder), "peft=lora", name="adapted")


@pytest.mark.parametrize("name", [ALSO_ZERO3, "fsdp2"])
def test_adapters_train_the_same_and_merge(folder: Path, adapted: Run, name: str) -> None:
    overrides = [
        f"strategy={name}",
        "peft=lora",
        f"trainer.gradient_checkpointing={'selective' if name == 'fsdp2' else 'none'}",
    ]
    run = train(folder, config_of(folder), *overrides, name=f"{name}-adapted", processes=2)
    assert_same_training(run, adapted)  # merged: the model it started from was new
    assert_same_training(run, adapted, file="final-adapters/adapter_model.safetensors")


def pairs_of(folder: Path) -> dict[str, Any]:
    """Preference pairs over a model and a second one that is its reference."""
    if not (folder / "pairs.jsonl").exists():
        write_jsonl(folder / "pairs.jsonl", preferences(6, 0))
        write_jsonl(folder / "eval-pairs.jsonl", preferences(4, 1))
    config = config_of(folder, trainer={"max_steps": 2, "eval_every": 2, "samples": [], "checkpoint_every": None})
    config["data"] |= {"train": str(folder / "pairs.jsonl"), "eval": str(folder / "eval-pairs.jsonl"), "max_length": 92}
    config["batch"] = {"examples_per_step": 5, "tokens_per_device": 190}
    return config


@pytest.fixture(scope="module")
def preferred(folder: Path) -> Run:
    return train(folder, pairs_of(folder), name="preferred", command="dpo")


@pytest.mark.parametrize("name", [ALSO_ZERO2, ZERO3, "fsdp2"])  # ddp: test_answer_runs.py
def test_preferences_train_the_same_on_two_processes_of_which_one_has_no_pair(
    folder: Path, preferred: Run, name: str
) -> None:
    run = train(folder, pairs_of(folder), f"strategy={name}", name=f"{name}-preferred", command="dpo", processes=2)
    assert_same_training(run, preferred)
    for ours, theirs in zip(run.steps, preferred.steps, strict=True):
        for figure in (one.name for one in OBJECTIVES["dpo"].figures):
            assert ours[figure] == pytest.approx(theirs[figure], rel=1e-5, abs=1e-5), (ours["step"], figure)


@pytest.mark.parametrize("name", [ZERO1, ALSO_ZERO2, ZERO3])
def test_gradients_of_bfloat16_weights_are_added_up_in_float32(folder: Path, name: str) -> None:
    """In steps of eight micro-batches a process and of one, all of the same document: each eighth is exact in bfloat16,
    sums of three or five of them are not."""
    same = write_jsonl(folder / "same.jsonl", conversations(1) * 18)
    config = base_config(folder, data={"train": str(same)}, optim={"name": "sgd", "learning_rate": 1e-30})
    config["model"] |= {"config": MODEL, "dtype": "bfloat16"}
    config["batch"] = {"examples_per_step": 16, "examples_per_device": 1}
    overrides = [f"strategy={name}", "packing=padding", "trainer.max_steps=2"]
    many, one = train(folder, config, *overrides, name=f"{name}-same", processes=2).steps
    assert (many["examples"], one["examples"]) == (16, 2)
    assert many["grad_norm"] == one["grad_norm"]


@NEEDS_DEEPSPEED
def test_bfloat16_weights_of_deepspeed_do_not_round_the_precomputed_reference(folder: Path) -> None:
    overrides = ["strategy=zero2", "model.dtype=bfloat16", "objective.reference=precomputed", "trainer.max_steps=1"]
    run = train(folder, pairs_of(folder), *overrides, name="precomputed", command="dpo", processes=2)
    (step,) = run.steps
    assert step["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert step["rewards/chosen"] == step["rewards/rejected"] == 0


def test_a_model_that_is_not_spread_as_asked_for_is_found_out() -> None:
    model = torch.nn.Linear(2, 2)
    for name, spec in STRATEGIES.all().items():
        with pytest.raises(CheckFailed, match=name) if spec.shards else nullcontext():
            check_spread(spec, model, model)


def test_mixed_precision_is_autocast_with_float32_outputs_where_accelerate_does_not_see_to_it() -> None:
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**MODEL_ARGUMENTS))
    ids = torch.arange(7)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(input_ids=ids).logits
    compute_in(model, torch.bfloat16)
    logits = model(input_ids=ids).logits
    assert (expected.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(logits, expected.float())


@pytest.mark.parametrize(
    ("family", "name", "attention"),
    [("mamba", "fsdp2", "per_document"), ("bloom", "zero3", "per_document")],
)
def test_rows_that_processes_would_run_differently_often_are_refused(family: str, name: Any, attention: Any) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "n_layer": 1, "n_head": 2, "vocab_size": 50}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes))
    ranks = Ranks(0, 1, torch.device("cpu"), name)
    with pytest.raises(CheckFailed, match=name):
        choose_on_all_ranks(attention, model, ranks, None, prove=False)
    for other in ("ddp", "zero2"):
        choose_on_all_ranks(attention, model, replace(ranks, strategy=other), None, prove=False)


def test_what_a_launcher_left_in_the_environment_does_not_choose_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    open_strategy(STRATEGIES[DEFAULT])
    assert not {"ACCELERATE_USE_DEEPSPEED", "FSDP_VERSION"} & os.environ.keys()
