"""`packtrain verify`: exact where packed rows train as the documents alone, and never silent where they do not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from running import LLAMA, base_config, joined, packtrain, written
from tiny_models import break_borders, tiny_model, whole

from packtrain.attention import segmented
from packtrain.config.objective import Objective
from packtrain.config.schema import Batch, Data, Model, Packing, Peft, RunConfig, Trainer
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import CheckFailed
from packtrain.model.precision import Precision
from packtrain.model.spread import Ranks
from packtrain.objectives.sft.run import SFT
from packtrain.packing.segments import Segments
from packtrain.run_folder import RunFolder
from packtrain.train.run import verify_in
from packtrain.train.verify import measure as verifying
from packtrain.train.verify.command import print_verdicts
from packtrain.train.verify.loss_proofs import MODES, Comparison, compare_modes, lengths_for, loss_on_random_examples

MAMBA = {"model_type": "mamba", "hidden_size": 48, "state_size": 8, "num_hidden_layers": 2}
MPT = {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 1024}
GPT_OSS = {**LLAMA, "model_type": "gpt_oss", "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2}


def proved(folder: Path, model: dict[str, Any], **groups: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and report of a proof in this process; `groups`: attention and dtype of the model, other config groups."""
    of_model = {name: groups.pop(name) for name in ("attention", "dtype") if name in groups}
    config = RunConfig(
        model=Model(init="random", config=dict(model), tokenizer="quickstart", **of_model),
        data=Data(train="quickstart"),
        batch=Batch(examples_per_step=4),
        **groups,
    )
    config = replace(config, trainer=replace(config.trainer, output_dir=str(folder)))
    code = verify_in(config, Ranks(0, 1, torch.device("cpu")))
    return code, json.loads(RunFolder.of(config.trainer).verification.read_text())


def compared(model: Any, folder: Path) -> Comparison:
    objective, trainer = SFT(RunConfig()), Trainer(output_dir=str(folder))
    precision = Precision(model.dtype, torch.bfloat16 if trainer.mixed_precision == "bf16" else None)
    tokenizer = load_tokenizer(Model(tokenizer="quickstart"))
    return compare_modes(*loss_on_random_examples(objective, model, tokenizer, precision, trainer), "segmented")


def test_an_exact_model_ends_with_0_and_one_json_document_and_leaves_the_run_folder_alone(tmp_path: Path) -> None:
    (other := tmp_path / "step-000002").mkdir()  # that of a run at another rate, which is not gone on with
    (other / "origin.json").write_text(origin := json.dumps({"optim.learning_rate": "0.5"}))
    whole = {"origin.json": {"bytes": len(origin), "blake2b": hashlib.blake2b(origin.encode()).hexdigest()}}
    (other / "manifest.json").write_text(json.dumps(whole))
    path = written(tmp_path, base_config(tmp_path, trainer={"resume": str(other)}))
    report = json.loads(packtrain("verify", path, "strategy=fsdp2", "--json").stdout)
    assert report["modes_on"] == "spread"
    assert report["verdict"] == "exact" and report["backend"] == "segmented" and report["problem"] == ""
    assert report["architecture"] == "LlamaForCausalLM" and report["model"]
    isolation = report["isolation"]
    for name in ("max_abs_diff_before", "max_abs_diff_after", "max_abs_diff_alone"):
        assert 0 <= isolation[name] <= isolation["tolerance"] == 2e-4
    assert isolation["control"] > 5 * isolation["tolerance"]
    assert tuple(report["modes"]) == MODES
    for figures in report["modes"].values():
        assert figures["loss"] == pytest.approx(report["reference"]["loss"], rel=1e-5)
        assert 0 <= figures["grad_rel_diff"] < 1e-4
    assert report["control"]["grad_rel_diff"] > 1000 * report["tolerances"]["grad_rel_diff"]
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_of_several_processes_the_worst_verdict_is_told_in_a_table_with_the_leak_and_its_cure(tmp_path: Path) -> None:
    path = written(tmp_path, base_config(tmp_path, model={"config": MAMBA, "attention": "segmented"}))
    strategy = "zero3" if find_spec("deepspeed") else "fsdp2"
    done, _ = joined(2, "verify", path, f"strategy={strategy}", expect=3)
    for part in (strategy, "2 processes", "rank 0 of 2", "backbone.layers.0.mixer", "model.attention=auto"):
        assert part in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        pytest.param(LLAMA, {"peft": Peft(kind="lora", r=4)}, id="lora"),
        pytest.param(LLAMA, {"dtype": "bfloat16"}, id="bf16"),
        pytest.param(LLAMA, {"trainer": Trainer(mixed_precision="bf16")}, id="mixed"),
        pytest.param(GPT_OSS, {}, id="sinks"),
        pytest.param({**LLAMA, "model_type": "mistral", "sliding_window": 200}, {}, id="window"),
    ],
)
def test_adapters_16_bits_sinks_and_windows_are_exact(model: dict, groups: dict, tmp_path: Path) -> None:
    code, report = proved(tmp_path, model, **groups)
    assert (code, report["verdict"], report["backend"]) == (0, "exact", "segmented")
    in_16_bits = "dtype" in groups or "trainer" in groups
    assert report["tolerances"]["grad_rel_diff"] == (5e-2 if in_16_bits else 1e-4)
    beyond_windows = {"mistral": 207}  # a window of 200
    assert report["reference"]["documents"][-1] == beyond_windows.get(model["model_type"], 135)


