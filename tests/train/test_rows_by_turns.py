"""Documents by turns train as alone in every mode; common beginnings run once."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matrix import assert_same_training
from running import LLAMA, WORDS, base_config, packtrain, trained, write_jsonl, written
from tiny_models import EXPERTS, gradient, off, tiny_model
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention.backends import attending_by
from packtrain.config.schema import Batch, Data, DataSource, Packing
from packtrain.data.dataset import TokenDataset
from packtrain.data.prepare import prepare
from packtrain.data.sources.quickstart import tokenizer as quickstart_tokenizer
from packtrain.data.tokens.cache import Document
from packtrain.data.tokens.chat_template import choose_template
from packtrain.data.tokens.encode import Encoder
from packtrain.data.tokens.tokenizer import plain_tokenizer
from packtrain.model.forward import add_loss_sum
from packtrain.packing.collate import IGNORE, collate_padded
from packtrain.packing.prefixes import index_prefixes
from packtrain.packing.schedule import make_schedule
from packtrain.proof.choice import choose_attention
from packtrain.train.loader import Steps

GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}
GEMMA2 |= {"layer_types": ["sliding_attention", "full_attention"]}
HYBRID = {**LLAMA, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
ROUTED = {**LLAMA, "model_type": "qwen3_moe", "head_dim": 12, "moe_intermediate_size": 16, "num_experts": 4}
ROUTED |= {"num_experts_per_tok": 2, "output_router_logits": True}
PADDED = ("packing.mode=padding", "batch.tokens_per_device=null", "batch.examples_per_device=3")


def said(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def thinkers(count: int, seed: int = 0, turns: int = 4) -> list[dict[str, Any]]:
    """Conversations with thoughts. Qwen3's template leaves out the thoughts of earlier answers."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        messages = [{"role": "system", "content": "Answer in a few words of the garden."}]
        for _ in range(rng.randint(1, turns)):
            answer = {"role": "assistant", "content": said(rng, 6), "reasoning_content": said(rng, 9)}
            messages += [{"role": "user", "content": said(rng, 6)}, answer]
        rows.append({"messages": messages})
    return rows


def config_of(folder: Path, model: dict[str, Any] | None = None, **groups: dict[str, Any]) -> str:
    config = base_config(folder, trainer={"max_steps": 5, "eval_every": 3}, **groups)
    config["data"] |= {
        "train": str(write_jsonl(folder / "thinkers.jsonl", thinkers(14))),
        "eval": str(write_jsonl(folder / "eval.jsonl", thinkers(4, 1))),
        "max_length": 300,
        "chat_template": "qwen3",
    }
    config["model"]["config"] = model or LLAMA
    config["optim"] |= {"max_grad_norm": 0.5}
    config["batch"] = {"examples_per_step": 4, "tokens_per_device": 320}
    return written(folder, config)


CASES: dict[str, tuple[int, dict[str, Any] | None, list[str]]] = {
    "one process": (1, None, []),
    "windows, soft-caps, full logits": (1, GEMMA2, []),
    "hybrid": (1, HYBRID, []),
    "three processes": (3, None, []),
    "fsdp2": (2, None, ["strategy=fsdp2"]),
    "padding free": (2, None, ["packing.mode=padding_free", PADDED[1], PADDED[2]]),
    "divided trees": (1, None, ["batch.tokens_per_device=130", "data.max_length=130"]),
    "across examples": (2, None, ["packing.share_prefix=true"]),
    "split rows": (2, None, ["strategy.sequence_parallel=auto", "batch.tokens_per_device=110"]),
    "adapters": (1, None, ["peft=lora", "peft.r=4"]),
    "in order": (2, None, ["packing.strategy=in_order"]),
    "rows": (2, None, ["batch.examples_per_step=null", "batch.tokens_per_step=640"]),
    "answers cut": (1, None, ["data.max_length=90"]),
}


