"""Attention over packed rows, forward and backward: the backends side by side with a dense mask and with padding.

    python benchmarks/attention.py [--device cpu|cuda] [--repeat 15] [--rows 8192,32768,131072] [--documents 64,512,2048,8192,mixed,groups]

On a CPU: 4,096 tokens in documents of 1,024, 9 heads of 64, float32: `segmented` against sdpa with a dense block mask, and
against plain causal sdpa over the whole row (faster than a mask, and wrong: documents see each other); then what
`segmented` costs beyond sdpa where a row is one document. On a GPU: every varlen kernel that is right there, `segmented`,
the dense mask and padded sdpa, on rows of 8k to 128k tokens, 32 heads of 128 over 8 key heads, bfloat16; `mixed` are lengths
drawn evenly on a log scale from 64 to 8,192, `groups` are prompts of a 16th of the row that 8 answers of a 16th to a half of their
length share (repeated in `padded sdpa`). Tokens are real ones, padding not counted; the share of peak counts the
scores that documents need (half a square each, 2 products forward and 5 backward), so that wasted work lowers it.

Contestants take turns, so that a busy moment hits all of them; times are medians, on a GPU by its own events, around calls that are
queued while the one before still runs. The gradient of the output is drawn once. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from packtrain.attention.kernel_choice import LayerFeatures, kernel_error, kernel_tolerance
from packtrain.attention.segmented import segmented_attention
from packtrain.attention.varlen import CANDIDATES, Kernel, Scoring, attend_by_segments
from packtrain.packing.segments import Segments

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query [1, heads, T, d], key [1, kv_heads, T, d], value) → a tensor of T × heads × d numbers (times padding)."""
MASK_LIMIT = 32_768  # tokens of a row; a dense mask of more is over 4 GiB in bfloat16
MODULE = torch.nn.Module()  # transformers' functions look at the layer that calls them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--rows", default="8192,32768,131072")
    parser.add_argument("--documents", default="64,512,2048,8192,mixed,groups")
    asked = parser.parse_args()
    if asked.device == "cpu":
        print(
            f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        )
        compare_on_cpu(asked.repeat)
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
        compare_on_gpu(asked.repeat, [int(n) for n in asked.rows.split(",")], asked.documents.split(","))


