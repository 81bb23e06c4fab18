"""Variable-length ("varlen") kernels: one call attends within every segment, without mask and padding.

All of them take queries, keys and values [tokens, heads, d] and the running sums of the segments' lengths, and align causality at the
bottom right: a segment may have more keys than queries. So shared prefixes are served by gathering the keys and values of a segment's
whole path, its own tokens last. torch's own kernel can also read them in place, by two calls that are merged. A kernel's signature shows
whether it has soft-cap or sinks; kernel_choice.py checks that it is correct.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from packtrain.packing.collate import to_device
from packtrain.packing.segments import Segments

_ALIGNMENT = 8  # kernels take head dimensions that are multiples of 16 bytes


class Lacks(Exception):
    """A kernel is not installed, or lacks a feature that a layer needs. The message says which."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer weighs its keys. `scale` of the dot products, `window` in tokens (the query's own included), and the
    `softcap` that limits scores. There is no dropout: its random draws could not be compared with a reference."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Borders:
    """A row's segments in the form that kernels take.

    `queries` and `keys`: int32 [segments + 1] on the device, running sums of lengths; `longest_*` in tokens. `gather`:
    int64, for each key its token in the row, or None if the keys are exactly the row. The keys of token t are `copies[starts[t] :
    starts[t + 1]]`. `prompts`: borders of a second call. In it answers see their whole prompt (`causal` is False).
    """

    queries: torch.Tensor
    keys: torch.Tensor
    longest_queries: int
    longest_keys: int
    gather: torch.Tensor | None = None
    copies: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    prompts: Borders | None = None
    causal: bool = True


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Borders, Scoring, torch.Tensor | None], torch.Tensor]
"""(query [T, heads, d], key [K, kv_heads, d], value [K, kv_heads, d_v], borders, scoring, sinks [heads]) → [T, heads, d_v]."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, with a `name` for people. `in_place`: it reads shared keys in place if the row permits that."""

    name: str
    attend: Attend
    in_place: bool = False


@lru_cache(maxsize=16)  # the same for every layer, also when gradient checkpointing runs it again
def borders_of(segments: Segments, device: torch.device, in_place: bool = False) -> Borders:
    """Return the borders of a row on `device`, without waiting for the device. With `in_place` keys are not gathered if that is possible."""

    def sums_of(lengths: list[int]) -> torch.Tensor:
        return to_device(torch.tensor((0, *accumulate(lengths)), dtype=torch.int32), device)

    longest = max(segments.lengths)
    with torch.inference_mode(False):  # an evaluation's cached tensors are used again in training
        queries = to_device(segments.cumulative_lengths(), device)
        if not any(segments.prefix_lengths):
            return Borders(queries, queries, longest, longest)
        if in_place and (trees := _prompts_and_answers(segments)):
            # a prompt's queries see nothing, its answers see it, and their keys are seen by no query
            seeing = [length for prompt, answers in trees for length in (prompt, answers, 0)]
            seen = [length for prompt, answers in trees for length in (0, prompt, answers)]
            prompts = Borders(sums_of(seeing), sums_of(seen), max(seeing), max(seen), causal=False)
            return Borders(queries, queries, longest, longest, prompts=prompts)
        lengths = [own + before for own, before in zip(segments.lengths, segments.prefix_lengths, strict=True)]
        tokens = segments.tokens_along(range(len(lengths)))
        counts = np.bincount(tokens)
        arrays = (tokens, tokens.argsort(kind="stable"), counts.cumsum() - counts)
        gather, copies, starts = (to_device(torch.from_numpy(one), device) for one in arrays)
        return Borders(queries, sums_of(lengths), longest, max(lengths), gather, copies, starts)


def fewer_bytes_in_place(segments: Segments, heads: int, kv_heads: int) -> bool:
    """Return whether a second call moves fewer bytes than gathering keys.

    Per channel, a gathered key moves 24 bytes for each key/value head and 8 for each query head (copies and gradients of k and v). The
    second call moves 54 for each token and query head (outputs and gradients of q once more). All are divided by 8.
    """
    return sum(segments.prefix_lengths) * (3 * kv_heads + heads) > 7 * segments.tokens * heads


def _prompts_and_answers(segments: Segments) -> list[tuple[int, int]]:
    """Return the lengths of each prompt and of all its answers. [] unless the answers to a prompt follow it at once."""
    roots = [number for number, prefix in enumerate(segments.shared) if prefix is None]
    trees = list(zip(roots, [*roots[1:], len(segments.lengths)], strict=True))
    if any(segments.shared[number] != root for root, end in trees for number in range(root + 1, end)):
        return []
    return [(segments.lengths[root], sum(segments.lengths[root + 1 : end])) for root, end in trees]


