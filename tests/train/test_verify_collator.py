"""`packtrain verify --collator`: where collators of others leak, where they do not, and what is wrong with those that cannot be had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import LLAMA, base_config, packtrain, written

from packtrain.config.schema import Model, Peft, Trainer
from packtrain.errors import UserError
from packtrain.train.verify.foreign_collator import verify_collator

OF_OTHERS = """
import os
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
flat, number = DataCollatorWithFlattening(), 3
def flattening(): return flat
def of_trl(pad_token_id): return DataCollatorForLanguageModeling(pad_token_id=pad_token_id, padding_free=True)
def padding(tokenizer): return DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
def padding_left(tokenizer):
    tokenizer.padding_side = "left"
    names = ("input_ids", "attention_mask")
    return lambda features: tokenizer.pad([{n: one[n] for n in names} for one in features], return_tensors="pt")
def without_positions(features): return {name: value for name, value in flat(features).items() if name != "position_ids"}
def trains_borders(features): return {**(row := flat(features)), "labels": row["input_ids"].clone()}
def last_first(features): return flat(features[::-1])
def cutting(features):
    return flat([{**one, "input_ids": one["input_ids"][:4], "labels": one["labels"][:4]} for one in features])
def raising(features): return {}[features[0]["text"]]
def leaving(features): os._exit(0)
def with_more(features): return {**flat(features), "inputs_embeds": 1}
def nothing(features): return [1, 2]
class Needy:
    def __init__(self, tokenizer, rows): ...
"""
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4},
    "opt": {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 48},
    "gpt_oss": {**LLAMA, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"hidden_size": 48, "state_size": 8, "num_hidden_layers": 2},
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 4},
}


@pytest.fixture
def others(tmp_path: Path) -> str:
    (tmp_path / "others.py").write_text(OF_OTHERS)
    return f"{tmp_path / 'others.py'}:"


def proved(family: str, spec: str, **how: Any) -> dict[str, Any]:
    model = Model(init="random", config={**MODELS[family], "model_type": family}, tokenizer="quickstart")
    code, report = verify_collator(model, Peft(), Trainer(), spec, **how)
    assert code == {"exact": 0, "leaks": 3}[report["verdict"]]
    assert report["isolation"]["control"] > 1e-3
    return report


@pytest.mark.parametrize("name", ["flattening", "of_trl"])
@pytest.mark.parametrize(
    ("family", "attention", "where"),
    [
        ("llama", "sdpa", None),
        ("gpt2", "eager", None),
        ("opt", "eager", "model.decoder.layers.0.self_attn"),
        ("gpt_oss", "eager", "model.layers.0.self_attn"),
        ("mamba", None, "backbone.layers.0.mixer"),
        ("bloom", None, "transformer.h.0"),
    ],
)
def test_rows_of_transformers_and_of_trl_leak_in_some_models_and_not_once_attached(
    others: str, name: str, family: str, attention: str | None, where: str | None
) -> None:
    report = proved(family, others + name, attention=attention)
    assert (report["rows"], report["positions"]) == ([1, 37], "restart")
    if where is None:
        assert report["verdict"] == "exact" and not report["leaks"] and not report["problem"]
    else:
        assert report["where"]["module"].startswith(where)
        assert {(one["changed"], one["moved"]) for one in report["leaks"]} >= {(1, 2), (2, 3)}
        assert all(one["changed"] < one["moved"] and one["by"] > 2e-4 for one in report["leaks"])
        assert report["problem"] and "attach" in report["fix"]
    if name == "of_trl":
        assert proved(family, others + name, attached=True)["verdict"] == "exact"


@pytest.mark.parametrize("name", ["padding", "padding_left"])
def test_padding_is_exact_attached_or_not(others: str, name: str) -> None:
    for attached in (False, True):
        report = proved("llama", others + name, attached=attached)
        assert (report["verdict"], report["rows"], report["positions"]) == ("exact", [3, 27], "not given")


def test_it_tells_positions_that_run_on_and_labels_of_another_document(others: str) -> None:
    report = proved("llama", others + "without_positions")
    assert report["verdict"] == "leaks" and report["positions"] == "not given" and len(report["leaks"]) == 3
    across = proved("llama", others + "trains_borders")
    assert across["verdict"] == "leaks" and across["labels_across"] == [2, 3] and not across["leaks"]
    turned = proved("opt", others + "last_first")
    assert {(one["changed"], one["moved"]) for one in turned["leaks"]} == {(3, 2), (3, 1), (2, 1)}
    assert turned["isolation"]["max_abs_diff_before"] == 0 and turned["isolation"]["max_abs_diff_after"] > 1e-3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cutting", "5 tokens of document 1"),
        ("raising", "KeyError: 'text'"),
        ("with_more", "LlamaForCausalLM .* ValueError"),
        ("nothing", "input_ids.* but list"),
        ("Needy", "rows"),
        ("number", "int"),
        ("flatening", "flattening"),
    ],
)
def test_what_is_wrong_with_a_collator_is_said(others: str, name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        proved("llama", others + name)


def test_the_command_shows_it_and_its_exit_code_tells(tmp_path: Path, others: str) -> None:
    config = base_config(tmp_path, model={"config": {**MODELS["opt"], "model_type": "opt"}})
    written(tmp_path, config)
    (tmp_path / "broken.py").write_text("import no_such_package")

    def command(*arguments: str, expect: int) -> Any:
        return packtrain("verify", "run.yaml", *arguments, cwd=tmp_path, expect=expect)

    leaks = command("--collator", "others:flattening", expect=3).stdout
    assert "document 1 changed: 2 moves by" in leaks
    report = json.loads(command("--collator", "packtrain:PackedCollator", "--attach", "--json", expect=0).stdout)
    assert report["verdict"] == "exact" and "segmented" in report["backend"]
    assert {"model", "architecture", "isolation", "collator", "leaks", "positions"} <= report.keys()
    for spec, said in {
        "others": "others",
        "nowhere.py:x": "nowhere.py",
        "others:leaving": "others.py: it ended the process by os._exit(0)",
        "broken:x": "No module named 'no_such_package'",
    }.items():
        assert said in command("--collator", spec, expect=2).stderr
    assert "--collator" in command("--attach", expect=2).stderr
