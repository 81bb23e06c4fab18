"""The choice of a layer's varlen kernel: the fastest of CANDIDATES that run CORRECTLY here.

A successful import proves little: a package may lack code for this GPU, the backward pass, or a combination of features, and
some versions were wrong in corner cases. So each candidate, in a fixed order, runs forward and backward on a small row with
exactly the features of the layer, and is compared with a dense float64 reference. It costs milliseconds a kernel (seconds if it
compiles), once per kind of layer and process. If several agree on a GPU, they are timed on a row of documents. A later one is chosen only
if it is clearly faster. The first rank that has chosen decides for all. A deterministic run takes the first that agrees. Checkpoints name the
kernels that were chosen, because others round differently. A resumed run takes those that are still right (`keep_kernels`).

A layer may ask for its kernel in a forward pass that gradient checkpointing runs again, or under autocast. So kernels are tried in a
separate thread, without modes or hooks on saved tensors (checkpointing counts them, and ends a recomputation by an exception).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial, reduce

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from packtrain.attention.varlen import CANDIDATES, Attend, Kernel, Lacks, Scoring, attend_by_segments
from packtrain.errors import CheckFailed
from packtrain.packing.segments import Segments
from packtrain.wording import first_line

# Lengths of 1, below, at and beyond the tiles of 64 and 128 that kernels work in; a prefix shared by three.
_TREE = Segments((37, 1, 150, 128, 20), (None, 0, 0, None, 0))
_GROUPS = Segments((37, 1, 150, 20, 128, 1, 70, 3), (None, 0, 0, 0, None, None, 5, 5))  # these permit reading in place
_DOCUMENTS = Segments((4096, *[2048] * 2, *[1024] * 4, *[512] * 4, *[256] * 4, *[64] * 16))  # 16,384 tokens to time
_TIMED_WIDTH, _TIMED_WINDOW = 2048, 1024  # of all query heads: 64 MiB a tensor, and more to do than to launch
_TURNS, _CALLS = 4, 3
_FASTER = 0.97  # a kernel is faster if its time is below this share of another's: the rest is noise
_WINDOW = 33  # reaches from the third segment back into its prefix
_KV_HEADS = 2
_chosen: dict[str, str] = {}
"""Names of the chosen kernels by the features of a layer. A checkpoint's names come first."""
_say: Callable[[str], None] = print


@dataclass(frozen=True, slots=True)
class LayerFeatures:
    """Features that a layer needs. `group`: query heads per key head; `softcap`: its value, which kernels compile in; `in_place`: if possible."""

    dtype: torch.dtype
    group: int
    head_dim: int
    value_dim: int
    window: bool = False
    softcap: float | None = None
    sinks: bool = False
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The chosen kernel, None if none is right. `lacks`: (name, reason) of the candidates before the first right one, and of slower ones."""

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
    """Return the kernel of CANDIDATES for `layer` on `device`: the fastest right one. Remembers it. Raises OutOfMemoryError on a full device."""
    return _choose(layer, device, torch.are_deterministic_algorithms_enabled())


@cache
def _choose(layer: LayerFeatures, device: torch.device, deterministic: bool) -> KernelChoice:
    with ThreadPoolExecutor(1) as thread:
        choice = thread.submit(_try_all, layer, device, not deterministic and device.type == "cuda").result()
    if choice.kernel is not None:
        _chosen[str(layer)] = choice.kernel.name
    return choice


def try_kernels(dtype: torch.dtype) -> dict[str, str]:
    """Try the kernels on a usual layer. Return the reasons against them by name; "" for the chosen one."""
    choice = choose_kernel(LayerFeatures(dtype, 4, 128, 128), torch.device("cuda", 0))
    return {**dict(choice.lacks), **({choice.kernel.name: ""} if choice.kernel else {})}


def forget_kernels() -> None:
    """Forget all choices: kernels are tried again."""
    _choose.cache_clear()
    _chosen.clear()


def keep_kernels(names: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Choose the kernels of a checkpoint, by its `chosen_kernels`. Later choices `say` which of them is not right here."""
    global _say
    forget_kernels()
    _chosen.update(names)
    _say = say


def chosen_kernels() -> dict[str, str]:
    """Return the names of the kernels that were chosen, by the features of a layer."""
    return {**_chosen}