def attend_by_segments(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend within one row, segment by segment.

    `query` [T, heads, d], `key` [T, kv_heads, d], `value` [T, kv_heads, d_v] → [T, heads, d_v]. Heads are padded with zeros to a width that
    kernels take, which changes no score and no output.
    """
    borders = borders_of(segments, query.device, kernel.in_place and scoring.window is None)
    if borders.gather is not None:
        key, value = (Gathered.apply(one, 0, borders.gather, borders.copies, borders.starts) for one in (key, value))
    width = -(-max(query.shape[-1], value.shape[-1]) // _ALIGNMENT) * _ALIGNMENT
    lacking = ((tensor, width - tensor.shape[-1]) for tensor in (query, key, value))  # a pad by nothing is a copy
    q, k, v = (torch.nn.functional.pad(tensor, (0, more)) if more else tensor for tensor, more in lacking)
    return kernel.attend(q, k, v, borders, scoring, sinks)[..., : value.shape[-1]]


class Gathered(torch.autograd.Function):
    """`index_select` along a dimension. The gradients of a row that was taken several times are summed in float32.

    With `bags` (Borders.copies, starts), for dimension 0, one kernel does so: without a copy in float32, in a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, rows: torch.Tensor, *bags: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, *bags)
        ctx.shape, ctx.dim = tensor.shape, dim
        return tensor.index_select(dim, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (rows, *bags) = gradients, ctx.saved_tensors
        if bags:
            total = torch.nn.functional.embedding_bag(bags[0], gradient.reshape(len(rows), -1), bags[1], mode="sum")
            return total.view(ctx.shape), None, None, None, None
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=gradient.device)
        return total.index_add_(ctx.dim, rows, gradient.to(wide)).to(gradient.dtype), None, None


def from_package(module: str) -> Attend:
    """Return `flash_attn_varlen_func` of an installed package. Raises Lacks if it is not there, and every error of its import."""
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        raise Lacks(f"{error.name} is not installed") from error
    if getattr(loaded, "__file__", "") is None:  # only flash-attn-4: its folder `flash_attn` has nothing but `cute`
        raise Lacks("not installed")
    return _by_signature(loaded.flash_attn_varlen_func)


def from_hub(repository: str) -> Attend:
    """Return `flash_attn_varlen_func` of a hub kernel that was downloaded before. Training downloads no code.
    Raises Lacks if it is not there, and every error of loading it."""
    try:
        import_module("kernels")
    except ModuleNotFoundError as error:
        raise Lacks("the kernels package is not installed") from error
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from transformers.integrations.hub_kernels import get_kernel
    from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_VERSIONS

    cache = Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)
    kinds = ("kernel", "model")
    if not any((cache / repo_folder_name(repo_id=repository, repo_type=kind)).is_dir() for kind in kinds):
        raise Lacks(f"{repository} is not downloaded")
    return _by_signature(get_kernel(repository, version=FLASH_ATTN_KERNEL_VERSIONS[repository]).flash_attn_varlen_func)


def _by_signature(function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]) -> Attend:
    """Adapt the functions of FlashAttention 2, 3, 4 and others. Their arguments differ by their features."""
    names = signature(function).parameters
    sink_name = "s_aux" if "s_aux" in names and "learnable_sink" not in names else "learnable_sink"
    words = {"softcap": "soft-cap", "window_size": "sliding window", sink_name: "attention sinks"}

    def attend(q, k, v, borders: Borders, scoring: Scoring, sinks: torch.Tensor | None) -> torch.Tensor:
        if borders.prompts is not None:
            raise Lacks("no merged calls")
        asked = {
            "softcap": scoring.softcap,
            "window_size": None if scoring.window is None else (scoring.window - 1, 0),
            sink_name: None if sinks is None else sinks.to(q.dtype),
        }
        options = {name: value for name, value in asked.items() if value is not None}
        for name in options:
            if name not in names:
                raise Lacks(f"no {words[name]}")
        if "deterministic" in names:
            options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        elif torch.are_deterministic_algorithms_enabled():
            raise Lacks("no deterministic backward pass (trainer.deterministic)")
        options |= {"cu_seqlens_q": borders.queries, "cu_seqlens_k": borders.keys}
        options |= {"max_seqlen_q": borders.longest_queries, "max_seqlen_k": borders.longest_keys}
        output = function(q, k, v, softmax_scale=scoring.scale, causal=True, **options)
        return output[0] if isinstance(output, tuple) else output

    return attend


