"""The memory of a run on each device, by part, from weight shapes. No torch, no hub.

Every strategy is counted with the copies that its framework keeps (docs/planning.md has the tables and their sources). Parts add up
to the peak of a step. Memory outside torch's allocator (CUDA's context, kernels, NCCL) is subtracted from the device before a run
counts as fitting; fragmentation is not estimated. Activations are counted for llama and similar models (plan/activations.py).
Logits never exist as a whole: the heads work in chunks of tokens.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from packtrain.config.rules import check_checkpointing, check_strategy
from packtrain.config.schema import Optim, RunConfig
from packtrain.errors import UserError
from packtrain.plan.activations import FullestBatch, count_layers, fullest, offloaded, period
from packtrain.plan.known_model import (
    SCORE,
    Layers,
    Shapes,
    adapter_shapes,
    plan_precision,
    read_layers,
    reference_of,
    weights_of,
)
from packtrain.plan.launcher_settings import BUCKET, STAGES

GIB = 2**30
OUTSIDE = int(1.5 * GIB)
"""Bytes outside torch's allocator on each GPU: CUDA's context, kernels and libraries."""
NCCL = GIB
"""More bytes outside it for each communicator of several ranks (docs/planning.md has the sources)."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FORMATS = {2: "bfloat16"}  # of weights, by their bytes
ADAPTER_BYTES = 4  # peft keeps adapters in float32
QUANTIZED_BYTES = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0, "fp8": 1.0}
"""Bytes of a weight by model.quantize. nf4: 4 bits, an 8-bit scale per 64 weights, a 32-bit scale per 256 of those scales.
Scales of whole rows count as nothing."""
SHARDED = {  # parts that a strategy shards over the processes
    "ddp": (),
    "zero1": ("optimizer",),
    "zero2": ("gradients", "optimizer"),
    "zero3": ("weights", "gradients", "optimizer", "reference"),
    "fsdp2": ("weights", "gradients", "optimizer", "reference"),
    "zero3_offload": ("weights", "gradients", "optimizer", "reference"),
}
_TILE = (4096, 32768)  # tokens and words whose logits exist at once (trl.kernels.chunked_logprob)
# elements of bfloat16 gradients that ZeRO-1 reduces at once (deepspeed's MEMORY_OPT_ALLREDUCE_SIZE)
_REDUCED = 5 * 10**8
_LIVE = 10**9  # gathered weights that ZeRO-3 keeps for reuse (stage3_max_live_parameters)
HEAD_CHUNK = 2048
"""Tokens of documents whose logits exist at once (model/heads/summed.py)."""
COMPARED_PAIRS = 4
CHECKED_LOGITS = 2**27
"""dpo and kto compare the answers of so many first pairs before step 1. CHECKED_LOGITS bounds their logits (train/objectives/first_loss.py)."""
STEPPED = 2**26
"""Numbers in float32 at a time while 16-bit weights take their step in float32 (train/optim/float32_step.py)."""
CHECKPOINTING = ("none", "every_4", "every_3", "selective", "every_2", "full")
"""Values of trainer.gradient_checkpointing, from the fewest recomputed matrix products to all of them."""
SPARE = 0.1
"""Share of a device left free for fragmentation when the plan chooses to use memory.
It chooses trainer.gradient_checkpointing=auto and gradients that are exchanged once a step."""
PARTS = ("weights", "gradients", "optimizer", "reference", "buffers", "activations")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device, by part. `parameters` and `trained` count weights; `trained` includes adapters.

    `reference` is taken to be as large as the trained model. `buffers` belong to strategies and autocast, at the peak. `activations` is
    None if not known, for the reason `unknown`. `host` is memory of the machine per process. `device` is the memory of a GPU, if known;
    `outside` is allowed for on it beside torch's allocator. `checkpointing` is the resolved trainer.gradient_checkpointing, `chosen` the
    reason. FSDP2: `accumulated` are the whole float32 gradients that stay on each GPU between a step's micro-batches if only the last
    one exchanges them. A micro-batch that exchanges gradients sends `leaving` bytes out of each machine.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int | None
    reference: int = 0
    host: int = 0
    unknown: str = ""
    device: int | None = None
    advice: str = ""
    outside: int = OUTSIDE
    checkpointing: str = "none"
    chosen: str = ""
    accumulated: int | None = None
    leaving: int | None = None
    processes: int = 1

    @property
    def total(self) -> int:
        """The sum of all known parts."""
        return sum(getattr(self, name) or 0 for name in PARTS)

    @property
    def fits(self) -> bool | None:
        """Whether the run fits the device. None: the device is unknown, or only some parts are known and they fit."""
        if self.device is None:
            return None
        fits = self.total + self.outside <= self.device
        return None if fits and self.activations is None else fits

    @property
    def exchanges_once(self) -> bool:
        """Whether FSDP2 exchanges gradients once a step: the accumulated ones must fit too. Else after each micro-batch."""
        if not self.fits or self.accumulated is None or self.device is None:
            return False
        return self.total + self.outside + self.accumulated <= (1 - SPARE) * self.device

    def exchange(self) -> str:
        """Say when FSDP2 exchanges gradients; "" for other strategies."""
        if self.accumulated is None:
            return ""
        if self.exchanges_once:
            return (
                f"exchanged once a step; {in_gib(self.total + self.accumulated)} GiB in all between its micro-batches"
            )
        why = "which is not known to fit" if self.fits is None else "which is too much"
        return f"exchanged after each micro-batch; once a step would take {in_gib(self.accumulated)} GiB more, {why}"

    def sentence(self) -> str:
        """Return the total in words and, if it does not fit, what to try."""
        if self.device is None:
            text = f"{in_gib(self.total)} GiB of each device"
            if self.processes > 1:
                text += f" ({in_gib(self.total * self.processes)} GiB for all {self.processes} processes, if they are on one CPU)"
        else:
            text = f"{in_gib(self.total + self.outside)} of the {in_gib(self.device)} GiB of each GPU"
        if self.activations is None:
            text += f" before activations ({self.unknown})"
        if self.device is None:
            text += "; no GPU to compare with (packtrain plan --gpu-memory 80 names one)"
        elif self.fits is not None:
            text += ": fits" if self.fits else f": DOES NOT FIT, {self.advice}"
        text += f"; and {in_gib(self.host)} GiB of the machine's own memory per process" if self.host else ""
        return text + (f"; {in_gib(self.leaving)} GiB leave each machine with a micro-batch" if self.leaving else "")

    def to_json(self) -> dict[str, Any]:
        """Return the figures, `total`, whether it `fits`, and the sentence as `summary`."""
        derived = {"total": self.total, "fits": self.fits, "exchanges_once": self.exchanges_once}
        return {**asdict(self), **derived, "summary": self.sentence()}