@pytest.mark.sample("three processes", "rows")
@pytest.mark.parametrize("name", CASES)
def test_rows_by_turns_are_trained_as_each_document_by_itself(tmp_path: Path, name: str) -> None:
    processes, model, options = CASES[name]
    path = config_of(tmp_path, model)
    own = [
        one for one in options if one.startswith(("peft", "data", "batch.tokens_per_step", "batch.examples_per_step"))
    ]
    rows = "rows" in name
    padded = ("packing.mode=padding",) if rows else PADDED
    expected = trained(tmp_path / "padded", path, *padded, *own)
    run = trained(tmp_path / "run", path, *options, processes=processes)
    assert ("computed with another document" in run.log) == (name != "padding free")
    assert "common beginnings are repeated (packing.mode=padding)" in expected.log
    assert_same_training(run, expected, () if name == "adapters" else ("final/model.safetensors",), near=3e-6)
    if not rows:
        assert run.summary["examples"] == expected.summary["examples"] == 4 + 4 + 4 + 2 + 4


class InMemory(list[Document]):
    """Documents with their lengths."""

    def __init__(self, documents: list[Document], lengths: np.ndarray) -> None:
        super().__init__(documents)
        self.lengths = lengths


MIXERS = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        **EXPERTS,
        "mlp_only_layers": [0, 1],
    }
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}


@pytest.mark.parametrize("family", MIXERS)
def test_loss_and_gradients_of_trees_are_those_of_the_documents_alone(tmp_path: Path, family: str) -> None:
    tokenizer = quickstart_tokenizer()
    source = DataSource(path=str(write_jsonl(tmp_path / "rows.jsonl", thinkers(3))))
    asked = Data(train=source, chat_template="qwen3", cache_dir=str(tmp_path / "cache"))
    data = prepare(asked, tokenizer, "sft", seed=0).train
    assert isinstance(data, TokenDataset) and data.examples is not None
    model = tiny_model(family, vocab_size=len(tokenizer), max_position_embeddings=512, **MIXERS[family]).double()
    every, index = range(len(data)), index_prefixes(data, data.examples)
    schedule = make_schedule(data.lengths, Packing(), Batch(examples_per_step=3, tokens_per_device=4096), max_steps=1)
    tree = Steps(data, replace(schedule, prefixes=index), "shared", 0).collate(every)
    flat, padded = (Steps(data, schedule, layout, 0).collate(every) for layout in ("flat", "padding"))  # type: ignore[arg-type]
    assert tree.inputs["input_ids"].numel() < 0.7 * flat.inputs["input_ids"].numel()
    assert tree.trained == flat.trained == padded.trained == data.report.trained_tokens
    losses = []
    for document in map(data.__getitem__, every):
        batch = collate_padded([document], 0)
        labels = batch.pop("shift_labels")[0]
        losses.append(F.cross_entropy(model(**batch).logits[0], labels, ignore_index=IGNORE, reduction="sum"))
    (expected := torch.stack(losses).sum()).backward()
    known = gradient(model)
    backend = choose_attention("auto", model, model.device, pairs=True).backend.name
    add_fused_lm_head(model)
    add_loss_sum(model)
    for batch in (tree, flat, padded):
        model.zero_grad()
        with attending_by(model, backend) if batch is not padded else nullcontext():
            loss = model(**batch.inputs, loss_sum=True)
            loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and off(gradient(model), known) < 1e-5


@pytest.mark.exhaustive
def test_a_resumed_run_and_a_stream_go_on_with_whole_examples(tmp_path: Path) -> None:
    path = config_of(tmp_path)
    every = ("trainer.checkpoint_every=2", "trainer.keep_checkpoints=null")
    whole = trained(tmp_path / "whole", path, *every)
    rest = trained(tmp_path / "rest", path, whole.resume(2), processes=2)
    assert rest.losses == pytest.approx(whole.losses[2:], rel=3e-6)
    flow = ("data.streaming=true", "data.shuffle_buffer=5", "data.eval=null", "trainer.eval_every=null")
    stream = trained(tmp_path / "stream", path, *flow, *every, "trainer.max_steps=3")
    padded = trained(tmp_path / "padded", path, *flow, *PADDED, "trainer.max_steps=3")
    assert_same_training(stream, padded, near=3e-6)
    assert stream.summary["examples"] == stream.summary["data"]["examples"] == 12 < stream.summary["data"]["documents"]
    rest = trained(tmp_path / "flow", path, *flow, stream.resume(2), "trainer.max_steps=3")
    assert rest.losses == pytest.approx(stream.losses[2:], rel=3e-6)


REPEATS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "noise": (LLAMA, ["objective.options.neftune_noise_alpha=5"], "the noise on embeddings"),
    "attention": (LLAMA, ["model.attention=per_document"], "runs every document by itself"),
    "routers": (ROUTED, [], "the loss of routers counts by document"),
}


