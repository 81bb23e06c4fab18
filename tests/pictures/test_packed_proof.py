"""The proof with pictures: it passes exact backends, and finds what lets a document see another's picture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from packed import seeing
from tiny_seeing import FAMILIES
from transformers import PreTrainedModel

from packtrain.attention.backends import attention_by
from packtrain.errors import CheckFailed, UserError
from packtrain.packing.pictures import Sight
from packtrain.proof.choice import NotExact, choose_attention
from packtrain.proof.exhibits import Exhibits, check_pictures, prove_pictures, reach_of_gradients

CPU = torch.device("cpu")
BEST = {"qwen3_5": "mixers", "lfm2_vl": "mixers"}


def exhibited(family: str) -> tuple[PreTrainedModel, Exhibits]:
    model, sight, documents = seeing(family)
    return model, Exhibits(sight, documents[3], documents[0])


@pytest.mark.sample("qwen3_vl", "qwen3_5", "llava_next", "mistral3", "gemma3", "gemma4")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_best_backend_of_each_family_is_proved_with_pictures(family):
    model, exhibits = exhibited(family)
    decision = choose_attention("auto", model, CPU, exhibits=exhibits)
    assert decision.backend.name == BEST.get(family, "segmented")
    assert not any("vis" in word for word in decision.kernel.split())
    assert decision.pictures is not None and decision.pictures.verdict == "exact"
    assert {changed for changed, _ in decision.pictures.moved} == {0, 1, 2}
    check_pictures(model, exhibits, padding=True)
    others, own = reach_of_gradients(model, decision.backend.name, exhibits)
    assert others == 0 and own > 0


def test_a_tower_that_mixes_pictures_is_found():
    model, exhibits = exhibited("qwen2_5_vl")
    tower = model.model.visual
    inner = tower.blocks[0].forward

    def all_as_one(hidden, cu_seqlens, **kwargs):
        return inner(hidden, cu_seqlens=cu_seqlens[[0, -1]], **kwargs)

    tower.blocks[0].forward = all_as_one
    assert prove_pictures(model, "segmented", exhibits).verdict == "leaks"
    assert reach_of_gradients(model, "segmented", exhibits)[0] > 0
    with pytest.raises(NotExact, match="with pictures"):
        choose_attention("segmented", model, CPU, exhibits=exhibits)
    assert choose_attention("auto", model, CPU, exhibits=exhibits).backend.name == "per_document"


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_rule_that_is_missing_is_found(family):
    """Pictures that are seen both ways in a type that nobody listed."""
    model, exhibits = exhibited(family)
    unknown = replace(exhibits, sight=replace(exhibits.sight, two_way=None))
    assert choose_attention("auto", model, CPU, exhibits=unknown).backend.name == "per_document"


def test_pictures_that_change_nothing_prove_nothing():
    model, exhibits = exhibited("llava")
    model.model.multi_modal_projector.linear_2.weight.data.zero_()
    assert prove_pictures(model, "segmented", exhibits).verdict == "unsupported"


def test_flash_refuses_pictures_that_are_seen_both_ways():
    model, exhibits = exhibited("gemma3")
    with pytest.raises(CheckFailed) as refusal:
        prove_pictures(model, "flash", exhibits)
    assert "one way" in str(refusal.value)
    assert attention_by("flash").why_not(model) == ""


def test_text_that_sees_later_text_is_refused():
    model, exhibits = exhibited("gemma3")
    for part in model.modules():
        if hasattr(part, "is_causal"):
            part.is_causal = False
    for layer in model.model.language_model.layers:
        layer.self_attn.forward = _ahead(layer.self_attn.forward)
    with pytest.raises(CheckFailed) as refusal:
        check_pictures(model, exhibits, padding=False)
    assert refusal.value.problems[0].code == "not-causal"


def test_a_model_that_sees_its_prompt_both_ways_is_refused():
    model, exhibits = exhibited("llava")
    model.config.text_config.use_bidirectional_attention = True
    with pytest.raises(UserError) as refusal:
        Sight.of(model, exhibits.sight.reader)
    assert refusal.value.problems[0].code == "text-both-ways"


def _ahead(inner):
    def forward(*args, attention_mask=None, **kwargs):
        return inner(*args, attention_mask=None, **kwargs)

    return forward