@pytest.mark.sample(without=("model2-sft",))
@pytest.mark.parametrize(("model", "kind"), [(MPT, "sft"), (MPT, "dpo"), (MAMBA, "sft")])
def test_a_model_that_mixes_tokens_elsewhere_is_exact_by_its_mixers(
    tmp_path: Path, model: dict[str, Any], kind: Any
) -> None:
    code, report = proved(tmp_path, model, objective=Objective(kind=kind))
    assert (code, report["verdict"], report["backend"]) == (0, "exact", "mixers"), report["problem"]
    assert report["control"]["grad_rel_diff"] > 0.1 and report["controls_see"]
    assert [one["backend"] for one in report["lacking"]] == ["flash", "segmented"]


def test_what_a_strategy_cannot_train_is_not_called_exact() -> None:
    spread = Ranks(0, 1, torch.device("cpu"), "fsdp2")
    model = tiny_model("llama")
    config = RunConfig(model=Model(attention="per_document"))
    found = verifying.isolation_of(config, spread, model, None)
    assert found.problem and "zero2" in found.problem.fix
    padded = replace(config, packing=Packing(mode="padding"))
    assert verifying.isolation_of(padded, spread, tiny_model("llama"), None).problem is None


def test_a_named_backend_that_leaks_is_named_with_the_first_module(tmp_path: Path, capsys: Any) -> None:
    code, report = proved(tmp_path, MAMBA, attention="segmented")
    assert (code, report["verdict"], report["backend"]) == (3, "leaks", "segmented")
    assert report["where"]["module"] == "backbone.layers.0.mixer" and report["where"]["kind"]
    assert report["isolation"]["max_abs_diff_after"] > 100 * report["isolation"]["tolerance"]
    assert report["modes"]["packed"]["grad_rel_diff"] > 0.05
    assert report["modes"]["padding"]["grad_rel_diff"] < 1e-4
    print_verdicts(report, as_json=True)
    assert json.loads(capsys.readouterr().out) == report


@pytest.mark.parametrize(
    ("long", "right"),
    [(lambda row: len(row.lengths) > 4, []), (lambda row: row.tokens >= 256, ["padding_free"])],
    ids=["of many documents", "of many tokens"],
)
def test_what_the_rows_of_the_isolation_proof_do_not_show_the_modes_do(
    long: Callable[[Segments], bool], right: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    break_borders(monkeypatch, lambda _, row: whole(row) if long(row) else row)
    code, report = proved(tmp_path, LLAMA, attention="segmented")
    assert (code, report["verdict"]) == (3, "leaks")
    assert report["isolation"]["max_abs_diff_after"] < report["isolation"]["tolerance"]
    assert report["modes"]["packed"]["grad_rel_diff"] > 1e-4 and "packing.mode=padding" in report["fix"]
    assert all(report["modes"][mode]["grad_rel_diff"] < 1e-4 for mode in ["padding", *right])


def test_a_model_that_shows_too_little_is_exact_only_where_documents_run_apart(tmp_path: Path) -> None:
    blind = {**LLAMA, "initializer_range": 1e-6}
    code, report = proved(tmp_path, blind, attention="segmented")
    assert (code, report["verdict"], report["controls_see"]) == (3, "unsupported", False)
    code, report = proved(tmp_path, blind)
    assert (code, report["verdict"], report["backend"], report["controls_see"]) == (0, "exact", "per_document", False)


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    code, report = proved(tmp_path, {"model_type": "bert", **small})
    assert (code, report["verdict"]) == (3, "unsupported") and "not causal" in report["problem"]
    code, report = proved(tmp_path, {"model_type": "bert", "is_decoder": True, **small})
    assert (code, report["verdict"], report["head"]) == (0, "exact", "full logits")


def test_nothing_but_padding_is_unsupported_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CheckFailed("no way to run packed rows of it exactly", fix="set packing.mode=padding")

    monkeypatch.setattr(verifying, "choose_attention", refuse)
    code, report = proved(tmp_path, LLAMA)
    assert (code, report["verdict"], report["backend"]) == (3, "unsupported", None)
    assert report["modes"]["padding"]["grad_rel_diff"] < 1e-4
    packed = report["modes"]["packed"]
    assert packed["problem"] and packed["loss"] is packed["loss_rel_diff"] is packed["grad_rel_diff"] is None


def test_documents_reach_beyond_windows_and_chunks_but_not_beyond_the_positions() -> None:
    assert max(lengths_for(tiny_model("llama"))) == 135
    assert max(lengths_for(tiny_model("mistral", sliding_window=200))) == 207
    assert max(lengths_for(tiny_model("mistral", sliding_window=4096))) == 135
    assert max(lengths_for(tiny_model("llama", max_position_embeddings=64))) == 64


def disturb_attention(model: torch.nn.Module) -> None:
    """As another kernel would round: every attention output off by about a unit in the last place of bfloat16."""

    def disturb(module: torch.nn.Module, inputs: Any, output: tuple) -> tuple:
        return (output[0] * (1 + 2**-8 * torch.randn_like(output[0])), *output[1:])

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_hook(disturb)


@pytest.mark.sample("True")
@pytest.mark.parametrize("broken", [False, True])
def test_routers_that_choose_otherwise_in_16_bits_are_no_leak_and_hide_none(
    broken: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    model = tiny_model("mixtral", num_local_experts=8, num_experts_per_tok=2).bfloat16()
    disturb_attention(model)
    if broken:
        break_borders(monkeypatch, lambda _, row: whole(row))
    comparison = compared(model, tmp_path)
    assert comparison.tolerance.gradients > 5e-2 and comparison.sees
    assert comparison.off == (["padding_free", "packed"] if broken else [])


def test_the_gradients_are_those_of_all_trained_weights_and_none_are_left_behind(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.lm_head.weight.requires_grad_(False)
    comparison = compared(model, tmp_path)
    assert comparison.off == [] and comparison.sees
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config._attn_implementation != segmented.NAME
