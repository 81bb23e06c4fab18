"""The memory of a run on each device, by part, from weight shapes. No torch, no hub.

Every strategy is counted with the copies that its framework keeps (docs/planning.md has the tables and their sources). Parts add up
to the peak of a step. Memory outside torch's allocator (CUDA's context, kernels, NCCL) is subtracted from the device before a run
counts as fitting; fragmentation is not estimated. Logits never exist as a whole: the heads work in chunks of tokens.

Activations are counted for llama and similar models, after Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), applied to the tensors that
transformers' layers keep. With gradient checkpointing a layer keeps its input (`selective`: also what is costly to recompute). One layer at a
time is recomputed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import cast

from packtrain.config.rules import check_checkpointing, check_strategy
from packtrain.config.rules.paths_and_packages import frozen_of
from packtrain.config.schema import Optim, RunConfig
from packtrain.config.trainer import Checkpointing
from packtrain.errors import UserError
from packtrain.objectives.spec import CHECKED_LOGITS, COMPARED_PAIRS, head_chunk
from packtrain.optimizers import STEPPED
from packtrain.plan.fit import GIB, OUTSIDE, SPARE, Memory, in_gib
from packtrain.plan.known_model import (
    SCORE,
    TOWERS,
    Layers,
    Shapes,
    adapter_shapes,
    is_adapted,
    language_sizes,
    plan_precision,
    quantised_by,
    read_layers,
    reference_of,
    weights_of,
)
from packtrain.plan.vision import count_tower, read_tower
from packtrain.strategies.spec import STRATEGIES, Load, ModelSize, Overhead, StrategySpec

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


def fullest(config: RunConfig, width: int, *, gpu: bool, found: Found = Found()) -> FullestBatch | None:
    """Return the fullest micro-batch, `found` or the one that `config` allows. None: nothing limits its tokens."""
    examples, tokens = config.batch.limits(config.packing.mode)
    longest, bounds = config.data.max_length, [tokens]
    if longest is not None:
        step = None if config.data.render == "turns" else config.batch.examples_per_step  # by turns: of many documents
        bounds += [item and item * config.objective.spec.documents * longest for item in (examples, step)]
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
    changed = gpu and not (config.trainer.torch_compile or strategy.gathers_by_engine)
    if (fused := found.fused) is None:  # expect them if they are installed or required
        wanted = config.model.kernels == "liger" or all(map(find_spec, ("liger_kernel", "triton")))
        fused = changed and wanted and config.model.kernels in ("auto", "liger")
    together = changed and config.model.kernels != "none"
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


NCCL = GIB
"""More bytes outside it for each communicator of several ranks (docs/planning.md has the sources)."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FORMATS = {2: "bfloat16"}  # of weights, by their bytes
ADAPTER_BYTES = 4  # peft keeps adapters in float32
QUANTIZED_BYTES = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0, "fp8": 1.0}
"""Bytes of a weight by model.quantize. nf4: 4 bits, an 8-bit scale per 64 weights, a 32-bit scale per 256 of those scales.
Scales of whole rows count as nothing."""
_TILE = (4096, 32768)  # tokens and words whose logits exist at once (trl.kernels.chunked_logprob)
CHECKPOINTING = ("none", "every_4", "every_3", "selective", "every_2", "full")
"""Values of trainer.gradient_checkpointing, from the fewest recomputed matrix products to all of them."""


def estimate(
    config: RunConfig, processes: int, device_bytes: int | None = None, machines: int = 1, found: Found = Found()
) -> Memory | str:
    """Estimate the memory of a run on `processes` devices, or say why that is impossible.

    Devices have `device_bytes` each; None plans for CPUs. `found`: facts that a run has found out. If the run exceeds the device, `advice` says what to try.
    """
    try:
        model = _measure(config, gpu=device_bytes is not None)
        decided, _ = plan_precision(config, _FORMATS.get(model.width, "float32"), gpu=device_bytes is not None)
        # 8-bit products keep the same tensors as bfloat16 products, except autocast's copies of weights
        decided = decided.replace("fp8", "bf16")
        config = replace(config, trainer=replace(config.trainer, mixed_precision=decided))
        memory = _choose_checkpointing(config, model, (processes, machines), device_bytes, found)
    except UserError as error:
        return f"not known before loading: {error.in_words()}"
    if memory.fits is not False:
        return memory
    split = _advise_split(config, model, (processes, machines), device_bytes, replace(found, slots=None))
    return replace(memory, advice=f"try {split}" if split else _advice(config, processes))