@dataclass(frozen=True, slots=True)
class _Model:
    """A model in numbers, computed once for all configs that are tried.

    `width` is the bytes of a weight. Numbers of weights: `all`, in the `linear` layers and experts of its blocks, in the largest
    `block`, outside of blocks (`rest`, with any untied `embedding`), in the `largest` tensor, and `trained`.
    `sizes` are the known values of its own config. `packed`: bytes of a number in the linear layers if they are quantised.
    """

    width: int
    packed: float | None
    all: int
    linear: int
    block: int
    rest: int
    embedding: int
    largest: int
    trained: int
    sizes: Mapping[str, Any]


def estimate(config: RunConfig, processes: int, device_bytes: int | None = None, machines: int = 1) -> Memory | str:
    """Estimate the memory of a run on `processes` devices, or say why that is impossible.

    Devices have `device_bytes` each; None plans for CPUs. If the run exceeds the device, `advice` says what to try.
    """
    try:
        model = _measure(config)
        decided, _ = plan_precision(config, _FORMATS.get(model.width, "float32"), gpu=device_bytes is not None)
        # 8-bit products keep the same tensors as bfloat16 products, except autocast's copies of weights
        decided = decided.replace("fp8", "bf16")
        config = replace(config, trainer=replace(config.trainer, mixed_precision=decided))
        memory = _choose_checkpointing(config, model, (processes, machines), device_bytes)
    except UserError as error:
        return f"not known before loading: {error}"
    if memory.fits is not False:
        return memory
    split = _advise_split(config, model, (processes, machines), device_bytes)
    return replace(memory, advice=f"try {split}" if split else _advice(config, processes))


