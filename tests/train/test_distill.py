"""`packtrain distill`: its figures beside both models' full logits, its teachers, and its refusals. Cells of test_cells.py have the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_runs import save_model
from here import loaded, run_here, verified
from running import LLAMA, config_on, conversations, packtrain, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from packtrain.config.compose import load_config
from packtrain.config.schema import Model
from packtrain.errors import UserError
from packtrain.plan.memory import estimate
from packtrain.serve.evaluation import of_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3}
STUDENT = {**LLAMA, "initializer_range": 0.3}
TEACHERS: dict[str, dict[str, Any]] = {
    "wider": {**SIZES, "model_type": "qwen3", "hidden_size": 96, "vocab_size": 1000},
    "gemma2": {**SIZES, "model_type": "gemma2", "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "granite": {**SIZES, "model_type": "granite", "logits_scaling": 0.5},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
}
Folder = Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("distill")
    for name, config in {"student": STUDENT, **TEACHERS}.items():
        save_model(Model(init="random", config=config, tokenizer="quickstart"), place / name)
    write_jsonl(place / "train.jsonl", conversations(14))
    write_jsonl(place / "eval.jsonl", conversations(5, seed=1))
    return place


def config_of(folder: Path, teacher: str = "wider", student: str = "student", **options: Any) -> dict[str, Any]:
    trainer = {"max_steps": 2, "eval_every": 2}
    config = config_on(folder / student, folder, trainer=trainer)
    config["objective"] = {"kind": "distill", "options": {"teacher": str(folder / teacher), **options}}
    config["data"] |= {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 200}
    config["batch"]["tokens_per_device"] = 512
    return config


def expected_figures(folder: Path, student: Path, teacher: Path) -> dict[str, float]:
    """Of the held-out rows, each alone through transformers' models in float64."""
    tokenizer = AutoTokenizer.from_pretrained(student)
    models = [AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64) for place in (student, teacher)]
    rows = [json.loads(line)["messages"] for line in (folder / "eval.jsonl").read_text().splitlines()]
    sums, trained = torch.zeros(4, dtype=torch.float64), 0
    for messages in rows:
        made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor([made["input_ids"]]), torch.tensor(made["assistant_masks"], dtype=torch.bool)[1:]
        with torch.no_grad():
            logits = [model(ids).logits[0, :-1][mask] for model in models]
        words = min(one.shape[1] for one in logits)
        own, its = (one[:, :words].log_softmax(dim=-1) for one in logits)
        targets = ids[0, 1:][mask][:, None]
        same = own.argmax(dim=-1) == its.argmax(dim=-1)
        values = (its.exp() * (its - own)).sum(dim=-1), -own.gather(1, targets), -its.gather(1, targets), same
        sums += torch.stack([value.double().sum() for value in values])
        trained += len(targets)
    return dict(zip(("kl", "nll", "teacher_nll", "agreement"), (sums / trained).tolist(), strict=True))


@pytest.mark.sample("wider-student", "gemma2-granite")
@pytest.mark.parametrize(
    ("teacher", "student"),
    [("wider", "student"), ("gemma2", "granite"), ("granite", "gemma2"), ("gpt2", "student"), ("student", "wider")],
)
def test_figures_are_those_of_full_logits_whatever_the_architectures(folder: Path, teacher: str, student: str) -> None:
    config = config_of(folder, teacher, student, nll_share=0.25)
    run = run_here(folder, config, name=f"{teacher}-{student}")
    assert "full logits" not in run.log and f"from {folder / teacher}" in run.log
    for line, place in ((run.evals[0], folder / student), (run.evals[-1], run.folder / "final")):
        expected = expected_figures(folder, place, folder / teacher)
        for name, value in expected.items():
            assert line[f"eval_{name}"] == pytest.approx(value, rel=2e-5), name
        assert line["eval_loss"] == pytest.approx(0.75 * expected["kl"] + 0.25 * expected["nll"], rel=2e-5)
    assert {"kl", "nll", "teacher_nll", "agreement"} <= run.steps[0].keys()
    evaluated = json.loads(packtrain("eval", str(run.folder), "--json").stdout)["figures"] if teacher == "wider" else {}
    assert all(value == pytest.approx(run.evals[-1][name], rel=1e-5) for name, value in evaluated.items())
