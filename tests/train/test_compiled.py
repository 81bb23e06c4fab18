"""trainer.torch_compile: the same losses and gradients, whatever the lengths of rows, without compiling for each; what is refused."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_runs import of_objective
from here import run_here
from running import LLAMA, WORDS, Run, base_config, joined, packtrain, train, write_jsonl, written
from tiny_models import gradient, off, tiny_model
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from packtrain.attention.backends import attending_by
from packtrain.errors import UserError
from packtrain.model import layers
from packtrain.model.layers import compile_layers, is_compiled
from packtrain.packing.collate import row_arguments
from packtrain.packing.segments import Segments
from packtrain.train.loop import StepTrainer
from tests.train import forked


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


def loss_and_gradients(model: Any, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one fixed function of all logits of a row, with all that a run gives the model with it."""
    ids = torch.arange(segments.tokens)[None] * 7 % 94 + 3
    model.zero_grad()
    logits = model(input_ids=ids, **row_arguments(segments), use_cache=False).logits.float()
    loss = (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape).sin()).sum()
    loss.backward()
    return loss.detach(), gradient(model)


ROWS = [Segments(one) for one in ((35, 7), (240,), (2,) * 64, (1, 90, 3, 3, 41), tuple(range(1, 17)))]
SHARED = [Segments((30, 5, 9, 21, 1, 14), (None, 0, 0, None, 3, 3)), Segments((8, 2, 70), (None, 0, 0))]
"""Two prompts with two answers each, and one."""


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler: nothing can be compiled")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiled_layers_compute_the_same_for_rows_of_any_lengths_and_are_compiled_once(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "BACKEND", backend)
    plain, fast = (tiny_model("llama", num_hidden_layers=2, attention_bias=True).train() for _ in range(2))
    for model in (plain, fast):
        model.gradient_checkpointing_enable()
    assert compile_layers(fast) == 2 and is_compiled(fast) and not is_compiled(plain)
    assert plain.state_dict().keys() == fast.state_dict().keys()
    graphs, before = [], counters["stats"]["unique_graphs"]
    with attending_by(plain, "segmented"), attending_by(fast, "segmented"):
        for segments in (*ROWS, *SHARED):
            (loss, gradients), (ours, our_gradients) = (loss_and_gradients(one, segments) for one in (plain, fast))
            assert abs(ours - loss) <= 1e-5 * abs(loss)
            assert off(our_gradients, gradients) <= 1e-5
            graphs.append(counters["stats"]["unique_graphs"] - before)
    first = graphs[0]
    assert 0 < first <= 4, "norms, projections before and after attention, MLP"
    # rows that share beginnings come without the arguments of other libraries' kernels
    assert graphs == [first] * len(ROWS) + [first + 1] * len(SHARED)


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler: nothing can be compiled")
def test_sums_of_the_residual_stream_stay_operators_of_their_own() -> None:
    """They are between the parts that are compiled. Sums inside of parts are in kernels."""
    model, segments = tiny_model("llama", num_hidden_layers=2).train(), ROWS[0]
    ids, found = torch.arange(segments.tokens)[None] * 7 % 94 + 3, list[int]()
    with attending_by(model, "segmented"):
        for compiled in (False, True):
            if compiled:
                compile_layers(model)
            model(input_ids=ids, **row_arguments(segments), use_cache=False)
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
                model(input_ids=ids, **row_arguments(segments), use_cache=False)
            operators = [
                (one.key, one.input_shapes, one.count) for one in profiled.key_averages(group_by_input_shape=True)
            ]
            stream = [1, segments.tokens, 64]
            found.append(sum(n for name, shapes, n in operators if name == "aten::add" and shapes[:2] == [stream] * 2))
            norms = sum(n for name, _, n in operators if name == "aten::rsqrt")
            assert norms == (1 if compiled else 5), "the last norm is not in a layer"
    assert found == [4, 4]


SAID = [[20] * 16, [4] * 16, [3, 30, 9, 100] * 4, [*range(2, 34, 2)]]
"""Tokens of the documents of a step: rows of a few, of many, of both."""
FULL, LORA = {"gradient_checkpointing": "full"}, {"peft": {"kind": "lora", "r": 4}}
FREE = {"packing": {"mode": "padding_free"}, "batch": {"examples_per_device": 4, "tokens_per_device": None}}
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # verb, groups, trainer
    "packed": ("sft", {}, {}),
    "padding_free": ("sft", FREE, {}),
    "recomputed": ("sft", {}, FULL),
    "bf16": ("sft", {}, {"mixed_precision": "bf16"}),
    "lora": ("sft", LORA, {}),
    "dpo": ("dpo", {}, {}),
    "dpo, lora, recomputed": ("dpo", LORA, FULL),
}


