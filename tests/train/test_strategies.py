"""However weights, gradients and optimizer are spread over processes, the training is the same."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import LARGE, Cell, Runs, assert_same_training, needs
from running import after, base_config, conversations, train, write_jsonl
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packtrain import attach
from packtrain.errors import CheckFailed
from packtrain.model.precision import compute_in
from packtrain.model.spread import Ranks, layers_of, open_strategy
from packtrain.plan.fit import GIB, Memory
from packtrain.strategies.spec import DEFAULT, STRATEGIES
from packtrain.train import run as training
from packtrain.train.engine import check_spread
from packtrain.train.loop import StepTrainer
from packtrain.train.preflight import choose_on_all_ranks
from tests.train import forked


def counting(*given: Any) -> None:
    """The command; rank 0 writes what FSDP2 gathers and reduces in step 2."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

    calls: Counter[str] = Counter()

    for name in ("foreach_all_gather", "foreach_reduce"):
        setattr(fsdp, name, after(lambda *_, name=name, **__: calls.update([name]), getattr(fsdp, name)))
    begin = StepTrainer.next_batches

    def next_batches(self: StepTrainer, *args: Any) -> Any:
        calls.clear()
        batches = begin(self, *args)
        calls["micro-batches"] = len(batches)
        return batches

    def tell(self: StepTrainer, *_: Any) -> None:
        if self.state.step == 1 and self.accelerator.is_main_process:
            Path(self.settings.checkpoints.parent, "calls.json").write_text(json.dumps(calls))

    StepTrainer.next_batches, StepTrainer.update = next_batches, after(tell, StepTrainer.update)
    forked.run(*given)


def exchanging_once(*given: Any) -> None:
    """The same, of a plan that has memory for whole gradients."""
    sizes = dict.fromkeys(("parameters", "trained", "weights", "gradients", "optimizer", "buffers", "activations"), 0)
    memory = Memory(**sizes, accumulated=0, device=80 * GIB)
    training.preparation.plan_memory = lambda *_: memory
    counting(*given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_under_fsdp2_gradients_are_exchanged_once_a_step_where_they_fit(tmp_path: Path, mixed: str) -> None:
    runs, cell = Runs(tmp_path), Cell("sft", "fsdp2", "padding")
    one = ("batch.examples_per_device=1", f"trainer.mixed_precision={mixed}")
    found = [runs.run(cell, begin.__name__, *one, begin=begin) for begin in (counting, exchanging_once)]
    made = [json.loads((run.folder / "calls.json").read_text()) for run in found]
    each, once = made
    # of each micro-batch: two layers and the rest in both passes, the embedding in the forward pass alone
    assert each == {"micro-batches": 4, "foreach_all_gather": 4 * 7, "foreach_reduce": 4 * 4}
    assert once == {**each, "foreach_reduce": 4}
    assert_same_training(found[1], found[0], near=1e-6 if mixed == "no" else 1e-3)


@pytest.mark.exhaustive
def test_under_fsdp2_a_hybrid_gathers_each_layer_once_and_not_once_a_document(tmp_path: Path) -> None:
    """Otherwise processes, which have different numbers of documents, would wait for one another for ever."""
    run = Runs(tmp_path).run(Cell("sft", "fsdp2", variant="hybrid"), "hybrid", begin=counting)
    made = json.loads((run.folder / "calls.json").read_text())
    # two layers and the rest in both passes
    assert made["foreach_all_gather"] == 6 * made["micro-batches"] and "attention  mixers" in run.log


@pytest.mark.exhaustive
@needs("deepspeed")
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_gradients_of_bfloat16_weights_are_added_up_in_float32(tmp_path: Path, name: str) -> None:
    """In steps of eight micro-batches a process and of one, all of the same document: each eighth is exact in bfloat16,
    sums of three or five of them are not."""
    same = write_jsonl(tmp_path / "same.jsonl", conversations(1) * 18)
    config = base_config(tmp_path, data={"train": str(same)}, optim={"name": "sgd", "learning_rate": 1e-30})
    config["model"] |= {"config": LARGE, "dtype": "bfloat16"}
    config["batch"] = {"examples_per_step": 16, "examples_per_device": 1}
    overrides = [f"strategy={name}", "packing=padding", "trainer.max_steps=2"]
    many, one = train(tmp_path, config, *overrides, processes=2).steps
    assert (many["examples"], one["examples"]) == (16, 2)
    assert many["grad_norm"] == one["grad_norm"]


@needs("deepspeed")
def test_bfloat16_weights_of_deepspeed_do_not_round_the_precomputed_reference(tmp_path: Path) -> None:
    changes = ("model.dtype=bfloat16", "objective.reference=precomputed", "trainer.max_steps=1")
    run = Runs(tmp_path).run(Cell("dpo", "zero2"), "precomputed", *changes)
    (step,) = run.steps
    assert step["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert step["rewards/chosen"] == step["rewards/rejected"] == 0


def test_a_model_that_is_not_spread_as_asked_for_is_found_out() -> None:
    model = torch.nn.Linear(2, 2)
    for name, spec in STRATEGIES.all().items():
        with pytest.raises(CheckFailed, match=name) if spec.shards else nullcontext():
            check_spread(spec, model, model)


def test_mixed_precision_is_autocast_with_float32_outputs_where_accelerate_does_not_see_to_it() -> None:
    model = tiny_model("llama")
    ids = torch.arange(7)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(input_ids=ids).logits
    compute_in(model, torch.bfloat16)
    logits = model(input_ids=ids).logits
    assert (expected.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(logits, expected.float())


@pytest.mark.parametrize(("family", "name"), [("mamba", "fsdp2"), ("bloom", "zero3")])
def test_rows_that_processes_would_run_differently_often_are_refused(family: str, name: Any) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "n_layer": 1, "n_head": 2, "vocab_size": 50}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes))
    ranks = Ranks(0, 1, torch.device("cpu"), name)
    with pytest.raises(CheckFailed, match=name):
        choose_on_all_ranks("per_document", model, ranks, None, prove=False)
    for other in ("ddp", "zero2"):
        choose_on_all_ranks("per_document", model, replace(ranks, strategy=other), None, prove=False)
    choose_on_all_ranks("mixers", model, ranks, None, prove=False)  # within layers


