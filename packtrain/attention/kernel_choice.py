"""The choice of a layer's varlen kernel: the first of CANDIDATES that runs CORRECTLY here.

A successful import proves little: a package may lack code for this GPU, the backward pass, or a combination of features, and
some versions were wrong in corner cases. So each candidate, in a fixed order, runs forward and backward on a small row with
exactly the features of the layer, and is compared with a dense float64 reference. The first that agrees is taken. It costs
milliseconds a kernel (seconds if it compiles), once per kind of layer and process.

A layer may ask for its kernel in a forward pass that gradient checkpointing runs again, or under autocast. So kernels are tried in a
separate thread, without modes or hooks on saved tensors (checkpointing counts them, and ends a recomputation by an exception).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from packtrain.attention.varlen import CANDIDATES, Kernel, Scoring, attend_by_segments
from packtrain.errors import CheckFailed
from packtrain.packing.segments import Segments
from packtrain.wording import first_line

# Lengths of 1, below, at and beyond the tiles of 64 and 128 that kernels work in; a prefix shared by three.
_LENGTHS = (37, 1, 150, 128, 20)
_PREFIXES = (None, 0, 0, None, 0)
_WINDOW = 33  # reaches from the third segment back into its prefix
_KV_HEADS = 2


@dataclass(frozen=True, slots=True)
class LayerFeatures:
    """Features that a layer needs. `group`: query heads per key head; `softcap`: its value, which kernels compile in."""

    dtype: torch.dtype
    group: int
    head_dim: int
    value_dim: int
    window: bool = False
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The chosen kernel, None if none is right. `lacks`: (name, reason) for every candidate before it."""

    kernel: Kernel | None
    lacks: tuple[tuple[str, str], ...]

    def why_not(self) -> str:
        """Return one line with the reason for each rejected candidate, grouped by reason."""
        reasons = dict.fromkeys(reason for _, reason in self.lacks)
        return "; ".join(f"{', '.join(n for n, why in self.lacks if why == reason)}: {reason}" for reason in reasons)


def kernel_tolerance(dtype: torch.dtype) -> float:
    """Return the largest error of a row that rounding alone may cause. The row is of output or gradient, the error relative to its norm.

    Kernels round probabilities, outputs and score gradients to `dtype` and sum in float32. Emulated for head dimensions 32 to 256,
    that is off by up to 0.027 in bfloat16 and 0.003 in float16 on the row that is run here; the tolerance is over twice that. One
    key too many or too few for a query is off by 1, missing sinks by 3, a missing soft-cap of up to 100 by 0.25.
    """
    return {torch.float16: 1e-2, torch.float32: 1e-3, torch.float64: 1e-9}.get(dtype, 6e-2)


def choose_kernel(layer: LayerFeatures, device: torch.device) -> KernelChoice:
    """Return the first kernel of CANDIDATES that is right for `layer` on `device`. Remembers it. Raises OutOfMemoryError on a full device."""
    return _choose(layer, device, torch.are_deterministic_algorithms_enabled())


@cache
def _choose(layer: LayerFeatures, device: torch.device, deterministic: bool) -> KernelChoice:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_first_right, layer, device).result()


def try_kernels(dtype: torch.dtype) -> dict[str, str]:
    """Try the kernels in order on a usual layer. Return each with its lack, down to the right one, whose lack is ""."""
    choice = choose_kernel(LayerFeatures(dtype, 4, 128, 128), torch.device("cuda", 0))
    return {**dict(choice.lacks), **({choice.kernel.name: ""} if choice.kernel else {})}


forget_kernels = _choose.cache_clear
"""Forget all choices: kernels are tried again."""


def _first_right(layer: LayerFeatures, device: torch.device) -> KernelChoice:
    lacks: list[tuple[str, str]] = []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # new threads use the first one
        for name, load in CANDIDATES:
            try:
                kernel = Kernel(name, load())
                error = kernel_error(kernel, layer, device)
                if error <= kernel_tolerance(layer.dtype):
                    return KernelChoice(kernel, tuple(lacks))
                reason = f"wrong by {error:.2g}"
            except torch.OutOfMemoryError:  # not the kernel's fault
                raise
            except Exception as failure:  # packages and kernels raise exceptions of every type
                reason = first_line(failure)
            _check_alive(name, reason, device)
            lacks.append((name, reason))
    return KernelChoice(None, tuple(lacks))


def _check_alive(name: str, failure: str, device: torch.device) -> None:
    """Raise CheckFailed if kernel `name` has made the GPU unusable for this process. Its `failure` may be an illegal access."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            what = f"{name} made {device} unusable for this process when it was tried: {failure}"
            fix = "uninstall that package or install another version of it; model.attention=segmented does without kernels"
            raise CheckFailed(what, where="model.attention", fix=fix, code="kernel-broke-gpu") from error


def kernel_error(kernel: Kernel, layer: LayerFeatures, device: torch.device) -> float:
    """Return the largest error of `kernel` on a small row, outputs and gradients (see `kernel_tolerance`). It is nan if any of them is nan."""
    segments, random = Segments(_LENGTHS, _PREFIXES), torch.Generator().manual_seed(0)
    scale = layer.head_dim**-0.5 * max(1.0, (layer.softcap or 0.0) / 6)  # scores large enough to be capped
    scoring = Scoring(scale, _WINDOW if layer.window else None, layer.softcap)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device, layer.dtype).requires_grad_()

    heads = layer.group * _KV_HEADS
    shapes = [(heads, layer.head_dim), (_KV_HEADS, layer.head_dim), (_KV_HEADS, layer.value_dim)]
    query, key, value = (draw(segments.tokens, *shape) for shape in shapes)
    sinks = draw(heads) if layer.sinks else None
    inputs = [tensor for tensor in (query, key, value, sinks) if tensor is not None]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ours = attend_by_segments(kernel, query, key, value, segments, scoring, sinks)
    exact_sinks = exact[3] if layer.sinks else None
    reference = dense_attention(exact[0], exact[1], exact[2], exact_sinks, segments, scoring)
    gradient = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1)).to(device, ours.dtype)
    ours_back = torch.autograd.grad(ours, inputs, gradient)
    exact_back = torch.autograd.grad(reference, exact, gradient.double())
    pairs = zip((ours, *ours_back), (reference, *exact_back), strict=True)
    return torch.stack([_row_error(a.detach(), b.detach()) for a, b in pairs]).max().item()


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    segments: Segments,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend with all T × T scores at once: the plain reference. It has the precision of its inputs; shapes as in `attend_by_segments`."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    visible = segments.visible(scoring.window).to(query.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=2)
    probabilities = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", probabilities, value)


def _row_error(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the largest |a - b| of a row (last dimension) over its |b|. If the mean |b| is larger, that is the divisor."""
    error, norm = (ours.double() - exact).norm(dim=-1), exact.norm(dim=-1)
    return (error / norm.clamp(min=norm.square().mean().sqrt())).max()
