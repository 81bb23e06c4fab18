"""The parts of benchmarks/gpu.py.

Each is a function of `note`, which writes a line, and `tiny`. A Ladder is a model on the device with full rows. Its variants are context managers that change it in place and undo that.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import attention
import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import packtrain.model.forward
from packtrain.attention import flash
from packtrain.attention.backends import attention_by, attention_of
from packtrain.attention.kernel_choice import KernelChoice, LayerFeatures
from packtrain.attention.varlen import Kernel
from packtrain.changes.experts import fuse_experts, group_experts
from packtrain.changes.liger import fuse_by_liger, why_no_kernels, why_no_liger
from packtrain.changes.linears import add_in_products
from packtrain.changes.lora import fuse_adapters
from packtrain.changes.residual import carry_in
from packtrain.config.objective import Objective
from packtrain.config.schema import Batch, Model, Packing, Peft
from packtrain.data.dataset import Document, Preference
from packtrain.model.adapters import add_adapters
from packtrain.model.flops import training_flops
from packtrain.model.forward import patch_forward
from packtrain.model.layers import recompute
from packtrain.model.load import base_model
from packtrain.model.precision import settle_kernels, weights_cast_once
from packtrain.objectives.spec import equal_weights, head_chunk
from packtrain.packing.collate import collate_flat, collate_padded, label_positions, on_device
from packtrain.plan.surroundings import lack_of_compiler
from packtrain.run_folder import installed_version

ROOT = Path(__file__).resolve().parents[1]
Note = Callable[..., None]
Change = AbstractContextManager[Any]
ROW = 16_384
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
LARGE = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32}
MIDDLE = {"model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960}
MIDDLE |= {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
EXPERTS = {**QWEN3, **SMALL, "model_type": "qwen3_moe", "num_hidden_layers": 16, "num_experts": 64}
EXPERTS |= {"num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True}
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {**QWEN3, **SMALL, "tie_word_embeddings": True, "max_position_embeddings": 40_960},
    "1.5B": {**MIDDLE, "tie_word_embeddings": True, "max_position_embeddings": 32_768},
    "8B": {**QWEN3, **LARGE, "tie_word_embeddings": False, "max_position_embeddings": 40_960},
    "experts 2B": {**EXPERTS, "tie_word_embeddings": True, "max_position_embeddings": 40_960},
}
TINY = {"vocab_size": 1024, "head_dim": 16, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96}
TINY |= {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS = {  # of kernels in a profile, by names; the first that fits. All others are elementwise
    "attention": r"flash|fmha|varlen|scaled_dot",
    "optimizer": r"adam|multi_tensor|_foreach|lpnorm",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|\bmm\b|addmm|linear",
    "head": r"logprob|log_?prob|cross_?entropy|nll_loss",
    "copies": r"memcpy|memset|copy|cat|fill|index|gather|scatter|embedding",
}


class Lacking(Exception):
    """A variant cannot run here, for a reason that is no fault."""


class Ladder:
    """A model on the device, with full rows to time it on."""

    def __init__(self, note: Note, kind: str, tiny: bool, *, lora: bool = False, dtype: torch.dtype = torch.bfloat16):
        settle_kernels()
        self.note, self.tiny, self.device = note, tiny, device()
        self.base: Any = drawn(kind, tiny, dtype)
        self.model: Any = add_adapters(self.base, Peft(kind="lora"), seed=0) if lora else self.base
        on_gpu = self.device.type == "cuda"
        patch_forward(self.base, token_objective=Objective(), backend="flash" if on_gpu else "segmented")
        self.model.train()
        features = flash.plain_features(self.base.config, torch.bfloat16)
        self.kernels, _ = attention.usable_kernels(features, self.device) if on_gpu else ([], [])
        longest = 64 if tiny else 2048 if kind == "0.6B" else 8192
        self.rows = [self.row(longest, seed) for seed in range(2)]

    def row(self, longest: int, seed: int) -> dict[str, Any]:
        """A full row of documents of `longest` / 4 to `longest` tokens."""
        random, lengths, tokens = np.random.default_rng(seed), [], 256 if self.tiny else ROW
        while (left := tokens - sum(lengths)) > 0:
            lengths.append(min(left, int(random.integers(longest // 4, longest + 1))))
        return self.collated(lengths, seed)

    def collated(self, lengths: Sequence[int], seed: int, *, padded: bool = False) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        documents = [Document(random.integers(3, 500, n).astype(np.int32), np.ones(n, bool)) for n in lengths]
        batch = collate_padded(documents, 0) if padded else collate_flat(documents)
        places = label_positions(batch["shift_labels"])
        return {**on_device(batch, self.device), "label_places": places, "lengths": np.array(lengths)}

    def run(self, batch: dict[str, Any]) -> torch.Tensor:
        """Forward and backward; the mean loss."""
        given = {name: value for name, value in batch.items() if name != "lengths"}
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.base(**given, loss_sum=True) / len(batch["label_places"])
        loss.backward()
        return loss.detach()

    def measure(
        self, variant: str, *changes: Change, batches: Sequence[dict[str, Any]] = (), warm: int = 2, timed: int = 6
    ) -> None:
        """Writes the line of a variant: medians of micro-batches, the peak of memory."""
        batches, (warm, timed) = batches or self.rows, (min(warm, 1), 2) if self.tiny else (warm, timed)
        peak_flops, flops = attention.peak_of(self.device), training_flops(self.model)

        def work() -> dict[str, Any]:
            with ExitStack() as stack:
                for change in changes:
                    stack.enter_context(change)
                forget(self.model)
                used = [batches[number % len(batches)] for number in range(warm + timed)]
                losses, seconds = zip(
                    *(clocked(lambda one=one: self.run(one), self.device) for one in used), strict=True
                )
                times, measured = [one() for one in seconds][warm:], used[warm:]
            spent, tokens = sum(times), sum(int(one["lengths"].sum()) for one in measured)
            needed = sum(flops.of(one["lengths"], None, len(one["label_places"])) for one in measured)
            mfu = {} if peak_flops is None else {"mfu": needed / spent / peak_flops}
            rates = {
                "ms": statistics.median(times) * 1e3,
                "slowest_ms": max(times) * 1e3,
                "tokens_per_second": tokens / spent,
            }
            return {**rates, **mfu, "peak_gib": peak_gib(), "loss": float(losses[-1])}

        attempt(self.note, variant, work)

    def others(self) -> list[Kernel]:
        """The kernels beside torch's own, which is the last of them."""
        return self.kernels[:-1]

    def own(self) -> Change:
        """torch's own kernel, also where newer ones are installed."""
        return using(self.kernels[-1]) if self.kernels else ExitStack()

    def liger(self) -> Change:
        return liger(self.base, self.device)


