"""What `plan` reads of a model type from transformers' source is what its classes take: no key and no layer of a model is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quirks import QUIRKS, UNBUILDABLE
from sweep import quietly_on_one_thread
from test_architectures import KINDS
from tiny import model_types, tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from packtrain.config.schema import Model, Peft
from packtrain.errors import UserError
from packtrain.plan.known_model.model_config import check_model, checked_when_loaded

_OF_OTHER_FOLDERS = (
    "gemma3_text",
    "gemma3",
    "gpt-sw3",
    "openai-gpt",
    "data2vec-text",
    "qwen3_5_text",
    "internlm3",
    "xmod",
)
_SAMPLE = sorted({*KINDS, *_OF_OTHER_FOLDERS, "mistral", "qwen2", "qwen3", "xlstm", "cohere2_moe"} - {*UNBUILDABLE})
_ALL = sorted({*model_types()} - {*UNBUILDABLE})
_SETS = [pytest.param(_SAMPLE, id="sample"), pytest.param(_ALL, id="all", marks=pytest.mark.exhaustive)]
_NEEDS_TIMM = ("gemma3n",)


@pytest.fixture(autouse=True, scope="module")
def quietly():
    with quietly_on_one_thread():
        yield


def new(config: dict[str, Any]) -> Model:
    return Model(path=None, init="random", config=config)


@pytest.mark.parametrize("kinds", _SETS)
def test_each_key_that_a_model_type_has_is_known_and_others_are_not(kinds: list[str]) -> None:
    for kind in kinds:
        made = CONFIG_MAPPING[kind](**(QUIRKS[kind].full if kind in QUIRKS else {}))
        taken = {**dict.fromkeys(made.attribute_map), **made.to_dict(), "model_type": kind}
        beside = {"head_dim": 8, "rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5}
        taken |= beside if hasattr(made, "rope_parameters") else {}
        check_model(new(taken), Peft())
        with pytest.raises(UserError, match=f"{kind} model has no 'return_dcit'") as told:
            check_model(new({**taken, "return_dcit": True}), Peft())
        assert len(told.value.problems) == 1 and "return_dict" in str(told.value)


@pytest.mark.parametrize("kinds", _SETS)
def test_each_layer_that_a_model_type_has_is_known_and_others_are_not(kinds: list[str]) -> None:
    unknown = set[str]()
    for kind in set(kinds).difference(_NEEDS_TIMM):
        config = tiny_config(kind)
        for scores in (False, True):
            if scores and kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
                continue
            with torch.device("meta"):
                maker = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
                model = maker.from_config(config)
            layers = [name for name, part in model.named_modules() if name and any(True for _ in part.parameters())]
            fields = {one.name for one in dataclasses.fields(config)}
            known = new(
                {"model_type": kind, **{key: value for key, value in config.to_dict().items() if key in fields}}
            )
            lora = Peft(
                kind="lora", target_modules=layers, modules_to_save=[name[-4:].rpartition(".")[2] for name in layers]
            )
            check_model(known, lora, scores=scores)
            typo = Peft(kind="lora", target_modules=[*layers[-1:], "q_porj"])
            if checked_when_loaded(known, typo, scores=scores):
                unknown.add(kind)
                continue
            with pytest.raises(UserError, match="q_porj"):
                check_model(known, typo, scores=scores)
    assert len(unknown) <= len(kinds) // 10, unknown


def test_a_model_with_code_of_its_own_says_how_it_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "internlm2", "auto_map": {"AutoConfig": "a.B"}}))
    with pytest.raises(UserError, match=r"model\.path: .*internlm2") as told:
        check_model(Model(path=str(tmp_path)), Peft())
    assert "model.trust_remote_code=true" in str(told.value)
    check_model(Model(path=str(tmp_path), trust_remote_code=True), Peft())


@pytest.mark.parametrize(
    ("kind", "key", "fix"),
    [
        ("deepseek_v3", "rope_scaling", "Write it into model.config.rope_parameters."),
        ("gemma3", "max_position_embeddings", "Write it into model.config.text_config."),
        ("gpt2", "rope_theta", "Take it away."),
    ],
)
def test_a_key_that_has_its_place_elsewhere_is_sent_there(kind: str, key: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UserError) as told:
        check_model(Model(path=str(tmp_path), config={key: 1}), Peft())
    assert told.value.problems[0].fix == fix