def possible_policies(config: RunConfig) -> dict[str, RunConfig]:
    """Return the config with each value of trainer.gradient_checkpointing that its other keys allow."""
    asked = {one: replace(config.trainer, gradient_checkpointing=cast(Checkpointing, one)) for one in CHECKPOINTING}
    tried = {policy: replace(config, trainer=trainer) for policy, trainer in asked.items()}
    return {policy: one for policy, one in tried.items() if not any(check_checkpointing(one))}


def _choose_checkpointing(
    config: RunConfig, model: ModelSize, spread: tuple[int, int], device_bytes: int | None, found: Found
) -> Memory:
    """Resolve trainer.gradient_checkpointing and return the memory. `auto` recomputes just enough to leave SPARE of the device free."""
    counts: dict[str, Memory] = {}
    for policy, tried in possible_policies(config).items():
        counts[policy] = _count(tried, model, spread, device_bytes, found)
        counts[policy] = replace(counts[policy], device=device_bytes, checkpointing=policy)
    if (asked := config.trainer.gradient_checkpointing) != "auto":
        return replace(counts[asked], chosen="asked for")
    counts = {one: replace(made, fallbacks=(*counts,)[n:]) for n, (one, made) in enumerate(counts.items(), start=1)}
    kept = counts["none"]
    if device_bytes is None or kept.activations is None:
        return replace(kept, chosen="auto: no GPU" if device_bytes is None else "auto: activations are not known")
    room = (1 - SPARE) * device_bytes - kept.outside
    chosen = next((memory for memory in counts.values() if memory.total <= room), counts["full"])
    if chosen is kept:
        return replace(kept, chosen="auto: all fits")
    return replace(chosen, chosen=f"auto: with none it would take {in_gib(kept.total + kept.outside)} GiB")


def _measure(config: RunConfig, *, gpu: bool) -> ModelSize:
    weights = weights_of(config.model, scores=config.objective.spec.scores)
    shapes, held = weights.shapes, weights.packed if quantised_by(weights.sizes, gpu=gpu) else {}
    in_bits = sum(math.prod(shapes[name]) for name in held)
    trained = adapter_shapes(shapes, config.peft)
    if config.peft.kind == "none":
        scales = {name: [one.lr_scale for one in config.optim.groups if re.search(one.match, name)] for name in shapes}
        kept = TOWERS if config.model.towers == "frozen" else re.compile("(?!)")
        trained = [one for name, one in shapes.items() if scales[name][:1] != [0] and not kept.search(name)]
    if not trained:
        raise UserError("no layer of the model has a name of peft.target_modules", code="nothing-trained")
    blocks: Counter[str] = Counter()
    linear = 0
    for name, shape in shapes.items():
        block = re.match(r".*?\.\d+(?=\.)", name)
        blocks[block.group() if block else ""] += math.prod(shape)
        linear += math.prod(shape) if block and len(shape) >= 2 else 0
    rest = blocks.pop("", 0)
    return ModelSize(
        width=BYTES.get(config.model.dtype, weights.stored),
        packed=sum(held.values()) / in_bits if held else QUANTIZED_BYTES.get(config.model.quantize),
        all=rest + sum(blocks.values()),
        linear=in_bits or linear,
        block=max(blocks.values(), default=0),
        rest=rest,
        embedding=_embedding(shapes),
        largest=max(map(math.prod, shapes.values())),
        trained=sum(map(math.prod, trained)),
        sizes=weights.sizes,
    )


def _embedding(shapes: Shapes) -> int:
    """Return the numbers in the token embedding; 0 if the output head shares it."""
    sizes = [math.prod(shape) for name, shape in shapes.items() if name.endswith("embed_tokens.weight")]
    return max(sizes, default=0) if any(name.endswith(("lm_head.weight", SCORE)) for name in shapes) else 0


