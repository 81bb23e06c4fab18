"""The activations of a micro-batch on each device, in bytes. No torch, no hub.

They are counted for llama and similar models, after Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), applied to the tensors that
transformers' layers keep. With gradient checkpointing a layer keeps its input (`selective`: also what is costly to recompute). One layer at a
time is recomputed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

from packtrain.config.schema import RunConfig
from packtrain.plan.known_model import Layers, is_adapted

STASHED = 6
"""Layer inputs that stay on the device despite offloading. They are being copied (TRL's max_fwd_stash_size), or are the last."""


@dataclass(frozen=True, slots=True)
class FullestBatch:
    """The fullest micro-batch of a device: its `tokens` are slots.

    `masked` counts the keys per query of its mask, None without a mask. Bytes: `weight` of one weight as layers see it, `compute` of one
    number in their computation (2 under autocast), `stream` of one number in the residual stream. `scores` counts the keys per query whose
    attention scores are kept: torch has no grouped-query kernel for float32 on GPUs. `fused`: whether Liger's kernels compute norms and
    activations. Norms then keep only their input, and MLPs do not keep the activation's result. `copies`: see Found. `together`: whether
    linear layers share a cast input (changes/linears.py).
    """

    tokens: int
    masked: int | None
    weight: int
    compute: int
    stream: int
    scores: int = 0
    fused: bool = False
    copies: float = 1
    together: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """Facts about the largest micro-batch that only a run finds out. None: not yet known.

    `slots` of tokens. `copies`: how many copies of a key attention keeps on average, where documents share a beginning. `fused`: whether
    Liger's kernels proved exact.
    """

    slots: int | None = None
    copies: float = 1
    fused: bool | None = None


NOTHING_FOUND = Found()


def fullest(config: RunConfig, width: int, *, gpu: bool, found: Found = NOTHING_FOUND) -> FullestBatch | None:
    """Return the fullest micro-batch, `found` or the one that `config` allows. None: nothing limits its tokens."""
    examples, tokens = config.batch.limits(config.packing.mode)
    longest, bounds = config.data.max_length, [tokens]
    if longest is not None:
        each = config.objective.spec.documents * longest
        bounds += [item and item * each for item in (examples, config.batch.examples_per_step)]
    most = found.slots or min((item for item in bounds if item is not None), default=None)
    if most is None:
        return None
    masked = most if config.model.backend and config.model.backend.dense_mask else None
    if config.packing.mode == "padding":
        masked = min(longest or most, most)
    mixed, strategy = config.trainer.mixed_precision == "bf16", config.strategy.spec
    width = 2 if mixed and strategy.casts_weights else width
    narrow = mixed and gpu and not strategy.shards_weights  # if changes/residual.py proves exact
    compute = 2 if mixed else width
    scores = min(longest or most, most) if gpu and compute == 4 and masked is None else 0
    if (fused := found.fused) is None:  # expect them if they are installed or required
        wanted = config.model.kernels == "liger" or all(map(find_spec, ("liger_kernel", "triton")))
        fused = wanted and config.model.kernels in ("auto", "liger") and gpu
        fused = fused and not (config.trainer.torch_compile or strategy.gathers_by_engine)
    together = gpu and not (
        config.model.kernels == "none" or config.trainer.torch_compile or strategy.gathers_by_engine
    )
    return FullestBatch(most, masked, width, compute, 2 if narrow else width, scores, fused, found.copies, together)


def count_layers(config: RunConfig, layers: Layers, batch: FullestBatch) -> tuple[int, int]:
    """Count bytes kept by all layers between the passes, and the last layer's backward bytes."""
    tile = config.trainer.tokens_per_mlp_tile or batch.tokens
    layer, inside = batch.tokens * _count_layer(config, layers, batch), _count_mlp(config, layers, batch)
    # of the tensors inside the MLP; Liger writes half of them over the kept tensors
    gradients = min(tile, batch.tokens) * (1 if batch.fused else 2) * layers.inner * batch.compute
    if tile < batch.tokens:  # MLPs keep only their input, and all their tensors for one tile at a time
        layer -= batch.tokens * (inside - layers.hidden * batch.compute)
        gradients += tile * inside
    last_norm = batch.tokens * layers.hidden * (batch.stream if batch.fused else 4 + batch.stream)
    checkpointing = config.trainer.gradient_checkpointing
    every = period(checkpointing)
    again = math.ceil(layers.number / every) if every else 0
    held, made = batch.tokens * layers.hidden * batch.stream, layer  # a recomputed layer: bytes kept, bytes made again
    if checkpointing == "selective":  # also kept: the keys, and the results of attention, o_proj and up_proj
        results = layers.key + layers.query + layers.hidden + layers.inner
        kept = batch.tokens * (results * batch.compute + 4 * layers.heads)
        held, made = held + kept, layer - kept
    here = min(again, STASHED) if config.trainer.activation_offload else again
    waiting = here * held + (layers.number - again) * layer + last_norm
    return waiting, gradients + (made if every and (layers.number - 1) % every == 0 else 0)


def _count_layer(config: RunConfig, layers: Layers, batch: FullestBatch) -> int:
    """Return the bytes per token that a layer keeps for its backward pass."""
    full, compute = config.peft.kind == "none", batch.compute
    norms = 2 * layers.hidden * (4 + (batch.stream if full else 0)) + 8
    heads = layers.query + layers.key if layers.kind == "qwen3" else 0  # norms of heads
    norms += heads * (4 + (compute if full else 0))
    if batch.fused:
        norms = 2 * (layers.hidden * batch.stream + 4) + heads * compute
    scores = batch.scores if layers.key < layers.query else 0
    keys = layers.query if batch.masked or scores else layers.key  # with a mask, sdpa repeats the keys for every head
    copied = math.ceil(2 * keys * batch.copies)  # keys and values
    attention = compute * (2 * layers.query + copied + (batch.masked or 0)) + 4 * layers.heads * (1 + scores)
    return norms + attention + _count_inputs(config, layers, batch, mlp=False) + _count_mlp(config, layers, batch)


def _count_mlp(config: RunConfig, layers: Layers, batch: FullestBatch) -> int:
    """Return the bytes per token that the MLP of one layer keeps."""
    return (2 if batch.fused else 3) * layers.inner * batch.compute + _count_inputs(config, layers, batch, mlp=True)


def _count_inputs(config: RunConfig, layers: Layers, batch: FullestBatch, *, mlp: bool) -> int:
    """Return the bytes per token of the inputs that linear layers keep.

    Only linear layers with trained weights or adapters keep inputs. `mlp` selects a layer's MLP, else its attention. Linear layers share the
    tensor that they read, unless each copies it: in autocast's format, or in the adapters' float32. Liger's norms return the format of the
    stream, which may be autocast's. Attention already keeps o_proj's input; down_proj's input is always new.
    """
    full, autocast = config.peft.kind == "none", config.trainer.mixed_precision == "bf16"

    def reading(part: str, *names: str) -> int:
        targets = config.peft.target_modules
        return sum(full or is_adapted(f"model.layers.0.{part}.{name}", targets) for name in names)

    copied = batch.compute != (batch.stream if batch.fused else batch.weight) if full else autocast or batch.weight != 4
    width = batch.compute if full else 2 if autocast else 4
    readers = reading("mlp", "gate_proj", "up_proj") if mlp else reading("self_attn", "q_proj", "k_proj", "v_proj")
    hidden = layers.hidden * (readers if copied and not (full and batch.together) else min(readers, 1))
    if mlp:
        return width * (hidden + layers.inner * reading("mlp", "down_proj"))
    return width * (hidden + (layers.query if copied and not full and reading("self_attn", "o_proj") else 0))


def period(checkpointing: str) -> int:
    """Return n if every nth layer recomputes activations, beginning with the first. 0: none does."""
    if checkpointing in ("none", "auto"):
        return 0
    return int(checkpointing.removeprefix("every_")) if checkpointing.startswith("every_") else 1
