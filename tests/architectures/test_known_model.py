"""What is refused before the data is prepared: no key and no layer that a model has, and each that it does not have."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_architectures import KINDS
from tiny import auto_class, model_types, tiny_config
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from packtrain.config.schema import Model, Peft
from packtrain.data.sources.quickstart import tokenizer
from packtrain.errors import UserError
from packtrain.model.adapters import odd_layers
from packtrain.model.load import check_before_loading
from packtrain.plan.known_model import check_model_config
from packtrain.plan.model_types import PACKAGES, UNTRAINABLE, check_type

_OF_OTHER_FOLDERS = ("gemma3_text", "gemma3", "gpt-sw3", "openai-gpt", "qwen3_5_text", "xmod", "cohere2_moe")
_SAMPLE = sorted({*KINDS, *_OF_OTHER_FOLDERS, "mistral", "qwen2", "qwen3", "xlstm"} - {*UNTRAINABLE})
_ALL = sorted({*model_types()} - {*UNTRAINABLE})
_SETS = [pytest.param(_SAMPLE, id="sample"), pytest.param(_ALL, id="all", marks=pytest.mark.exhaustive)]


def check(model: Model, peft: Peft, *, scores: bool = False) -> None:
    check_before_loading(model, peft, tokenizer(), scores=scores)


@pytest.mark.parametrize("kinds", _SETS)
def test_each_key_and_layer_that_a_model_type_has_is_taken_and_others_are_refused(kinds: list[str]) -> None:
    for kind in set(kinds).difference(PACKAGES):
        config = tiny_config(kind)
        fields = {one.name for one in dataclasses.fields(config)}
        sizes = {key: value for key, value in config.to_dict().items() if key in fields} | {"model_type": kind}
        new = Model(path=None, init="random", config=sizes)
        for scores in (False, True):
            if scores and kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
                continue
            with torch.device("meta"):
                maker = AutoModelForSequenceClassification if scores else auto_class(kind)
                model = maker.from_config(config)
            odd = odd_layers(model)  # test_adapters.py trains beside these
            named = [name for name, part in model.named_modules() if name and any(True for _ in part.parameters())]
            layers = [name for name in named if name.rpartition(".")[2] not in odd]
            ends = [name[-4:].rpartition(".")[2] for name in layers]
            check(new, Peft(kind="lora", target_modules=layers, modules_to_save=ends), scores=scores)
            with pytest.raises(UserError, match="q_porj") as layer:
                check(new, Peft(kind="lora", target_modules=[*layers[-1:], "q_porj"]), scores=scores)
            assert len(layer.value.problems) == 1
        with pytest.raises(UserError, match="model has no 'return_dcit'") as key:
            check(dataclasses.replace(new, config={**sizes, "return_dcit": True}), Peft())
        assert len(key.value.problems) == 1 and "return_dict" in str(key.value)


def test_a_key_that_may_have_its_place_elsewhere_is_sent_there_and_code_of_a_model_says_how_it_is_trusted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    with pytest.raises(UserError) as refused:
        check(Model(path=str(tmp_path), config={"rope_scaling": 1}), Peft())
    assert "model.config.rope_parameters" in refused.value.problems[0].fix
    own: dict[str, Any] = {"model_type": "internlm2", "auto_map": {"AutoConfig": "a.B"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(UserError, match=r"model\.trust_remote_code=true") as told:
        check(Model(path=str(tmp_path)), Peft())
    assert told.value.problems[0].where == "model.path"
    check(Model(path=str(tmp_path), trust_remote_code=True), Peft())


REFUSED = {
    "t5": "type-not-trained",  # an encoder-decoder
    "blip-2": "type-not-trained",
    "diffusion_gemma": "type-not-trained",
    "vision-encoder-decoder": "type-not-trained",
    "wav2vec2": "type-not-trained",
    "llama5000": "unknown-model-type",
    **dict.fromkeys(PACKAGES, "package-missing"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_type_that_does_not_train_is_refused_by_its_name_before_torch_is_imported(kind: str, tmp_path: Path) -> None:
    if kind in PACKAGES and find_spec(PACKAGES[kind]):
        pytest.skip("its package is installed")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    code = f"""if True:
        import sys
        from packtrain.config.schema import Model
        from packtrain.errors import UserError
        from packtrain.plan.known_model import check_model_config
        for model in (Model(path={str(tmp_path)!r}), Model(path=None, init="random", config={{"model_type": {kind!r}}})):
            try:
                check_model_config(model)
            except UserError as error:
                print(error.problems[0].code, error.problems[0].where, "torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wanted = REFUSED[kind]
    assert done.stdout == f"{wanted} model.path False\n{wanted} model.config.model_type False\n"


def test_types_that_train_and_types_with_code_of_their_own_are_not_refused_early(tmp_path: Path) -> None:
    for kind in {*model_types()} - {*UNTRAINABLE, *PACKAGES}:
        check_type({"model_type": kind}, "model.path", scores=False)
    for kind in {*MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES} - {*UNTRAINABLE, *PACKAGES}:
        check_type({"model_type": kind}, "model.path", scores=True)
    check_type({"model_type": "t5", "auto_map": {"AutoModelForCausalLM": "a.B"}}, "model.path", scores=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    check_model_config(Model(path=str(tmp_path), trust_remote_code=True))