def _count(config: RunConfig, model: ModelSize, spread: tuple[int, int], device: int | None, found: Found) -> Memory:
    processes, machines = spread
    spec, full, copied = config.strategy.spec, config.peft.kind == "none", config.strategy.shard_within == "machine"
    shards = processes // machines if copied else processes
    rounded = spec.keeps_masters and model.width == 2  # all weights, adapters too
    trained_width = model.width if full or rounded else ADAPTER_BYTES
    saved = model.linear * (model.width - (model.packed or model.width))
    parts = {
        "weights": math.ceil(model.all * model.width - saved) + (0 if full else model.trained * trained_width),
        "gradients": model.trained * (4 if rounded else trained_width),  # summed in float32
        "optimizer": optimizer_bytes(config.optim, spec, model.trained, trained_width)
        + (4 * model.trained if config.trainer.ema else 0),
        "reference": _reference(config, model, gpu=device is not None),
    }
    sharded = (*spec.shards, "reference") if spec.shards_weights else spec.shards
    split = {item: math.ceil(size / shards) if item in sharded else size for item, size in parts.items()}
    if config.objective.spec.frees_frozen(config):  # before there are gradients and, but in DeepSpeed, states
        other = split["gradients"] + (0 if spec.steps_in_backward else split["optimizer"])
        split["reference"] = max(0, split["reference"] - other)
    host = model.all * model.width if spec.shards_weights else 0  # each process loads all, then shards
    # each process reads only its slices (model/weights.py)
    if config.model.is_base_for_adapters and not config.peft.options.get("use_dora"):
        host = math.ceil(host / shards)
    if spec.offloads:
        split["gradients"] += math.ceil(4 * model.trained / processes)  # also in float32, for the optimizer
        host = max(host, sum(split.values()))
        split = dict.fromkeys(split, 0)
    batch = fullest(config, model.width, gpu=device is not None, found=found)
    activations, moved, unknown = _activations(config, model, batch, device or 0)
    pictures = 0 if activations is None or batch is None else _pictures(config, model, batch, activations)
    activations = None if activations is None else activations + pictures
    host = max(host, moved + (host if spec.offloads else 0))
    compute = 2 if config.trainer.mixed_precision == "bf16" else model.width
    load = Load(
        model=model,
        trained_width=trained_width,
        compute=compute,
        block_width=model.packed or compute,
        whole=full,
        processes=processes,
        machines=machines,
        copy_on_each=copied,
    )
    overhead = spec.memory(load)
    buffers = overhead.buffers + (0 if spec.casts_weights else _autocast_copies(config, model))
    stepped = math.ceil(model.trained / (shards if "optimizer" in spec.shards else 1))
    least = max(
        _stepping(config, model, trained_width, stepped, overhead) - (activations or 0),  # freed by then
        # neither gradients nor states exist before step 1
        _first_check(config, model, batch) - (activations or 0) - split["gradients"] - split["optimizer"],
        _first_watch(config, batch) - (activations or 0) - split["gradients"],
        _first_proofs(config, model, batch, device or 0) - activations - split["optimizer"]
        if batch and activations
        else 0,
    )
    return Memory(
        **{**split, "buffers": buffers if spec.offloads else max(buffers, least), "activations": activations},
        parameters=model.all,
        trained=model.trained,
        host=host,
        unknown=unknown,
        outside=OUTSIDE + (overhead.communicators * NCCL if processes > 1 else 0),
        accumulated=overhead.accumulated,
        leaving=overhead.leaving,
        processes=processes,
        pictures=pictures,
        slots=batch.tokens if batch else 0,
        fused=batch is not None and batch.fused,
    )


def _stepping(config: RunConfig, model: ModelSize, width: int, stepped: int, overhead: Overhead) -> int:
    """Return the bytes that the optimizer's step takes for `stepped` numbers of `width` bytes. AdamW makes a temporary list of tensors."""
    if width == 2 and not config.strategy.spec.keeps_masters:
        return _in_float32(config) * min(stepped, max(STEPPED, model.largest))
    listed = width if config.optim.spec.lists_weights else 0
    return max(stepped * (overhead.widened + listed), overhead.reduced)


