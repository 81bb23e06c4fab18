"""Tokens of a picture that see each other both ways: masks beside their definition, and beside transformers' own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4

from packtrain.attention import sdpa_mask, segmented
from packtrain.packing.segments import Segments, TwoWay

ROW = Segments((9, 5, 7, 12, 9), (None, 0, 0, None, None), ((2, 8), (9, 12), (22, 31), (33, 35), (38, 41)))
RULES = [TwoWay(everywhere, beyond) for everywhere in (True, False) for beyond in (True, False)]


def row(rule: TwoWay) -> Segments:
    return Segments(ROW.lengths, ROW.prefixes, ROW.blocks, rule)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
def test_visible_is_its_definition(rule, window):
    segments, window_ = row(rule), window or 10**6
    seen, numbers = segments.visible(window), segments.segment_ids()[0].tolist()
    positions = segments.position_ids()[0].tolist()
    for query, key in itertools.product(range(segments.tokens), repeat=2):
        ahead = any(start <= query < end and start <= key < end for start, end in segments.blocks)
        before = numbers[key] in segments.paths[numbers[query]] and positions[key] <= positions[query]
        near = positions[query] - positions[key] < window_
        wanted = (before and near) or ahead if rule.beyond_window else (before or ahead) and near
        assert seen[query, key].item() == wanted, (query, key)


class Layer(nn.Module):
    """What attention functions read of a layer."""

    num_key_value_groups, layer_idx, is_causal, training = 2, 0, True, False

    def __init__(self) -> None:
        super().__init__()
        self.scaling = 0.5


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
def test_segmented_attends_as_the_dense_mask(rule, window):
    torch.manual_seed(0)
    segments = row(rule)
    query, key, value = (torch.randn(1, heads, segments.tokens, 8, requires_grad=True) for heads in (4, 2, 2))
    found = []
    for name in (segmented.NAME, sdpa_mask.NAME):
        given = {"segments": segments, "sliding_window": window, "scaling": 0.5}
        output, _ = AttentionInterface()[name](Layer(), query, key, value, None, **given)
        gradients = torch.autograd.grad(output.square().sum(), [query, key, value])
        found.append([output, *gradients])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    given["segments"] = Segments(ROW.lengths, ROW.prefixes)
    one_way, _ = AttentionInterface()[segmented.NAME](Layer(), query, key, value, None, **given)
    differs = not torch.allclose(one_way, found[0][0], atol=1e-5)
    assert differs == (window is not None or rule.in_global_layers)


@pytest.mark.parametrize(
    ("family", "module", "everywhere"), [("gemma3", modeling_gemma3, True), ("gemma4", modeling_gemma4, False)]
)
def test_the_rule_is_that_of_the_models_own_masks(family, module, everywhere):
    tokens, blocks, window = 20, ((3, 11), (14, 17)), 4
    types = torch.zeros(1, tokens, dtype=torch.long)
    for start, end in blocks:
        types[:, start:end] = 1
    config = module.Gemma3TextConfig() if family == "gemma3" else module.Gemma4TextConfig()
    config.sliding_window, config._attn_implementation = window, "eager"
    groups = module.get_block_sequence_ids_for_mask(types, device=torch.device("cpu"))
    given = {"inputs_embeds": torch.zeros(1, tokens, 1), "attention_mask": None, "cache": None}
    given["position_ids"] = torch.arange(tokens)[None]
    masks = module.create_masks_for_vision_model(config, **given, block_sequence_ids=groups)
    rule = TwoWay(everywhere, beyond_window=False)
    local = Segments((tokens,), (), blocks, rule).visible(window)
    full = Segments((tokens,), (), blocks if everywhere else (), rule).visible()
    assert torch.equal(masks["sliding_attention"][0, 0] == 0, local)
    assert torch.equal(masks["full_attention"][0, 0] == 0, full)