def _choose_checkpointing(
    config: RunConfig, model: _Model, spread: tuple[int, int], device_bytes: int | None
) -> Memory:
    """Resolve trainer.gradient_checkpointing and return the memory. `auto` recomputes just enough to leave SPARE of the device free."""
    counts: dict[str, Memory] = {}
    for policy in CHECKPOINTING:
        tried = replace(config, trainer=replace(config.trainer, gradient_checkpointing=cast(Any, policy)))
        if not any(check_checkpointing(tried)):
            counts[policy] = _count(tried, model, *spread, gpu=device_bytes is not None)
            counts[policy] = replace(counts[policy], device=device_bytes, checkpointing=policy)
    asked, kept = config.trainer.gradient_checkpointing, counts["none"]
    if asked != "auto":
        return replace(counts[asked], chosen="asked for")
    if device_bytes is None or kept.activations is None:
        return replace(kept, chosen="auto: no GPU" if device_bytes is None else "auto: activations are not known")
    room = (1 - SPARE) * device_bytes - kept.outside
    chosen = next((memory for memory in counts.values() if memory.total <= room), counts["full"])
    if chosen is kept:
        return replace(kept, chosen="auto: all fits")
    return replace(chosen, chosen=f"auto: with none it would take {in_gib(kept.total + kept.outside)} GiB")