def of_many_lengths(folder: Path, verb: str) -> Path:
    """Eight steps of sixteen documents, or of four pairs, none like another."""
    words = random.Random(0)

    def said(tokens: int) -> str:
        return " ".join(words.choices(WORDS, k=tokens)) + " "

    if verb == "dpo":
        rows: list[dict[str, Any]] = [
            {"prompt": said(1 + 5 * (n % 4)), "chosen": said(1 + n % 7), "rejected": said(1 + n % 3) + "x"}
            for n in range(32)
        ]
    else:
        rows = [{"input_ids": words.choices(range(3, 97), k=length)} for n in range(8) for length in SAID[n % 4]]
    return write_jsonl(folder / "lengths.jsonl", rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", RUNS)
def test_a_run_compiles_nothing_after_its_second_step_and_trains_as_uncompiled(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By graphs that run as they were traced: for which inputs there is a new one is decided before any backend compiles it."""
    monkeypatch.setattr(layers, "BACKEND", "eager")
    (verb, groups, trainer), graphs, update = RUNS[case], list[int](), StepTrainer.update

    def counting(self: StepTrainer, *given: Any) -> float:
        graphs.append(counters["stats"]["unique_graphs"])
        return update(self, *given)

    monkeypatch.setattr(StepTrainer, "update", counting)
    batch = {"examples_per_step": 4 if verb == "dpo" else 16, "tokens_per_device": 256}
    config = base_config(
        tmp_path,
        objective={"kind": verb},
        **{**groups, "batch": {**batch, **groups.get("batch", {})}},
        data={"train": str(of_many_lengths(tmp_path, verb)), "max_length": 120, "shuffle": False},
        trainer={"max_steps": 8, **trainer},
    )
    config["model"] = {**config["model"], "config": {**LLAMA, "num_hidden_layers": 1}}
    plain = run_here(tmp_path, config, "verify.preflight=false", name="plain")
    assert graphs == graphs[:1] * 8
    fast = run_here(tmp_path, config, "verify.preflight=false", "trainer.torch_compile=true", name="fast")
    assert graphs[7] < graphs[9] and graphs[9:] == graphs[9:10] * 7
    assert fast.losses == pytest.approx(plain.losses, rel=1e-6)
    norms = [[line["grad_norm"] for line in run.lines] for run in (fast, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for name, weight in plain.weights().items():
        torch.testing.assert_close(fast.weights()[name], weight, rtol=1e-5, atol=1e-7)


def traced(*given: Any) -> None:
    """`forked.run`, with graphs of torch.compile that run as they were traced: that takes seconds, compiling them a minute."""
    layers.BACKEND = "eager"
    forked.run(*given)


def counted(*given: Any) -> None:
    """`traced`, and says at its end how many graphs that were."""
    try:
        traced(*given)
    finally:
        print("graphs:", counters["stats"]["unique_graphs"], file=sys.stderr, flush=True)


@pytest.mark.exhaustive
def test_layers_that_fsdp2_gathers_are_compiled_and_train_as_uncompiled(tmp_path: Path) -> None:
    config = base_config(tmp_path, strategy={"name": "fsdp2"}, trainer={"max_steps": 2})
    plain = train(tmp_path, config, name="plain", processes=2)
    config["trainer"]["torch_compile"] = True
    for rank in joined(2, "sft", written(tmp_path, config), f"trainer.output_dir={tmp_path / 'fast'}", begin=counted):
        assert int(rank.stderr.rpartition("graphs: ")[2].split()[0]) > 0
    fast = Run(tmp_path / "fast")
    assert fast.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, weight in plain.weights().items():
        torch.testing.assert_close(fast.weights()[name], weight, rtol=1e-5, atol=1e-7)


@pytest.mark.exhaustive
def test_preferences_of_two_processes_begin_with_a_zero_margin_as_the_reference_is_compiled_too(tmp_path: Path) -> None:
    trainer = {"max_steps": 1, "mixed_precision": "bf16", "torch_compile": True}
    config = of_objective(tmp_path, "dpo", trainer=trainer, batch={"tokens_per_device": 400})
    config["model"]["config"] = {**config["model"]["config"], "num_hidden_layers": 1}
    run = train(tmp_path, config, processes=2, begin=traced, command="dpo")
    assert run.losses[0] == pytest.approx(0.6931472, abs=1e-6)  # in bfloat16 another rounding would show
    assert "compiled   1 layer by torch.compile" in run.log and "isolation  exact" in run.log


@pytest.mark.parametrize("family", ["gpt_oss", "bloom", "mamba"])  # experts, attention and states of their own
def test_models_whose_layers_are_another_program_for_each_row_are_refused(family: str) -> None:
    with pytest.raises(UserError, match=r"\[cannot-compile\]"):
        compile_layers(tiny_model(family))


def test_without_a_compiler_the_run_ends_before_anything_is_loaded(tmp_path: Path) -> None:
    path = written(tmp_path, base_config(tmp_path, trainer={"torch_compile": True}))
    refused = packtrain("sft", path, env={"CXX": "no-such-compiler"}, expect=2)
    assert "trainer.torch_compile" in refused.stderr and "no-such-compiler" in refused.stderr
    assert not (tmp_path / "run").exists()
