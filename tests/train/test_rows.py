"""Documents over rows: beginnings that are alike computed once, those that exceed a device split over processes; the training stays."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from matrix import assert_same_training, needs
from running import LLAMA, WORDS, Run, base_config, conversations, joined, packtrain, trained, write_jsonl, written
from tiny_models import EXPERTS

GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}
GEMMA2 |= {"layer_types": ["sliding_attention", "full_attention"]}
ROUTED = "{head_dim: 12, moe_intermediate_size: 16, num_experts: 4, num_experts_per_tok: 2, output_router_logits: true}"
LIMIT = 220  # tokens of a device
SHARED = ("packing.share_prefix=true", "data.shuffle=by_prefix")


def unrolled(count: int) -> list[dict[str, Any]]:
    """Conversations with one system prompt, a row for each turn; every second one has two answers to its last question."""
    rng = random.Random(3)

    def said(role: str, most: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(1, most)))}

    rows = []
    for number in range(count):
        messages = [{"role": "system", "content": "Answer in a few words of the garden."}]
        for _ in range(rng.randint(1, 3)):
            messages = [*messages, said("user", 9), said("assistant", 9)]
            rows.append({"messages": messages})
        if number % 2:
            rows.append({"messages": [*messages[:-1], said("assistant", 9)]})
    rng.shuffle(rows)
    return rows


def config_of(folder: Path, model: dict[str, Any] | None = None, **groups: dict[str, Any]) -> str:
    config = base_config(folder, trainer={"max_steps": 4, "eval_every": 2}, **groups)
    rows = unrolled(12)
    config["data"] |= {
        "train": str(write_jsonl(folder / "turns.jsonl", rows)),
        "eval": str(write_jsonl(folder / "eval.jsonl", rows[:7])),
    }
    config["model"]["config"] = model or LLAMA
    config["optim"] |= {"max_grad_norm": 0.5}
    config["batch"] = {"examples_per_step": 9, "tokens_per_device": LIMIT}
    return written(folder, config)


CASES: dict[str, tuple[int, dict[str, Any] | None, list[str]]] = {
    "one process": (1, None, []),
    "all tokens trained": (1, None, ["data.loss_on=all"]),
    "dft": (1, None, ["objective.loss=dft"]),
    "windows, soft-caps, full logits": (1, GEMMA2, []),
    "three processes": (3, None, []),
    "fsdp2": (2, None, ["strategy=fsdp2"]),
    "zero3": (2, None, ["strategy=zero3"]),
    "split rows": (2, None, ["strategy.sequence_parallel=auto", "batch.tokens_per_device=80"]),
    "adapters": (2, None, ["peft=lora", "peft.r=4"]),
}


@pytest.mark.sample("split rows", "windows, soft-caps, full logits")
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=needs("deepspeed")) if one == "zero3" else one for one in CASES]
)
def test_documents_that_begin_alike_are_trained_as_each_by_itself(tmp_path: str, name: str) -> None:
    processes, model, options = CASES[name]
    path = config_of(tmp_path, model)
    own = [one for one in options if one.split(".")[0] not in ("strategy", "batch") and "strategy" not in one]
    expected = trained(tmp_path / "each", path, "data.shuffle=by_prefix", *own)
    run = trained(tmp_path / "shared", path, *SHARED, *options, processes=processes)
    assert "computed with another document" in run.log and "computed with another" not in expected.log
    assert_same_training(run, expected, () if name == "adapters" else ("final/model.safetensors",), near=3e-6)


def test_the_model_runs_on_fewer_tokens(tmp_path: str) -> None:
    path = config_of(tmp_path)
    seen: dict[str, Any] = {}
    for share in ("true", "false"):
        told = packtrain("inspect", path, "--json", "data.shuffle=by_prefix", f"packing.share_prefix={share}")
        seen[share] = json.loads(told.stdout)["modes"]["packed"]
    part = seen["true"]["slots"] / seen["false"]["slots"]
    assert part < 0.62 and seen["true"]["saved_by_sharing"] == pytest.approx(1 - part, abs=0.05)
    assert "saved_by_sharing" not in seen["false"]


def test_verify_compares_shared_rows_with_their_gradients(tmp_path: str) -> None:
    path = config_of(tmp_path)
    report = json.loads(packtrain("verify", path, "--json", "packing.share_prefix=true").stdout)
    assert report["verdict"] == "exact" and report["pairs"]["prompts_shared"]
    assert report["prefix_shared"]["grad_rel_diff"] < 1e-5 and report["prefix_shared"]["loss_rel_diff"] < 1e-6
    shown = packtrain("verify", path, "packing.share_prefix=true").stdout
    assert "prefixes" in shown and "shared prefixes" in shown and "prompts" not in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["objective.options.neftune_noise_alpha=5"], "[noise-on-shared-tokens]"),
        (["model.attention=per_document"], "runs every document by itself"),
        (
            ["model.config.model_type=qwen3_moe", f"model.config={ROUTED}"],
            "[routers-share-tokens]",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    refused = packtrain("sft", config_of(tmp_path), "packing.share_prefix=true", *options, expect=None)
    assert refused.returncode in (2, 3) and said in refused.stderr and "Traceback" not in refused.stderr


MODEL = {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 2}
ROOM = 104  # tokens of a device; documents have up to 200, pairs up to 2 × 100


def answers(count: int) -> list[dict[str, Any]]:
    """Pairs of short and long answers."""
    rng = random.Random(1)

    def text(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.choice([1, 3, 9, most])))

    return [{"prompt": text(20), "chosen": text(30), "rejected": text(30)} for _ in range(count)]


def config_of_long(folder: Path, verb: str, **groups: dict[str, Any]) -> str:
    """Steps in which some documents are split and others are not, with an evaluation."""
    rows = conversations(22) if verb == "sft" else answers(22)
    config = base_config(folder, trainer={"max_steps": 4, "eval_every": 2}, **{"model": {"config": MODEL}, **groups})
    config["data"] |= {
        "train": str(write_jsonl(folder / f"{verb}.jsonl", rows)),
        "eval": str(write_jsonl(folder / f"{verb}-eval.jsonl", rows[:5])),
        "max_length": 200 if verb == "sft" else 100,
    }
    config["optim"] |= {"max_grad_norm": 0.5, "learning_rate": 1e-3}
    return written(folder, config)


def alone(folder: Path, verb: str, path: str, *more: str) -> Run:
    packtrain(verb, path, "batch.tokens_per_device=512", f"trainer.output_dir={folder / 'alone'}", *more)
    return Run(folder / "alone")


def split(folder: Path, verb: str, path: str, processes: int, *more: str) -> Run:
    limits = [f"batch.tokens_per_device={ROOM}", "strategy.sequence_parallel=auto"]
    joined(processes, verb, path, *limits, f"trainer.output_dir={folder / 'split'}", *more)
    return Run(folder / "split")


def assert_split(run: Run, expected: Run) -> None:
    assert "split " in run.log and "split " not in expected.log
    assert_same_training(run, expected, near=3e-6)


SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}


def heads(query: int, key: int, size: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": key, "head_dim": size}


OTHERS = {
    "sinks, windows": {"model_type": "gpt_oss", **EXPERTS, **heads(6, 2, 8), "sliding_window": 24},
    "soft-cap": {"model_type": "gemma2", **heads(3, 1, 16), "sliding_window": 40},
    "fewer heads than ranks": {"model_type": "llama", **heads(2, 1, 24)},
    "router loss": {"model_type": "qwen3_moe", **EXPERTS, **heads(4, 2, 12), "output_router_logits": True},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_other_attention_is_split_alike(tmp_path: str, name: str) -> None:
    path = config_of_long(tmp_path, "sft", model={"config": {**SIZES, **OTHERS[name]}})
    assert_split(split(tmp_path, "sft", path, 3), alone(tmp_path, "sft", path))


@pytest.mark.exhaustive
def test_a_run_goes_on_with_another_number_of_ranks_to_a_document(tmp_path: str) -> None:
    path = config_of_long(tmp_path, "sft")
    expected = alone(tmp_path, "sft", path)
    half = split(tmp_path, "sft", path, 2, "trainer.checkpoint_every=2", "trainer.keep_checkpoints=null")
    assert half.losses == pytest.approx(expected.losses, rel=1e-6)
    limits = ["batch.tokens_per_device=60", "strategy.sequence_parallel=4", f"trainer.output_dir={tmp_path / 'on'}"]
    joined(4, "sft", path, *limits, half.resume(2))
    assert Run(tmp_path / "on").losses == pytest.approx(expected.losses[2:], rel=1e-6)


def test_pairs_of_processes_split_and_short_documents_stay_local(tmp_path: str) -> None:
    path = config_of_long(tmp_path, "sft", peft={"kind": "lora", "r": 4})
    run = split(tmp_path, "sft", path, 4, "strategy.sequence_parallel=2", "model.attention=sdpa_mask")
    assert run.losses == pytest.approx(alone(tmp_path, "sft", path).losses, rel=1e-6)
    assert "over 2 processes each" in run.log


@pytest.mark.exhaustive
@pytest.mark.parametrize(("verb", "strategy"), [("sft", "ddp"), ("dpo", "fsdp2"), ("reward", "ddp")])
def test_verify_proves_split_rows_with_their_gradients(tmp_path: str, verb: str, strategy: str) -> None:
    path = config_of_long(tmp_path, verb, objective={"kind": verb})
    options = ["strategy.sequence_parallel=3", f"batch.tokens_per_device={ROOM}", f"strategy={strategy}", "--json"]
    first, *_ = joined(3, "verify", path, *options)
    report = json.loads(first.stdout)
    assert report["verdict"] == "exact" and report["isolation"]["control"] > 1e-2
    assert report["split"]["loss_rel_diff"] < 1e-6 and report["split"]["grad_rel_diff"] < 1e-5


@pytest.mark.parametrize(
    ("processes", "options", "said"),
    [
        (3, ["strategy.sequence_parallel=2"], "3 processes cannot make groups of 2 [uneven-groups]"),
        (2, ["batch.tokens_per_device=50"], "[document-exceeds-micro-batch]"),
        (2, ["mamba"], "[cannot-split]"),  # it mixes tokens elsewhere, too
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path: Path, processes: int, options: list[str], said: str) -> None:
    mamba = {"model_type": "mamba", "hidden_size": 48, "state_size": 8, "num_hidden_layers": 2}
    path = config_of_long(tmp_path, "sft", **({"model": {"config": mamba}} if options == ["mamba"] else {}))
    limits = [f"batch.tokens_per_device={ROOM}", "strategy.sequence_parallel=auto"]
    done = joined(processes, "sft", path, *limits, *(one for one in options if one != "mamba"), expect=2)
    assert said in " ".join(done[0].stderr.split()), done[0].stderr