def test_mixers_outside_of_layers_are_refused_if_processes_gather_their_weights() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50, "is_decoder": True}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["roformer"](**sizes, intermediate_size=32))
    for weight in model.parameters():
        weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(CheckFailed, match="zero3"):
        choose_on_all_ranks("mixers", model, Ranks(0, 1, torch.device("cpu"), "zero3"), None, prove=False)
    choose_on_all_ranks("mixers", model, Ranks(0, 1, torch.device("cpu"), "zero2"), None, prove=False)


def test_a_mixer_whose_parts_gather_weights_is_refused_unless_its_layer_gathers_them() -> None:
    """ZeRO-3 gathers module by module, as it does for `attach`; a run of packtrain has it gather layers."""
    model = tiny_model("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])
    for weight in model.parameters():
        weight.ds_id = 0  # type: ignore[attr-defined]
    zero3 = Ranks(0, 1, torch.device("cpu"), "zero3")
    with pytest.raises(CheckFailed, match=r"\[calls-differ-by-rank\]"):
        choose_on_all_ranks("mixers", model, zero3, None, prove=False)
    choose_on_all_ranks("mixers", model, replace(zero3, strategy="zero2"), None, prove=False)
    with pytest.raises(CheckFailed, match=r"\[gathers-unevenly\]"):
        attach(model)
    for layer in layers_of(model):
        layer._z3_leaf = True  # type: ignore[assignment]
    assert choose_on_all_ranks("mixers", model, zero3, None, prove=False).kernel == "conv"


def test_what_a_launcher_left_in_the_environment_does_not_choose_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    open_strategy(STRATEGIES[DEFAULT])
    assert not {"ACCELERATE_USE_DEEPSPEED", "FSDP_VERSION"} & os.environ.keys()