def _try_all(layer: LayerFeatures, device: torch.device, timed: bool) -> KernelChoice:
    """Choose the first right kernel, or the fastest if kernels are to be `timed`."""
    lacks, right, untried = list[tuple[str, str]](), list[Kernel](), list[Kernel]()
    kept = _chosen.get(str(layer))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # new threads use the first one
        for name, load in sorted(CANDIDATES, key=lambda candidate: candidate[0] != kept):
            if right and not timed:
                break
            try:
                found = _try(name, load, layer, device)
            except torch.OutOfMemoryError:
                if not right:
                    raise
                # another one serves, unless a rank with more memory has chosen this one
                untried.append(Kernel(name, load()))
                continue
            if isinstance(found, Kernel):
                right.append(found)
                if name == kept:
                    return KernelChoice(found, (("others", "not tried, since this one was chosen before"),))
            elif not right:
                lacks.append((name, found))
        if kept:
            why = dict(lacks).get(kept, "this version of packtrain does not know it")
            _say(f"attention  by another kernel than before, which rounds differently: {kept}: {why}")
        if len(right) + len(untried) < 2:
            return KernelChoice(right[0] if right else None, tuple(lacks))
        times = _times(right, layer, device)
    fastest = reduce(lambda best, one: one if times[one.name] < _FASTER * times[best.name] else best, right)
    if dist.is_initialized():  # no rank waits for another: the first one writes its choice
        store, key = distributed_c10d._get_default_store(), f"packtrain/kernel/{layer}"
        agreed = store.compare_set(key, "", fastest.name).decode()
        fastest = next((kernel for kernel in (*right, *untried) if kernel.name == agreed), fastest)
    own = times.pop(fastest.name, torch.inf)
    row = f"ms for {_DOCUMENTS.tokens:,} tokens, forward and backward, {fastest.name} {own:.3g}"
    slower = [
        (name, f"{time:.3g} {row}" if max(time, own) < torch.inf else "not timed") for name, time in times.items()
    ]
    if any(time < _FASTER * own for time in times.values()):
        slower = [(name, f"{why}, as another rank chose") for name, why in slower]
    return KernelChoice(fastest, (*lacks, *slower))


def _try(name: str, load: Callable[[], Attend], layer: LayerFeatures, device: torch.device) -> Kernel | str:
    """Return the kernel, or why it is not right. It reads shared keys in place if the layer asks for it and that is right, too."""
    right, reason = None, ""
    try:
        kernel = Kernel(name, load())
        for tried in (kernel, replace(kernel, in_place=True))[: 1 + layer.in_place]:
            if not (error := kernel_error(tried, layer, device)) <= kernel_tolerance(layer.dtype):
                raise Lacks(f"wrong by {error:.2g}")
            right = tried
    except torch.OutOfMemoryError:  # not the kernel's fault
        raise
    except Exception as failure:  # packages and kernels raise exceptions of every type
        reason = first_line(failure)
        _check_alive(name, reason, device)
    return right or reason


def _times(kernels: Sequence[Kernel], layer: LayerFeatures, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of each kernel, inf if it failed. They take turns, since the clock of a GPU varies."""
    scoring = Scoring(layer.head_dim**-0.5, _TIMED_WINDOW if layer.window else None, layer.softcap)
    times = {kernel.name: torch.inf for kernel in kernels}

    def call(kernel: Kernel) -> None:
        torch.autograd.grad(attend_by_segments(kernel, q, k, v, _DOCUMENTS, scoring, *sinks), inputs, gradient)

    with suppress(torch.OutOfMemoryError):
        kv_heads = max(1, _TIMED_WIDTH // (layer.head_dim * layer.group))
        inputs = _draw(layer, kv_heads, 64, device, times=_DOCUMENTS.tokens // 64)
        q, k, v, *sinks = inputs
        gradient = v.detach().repeat_interleave(layer.group, dim=1)
        for kernel in _TURNS * tuple(kernels):  # in its first turn a kernel may compile
            with suppress(Exception):  # as above, of every type
                times[kernel.name] = min(times[kernel.name], milliseconds(partial(call, kernel)))
            _check_alive(kernel.name, "a long row", device)
    return times


def milliseconds(call: Callable[[], None]) -> float:
    """Return the GPU's time for a call, the mean of several."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / _CALLS


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
    segments = _GROUPS if kernel.in_place else _TREE
    scale = layer.head_dim**-0.5 * max(1.0, (layer.softcap or 0.0) / 6)  # scores large enough to be capped
    scoring = Scoring(scale, _WINDOW if layer.window else None, layer.softcap)

    inputs = _draw(layer, _KV_HEADS, segments.tokens, device)
    query, key, value, *sinks = inputs
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ours = attend_by_segments(kernel, query, key, value, segments, scoring, *sinks)
    exact_sinks = exact[3] if layer.sinks else None
    reference = dense_attention(exact[0], exact[1], exact[2], exact_sinks, segments, scoring)
    gradient = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1)).to(device, ours.dtype)
    ours_back = torch.autograd.grad(ours, inputs, gradient)
    exact_back = torch.autograd.grad(reference, exact, gradient.double())
    pairs = zip((ours, *ours_back), (reference, *exact_back), strict=True)
    return torch.stack([_row_error(a.detach(), b.detach()) for a, b in pairs]).max().item()


def _draw(layer: LayerFeatures, kv_heads: int, tokens: int, device: torch.device, times: int = 1) -> list[torch.Tensor]:
    """Draw queries, keys, values, and the layer's sinks. The `tokens` are repeated `times`."""
    random, heads = torch.Generator().manual_seed(0), layer.group * kv_heads
    shapes = [(heads, layer.head_dim), (kv_heads, layer.head_dim), (kv_heads, layer.value_dim)]
    drawn = [
        torch.randn((tokens, *shape), generator=random).to(device, layer.dtype).repeat(times, 1, 1) for shape in shapes
    ]
    drawn += [torch.randn(heads, generator=random).to(device, layer.dtype)] * layer.sinks
    return [tensor.requires_grad_() for tensor in drawn]


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
