"""What documents of a step begin with alike is computed once: the training is that of documents each by itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from matrix import assert_same_training, needs
from running import LLAMA, WORDS, Run, base_config, joined, packtrain, write_jsonl, written

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


def trained(folder: Path, path: str, *options: str, processes: int = 1) -> Run:
    joined(processes, "sft", path, f"trainer.output_dir={folder}", *options)
    return Run(folder)


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
        (["objective.options.neftune_noise_alpha=5"], "shared tokens belong to several"),
        (["model.attention=per_document"], "runs every document by itself"),
        (
            ["model.config.model_type=qwen3_moe", f"model.config={ROUTED}"],
            "counts a token in every document that has it",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    refused = packtrain("sft", config_of(tmp_path), "packing.share_prefix=true", *options, expect=None)
    assert refused.returncode in (2, 3) and said in refused.stderr and "Traceback" not in refused.stderr
