"""Every varlen kernel that is installed, in half precision on the device against a float64 reference.

A kernel that is not there, or has not what a case needs, is skipped with the reason; one that computes something wrong is
not: the choice between kernels would pass it over, and this is where that is seen. torch's own must do what it can.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from packtrain.attention.kernel_choice import (
    LayerFeatures,
    choose_kernel,
    dense_attention,
    kernel_error,
    kernel_tolerance,
)
from packtrain.attention.varlen import CANDIDATES, Kernel, Scoring, attend_by_segments
from packtrain.packing.segments import Segments

NEEDS = {
    "heads of 64": LayerFeatures(torch.bfloat16, 1, 64, 64),
    "float16": LayerFeatures(torch.float16, 1, 64, 64),
    "grouped queries": LayerFeatures(torch.bfloat16, 4, 128, 128),
    "heads of 96": LayerFeatures(torch.bfloat16, 3, 96, 96),
    "heads of 256": LayerFeatures(torch.bfloat16, 2, 256, 256),
    "heads of 20": LayerFeatures(torch.bfloat16, 1, 20, 20),
    "window": LayerFeatures(torch.bfloat16, 2, 128, 128, window=True),
    "soft-cap": LayerFeatures(torch.bfloat16, 2, 128, 128, softcap=50.0),
    "soft-cap and window": LayerFeatures(torch.bfloat16, 2, 128, 128, window=True, softcap=50.0),
    "sinks": LayerFeatures(torch.bfloat16, 8, 64, 64, sinks=True),
    "sinks and window": LayerFeatures(torch.bfloat16, 8, 64, 64, window=True, sinks=True),
    "latent attention": LayerFeatures(torch.bfloat16, 1, 192, 128),
}
TORCH = "torch's varlen_attn"
TORCH_HAS_NOT = ("soft-cap", "soft-cap and window")


@pytest.mark.parametrize("case", NEEDS)
@pytest.mark.parametrize("name", [name for name, _ in CANDIDATES])
def test_a_kernel_is_right_in_output_and_gradients_or_says_what_it_lacks(
    name: str, case: str, device: torch.device
) -> None:
    needs, load = NEEDS[case], dict(CANDIDATES)[name]
    try:
        error = kernel_error(Kernel(name, load()), needs, device)
    except Exception as reason:  # of every type, as kernels refuse
        if name == TORCH and case not in TORCH_HAS_NOT:
            raise
        pytest.skip(f"{name}: {(str(reason) or type(reason).__name__).splitlines()[0]}")
    assert error <= kernel_tolerance(needs.dtype)


@pytest.mark.parametrize("case", [case for case in NEEDS if case not in TORCH_HAS_NOT and "window" not in case])
def test_torchs_kernel_reads_shared_keys_in_place(case: str, device: torch.device) -> None:
    """Outputs and gradients are within the tolerance. If they were not, a run would gather the keys."""
    kernel = Kernel(TORCH, dict(CANDIDATES)[TORCH](), in_place=True)
    assert kernel_error(kernel, NEEDS[case], device) <= kernel_tolerance(NEEDS[case].dtype)


def drawn(segments: Segments, random: torch.Generator, device: torch.device) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient of the output."""
    shapes = [(segments.tokens, heads, 128) for heads in (8, 2, 2, 8)]
    return [torch.randn(shape, generator=random).to(device, torch.bfloat16) for shape in shapes]


def results(attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of queries, keys and values."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    output = attend(*leaves)
    return [output, *torch.autograd.grad(output, leaves, tensors[3])]


DOCUMENTS = (None,) * 24
TREE = (None, 0, 0, 1, 1, 3, None, 6, 6, 6, 9)
"""Prompts, turns that continue them, and answers that continue these; windows end in the midst of a path."""
GROUPS = (None, 0, 0, None, 3, 3, 3, 3, 3)
"""Prompts and answers, whose keys can be read in place."""


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("prefixes", [DOCUMENTS, TREE, GROUPS], ids=["documents", "tree", "groups"])
def test_rows_equal_the_definition(prefixes: tuple[int | None, ...], window: int | None, device: torch.device) -> None:
    """Tolerances as for the small row: errors of rounding do not grow with the row, only with a document's length."""
    random = torch.Generator().manual_seed(0)
    segments = Segments(tuple(torch.randint(1, 300, (len(prefixes),), generator=random).tolist()), prefixes)
    tensors, scoring = drawn(segments, random, device), Scoring(128**-0.5, window)
    in_place = prefixes == GROUPS
    features = LayerFeatures(torch.bfloat16, 4, 128, 128, window=window is not None, in_place=in_place)
    kernel = choose_kernel(features, device).kernel
    assert kernel
    ours = results(lambda q, k, v: attend_by_segments(kernel, q, k, v, segments, scoring), tensors)
    exact = [tensor.double() for tensor in tensors]
    wanted = results(lambda q, k, v: dense_attention(q, k, v, None, segments, scoring), exact)
    for a, b in zip(ours, wanted, strict=True):
        norm = b.norm(dim=-1)  # a document of one token has no gradient of its scores
        error = (a.double() - b).norm(dim=-1) / norm.clamp(min=norm.square().mean().sqrt())
        assert error.max() <= kernel_tolerance(torch.bfloat16)