def attempt(note: Note, variant: str, work: Callable[[], dict[str, Any]]) -> None:
    """Write the figures of `work`, or the reason why there are none, and go on."""
    try:
        note(variant, **work())
    except Lacking as reason:
        note(variant, skipped=str(reason))
    except torch.OutOfMemoryError:
        note(variant, skipped="out of memory")
    except Exception as error:
        note(variant, failed=f"{type(error).__name__}: {error}"[:300])


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def drawn(kind: str, tiny: bool, dtype: torch.dtype) -> Any:
    """A model of these sizes, drawn on the device."""
    torch.manual_seed(0)
    sizes = SIZES[kind] | (TINY if tiny else {}) | (TINY_EXPERTS if tiny and kind == "experts 2B" else {})
    with torch.device(device()):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes, use_cache=False), dtype=dtype)


def clocked(work: Callable[[], Any], on: torch.device) -> tuple[Any, Callable[[], float]]:
    """Run `work`; return its result, and a function that tells its seconds (on a GPU by events)."""
    found: list[Any] = []
    seconds = attention.timed(lambda: found.append(work()), torch.empty(0, device=on))
    return found[0], lambda: synchronised(seconds)


def synchronised(seconds: Callable[[], float]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return seconds()


def seconds_of(work: Callable[[], Any], *, warm: int = 2, timed: int = 6) -> float:
    """The median of `timed` runs after `warm` ones."""
    runs = [clocked(work, device())[1] for _ in range(warm + timed)]
    return statistics.median(one() for one in runs[warm:])


def forget(model: torch.nn.Module) -> None:
    """Drops gradients, and the peak so far."""
    for weight in model.parameters():
        weight.grad = None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


# Changes.


@contextmanager
def replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def head_by(chunk: int) -> Change:
    """The head on this number of tokens at a time."""
    return replaced(packtrain.model.forward, "head_chunk", lambda *given: chunk)


def using(kernel: Kernel) -> Change:
    return replaced(flash, "choose_kernel", lambda layer, device: KernelChoice(kernel, ()))


def pads() -> Change:
    """A pad by nothing before each call of a kernel, as packtrain had it."""
    attend = flash.attend_by_segments
    return replaced(flash, "attend_by_segments", lambda kernel, q, k, v, *rest: attend(kernel, *padded(q, k, v), *rest))


def padded(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [F.pad(tensor, (0, 0)) for tensor in tensors]


@contextmanager
def changed(make: Callable[[Any], Callable[[], object]], base: Any) -> Iterator[None]:
    undo = make(base)
    try:
        yield
    finally:
        undo()


@contextmanager
def adding(base: Any) -> Iterator[None]:
    """Gradients of inputs added up in the products, as packtrain does on GPUs."""
    with changed(add_in_products, base):
        yield


@contextmanager
def liger(base: Any, on: torch.device) -> Iterator[None]:
    if lack := why_no_liger(base, on):
        raise Lacking(lack)
    with changed(fuse_by_liger, base):
        yield


@contextmanager
def fused_experts(base: Any, on: torch.device) -> Iterator[None]:
    if lack := why_no_kernels(on):
        raise Lacking(lack)
    with changed(fuse_experts, base):
        yield


@contextmanager
def recomputing(base: Any, policy: str) -> Iterator[None]:
    recompute(base, policy)
    try:
        yield
    finally:
        base.activation_checkpointing_disable()


@contextmanager
def peft_casts(model: torch.nn.Module) -> Iterator[None]:
    """PEFT's casts of the inputs of adapted layers, as packtrain left them."""
    own = [
        (layer, vars(layer).pop("_cast_input_dtype")) for layer in model.modules() if "_cast_input_dtype" in vars(layer)
    ]
    try:
        yield
    finally:
        for layer, cast_ in own:
            layer._cast_input_dtype = cast_


@contextmanager
def carrying(base: Any) -> Iterator[None]:
    undo = carry_in(base, torch.bfloat16)
    try:
        with weights_cast_once():
            yield
    finally:
        undo()


@contextmanager
def cudnn(on: bool) -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# Parts.


def ceilings(note: Note, tiny: bool) -> None:
    """The most that the device gives."""
    names = ("torch", "transformers", "trl", "triton", "peft", "liger-kernel", "flash-attn-4", "flash-attn")
    at, dtype = device(), torch.bfloat16
    of = torch.cuda.get_device_name(at) if at.type == "cuda" else "CPU"
    note("versions", device=of, cuda=torch.version.cuda, **{name: installed_version(name) for name in names})
    shapes = [(1536, 8960), (8960, 1536), (1536, 1536), (1024, 3072), (3072, 1024), (4096, 12_288), (12_288, 4096)]
    for inner, width in [*shapes, (1536, 151_936)]:
        rows, inner, width = (256, inner // 32, width // 32) if tiny else (2048 if width > 10**5 else ROW, inner, width)
        a, b = (torch.randn(*size, device=at, dtype=dtype) for size in ((rows, inner), (inner, width)))
        spent = seconds_of(lambda a=a, b=b: a @ b)
        note(f"product {rows} × {inner} × {width}", ms=spent * 1e3, tflops=2 * rows * inner * width / spent / 1e12)
    source = torch.empty(2**20 if tiny else 2**30, dtype=torch.uint8, device=at)
    note("copy", gb_per_second=2 * len(source) / seconds_of(source.clone) / 1e9)


def kernels(note: Note, tiny: bool) -> None:
    """Attention of full rows by every kernel, and cuDNN's plan for a new length."""
    settle_kernels()
    at, row = device(), 256 if tiny else ROW
    dtype = torch.bfloat16 if at.type == "cuda" else torch.float32
    shapes = ((4, 2, 16),) if tiny else ((12, 2, 128), (16, 8, 128), (32, 8, 128))
    for heads, kv_heads, width in shapes:
        usable, lines = attention.usable_kernels(LayerFeatures(dtype, heads // kv_heads, width, width), at)
        note(f"{heads}/{kv_heads} heads, kernels", found="; ".join(lines))
        for kernel in usable[-1:]:
            with_pads = lambda q, k, v, *rest, own=kernel.attend: own(*padded(q, k, v), *rest)  # noqa: E731
            usable = [*usable, Kernel(f"{kernel.name}, pads by nothing", with_pads)]
        for kind in ("32", "groups") if tiny else ("128", "512", "2048", "4096", "mixed", "groups"):
            with replaced(attention, "MASK_LIMIT", 0):
                found = attention.compare_row(row, kind, usable, 1 if tiny else 6, at, (heads, kv_heads, width), dtype)
            for one in found:
                of_peak = {} if one["share"] is None else {"of_peak": one["share"]}
                note(f"{heads}/{kv_heads} heads, {kind}: {one['attention']}", ms=one["ms"], gib=one["gib"], **of_peak)
    for on in (True, False):
        first, again = [], []
        for number in range(2 if tiny else 6):
            length = (16 if tiny else 1000) + 24 * number
            q, k, v = (torch.randn(2, 4, length, 16 if tiny else 128, device=at, dtype=dtype) for _ in range(3))
            q.requires_grad_()
            for times in (first, again):
                began = time.perf_counter()
                with cudnn(on):
                    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
                times.append(synchronised(lambda began=began: time.perf_counter() - began))
        state = "on" if on else "off"
        note(
            f"sdpa, cuDNN {state}",
            new_length_ms=statistics.median(first[1:]) * 1e3,
            again_ms=statistics.median(again) * 1e3,
        )
    _, lines = attention.usable_kernels(LayerFeatures(dtype, 2, 64, 64, sinks=True), at)
    note("sinks", found="; ".join(lines))


def pieces(note: Note, tiny: bool) -> None:
    """The head by its chunk, and an update of a billion weights."""
    from packtrain.train.optim.dither import dithered

    at = device()
    head_by_chunk(note, tiny)
    count = 2**13 if tiny else 2**28  # Triton's interpreter is slow
    for masters, by_kernel in itertools.product((True, False), repeat=2):
        weight = torch.nn.Parameter(torch.randn(count, device=at).bfloat16())
        weight.grad = torch.randn_like(weight)
        way = f"{'masters' if masters else 'stochastic rounding'}, {'one kernel' if by_kernel else 'plain'}"

        def work(weight: torch.Tensor = weight, masters: bool = masters, by_kernel: bool = by_kernel) -> dict[str, Any]:
            step = adamw({"w": weight}, masters=masters, by_kernel=by_kernel).step
            return {"ms_per_billion": seconds_of(step) * 1e12 / count}

        attempt(note, f"AdamW, {way}", work)
        del weight, work
    numbers = torch.randn(count, device=at)
    attempt(
        note, "one rounding", lambda: {"ms_per_billion": seconds_of(lambda: dithered(numbers, 0, "w")) * 1e12 / count}
    )


def adamw(weights: dict[str, torch.Tensor], *, masters: bool, by_kernel: bool) -> Any:
    """AdamW over bfloat16 weights. Raises Lacking if its kernel cannot be used."""
    from packtrain.train.optim.dither import Dither
    from packtrain.train.optim.float32_step import stepping_in_float32
    from packtrain.train.optim.fused_adamw import step_by_kernel

    names, said = {weight: name for name, weight in weights.items()}, ["they need a GPU"]
    kind: Any = stepping_in_float32(torch.optim.AdamW, masters=masters, seed=0, names=names, dither=Dither())
    optimizer = kind(list(names), lr=1e-5, fused=True)
    if by_kernel:
        step_by_kernel(optimizer, device(), said.append)
        if optimizer.kernel is None:
            raise Lacking(said[-1].rpartition("plain: ")[2])
    return optimizer


def head_by_chunk(note: Note, tiny: bool) -> None:
    at, (tokens, width, words) = device(), (256, 64, 512) if tiny else (ROW, 1536, 151_936)
    hidden = torch.randn(tokens, width, device=at, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, words, (tokens,), device=at)
    head = torch.nn.Linear(width, words, bias=False, device=at, dtype=torch.bfloat16)

    def work() -> dict[str, Any]:
        forget(head)
        spent = seconds_of(
            lambda: packtrain.model.forward.sum_losses(
                hidden, head, packtrain.model.forward.ChosenTokens(targets, equal_weights)
            ).backward()
        )
        return {"ms": spent * 1e3, "peak_gib": peak_gib()}

    chosen: dict[str, Any] = {}
    if at.type == "cuda":
        chosen["chunk"] = head_chunk(words, 2, torch.cuda.get_device_properties(at).total_memory)
    attempt(note, "head, chunks by memory", lambda: {**work(), **chosen})
    for chunk in (64, 128) if tiny else (2048, 4096, 8192, 16_384):
        with head_by(chunk):
            attempt(note, f"head, chunks of {chunk:,}", work)


def full_middle(note: Note, tiny: bool) -> None:
    ladder = Ladder(note, "1.5B", tiny)
    chunk = 64 if tiny else 2048
    ladder.measure("as it comes", ladder.own())
    ladder.measure("pads by nothing, as before", ladder.own(), pads())
    ladder.measure("Liger", ladder.own(), ladder.liger())
    ladder.measure("Liger, gradients in products", ladder.own(), ladder.liger(), adding(ladder.base))
    ladder.measure(f"Liger, head by {chunk:,}", ladder.own(), ladder.liger(), head_by(chunk))
    for kernel in ladder.others():
        ladder.measure(f"Liger, {kernel.name}", using(kernel), ladder.liger())


def adapted_large(note: Note, tiny: bool) -> None:
    ladder = Ladder(note, "8B", tiny, lora=True)
    ladder.measure("every_4, PEFT's casts", ladder.own(), recomputing(ladder.base, "every_4"), peft_casts(ladder.model))
    ladder.measure("every_4", ladder.own(), recomputing(ladder.base, "every_4"))
    ladder.measure("none, PEFT's casts", ladder.own(), peft_casts(ladder.model))
    ladder.measure("none", ladder.own())
    ladder.measure("none, adapters in one function", ladder.own(), changed(fuse_adapters, ladder.base))
    ladder.measure("none, Liger", ladder.own(), ladder.liger())
    both = "none, Liger, adapters in one function"
    ladder.measure(both, ladder.own(), ladder.liger(), changed(fuse_adapters, ladder.base))
    for kernel in ladder.others():
        fused = changed(fuse_adapters, ladder.base)
        ladder.measure(f"{both}, {kernel.name}", using(kernel), ladder.liger(), fused)


def full_large(note: Note, tiny: bool) -> None:
    ladder = Ladder(note, "8B", tiny)
    ladder.measure("selective, Liger", ladder.own(), recomputing(ladder.base, "selective"), ladder.liger())
    ladder.measure("none, Liger", ladder.own(), ladder.liger())
    ladder.measure("selective", ladder.own(), recomputing(ladder.base, "selective"))
    changes = (recomputing(ladder.base, "selective"), adding(ladder.base))
    ladder.measure("selective, gradients in products", ladder.own(), *changes)
    for kernel in ladder.others():
        ladder.measure(
            f"selective, Liger, {kernel.name}", using(kernel), recomputing(ladder.base, "selective"), ladder.liger()
        )

    def update() -> dict[str, Any]:
        weights = dict(ladder.base.named_parameters())
        optimizer = adamw(weights, masters=False, by_kernel=True)
        forget(ladder.base)
        with recomputing(ladder.base, "selective"):
            loss = float(ladder.run(ladder.rows[0]))
        return {"ms": seconds_of(optimizer.step) * 1e3, "peak_gib": peak_gib(), "loss": loss}

    attempt(note, "an update with stochastic rounding", update)


def full_small(note: Note, tiny: bool) -> None:
    ladder = Ladder(note, "0.6B", tiny, dtype=torch.float32)
    ladder.measure("packed, float32 + autocast", ladder.own(), carrying(ladder.base))
    ladder.measure("packed, gradients in products", ladder.own(), carrying(ladder.base), adding(ladder.base))
    ladder.measure("packed, Liger", ladder.own(), carrying(ladder.base), ladder.liger())
    random = np.random.default_rng(0)
    for on in (True, False):
        lengths = [random.integers(8, 64, 4) if tiny else random.integers(200, 2048, 12) for _ in range(6)]
        batches = [ladder.collated(list(map(int, some)), seed, padded=True) for seed, some in enumerate(lengths)]
        for known in ("new lengths", "known lengths"):
            about = f"padding, cuDNN {'on' if on else 'off'}, {known}"
            changes = (attention_of(ladder.base, "sdpa"), carrying(ladder.base), cudnn(on))
            ladder.measure(about, *changes, batches=batches, warm=0)


def experts(note: Note, tiny: bool) -> None:
    ladder = Ladder(note, "experts 2B", tiny)
    ladder.measure("grouped", ladder.own(), changed(group_experts, ladder.base))
    ladder.measure("grouped experts, Liger", ladder.own(), changed(group_experts, ladder.base), ladder.liger())
    ladder.measure("fused experts, Liger", ladder.own(), fused_experts(ladder.base, ladder.device), ladder.liger())


def preferences(note: Note, tiny: bool) -> None:
    """A step of dpo against a reference, as packtrain's loss computes it."""
    from packtrain.data.tokens.pretrained import load_tokenizer
    from packtrain.objectives.dpo.run import DPOLoss
    from packtrain.packing.schedule import make_schedule
    from packtrain.train.objectives.loss import Setup
    from packtrain.train.objectives.pairs_and_answers import PairSteps
    from packtrain.train.run_state import LoopSettings, StopRequest

    settle_kernels()
    at, random, folder = device(), np.random.default_rng(0), Path(tempfile.mkdtemp(prefix="packtrain-dpo-"))

    def pair() -> Preference:
        prompt, *answers = random.integers(8, 32, 3) if tiny else random.integers(200, 900, 3)
        ids = random.integers(3, 500, prompt)
        both = [np.concatenate([ids, random.integers(3, 500, answer)]).astype(np.int32) for answer in answers]
        return Preference(*(Document(one, np.arange(len(one)) >= prompt) for one in both), int(prompt))

    pairs: Any = [pair() for _ in range(4 if tiny else 8)]
    lengths = np.array([len(one.chosen.input_ids) + len(one.rejected.input_ids) for one in pairs], np.int32)
    schedule = make_schedule(
        lengths, Packing(mode="padding_free"), Batch(examples_per_step=len(pairs), examples_per_device=len(pairs))
    )
    steps = PairSteps(pairs, schedule, "flat", 0)
    policy, reference = drawn("0.6B", tiny, torch.float32), drawn("0.6B", tiny, torch.float32)
    of_loop = LoopSettings(steps, {}, StopRequest(), folder, {}, autocast=torch.bfloat16)
    setup = Setup(policy, load_tokenizer(Model(tokenizer="quickstart")), of_loop)
    loss = DPOLoss(setup, Objective(kind="dpo"), reference)
    for model in (policy, reference):
        attention_by("flash" if at.type == "cuda" else "segmented").install_when_packed(base_model(model))
    policy.train()
    tokens = int(lengths.sum())

    def measured(layout: Any, on: bool) -> dict[str, Any]:
        steps = PairSteps(pairs, schedule, layout, 0)
        batch = steps.collate(np.arange(len(pairs)))
        counts, found = torch.tensor(batch.counts, device=at), []

        def run() -> None:
            loss.open_step([batch])
            with torch.autocast(at.type, torch.bfloat16):
                value = loss.compute(policy, batch, counts)
            value.backward()
            found.append(value.detach())

        forget(policy)
        with cudnn(on):
            spent = seconds_of(run, warm=1 if tiny else 2, timed=2 if tiny else 6)
        return {
            "ms": spent * 1e3,
            "tokens_per_second": tokens / spent,
            "peak_gib": peak_gib(),
            "loss": float(found[-1]),
        }

    try:
        for layout, on in (("shared", False), ("flat", False), ("padding", False), ("padding", True)):
            attempt(note, f"{layout}, cuDNN {'on' if on else 'off'}", lambda layout=layout, on=on: measured(layout, on))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def profiled(note: Note, tiny: bool) -> None:
    """The kernels of one micro-batch, by torch's raw events."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    ladder = Ladder(note, "1.5B", tiny)
    with ExitStack() as stack:
        lacks = why_no_liger(ladder.base, ladder.device)
        stack.enter_context(ExitStack() if lacks else ladder.liger())
        for _ in range(2):
            ladder.run(ladder.rows[0])
        seen = supported_activities()  # no kernels of a stand-in
        activity = ProfilerActivity.CUDA if ProfilerActivity.CUDA in seen else ProfilerActivity.CPU
        synchronised(float)
        with profile(activities=[activity]) as profiler:
            began = time.perf_counter()
            ladder.run(ladder.rows[0])
            spent = synchronised(lambda: time.perf_counter() - began)
    by_name: Counter[str] = Counter()
    for event in cast(Any, profiler).profiler.kineto_results.events():
        by_name[event.name()] += event.duration_ns() / 1e9
    note("micro-batch", seconds=spent, kernels_seconds=sum(by_name.values()), **shares(by_name))
    for name, seconds in by_name.most_common(3 if tiny else 15):
        note(f"`{name[:80]}`", kind=kind_of(name), seconds=seconds)


def kind_of(kernel: str) -> str:
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE)), "elementwise")


def shares(by_name: Counter[str]) -> dict[str, float]:
    """The share of each kind of work in the time of all kernels."""
    kinds: Counter[str] = Counter()
    for name, seconds in by_name.items():
        kinds[kind_of(name)] += seconds
    return {kind: seconds / max(sum(by_name.values()), 1e-12) for kind, seconds in kinds.most_common()}


def gpu_tests(note: Note, tiny: bool) -> None:
    """tests/gpu, those first that are least known; a failure is a line at once."""
    import pytest

    counts: Counter[str] = Counter()

    class Lines:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                message = (crash.message if crash else str(report.longrepr)).strip().splitlines()
                note(report.nodeid.rpartition("/")[2], failed=message[0][:300] if message else "")
                print(report.longrepr, flush=True)
            if report.when == "call" or report.skipped:
                counts[report.outcome] += 1

    os.chdir(ROOT)
    # pyproject.toml's own options are for pytest-xdist, too, which need not be there
    options = ["-q", "-o", "addopts=-m 'not exhaustive'", "-p", "no:cacheprovider", "-p", "no:randomly"]
    asked = [
        (["test_models.py"], "gpt_oss or compiled"),
        (["test_waits.py"], ""),
        (["test_models.py", "test_kernels.py"], ""),
    ]
    for files, chosen in [(["test_kernels.py"], "grouped")] if tiny else asked:
        counts.clear()
        pytest.main([*options, *(f"tests/gpu/{name}" for name in files), "-k", chosen], plugins=[Lines()])
        note(f"{' '.join(files)} {chosen}".strip(), **counts)


def product(note: Note, tiny: bool) -> None:
    """`packtrain sft` as a user starts it, but for the weights that it would write."""
    from packtrain import cli
    from packtrain.train import preparation, run

    folder = Path(tempfile.mkdtemp(prefix="packtrain-product-"))
    random, rows, steps = np.random.default_rng(0), folder / "rows.jsonl", 3 if tiny else 10
    longest, row = (64, 256) if tiny else (8192, ROW)
    with rows.open("w") as file:
        for _ in range(4 * 12 if tiny else 12 * steps):
            ids = random.integers(3, 500, random.integers(longest // 4, longest + 1)).tolist()
            file.write(json.dumps({"input_ids": ids, "labels": [-100] * 8 + ids[8:]}) + "\n")
    load = preparation.load_model

    def drawn_there(*arguments: Any, **keywords: Any) -> Any:
        with torch.device(device()):  # a CPU would draw for a minute
            return load(*arguments, **keywords)

    train_in = run.train_in
    output, sizes = folder / "run", SIZES["1.5B"] | (TINY if tiny else {})
    config = [f"+model.config.{name}={str(value).lower()}" for name, value in sizes.items()]
    config += [
        "model.init=random",
        "model.tokenizer=quickstart",
        "model.dtype=bfloat16",
        "trainer.mixed_precision=bf16",
    ]
    config += [
        f"data.train={rows}",
        f"data.cache_dir={folder / 'cache'}",
        f"data.max_length={longest}",
        "data.shuffle=false",
    ]
    config += ["packing.mode=packed", f"batch.tokens_per_device={row}", "batch.examples_per_step=12"]
    config += ["trainer.log_every=1", f"trainer.max_steps={steps}", f"trainer.output_dir={output}", "topology=single"]
    sys.argv = ["packtrain", "sft", *config]
    with (
        replaced(preparation, "load_model", drawn_there),
        replaced(run, "train_in", lambda *given, **more: train_in(*given, **{**more, "finish": lambda *_: None})),
    ):
        try:
            cli.main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"packtrain sft ended with {end.code}") from end
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for about, some in {"first three steps": lines[:3], "the others": lines[3:] or lines[-1:]}.items():
        figures = {name: statistics.median(one[name] for one in some) for name in ("tokens_per_second", "loss")}
        mfu = [one["mfu"] for one in some if one.get("mfu")]
        note(about, **figures, **({"mfu": statistics.median(mfu)} if mfu else {}))
    shutil.rmtree(folder, ignore_errors=True)


def compiled_middle(note: Note, tiny: bool) -> None:
    from packtrain.model import layers

    ladder = Ladder(note, "1.5B", tiny)
    if tiny:
        layers.BACKEND = "eager"  # graphs are made, and not compiled: that takes a CPU a minute
    if lack := "" if tiny else lack_of_compiler():
        return note("compiled", skipped=lack)
    if tiny and ladder.device.type == "cuda":
        return note("compiled", skipped="a stand-in GPU has nothing to compile for")
    layers.compile_layers(ladder.base)
    ladder.measure("compiled", ladder.own())


PARTS: dict[str, Callable[[Note, bool], Any]] = {
    "ceilings": ceilings,
    "attention": kernels,
    "pieces": pieces,
    "1.5B": full_middle,
    "LoRA 8B": adapted_large,
    "8B": full_large,
    "0.6B": full_small,
    "dpo 0.6B": preferences,
    "experts 2B": experts,
    "profile": profiled,
    "tests": gpu_tests,
    "product": product,
    "compiled": compiled_middle,
}
