"""Every attention function on trees of segments: outputs and gradients of dense attention under `Segments.visible`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from packtrain.attention.flash import flash_attention
from packtrain.attention.kernel_choice import dense_attention, forget_kernels
from packtrain.attention.sdpa_mask import dense_mask_attention
from packtrain.attention.segmented import segmented_attention
from packtrain.attention.varlen import Scoring
from packtrain.packing.segments import Segments
from tests.stand_in_kernels import MODULES, flash_attention_4

BACKENDS = {"segmented": segmented_attention, "flash": flash_attention, "sdpa_mask": dense_mask_attention}
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {  # with the family whose own function has it
    "grouped queries": ("llama", {}),
    "window": ("llama", {"sliding_window": 4}),
    "window of two": ("llama", {"sliding_window": 2}),
    "soft-cap": ("gemma2", {"softcap": 1.5}),
    "sinks": ("gpt_oss", {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.1])}),
    "sinks and window": ("gpt_oss", {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.1]), "sliding_window": 5}),
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEADS, KEY_HEADS, WIDTH = 4, 2, 16


def random_tree(seed: int, depth: int, among: int) -> Segments:
    """12 segments of 1 to 12 tokens, up to `depth` below each other, each continues one of the `among` last that it may."""
    rng = np.random.default_rng(seed)
    prefixes: list[int | None] = [None]
    depths = [1]
    for number in range(1, 12):
        under = [one for one in range(number) if depths[one] < depth]
        prefix = int(rng.choice(under[-among:])) if under and rng.random() < 0.85 else None
        prefixes.append(prefix)
        depths.append(1 if prefix is None else depths[prefix] + 1)
    return Segments(tuple(int(one) for one in rng.choice([1, 2, 5, 12], len(prefixes))), tuple(prefixes))


TREES = [random_tree(seed, depth, wide) for seed, (depth, wide) in enumerate([(2, 3), (2, 12), (3, 6), (5, 2), (5, 9)])]


@pytest.fixture(autouse=True)
def a_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in for the first one that flash looks for."""
    forget_kernels()
    module = SimpleNamespace(flash_attn_varlen_func=flash_attention_4)
    monkeypatch.setitem(sys.modules, MODULES["FlashAttention 4"], module)
    yield
    forget_kernels()


def layer_of(family: str, dtype: torch.dtype) -> torch.nn.Module:
    layer: Any = tiny_model(family, num_hidden_layers=2, head_dim=WIDTH, sliding_window=None).to(dtype)
    return layer.model.layers[1].self_attn.train()


def outputs_and_gradients(backend: str, feature: str, segments: Segments, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of the row that `segments` are: the output [T, heads, d], and the gradients of query, key, value and sinks."""
    family, asked = FEATURES[feature]
    random = torch.Generator().manual_seed(1)
    shapes = [(1, heads, segments.tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    exact = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    leaves = [one.double() if backend == "reference" else one for one in exact]
    leaves = [one.clone().requires_grad_() for one in leaves]
    if backend == "reference":
        sinks = asked["s_aux"].to(dtype).double().requires_grad_() if "s_aux" in asked else None
        scoring = Scoring(WIDTH**-0.5, asked.get("sliding_window"), asked.get("softcap"))
        output = dense_attention(*(one[0].transpose(0, 1) for one in leaves), sinks, segments, scoring)
    else:
        layer: Any = layer_of(family, dtype)
        sinks = torch.nn.Parameter(asked["s_aux"].to(dtype)) if "s_aux" in asked else None
        if sinks is not None:
            layer.sinks = sinks
        asked = {"scaling": WIDTH**-0.5, **asked, **({"s_aux": sinks} if sinks is not None else {})}
        output = BACKENDS[backend](layer, *leaves, None, segments=segments, **asked)[0][0]
    leaves += [] if sinks is None else [sinks]
    weights = torch.randn(output.shape, generator=random).to(dtype).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, weights)]


def off(backend: str, feature: str, given: Segments, meant: Segments, dtype: torch.dtype) -> float:
    """The largest difference from the reference, relative to its norm, of outputs and gradients."""
    ours = outputs_and_gradients(backend, feature, given, dtype)
    exact = outputs_and_gradients("reference", feature, meant, dtype)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tree_has_the_outputs_and_gradients_of_dense_attention(backend, feature, dtype):
    for segments in TREES:
        assert off(backend, feature, segments, segments, dtype) < TOLERANCES[dtype], segments


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_path_is_seen_at_any_depth(backend: str) -> None:
    """Trees of the same shape, in which one segment continues another one than it should."""
    lengths, meant = (5, 5, 2, 1, 2, 3, 1), (None, None, 0, 2, 2, 3, 5)
    for wrong in ((None, None, 1, 2, 2, 3, 5), (None, None, 0, 2, 2, 4, 5), (None, None, 0, 2, 2, 3, 4)):
        for dtype, tolerance in TOLERANCES.items():
            given, right = Segments(lengths, wrong), Segments(lengths, meant)
            assert off(backend, "grouped queries", given, right, dtype) > 5 * tolerance
