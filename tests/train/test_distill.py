"""`packtrain distill`: its figures beside both models' full logits, its teachers, and its refusals. Cells of test_cells.py have the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_runs import save_model
from here import loaded, run_here, verified
from matrix import cut
from running import LLAMA, config_on, conversations, packtrain, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from packtrain.config.schema import Model
from packtrain.errors import CheckFailed, UserError
from packtrain.plan.fit import Memory
from packtrain.plan.memory import estimate

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3}
STUDENT = {**LLAMA, "initializer_range": 0.3}
TEACHERS: dict[str, dict[str, Any]] = {
    "wider": {**SIZES, "model_type": "qwen3", "hidden_size": 96, "vocab_size": 1000},
    "gemma2": {**SIZES, "model_type": "gemma2", "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "granite": {**SIZES, "model_type": "granite", "logits_scaling": 0.5},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "short": {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
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


def expected_figures(
    folder: Path, student: Path, teacher: Path, dtype: torch.dtype = torch.float64
) -> dict[str, float]:
    """Figures of the held-out rows, which transformers' models run one by one."""
    tokenizer = AutoTokenizer.from_pretrained(student)
    models = [AutoModelForCausalLM.from_pretrained(place, dtype=dtype) for place in (student, teacher)]
    rows = [json.loads(line)["messages"] for line in (folder / "eval.jsonl").read_text().splitlines()]
    sums, trained = torch.zeros(4, dtype=torch.float64), 0
    for messages in rows:
        made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor([made["input_ids"]]), torch.tensor(made["assistant_masks"], dtype=torch.bool)[1:]
        with torch.no_grad():
            logits = [model(ids).logits[0, :-1][mask] for model in models]
        words = min(one.shape[1] for one in logits)
        own, its = (one[:, :words].double().log_softmax(dim=-1) for one in logits)
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


def test_shared_prefixes_change_nothing(folder: Path) -> None:
    config = config_of(folder)
    config["data"]["render"] = "turns"
    plain = run_here(folder, config, "packing.share_prefix=false", name="unshared")
    shared = run_here(folder, config, "packing.share_prefix=true", name="shared")
    assert shared.losses == pytest.approx(plain.losses, rel=1e-5)
    for name in ("eval_kl", "eval_agreement"):
        assert shared.evals[-1][name] == pytest.approx(plain.evals[-1][name], rel=1e-5)


def test_verify_compares_the_modes_with_both_models_alone(folder: Path) -> None:
    config = loaded(
        folder, config_of(folder, "gemma2"), "objective.loss=jsd", "objective.options.nll_share=0.5", name="v"
    )
    report = verified(config)
    assert report["verdict"] == "exact" and report["head"] == "fused"
    assert all(mode["loss_rel_diff"] < 1e-5 and mode["grad_rel_diff"] < 1e-4 for mode in report["modes"].values())


def test_a_run_says_who_taught_it_and_does_not_go_on_with_another(folder: Path) -> None:
    config = config_of(folder)
    cut(run_here(folder, config, "trainer.checkpoint_every=1", name="taught"), "cut", step=1)
    weights = folder / "wider/model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-64] + bytes(64))
    try:
        with pytest.raises(UserError, match="one of weights with hash"):
            run_here(folder, config, "trainer.checkpoint_every=1", name="cut")
        despite = "trainer.resume_despite=[model.frozen]"
        assert "resuming" in run_here(folder, config, "trainer.checkpoint_every=1", despite, name="cut").log
    finally:
        weights.write_bytes(kept)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (["objective.options.teacher=null"], "no-teacher"),
        (["objective.options.teacher=./nowhere"], "no-such-path"),
        (["objective.options.jsd_beta=0.4"], "jsd-beta-unused"),
        (["objective.options.temperature=0"], ""),
        (["objective.options.nll_share=1"], ""),
        (["objective.loss=jsd", "objective.options.jsd_beta=1"], ""),
        (["objective.options.teacher_quantize=int3"], ""),
        (["objective.loss=nll"], ""),
    ],
)
def test_what_cannot_be_taught_is_refused(folder: Path, change: list[str], code: str) -> None:
    with pytest.raises(UserError) as refused:
        loaded(folder, config_of(folder), *change, name="refused")
    print(refused.value)
    assert code in [problem.code for problem in refused.value.problems] or not code
    assert any("objective" in problem.where for problem in refused.value.problems)


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    tokenizer.add_tokens(["<more>"])
    other = folder / "other"
    AutoModelForCausalLM.from_pretrained(folder / "wider").save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(UserError, match=f"token {len(tokenizer) - 1} is '<more>', and no token of the student"):
        run_here(folder, config_of(folder, "other"), name="refused")


def test_a_teacher_of_too_few_positions_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"the model of objective\.options\.teacher is made for 64 positions"):
        run_here(folder, config_of(folder, "short"), name="refused")


def test_a_teacher_that_sees_later_tokens_is_refused(folder: Path) -> None:
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    save_model(
        Model(init="random", config={**config, "initializer_range": 0.3}, tokenizer="quickstart"), folder / "bert"
    )
    with pytest.raises(CheckFailed, match="is not causal") as refused:
        run_here(folder, config_of(folder, "bert"), name="refused")
    assert refused.value.problems[0].where == "objective.options.teacher"


def test_plans_count_the_teacher(folder: Path) -> None:
    config = loaded(folder, config_of(folder), name="planned")
    alone = replace(config, objective=replace(config.objective, kind="sft", options={}))
    with_teacher, without = (estimate(one, 1, None) for one in (config, alone))
    teacher = AutoModelForCausalLM.from_pretrained(folder / "wider")
    numbers = sum(weight.numel() for weight in teacher.parameters())
    assert isinstance(with_teacher, Memory) and isinstance(without, Memory)
    assert with_teacher.reference - without.reference == 4 * numbers


@pytest.mark.exhaustive
@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_a_quantised_teacher_teaches_what_its_rounded_weights_say(folder: Path, quantize: str) -> None:
    run = run_here(folder, config_of(folder, teacher_quantize=quantize), name=quantize)
    whole = expected_figures(folder, folder / "student", folder / "wider")["kl"]
    assert 1e-5 < abs(run.evals[0]["eval_kl"] - whole) / whole < 0.3


@pytest.mark.exhaustive
def test_the_losses_are_added_to_those_of_routers_and_adapters_learn(folder: Path) -> None:
    sparse = {
        **SIZES,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    sparse |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    save_model(Model(init="random", config=sparse, tokenizer="quickstart"), folder / "sparse")
    run = run_here(folder, config_of(folder, "wider", "sparse"), "peft=lora", name="sparse-run")
    assert all(line["router_aux_loss"] > 0 and line["kl"] > 0 for line in run.steps)
    single = torch.float32  # experts in one product take no float64
    expected = expected_figures(folder, folder / "sparse", folder / "wider", single)
    assert run.evals[0]["eval_loss"] == pytest.approx(expected["kl"], rel=1e-4)
    taught = run_here(folder, config_of(folder, "sparse"), name="of-sparse")
    expected = expected_figures(folder, folder / "student", folder / "sparse", single)
    assert taught.evals[0]["eval_kl"] == pytest.approx(expected["kl"], rel=1e-4)
