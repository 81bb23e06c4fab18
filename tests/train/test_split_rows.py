"""Documents that exceed a device, split over processes: other attention, other numbers of ranks, proofs, and refusals (the training itself: test_cells.py)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from matrix import assert_same_training
from running import LLAMA, WORDS, Run, base_config, conversations, joined, packtrain, write_jsonl, written
from tiny_models import EXPERTS

MODEL = {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 2}
LIMIT = 104  # tokens of a device; documents have up to 200, pairs up to 2 × 100


def answers(count: int) -> list[dict[str, Any]]:
    """Pairs of short and long answers."""
    rng = random.Random(1)

    def text(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.choice([1, 3, 9, most])))

    return [{"prompt": text(20), "chosen": text(30), "rejected": text(30)} for _ in range(count)]


def config_of(folder: Path, verb: str, **groups: dict[str, Any]) -> str:
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
    limits = [f"batch.tokens_per_device={LIMIT}", "strategy.sequence_parallel=auto"]
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
    path = config_of(tmp_path, "sft", model={"config": {**SIZES, **OTHERS[name]}})
    assert_split(split(tmp_path, "sft", path, 3), alone(tmp_path, "sft", path))


@pytest.mark.exhaustive
def test_a_run_goes_on_with_another_number_of_ranks_to_a_document(tmp_path: str) -> None:
    path = config_of(tmp_path, "sft")
    expected = alone(tmp_path, "sft", path)
    half = split(tmp_path, "sft", path, 2, "trainer.checkpoint_every=2", "trainer.keep_checkpoints=null")
    assert half.losses == pytest.approx(expected.losses, rel=1e-6)
    limits = ["batch.tokens_per_device=60", "strategy.sequence_parallel=4", f"trainer.output_dir={tmp_path / 'on'}"]
    joined(4, "sft", path, *limits, half.resume(2))
    assert Run(tmp_path / "on").losses == pytest.approx(expected.losses[2:], rel=1e-6)


def test_pairs_of_processes_split_and_short_documents_stay_local(tmp_path: str) -> None:
    path = config_of(tmp_path, "sft", peft={"kind": "lora", "r": 4})
    run = split(tmp_path, "sft", path, 4, "strategy.sequence_parallel=2", "model.attention=sdpa_mask")
    assert run.losses == pytest.approx(alone(tmp_path, "sft", path).losses, rel=1e-6)
    assert "over 2 processes each" in run.log


@pytest.mark.exhaustive
@pytest.mark.parametrize(("verb", "strategy"), [("sft", "ddp"), ("dpo", "fsdp2"), ("reward", "ddp")])
def test_verify_proves_split_rows_with_their_gradients(tmp_path: str, verb: str, strategy: str) -> None:
    path = config_of(tmp_path, verb, objective={"kind": verb})
    options = ["strategy.sequence_parallel=3", f"batch.tokens_per_device={LIMIT}", f"strategy={strategy}", "--json"]
    first, *_ = joined(3, "verify", path, *options)
    report = json.loads(first.stdout)
    assert report["verdict"] == "exact" and report["isolation"]["control"] > 1e-2
    assert report["split"]["loss_rel_diff"] < 1e-6 and report["split"]["grad_rel_diff"] < 1e-5


@pytest.mark.parametrize(
    ("processes", "options", "said"),
    [
        (3, ["strategy.sequence_parallel=2"], "3 processes cannot make groups of 2"),
        (2, ["batch.tokens_per_device=50"], "or start more processes"),
        (2, ["mamba"], "cannot be split"),  # it mixes tokens elsewhere, too
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path: Path, processes: int, options: list[str], said: str) -> None:
    mamba = {"model_type": "mamba", "hidden_size": 48, "state_size": 8, "num_hidden_layers": 2}
    path = config_of(tmp_path, "sft", **({"model": {"config": mamba}} if options == ["mamba"] else {}))
    limits = [f"batch.tokens_per_device={LIMIT}", "strategy.sequence_parallel=auto"]
    done = joined(processes, "sft", path, *limits, *(one for one in options if one != "mamba"), expect=2)
    assert said in " ".join(done[0].stderr.split()), done[0].stderr