def from_torch() -> Attend:
    """Return the operator under torch's `varlen_attn`. Its arguments have not changed since torch 2.10, unlike the function's."""

    def attend(q, k, v, borders: Borders, scoring: Scoring, sinks: torch.Tensor | None) -> torch.Tensor:
        if scoring.softcap is not None:
            raise Lacks("no soft-cap")
        if sinks is not None or borders.prompts is not None:
            return ByLogSums.apply(q, k, v, sinks, borders, scoring)
        arguments, options = _for_torch(borders, scoring)
        return torch.ops.aten._flash_attention_forward(q, k, v, *arguments, False, **options)[0]

    return attend


def _for_torch(borders: Borders, scoring: Scoring) -> tuple[tuple[torch.Tensor | float, ...], dict[str, float]]:
    """Return arguments and options of torch's operators."""
    lengths = (borders.queries, borders.keys, borders.longest_queries, borders.longest_keys)
    causal = borders.causal and scoring.window is None  # a window says so itself
    left = -1 if scoring.window is None else scoring.window - 1
    right = 0 if borders.causal else -1
    return (*lengths, 0.0, causal), {"scale": scoring.scale, "window_size_left": left, "window_size_right": right}


class ByLogSums(torch.autograd.Function):
    """Attention with sinks, or to the keys of two calls. torch's operators have neither.

    The operator returns outputs o and log-sums l of the scores. Two calls merge to l' = log(exp l1 + exp l2) and o' = o1 exp(l1 - l') +
    o2 exp(l2 - l'). A sink s is a key of that score without a value: o' = o σ(l - s), l' = log(exp l + exp s). The
    operator's backward computes its weights again from l', so (o', l') give each call its gradients of q, k and v; they are added. The
    gradient of s is -Σ σ(s - l) (do · o') over the queries.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        borders: Borders,
        scoring: Scoring,
    ) -> torch.Tensor:
        # with one query a segment the kernel may regroup heads, and order its log-sums otherwise
        calls = [replace(one, longest_queries=max(2, one.longest_queries)) for one in (borders, borders.prompts) if one]
        ctx.calls = [_for_torch(call, scoring) for call in calls]
        operator = torch.ops.aten._flash_attention_forward
        results = [operator(q, k, v, *arguments, False, **options) for arguments, options in ctx.calls]
        output, log_sums, *random = results[0]  # log_sums: [heads, T]
        for of_prompts, sums, *_ in results[1:]:
            sums = sums.masked_fill(sums.isinf(), -torch.inf)  # some kernels return inf for queries without keys
            before, log_sums = log_sums, torch.logaddexp(log_sums, sums)
            share, rest = ((one - log_sums).exp().T[..., None] for one in (before, sums))
            output.mul_(share).addcmul_(of_prompts, rest)
        if sinks is not None:
            sink = sinks.to(log_sums.dtype)[:, None]
            output = (output * torch.sigmoid(log_sums - sink).T[..., None]).to(q.dtype)
            log_sums = torch.logaddexp(log_sums, sink)
        ctx.save_for_backward(q, k, v, sinks, output, log_sums, *random[:2])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, output, log_sums, *random = ctx.saved_tensors
        gradient, of_sinks = gradients[0].contiguous(), None
        operator = torch.ops.aten._flash_attention_backward
        given = (gradient, q, k, v, output, log_sums)
        found = [operator(*given, *arguments, *random, **options) for arguments, options in ctx.calls]
        of_inputs = [first + others[0] if others else first for first, *others in zip(*found, strict=True)]
        if sinks is not None:
            share = torch.exp(sinks.to(log_sums.dtype)[:, None] - log_sums)  # of the sink, σ(s - l)
            products = (gradient.to(log_sums.dtype) * output.to(log_sums.dtype)).sum(-1)
            of_sinks = -(share * products.T).sum(1).to(sinks.dtype)
        return *of_inputs, of_sinks, None, None


CANDIDATES: tuple[tuple[str, Callable[[], Attend]], ...] = (
    ("FlashAttention 4", partial(from_package, "flash_attn.cute")),
    ("FlashAttention 4 of the hub", partial(from_hub, "kernels-community/flash-attn4")),
    ("FlashAttention 3", partial(from_package, "flash_attn_interface")),
    ("FlashAttention 3 of the hub", partial(from_hub, "kernels-community/flash-attn3")),
    ("FlashAttention 3 of vLLM", partial(from_hub, "kernels-community/vllm-flash-attn3")),
    ("FlashAttention 2", partial(from_package, "flash_attn")),
    ("FlashAttention 2 of the hub", partial(from_hub, "kernels-community/flash-attn2")),
    ("torch's varlen_attn", from_torch),
)
"""Names and loaders of the kernels, in the order of trying: newer generations first, torch's own last."""