@pytest.mark.sample("routers")
@pytest.mark.parametrize("name", REPEATS)
def test_what_cannot_share_is_laid_out_as_documents(tmp_path: Path, name: str) -> None:
    model, options, why = REPEATS[name]
    run = trained(tmp_path / "run", config_of(tmp_path, model), *options, "trainer.max_steps=2")
    assert "common beginnings are repeated" in run.log and why in run.log


TRAJECTORIES = {"one question": (1, 100, 1.0), "tools": (20, 5, 1.8), "many questions": (100, 1, 1.5)}


@pytest.mark.sample("tools")
@pytest.mark.parametrize("name", TRAJECTORIES)
def test_a_trajectory_of_100_answers_costs_little_more_than_one_conversation(name: str) -> None:
    questions, calls, most = TRAJECTORIES[name]
    rng, messages = random.Random(0), list[dict[str, Any]]()
    for _ in range(questions):
        messages.append({"role": "user", "content": said(rng, 20)})
        for call in range(calls):
            asked = {"type": "function", "function": {"name": "look", "arguments": {"place": said(rng, 4)}}}
            answer = {"role": "assistant", "content": said(rng, 8), "reasoning_content": said(rng, 8)}
            messages.append(answer if call == calls - 1 else {**answer, "tool_calls": [asked]})
            messages += [{"role": "tool", "content": said(rng, 20)}] if call < calls - 1 else []
    tokenizer = quickstart_tokenizer()

    def encoded(render: Any) -> list[Document]:
        data = Data(train="rows", render=render, max_length=None)
        encoder = Encoder(plain_tokenizer(tokenizer), choose_template("qwen3", tokenizer), data, "sft")
        return encoder.encode_row({"messages": messages}, "messages", {}, {})[0]

    (once,), turns = encoded("conversation"), encoded("turns")
    lengths = np.array([len(document.input_ids) for document in turns])
    tree = index_prefixes(InMemory(turns, lengths)).forest(np.arange(len(turns)))[0].tokens
    assert len(turns) == 100 and tree <= most * len(once.input_ids) and tree < 0.1 * lengths.sum()


def test_inspect_shows_each_answer_with_its_exact_context_and_what_it_costs(tmp_path: Path) -> None:
    path, place = config_of(tmp_path), f"{tmp_path / 'thinkers.jsonl'}:1"
    messages = thinkers(1)[0]["messages"]
    answers = [message for message in messages if message["role"] == "assistant"]
    shown = packtrain("inspect", path, "--source", place).stdout
    assert shown.count("── document ") == len(answers) > 1
    assert f"answer {len(answers)} of {len(answers)}, the first " in shown
    found = json.loads(packtrain("inspect", path, "--source", place, "--json").stdout)
    for number, (part, answer) in enumerate(zip(found["shown"], answers, strict=True), 1):
        text = "".join(span["text"] for span in part["parts"][0]["spans"] if span["trained"])
        assert answer["content"] in text and answer["reasoning_content"] in text
        before = "".join(span["text"] for span in part["parts"][0]["spans"] if not span["trained"])
        assert not any(other["reasoning_content"] in before for other in answers[: number - 1])
        assert (part["answer"], part["answers"]) == (number, len(answers)) and bool(part["as_answer"]) == (number > 1)
        assert part["shared"] < part["tokens"]
    slots = found["modes"]["packed"]["example_slots"]
    assert slots["examples"] == found["examples"] == 14 < slots["documents"] == found["documents"]
    assert slots["once"] < slots["shared"] < slots["repeated"] == found["tokens"]
    assert found["modes"]["packed"]["slots"] < found["modes"]["padding_free"]["slots"]
    one = packtrain("inspect", path, "--rows", "2").stdout
    assert one.count("answer 1 of") + one.count("── document ") >= 2


def test_verify_compares_trees_with_their_gradients(tmp_path: Path) -> None:
    report = json.loads(packtrain("verify", config_of(tmp_path), "--json").stdout)
    assert report["verdict"] == "exact" and report["pairs"]["prompts_shared"]
    assert report["prefix_shared"]["grad_rel_diff"] < 1e-5 and report["prefix_shared"]["loss_rel_diff"] < 1e-6