def _activations(
    config: RunConfig, model: ModelSize, batch: FullestBatch | None, device_bytes: int
) -> tuple[int | None, int, str]:
    """Return bytes of activations at the peak, their bytes on the host, and "". Or None, 0, and why they are unknown."""
    try:
        layers = read_layers(model.sizes)
    except UserError as error:
        return None, 0, f"not known: {error.in_words()}"
    if batch is None:
        return None, 0, "not known: a micro-batch has no longest document (data.max_length) and no most tokens"
    waiting, working = count_layers(config, layers, batch)
    inputs = layers.number * batch.tokens * layers.hidden * batch.stream  # of all layers
    moved = inputs if config.trainer.activation_offload else 0
    return waiting + max(working, _head(config, layers, batch, device_bytes)), moved, ""


def _pictures(config: RunConfig, model: ModelSize, batch: FullestBatch, text: int) -> int:
    """Return an upper bound of the bytes that pixels and towers add (vision.py).

    `text`: bytes of the language part's activations.
    """
    if (tower := read_tower(model.sizes)) is None:
        return 0
    every = period(config.trainer.gradient_checkpointing)
    pixels, kept, layer = count_tower(tower, batch.tokens, batch.compute, every)
    trained = config.model.towers == "trained"
    working = 0 if trained and not every else max(0, layer - text)  # while the language part keeps nothing
    return pixels + working + (kept if trained else 0)


def _head(config: RunConfig, layers: Layers, batch: FullestBatch, device_bytes: int) -> int:
    """Return the output head's bytes while it makes gradients. They are its input, logits, and gradients of input and weight."""
    if config.objective.spec.scores:  # one number a token
        return batch.tokens * layers.hidden * (batch.compute + 4)
    trained = config.peft.kind == "none" or "lm_head" in config.peft.modules_to_save
    weight = layers.vocabulary * layers.hidden
    of_weight = 4 * weight if trained else 0
    if config.objective.spec.documents > 1 or config.objective.spec.reference:  # TRL's head takes single tokens
        tile = min(batch.tokens, _TILE[0]) * _TILE[1] * batch.compute
        return batch.tokens * layers.hidden * (batch.compute + 4) + tile + of_weight
    cast = batch.compute if batch.compute != batch.weight else 0  # the head's copies in the compute dtype
    tokens = min(batch.tokens, head_chunk(layers.vocabulary, batch.compute, device_bytes))
    logits = tokens * layers.vocabulary * batch.compute
    if config.objective.spec.frozen(config):  # its logits of the same tokens, and a few tokens' in float32
        logits += layers.vocabulary * (tokens * batch.compute + 8 * 4 * min(tokens, 256))
    return batch.tokens * layers.hidden * (batch.weight + batch.compute + cast) + logits + weight * cast + of_weight


def _first_check(config: RunConfig, model: ModelSize, batch: FullestBatch | None) -> int:
    """Return the bytes of the check of first pairs before step 1. It holds logits, also in float32, and log-probabilities."""
    if not config.objective.spec.reference or not config.verify.preflight:
        return 0
    compute = 2 if config.trainer.mixed_precision == "bf16" else model.width
    longest, vocabulary = config.data.max_length, language_sizes(model.sizes).get("vocab_size")
    tokens = [item for item in (batch and batch.tokens, longest and 2 * COMPARED_PAIRS * longest) if item]
    every = min(tokens) * vocabulary if tokens and vocabulary else CHECKED_LOGITS
    return min(every, CHECKED_LOGITS) * (compute + 8)


def _first_watch(config: RunConfig, batch: FullestBatch | None) -> int:
    """Return the bytes of TRL's head in the watch over first steps. It needs a tile of logits, and no gradients."""
    if config.objective.spec.examples != "documents" or not config.verify.preflight or batch is None:
        return 0
    return min(batch.tokens, _TILE[0]) * _TILE[1] * batch.compute


def _first_proofs(config: RunConfig, model: ModelSize, batch: FullestBatch, device_bytes: int) -> int:
    """Return the bytes of activations in the proofs of changes. In bfloat16 they compute up to 2,048 tokens in float32.

    Layers then keep only their inputs. The head computes in bfloat16.
    """
    if batch.compute != 2 or config.strategy.spec.gathers_by_engine or config.model.kernels == "none":
        return 0
    again = replace(config.trainer, gradient_checkpointing="full", activation_offload=False)
    layers, few = read_layers(model.sizes), replace(batch, tokens=min(batch.tokens, 2048))
    exact = replace(few, compute=4, stream=4, fused=False, together=False)
    waiting, working = count_layers(replace(config, trainer=again), layers, exact)
    return waiting + max(working, _head(config, layers, few, device_bytes))


