"""Attention over a row whose tokens are split over neighbouring ranks.

It is an all-to-all over heads, and back (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv 2309.14509). Each rank has some tokens of the row for all
heads. For attention they exchange: each gets all tokens of the row for some heads. So any backend attends to the whole row as in one process,
prefixes, windows, sinks and soft-caps included; then the outputs go back. Outside of attention a rank keeps only its tokens. Heads need not
divide by the ranks. If there are fewer key/value heads than ranks, each is sent to several. Ranks without a query head rest meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist

from packtrain.packing.segments import SplitSegments

KEY = "strategy.sequence_parallel"
_groups: dict[int, dist.ProcessGroup] = {}
"""The group of this process with its neighbours, by their number."""


def open_group(parts: int) -> dist.ProcessGroup:
    """Return the group of the `parts` neighbouring ranks that split rows. All ranks make the first call together."""
    if parts not in _groups:
        world = range(dist.get_world_size())
        ranks = [list(world[first : first + parts]) for first in world[::parts]]
        _groups[parts] = cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(ranks)[0])
    return _groups[parts]


@cache
def heads_of_parts(query: int, key: int, parts: int) -> tuple[int, tuple[int, ...]]:
    """Share `query` heads over `key` key/value heads out to `parts` ranks.

    Returns how often a key/value head is repeated, and the first repeated head of each part and the end. The largest number of query heads of
    a part is as small as possible; then the repetitions. With fewer query heads than parts, some parts get none.
    """
    group = query // key
    least = min(parts, query)
    fits = [times for times in range(1, group + 1) if group % times == 0 and key * times >= least]
    repeat = min(fits, key=lambda times: (-(-key * times // parts) * (group // times), times))
    return repeat, tuple(key * repeat * part // parts for part in range(parts + 1))


def attend_over_ranks(
    attend: Callable[..., torch.Tensor],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: SplitSegments,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention outputs of this rank's tokens, [1, own tokens, heads, d_v].

    `attend` (module, query, key, value, sinks) gets all tokens of the row for some heads. `query` [1, heads, own tokens, d], `key` and `value`
    [1, kv_heads, own tokens, …]; `sinks` [heads] or None.
    """
    if torch.is_autocast_enabled(query.device.type):  # attention itself would do so: this halves the bytes to send
        format = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(format), key.to(format), value.to(format)
    parts, group = segments.parts, open_group(segments.parts)
    tokens = [end - first for first, end in pairwise(segments.borders)]
    heads = query.shape[1]
    repeat, borders = heads_of_parts(heads, key.shape[1], parts)
    each = heads // (key.shape[1] * repeat)  # query heads of a key/value head
    key, value = (tensor.repeat_interleave(repeat, dim=1) if repeat > 1 else tensor for tensor in (key, value))
    counts = [end - first for first, end in pairwise(borders)]
    query_counts = [each * count for count in counts]
    first, end = borders[segments.part] * each, borders[segments.part + 1] * each

    q, k, v = _heads_for_tokens([query, key, value], [query_counts, counts, counts], tokens, segments.part, group)
    if first == end:  # nothing to attend to, but all ranks exchange gradients together
        return _outputs_for_heads(v[0].transpose(0, 1), tokens, query_counts, segments.part, group)
    own: Any = copy.copy(module)
    own.num_key_value_groups = each
    if sinks is not None:
        sinks = sinks[first:end]
        if "sinks" in own._parameters:  # some eager functions read them from the module
            own._parameters = {name: weight for name, weight in own._parameters.items() if name != "sinks"}
            own.__dict__["sinks"] = sinks
    output = attend(own, q, k, v, sinks)[0]  # [T, own heads, d_v]
    return _outputs_for_heads(output, tokens, query_counts, segments.part, group)


def _outputs_for_heads(
    output: torch.Tensor, tokens: list[int], counts: list[int], part: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange `output` [T, own heads, d_v] for [1, own tokens, heads, d_v]. The parts have `tokens` tokens and `counts` heads."""
    width = output.shape[-1]
    sent = [piece.reshape(-1) for piece in output.split(tokens)]
    sizes = [tokens[part] * count * width for count in counts]
    received = _exchange(sent, sizes, group)
    pieces = [
        piece.view(tokens[part], count, width) for piece, count in zip(received.split(sizes), counts, strict=True)
    ]
    return torch.cat(pieces, dim=1)[None]


def _heads_for_tokens(
    tensors: list[torch.Tensor], counts: list[list[int]], tokens: list[int], part: int, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Exchange `tensors` [1, heads, own tokens, d] for [1, own heads, T, d]. It takes one call; `counts`: heads of each part."""
    split = [tensor[0].split(count) for tensor, count in zip(tensors, counts, strict=True)]
    sent = [torch.cat([piece.reshape(-1) for piece in pieces]) for pieces in zip(*split, strict=True)]
    shapes = [(count[part], tensor.shape[-1]) for tensor, count in zip(tensors, counts, strict=True)]
    per_token = [heads * width for heads, width in shapes]
    received = _exchange(sent, [sum(per_token) * number for number in tokens], group)
    pieces: list[list[torch.Tensor]] = [[] for _ in tensors]
    of_parts = received.split([size * number for number in tokens for size in per_token])
    for index, piece in enumerate(of_parts):
        heads, width = shapes[index % len(tensors)]
        pieces[index % len(tensors)].append(piece.view(heads, tokens[index // len(tensors)], width))
    return [torch.cat(piece, dim=1)[None] for piece in pieces]


def _exchange(sent: Sequence[torch.Tensor], sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send `sent`, a piece to each rank of the group. Returns the received pieces of these `sizes`, flat, one after the other."""
    return _AllToAll.apply(torch.cat(list(sent)), [len(piece) for piece in sent], sizes, group)  # type: ignore[no-any-return]


class _AllToAll(torch.autograd.Function):
    """`all_to_all_single`; its gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, sent: torch.Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (given, taken), group
        received = sent.new_empty(sum(taken))
        dist.all_to_all_single(received, sent.contiguous(), taken, given, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        given, taken = ctx.sizes
        returned = gradients[0].new_empty(sum(given))
        dist.all_to_all_single(returned, gradients[0].contiguous(), given, taken, group=ctx.group)
        return returned, None, None, None


def sum_over_parts(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """Sum `tensor` over the ranks that split a row, on each of them. The gradient is the sum of theirs."""
    return _Sum.apply(tensor, open_group(parts)) if parts > 1 else tensor  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