def _measure(config: RunConfig) -> _Model:
    weights = weights_of(config.model, scores=config.objective.spec.scores)
    shapes = weights.shapes
    trained = adapter_shapes(shapes, config.peft)
    if config.peft.kind == "none":
        scales = {name: [one.lr_scale for one in config.optim.groups if re.search(one.match, name)] for name in shapes}
        trained = [shape for name, shape in shapes.items() if scales[name][:1] != [0]]
    if not trained:
        raise UserError("no layer of the model has a name of peft.target_modules")
    blocks: Counter[str] = Counter()
    linear = 0
    for name, shape in shapes.items():
        block = re.match(r".*?\.\d+(?=\.)", name)
        blocks[block.group() if block else ""] += math.prod(shape)
        linear += math.prod(shape) if block and len(shape) >= 2 else 0
    rest = blocks.pop("", 0)
    return _Model(
        width=BYTES.get(config.model.dtype, weights.stored),
        packed=QUANTIZED_BYTES.get(config.model.quantize, weights.packed),
        all=rest + sum(blocks.values()),
        linear=linear,
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


def _count(config: RunConfig, model: _Model, processes: int, machines: int, *, gpu: bool) -> Memory:
    name, full, copied = config.strategy.name, config.peft.kind == "none", config.strategy.shard_within == "machine"
    shards = processes // machines if copied else processes
    rounded = name in STAGES and model.width == 2  # DeepSpeed's bf16 applies to all weights
    trained_width = model.width if full or rounded else ADAPTER_BYTES
    saved = model.linear * (model.width - (model.packed or model.width))
    parts = {
        "weights": math.ceil(model.all * model.width - saved) + (0 if full else model.trained * trained_width),
        "gradients": model.trained * (4 if rounded else trained_width),  # DeepSpeed sums them in float32
        "optimizer": optimizer_bytes(config.optim, name, model.trained, trained_width)
        + (4 * model.trained if config.trainer.ema else 0),
        "reference": _reference(config, model),
    }
    split = {item: math.ceil(size / shards) if item in SHARDED[name] else size for item, size in parts.items()}
    host = model.all * model.width if "weights" in SHARDED[name] else 0  # each process loads all, then shards
    if config.model.is_base_for_adapters and not config.peft.options.get(
        "use_dora"
    ):  # each process reads only its slices (model/weights/slices.py)
        host = math.ceil(host / shards)
    if name == "zero3_offload":
        split["gradients"] += math.ceil(4 * model.trained / processes)  # also in float32, for the optimizer
        host = max(host, sum(split.values()))
        split = dict.fromkeys(split, 0)
    activations, moved, unknown = _activations(config, model, gpu=gpu)
    host = max(host, moved + (host if name == "zero3_offload" else 0))
    buffers = _buffers(config, model, processes, trained_width)
    stepped = math.ceil(model.trained / (shards if "optimizer" in SHARDED[name] else 1))
    # during the optimizer's step: ZeRO-2 and 3 copy gradients to float32, AdamW makes a temporary list of tensors
    in_float32 = 4 if rounded and name != "zero1" else 0
    stepping = stepped * (in_float32 + (trained_width if config.optim.name == "adamw_torch" else 0))
    if trained_width == 2 and not rounded:
        stepping = _in_float32(config) * min(stepped, max(STEPPED, model.largest))
    if rounded and name == "zero1" and processes > 1:
        stepping = max(stepping, 4 * min(_REDUCED, model.trained))
    after = 0 if name == "zero3_offload" else stepping - (activations or 0)  # activations are freed by then
    checking = 0 if name == "zero3_offload" else _first_check(config, model, gpu=gpu) - (activations or 0)
    checking -= split["gradients"] + split["optimizer"]  # neither exists before step 1
    watching = 0 if name == "zero3_offload" else _first_watch(config, model, gpu=gpu) - (activations or 0)
    watching -= split["gradients"]
    communicators = 0 if processes == 1 else 2 if name in STAGES else 1  # DeepSpeed clones the group of all processes
    return Memory(
        **{**split, "buffers": max(buffers, after, checking, watching), "activations": activations},
        parameters=model.all,
        trained=model.trained,
        host=host,
        unknown=unknown,
        outside=OUTSIDE + communicators * NCCL,
        accumulated=4 * model.trained if name == "fsdp2" and processes > 1 else None,
        leaving=_leaving(config, model, machines) if name == "fsdp2" and machines > 1 else None,
        processes=processes,
    )


def _leaving(config: RunConfig, model: _Model, machines: int) -> int:
    """Return the bytes that one gradient exchange sends out of each machine. Its rings span all processes, or only machines."""
    if config.strategy.shard_within == "machine":
        return 2 * 4 * model.trained * (machines - 1) // machines  # gradients are summed, then handed back
    compute = 2 if config.trainer.mixed_precision == "bf16" else model.width
    return 2 * compute * model.all - compute * model.embedding + 4 * model.trained  # weights in both passes, gradients


def _activations(config: RunConfig, model: _Model, *, gpu: bool) -> tuple[int | None, int, str]:
    """Return bytes of activations at the peak, their bytes on the host, and "". Or None, 0, and why they are unknown."""
    batch = fullest(config, model.width, gpu=gpu)
    try:
        layers = read_layers(model.sizes)
    except UserError as error:
        return None, 0, f"not known: {error}"
    if batch is None:
        return None, 0, "not known: a micro-batch has no longest document (data.max_length) and no most tokens"
    waiting, working = count_layers(config, layers, batch)
    return waiting + max(working, _head(config, layers, batch)), offloaded(config, layers, batch), ""


def _head(config: RunConfig, layers: Layers, batch: FullestBatch) -> int:
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
    chunk = min(batch.tokens, HEAD_CHUNK) * layers.vocabulary * batch.compute
    return batch.tokens * layers.hidden * (batch.weight + batch.compute + cast) + chunk + weight * cast + of_weight


def _first_check(config: RunConfig, model: _Model, *, gpu: bool) -> int:
    """Return the bytes of the check of first pairs before step 1. It holds logits, also in float32, and log-probabilities."""
    if not config.objective.spec.reference or not config.verify.preflight:
        return 0
    compute = 2 if config.trainer.mixed_precision == "bf16" else model.width
    longest, vocabulary = config.data.max_length, model.sizes.get("vocab_size")
    batch = fullest(config, model.width, gpu=gpu)
    tokens = [item for item in (batch and batch.tokens, longest and 2 * COMPARED_PAIRS * longest) if item]
    every = min(tokens) * vocabulary if tokens and vocabulary else CHECKED_LOGITS
    return min(every, CHECKED_LOGITS) * (compute + 8)


def _first_watch(config: RunConfig, model: _Model, *, gpu: bool) -> int:
    """Return the bytes of TRL's head in the watch over first steps. It needs a tile of logits, and no gradients."""
    batch = fullest(config, model.width, gpu=gpu)
    if config.objective.spec.examples != "documents" or not config.verify.preflight or batch is None:
        return 0
    return min(batch.tokens, _TILE[0]) * _TILE[1] * batch.compute


def _buffers(config: RunConfig, model: _Model, processes: int, trained_width: int) -> int:
    """Return the bytes that the strategy and autocast hold during the backward pass."""
    name, full, width = config.strategy.name, config.peft.kind == "none", model.width
    copies, mixed = 0, config.trainer.mixed_precision == "bf16"
    if mixed and width == 4 and model.packed is None:
        # autocast keeps copies of trained weights until the step ends, copies of frozen weights as long as activations
        every = period(config.trainer.gradient_checkpointing)
        copies = 2 * model.linear if full or not every else 2 * model.linear * (every - 1) // every
    if name == "ddp":
        return copies + (model.trained * trained_width if processes > 1 else 0)
    if name == "fsdp2":
        # a layer, the buffer that it was gathered in, and the next layer; other weights stay gathered, but not the embedding (model/spread.py)
        compute = 2 if mixed else width
        gathered = 3 * model.block * (model.packed or compute)
        gathered += (model.rest - model.embedding) * compute
        made, reduced = (model.block + model.rest, model.block) if full else (0, 0)  # gradients, reduced in float32
        return math.ceil(gathered) + made * min(compute, trained_width) + reduced * 4
    rounded = width == 2
    if name == "zero1" and rounded:
        return copies  # no buckets: gradients are reduced when the step is complete
    if STAGES[name] < 3:  # one bucket is reduced, in float32, while the other fills (overlap_comm)
        return copies + 2 * trained_width * BUCKET + (4 * min(BUCKET, model.trained) if rounded else 0)
    return copies + 4 * BUCKET + min(model.all, _LIVE) * width


def optimizer_bytes(optim: Optim, strategy: str, trained: int, width: int) -> int:
    """Return the bytes of all states of `trained` weights of `width` bytes. DeepSpeed's optimizers add flat float32 copies."""
    masters = width == 2 and optim.keeps_masters
    copies = 4 * trained if strategy in STAGES or masters else 0
    each = 1 if "8bit" in optim.name else 0.5 if "4bit" in optim.name else 4 if copies else width
    return copies + math.ceil(_moments(optim.name) * trained * each)


def _moments(optimizer: str) -> int:
    """Return how many numbers an optimizer keeps per weight. adafactor's row and column per matrix count as nothing."""
    if optimizer in ("sgd", "adafactor"):
        return 0
    one = any(word in optimizer for word in ("lion", "rmsprop", "adagrad", "muon"))
    return 3 if "ademamix" in optimizer else 1 if one else 2


def _in_float32(config: RunConfig) -> int:
    """Return float32 bytes per number during its step. That is the gradient; without masters also weight, moments and rounding chance."""
    moments = 0 if any(bits in config.optim.name for bits in ("8bit", "4bit")) else _moments(config.optim.name)
    listed = 4 if config.optim.name == "adamw_torch" else 0
    return listed + (4 if config.optim.keeps_masters else 4 * (3 + moments))


def _reference(config: RunConfig, model: _Model) -> int:
    """Return the bytes of the model or the adapters that are kept for the reference."""
    if not config.objective.spec.reference:
        return 0
    kind = reference_of(config.model, config.peft, config.objective, config.strategy).kind
    if kind == "adapters":
        return model.trained * ADAPTER_BYTES
    return model.all * model.width if kind in ("model", "path") else 0


def _advice(config: RunConfig, processes: int) -> str:
    """Suggest what to try, the cheapest first. Nothing that changes the training or conflicts with this config."""
    now, offload = config.strategy.name, "zero3_offload"
    sharded = "zero3" if now in STAGES else "fsdp2"  # FSDP2 keeps no float32 copies of float32 weights

    def possible(name: str) -> bool:
        return not any(check_strategy(replace(config, strategy=replace(config.strategy, name=name))))

    tries = {
        f"strategy={sharded}": processes > 1 and "weights" not in SHARDED[now] and possible(sharded),
        "trainer.gradient_checkpointing=auto": config.trainer.gradient_checkpointing not in ("auto", "full"),
        "smaller micro-batches (batch.tokens_per_device, examples_per_device)": not config.objective.sorting_losses,
        f"strategy={offload}": now != offload and possible(offload),
        "peft=lora": config.peft.kind == "none",
        "larger GPUs": True,
    }
    return f"try {', '.join(what for what, helps in tries.items() if helps)}"


def _advise_split(config: RunConfig, model: _Model, spread: tuple[int, int], device_bytes: int | None) -> str:
    """Suggest the smallest split of documents over neighbours that fits. "" if splitting is impossible or does not help."""
    if config.packing.mode == "padding" or config.data.max_length is None or config.objective.sorting_losses:
        return ""
    longest = config.data.max_length * config.objective.spec.documents
    for parts in (number for number in range(1, spread[0] + 1) if spread[0] % number == 0):
        part = math.ceil(longest / parts)
        batch = replace(config.batch, tokens_per_device=part, examples_per_device=None)
        if _choose_checkpointing(replace(config, batch=batch), model, spread, device_bytes).fits:
            over = f"strategy.sequence_parallel={parts} batch.tokens_per_device={part}"
            return f"{over}, which splits documents of {longest:,} tokens over {parts} processes" if parts > 1 else ""
    return ""


def in_gib(size: int) -> str:
    """Return bytes in GiB, as plans show them."""
    value = size / GIB
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 10**6 else f"{value:.1e}"