def _autocast_copies(config: RunConfig, model: ModelSize) -> int:
    """Return the bytes of autocast's copies. Copies of trained weights exist until the step ends, others as long as activations."""
    if config.trainer.mixed_precision != "bf16" or model.width != 4 or model.packed:
        return 0
    every = period(config.trainer.gradient_checkpointing)
    return 2 * model.linear if config.peft.kind == "none" or not every else 2 * model.linear * (every - 1) // every


def optimizer_bytes(optim: Optim, strategy: StrategySpec, trained: int, width: int) -> int:
    """Return the bytes of all states of `trained` weights of `width` bytes."""
    masters = width == 2 and optim.keeps_masters
    copies = 4 * trained if strategy.keeps_masters or masters else 0
    each = optim.spec.state_bytes or (4 if copies else width)
    return copies + math.ceil(optim.spec.states * trained * each)


def _in_float32(config: RunConfig) -> int:
    """Return float32 bytes per number during its step. That is the gradient; without masters also weight, moments and rounding chance."""
    spec = config.optim.spec
    moments = 0 if spec.state_bytes else spec.states
    return 4 * spec.lists_weights + (4 if config.optim.keeps_masters else 4 * (3 + moments))


def _reference(config: RunConfig, model: ModelSize, *, gpu: bool) -> int:
    """Return the bytes of the reference, a model or adapters, or of another frozen model."""
    if frozen := frozen_of(config):
        other = _measure(replace(config, model=frozen[1]), gpu=gpu)
        return math.ceil(other.all * other.width - other.linear * (other.width - (other.packed or other.width)))
    if not config.objective.spec.reference:
        return 0
    kind = reference_of(config.model, config.peft, config.objective, config.strategy).kind
    if kind == "adapters":
        return model.trained * ADAPTER_BYTES
    return model.all * model.width if kind in ("model", "path") else 0


def _advice(config: RunConfig, processes: int) -> str:
    """Suggest what to try, the cheapest first. Nothing that changes the training or conflicts with this config."""
    now, all_ = config.strategy.spec, STRATEGIES.all().values()
    sharding = [one for one in all_ if one.shards_weights and not one.offloads]
    # of the same library, else without float32 copies of float32 weights
    sharded = min(sharding, key=lambda one: (one.run != now.run, one.keeps_masters)).name
    offload = next(one.name for one in all_ if one.offloads)

    def possible(name: str) -> bool:
        return not any(check_strategy(replace(config, strategy=replace(config.strategy, name=name))))

    tries = {
        f"strategy={sharded}": processes > 1 and not now.shards_weights and possible(sharded),
        "trainer.gradient_checkpointing=auto": config.trainer.gradient_checkpointing not in ("auto", "full"),
        "smaller micro-batches (batch.tokens_per_device, examples_per_device)": not config.objective.sorting_losses,
        f"strategy={offload}": now.name != offload and possible(offload),
        "peft=lora": config.peft.kind == "none",
        "larger GPUs": True,
    }
    return f"try {', '.join(what for what, helps in tries.items() if helps)}"


def _advise_split(
    config: RunConfig, model: ModelSize, spread: tuple[int, int], device_bytes: int | None, found: Found
) -> str:
    """Suggest the smallest split of documents over neighbours that fits. "" if splitting is impossible or does not help."""
    if config.packing.mode == "padding" or config.data.max_length is None or config.objective.sorting_losses:
        return ""
    longest = config.data.max_length * config.objective.spec.documents
    for parts in (number for number in range(1, spread[0] + 1) if spread[0] % number == 0):
        part = math.ceil(longest / parts)
        batch = replace(config.batch, tokens_per_device=part, examples_per_device=None)
        if _choose_checkpointing(replace(config, batch=batch), model, spread, device_bytes, found).fits:
            over = f"strategy.sequence_parallel={parts} batch.tokens_per_device={part}"
            return f"{over}, which splits documents of {longest:,} tokens over {parts} processes" if parts > 1 else ""
    return ""