def compare_on_cpu(repeat: int) -> None:
    """The three comparisons that packed rows on a CPU have to stand."""
    MODULE.num_key_value_groups = 1  # type: ignore[assignment]
    row, documents = 4096, Segments((1024,) * 4)
    packed: dict[str, Attend] = {
        "segmented": by_segments(documents),
        "sdpa, dense block mask": by_sdpa(documents.visible()[None, None]),
        "sdpa, causal over the whole row": by_sdpa(None),
    }
    seconds = taking_turns(packed, drawn(row, 9, 9, 64, torch.device("cpu"), torch.float32), repeat)
    print(f"\n{row} tokens in documents of 1024, 9 heads of 64, forward + backward, median of {repeat}")
    for name, one in seconds.items():
        print(f"{name:<34}{one * 1e3:>9.1f} ms{one / seconds['segmented']:>8.2f} × segmented")
    print("\none document per row")
    for length in (256, 1024, 4096):
        alone: dict[str, Attend] = {"segmented": by_segments(Segments((length,))), "sdpa": by_sdpa(None)}
        tensors = drawn(length, 9, 9, 64, torch.device("cpu"), torch.float32)
        many = repeat * max(1, 4096 // length)
        ours, theirs = taking_turns(alone, tensors, many).values()
        print(
            f"{length:>5} tokens: segmented {ours * 1e3:.2f} ms, sdpa {theirs * 1e3:.2f} ms, {ours / theirs - 1:+.1%}"
        )


def by_segments(segments: Segments) -> Attend:
    """`segmented` as a model's layer calls it."""
    return lambda q, k, v: segmented_attention(MODULE, q, k, v, None, segments=segments)[0]


def by_sdpa(mask: torch.Tensor | None) -> Attend:
    """transformers' sdpa as a model's layer calls it; without a mask it is causal over the whole row."""
    return lambda q, k, v: sdpa_attention_forward(MODULE, q, k, v, mask, is_causal=mask is None)[0]


def compare_on_gpu(repeat: int, rows: list[int], documents: list[str]) -> None:
    """A table for every length of row and of documents."""
    shape, device = (32, 8, 128), torch.device("cuda", torch.cuda.current_device())
    kernels, lines = usable_kernels(LayerFeatures(torch.bfloat16, 4, 128, 128), device)
    print(*lines, sep="\n")
    for row in rows:
        for kind in documents:
            print(f"\n{row} tokens in documents of {kind}, 32 / 8 heads of 128, bfloat16")
            for one in compare_row(row, kind, kernels, repeat, device, shape, torch.bfloat16):
                share = f"{one['share']:>7.1%} of peak" if one["share"] else ""
                print(
                    f"{one['attention']:<30}{one['ms']:>10.2f} ms{one['tokens_per_second']:>14,.0f} tokens/s"
                    f"{one['gib']:>8.2f} GiB{share}"
                )


def compare_row(
    row: int,
    kind: str,
    kernels: list[Kernel],
    repeat: int,
    device: torch.device,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """The figures of every attention of a row of documents of `kind`; `shape` is heads, key heads, their width."""
    segments, (heads, kv_heads, width) = filled(row, kind), shape
    if segments is None:
        return []
    MODULE.num_key_value_groups = heads // kv_heads  # type: ignore[assignment]
    tensors, peak = drawn(row, heads, kv_heads, width, device, dtype), peak_of(device)
    contestants = {kernel.name: by_kernel(kernel, segments) for kernel in kernels}
    if segments.prefixes and (torchs := [kernel for kernel in kernels if kernel.name == CANDIDATES[-1][0]]):
        contestants["shared keys in place"] = by_kernel(replace(torchs[0], in_place=True), segments)
    contestants["segmented"] = by_segments(segments)
    contestants["padded sdpa"] = by_padding(segments.unrolled().segments, device)
    if row <= MASK_LIMIT:
        contestants["sdpa, dense block mask"] = by_sdpa(dense_mask(segments, device))
    pairs = zip(segments.lengths, segments.prefix_lengths, strict=True)
    work = (
        7 * heads * width * sum(length * (length + 2 * before) for length, before in pairs)
    )  # 2 d l²/2 a product and head
    fits = {name: attend for name, attend in contestants.items() if fits_in_memory(name, attend, tensors)}
    memory = {name: peak_memory(attend, tensors) / 2**30 for name, attend in fits.items()}
    return [
        {
            "attention": name,
            "ms": seconds * 1e3,
            "tokens_per_second": row / seconds,
            "gib": memory[name],
            "share": work / seconds / peak if peak else None,
        }
        for name, seconds in taking_turns(fits, tensors, repeat).items()
    ]


def usable_kernels(needs: LayerFeatures, device: torch.device) -> tuple[list[Kernel], list[str]]:
    """The kernels that are right on the device; a line on each, with how far it is off or what it lacks."""
    usable, lines = [], []
    for name, load in CANDIDATES:
        try:
            kernel = Kernel(name, load())
            error = kernel_error(kernel, needs, device)
        except Exception as reason:  # of every type, as kernels refuse
            lines.append(f"{name}: {(str(reason) or type(reason).__name__).splitlines()[0][:100]}")
            continue
        lines.append(f"{name}: off by {error:.2g} (tolerance {kernel_tolerance(needs.dtype):.2g})")
        if error <= kernel_tolerance(needs.dtype):
            usable.append(kernel)
    return usable, lines


def filled(row: int, kind: str) -> Segments | None:
    """A row of exactly `row` tokens in documents of `kind` tokens, of mixed lengths, or in groups; None where they are too long."""
    if kind == "groups":
        return groups(row)
    if kind != "mixed":
        length = int(kind)
        return Segments((length,) * (row // length)) if row % length == 0 else None
    random, lengths = torch.Generator().manual_seed(0), []
    while (left := row - sum(lengths)) > 0:
        lengths.append(min(left, int(64 * 128 ** torch.rand((), generator=random).item())))
    return Segments(tuple(lengths))


def groups(row: int) -> Segments:
    """Prompts with 8 answers each as long as the row takes them, and a document of what is left."""
    prompt = max(16, row // 16)
    group = (prompt, *(prompt // 16 + answer * (prompt // 2 - prompt // 16) // 7 for answer in range(8)))
    count = row // sum(group)
    lengths, prefixes = list(group) * count, [one for at in range(count) for one in (None, *[9 * at] * 8)]
    if left := row - sum(lengths):
        lengths, prefixes = [*lengths, left], [*prefixes, None]
    return Segments(tuple(lengths), tuple(prefixes))


def by_kernel(kernel: Kernel, segments: Segments) -> Attend:
    """A varlen kernel as `flash` calls it. It reads shared keys in place if it may."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        return attend_by_segments(kernel, q, k, v, segments, Scoring(q.shape[-1] ** -0.5))

    return attend


def by_padding(segments: Segments, device: torch.device) -> Attend:
    """sdpa over [documents, heads, longest, d]. The documents are laid out so beforehand, as a padded batch would be."""
    longest = max(segments.lengths)
    laid_out: dict[int, Tensors] = {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if id(q) not in laid_out:
            shape = (len(segments.lengths), longest)
            laid_out[id(q)] = tuple(  # type: ignore[assignment]
                torch.randn(
                    shape[0], t.shape[1], shape[1], t.shape[3], device=device, dtype=t.dtype, requires_grad=True
                )
                for t in (q, k, v)
            )
        padded = laid_out[id(q)]
        return scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True)

    attend.inputs = laid_out  # type: ignore[attr-defined]
    return attend


def dense_mask(segments: Segments, device: torch.device) -> torch.Tensor:
    """bool [1, 1, T, T]"""
    with device:
        return segments.visible()[None, None]


def drawn(row: int, heads: int, kv_heads: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensors:
    """Query, key and value [1, heads, row, width], laid out in memory as a model's projections leave them."""
    new = partial(torch.randn, device=device, dtype=dtype)
    query, key, value = (new(1, row, count, width).requires_grad_() for count in (heads, kv_heads, kv_heads))
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


GRADIENTS: dict[tuple[Any, ...], torch.Tensor] = {}
"""The gradient of an output, by its shape, format and device."""


def once(attend: Attend, tensors: Tensors) -> None:
    """Forward and backward; gradients are added to nothing."""
    output = attend(*tensors)
    key = output.shape, output.dtype, output.device
    if key not in GRADIENTS:
        GRADIENTS[key] = torch.randn_like(output)
    inputs = getattr(attend, "inputs", {}).get(id(tensors[0]), tensors)
    torch.autograd.grad(output, inputs, GRADIENTS[key])


def taking_turns(contestants: dict[str, Attend], tensors: Tensors, repeat: int) -> dict[str, float]:
    """Median seconds of each; they take turns, after one round that is not counted."""
    times: dict[str, list[Callable[[], float]]] = {name: [] for name in contestants}
    for turn in range(repeat + 1):
        for name, attend in contestants.items():
            seconds = timed(lambda attend=attend: once(attend, tensors), tensors[0])
            if turn:
                times[name].append(seconds)
    synchronise(tensors[0])
    return {name: statistics.median(one() for one in many) for name, many in times.items()}


def timed(work: Callable[[], object], tensor: torch.Tensor) -> Callable[[], float]:
    """Run `work`; return a function that gives its seconds, once the device of `tensor` is done."""
    if not tensor.is_cuda:
        started = time.perf_counter()
        work()
        return partial(float, time.perf_counter() - started)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    return lambda: begin.elapsed_time(end) / 1e3


def synchronise(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def fits_in_memory(name: str, attend: Attend, tensors: Tensors) -> bool:
    try:
        once(attend, tensors)
    except torch.OutOfMemoryError:
        print(f"{name:<30} out of memory")
        torch.cuda.empty_cache()
        return False
    return True


def peak_memory(attend: Attend, tensors: Tensors) -> int:
    """Bytes on the GPU that one forward and backward takes beyond its inputs."""
    if not tensors[0].is_cuda:
        return 0
    synchronise(tensors[0])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once(attend, tensors)
    return torch.cuda.max_memory_allocated() - before


def peak_of(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s that the maker states, None where TRL does not know the device."""
    from trl.trainer.utils import get_peak_flops

    if device.type != "cuda":
        return None
    return get_peak_flops(torch.cuda.get_device_name(device), "bfloat16")


if __name__ == "__main__":
    main()
