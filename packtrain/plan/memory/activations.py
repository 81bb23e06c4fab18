"""What the forward pass of a micro-batch keeps for the backward pass, for llama and its kin.

The counting is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), applied to what transformers' layers keep:
RMS norms in float32, three tensors of the MLP's inner width and their product, attention without its s² term (kernels that
work by segments keep queries, keys, values, outputs and one number per head and token), no dropout. Where there is a mask, a
layer keeps one of token × longest document and keys and values for every head: padded batches, and under
model.attention=sdpa_mask packed rows, where it is token × row. With gradient checkpointing a layer keeps its input, and one
layer at a time is computed again.

Logits never exist as a whole: TRL's head works in tiles of 4,096 tokens × 32,768 words, but makes the gradient of its weight
in float32. A micro-batch is taken to be as full as the config allows, so what is found is the most that a step can need.
"""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.config.schema import RunConfig
from packtrain.plan.memory.shapes import Layers, is_adapted

_TILE = (4096, 32768)  # tokens and words whose logits exist at once (trl.kernels.chunked_logprob)
_OF_ATTENTION = ("q_proj", "k_proj", "v_proj")
_OF_THE_MLP = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Numbers:
    """Bytes of a number: of a stored weight, and of what layers compute in (another one under autocast)."""

    weight: int
    compute: int


@dataclass(frozen=True, slots=True)
class Slots:
    """The fullest micro-batch of a device: its token slots, and how many keys the mask of a query spans where there is one."""

    tokens: int
    masked: int | None


def fullest(config: RunConfig) -> Slots | None:
    """The fullest micro-batch that `config` allows; None where neither its tokens nor its documents' lengths have a limit."""
    each = 1 if config.objective.kind == "sft" else 2
    examples, tokens = config.batch.limits(config.packing.mode)
    longest = config.data.max_length
    bounds = [] if tokens is None else [tokens]
    if longest is not None:
        documents = (examples, config.batch.examples_per_step)
        bounds += [one * each * longest for one in documents if one is not None]
    if not bounds:
        return None
    most = min(bounds)
    if config.packing.mode == "padding":
        return Slots(most, min(longest or most, most))
    return Slots(most, most if config.model.attention == "sdpa_mask" else None)


def kept(config: RunConfig, of: Layers, slots: Slots, numbers: Numbers) -> int:
    """Bytes at the fullest moment of the fullest micro-batch: what waits for the backward pass, and what works then.

    At work is the output head, or the backward pass of the last layer.
    """
    waiting, working = of_the_layers(config, of, slots, numbers)
    return waiting + max(working, _of_the_head(config, of, slots.tokens, numbers))


def of_the_layers(config: RunConfig, of: Layers, slots: Slots, numbers: Numbers) -> tuple[int, int]:
    """(bytes that all layers keep between the passes, bytes that the last one needs in its backward pass)."""
    layer = slots.tokens * _of_a_layer(config, of, slots, numbers)
    gradients = slots.tokens * 2 * of.inner * numbers.compute  # those inside the MLP
    last_norm = slots.tokens * of.hidden * (4 + numbers.weight)
    if config.trainer.gradient_checkpointing:
        return of.number * slots.tokens * of.hidden * numbers.weight + last_norm, layer + gradients
    return of.number * layer + last_norm, gradients


def _of_a_layer(config: RunConfig, of: Layers, slots: Slots, numbers: Numbers) -> int:
    """Bytes that a layer keeps of a token."""
    full, compute = config.peft.kind == "none", numbers.compute
    norms = 2 * of.hidden * (4 + (numbers.weight if full else 0)) + 8
    if of.kind == "qwen3":
        norms += (of.query + of.key) * (4 + (compute if full else 0))
    keys = of.query if slots.masked else of.key  # a mask makes sdpa repeat them for every head
    attention = compute * (2 * of.query + 2 * keys + (slots.masked or 0)) + 4 * of.heads
    return norms + attention + 3 * of.inner * compute + _of_inputs(config, of, numbers)


def _of_inputs(config: RunConfig, of: Layers, numbers: Numbers) -> int:
    """Bytes per token that the linear layers of one layer keep of their inputs, where their weights or adapters are trained.

    Layers that read the same tensor share it, unless each makes its own copy: in the format that autocast wants, or in the
    adapters' float32. What o_proj reads attention has kept already, down_proj's input is always new.
    """
    full, autocast = config.peft.kind == "none", config.trainer.mixed_precision == "bf16"
    reading = [
        name for name in (*_OF_ATTENTION, *_OF_THE_MLP, "o_proj", "down_proj") if full or _is_adapted(config, name)
    ]
    if full:
        copied, width = numbers.compute != numbers.weight, numbers.compute
    else:
        copied, width = autocast or numbers.weight != 4, 2 if autocast else 4
    if copied:
        hidden = sum(name in reading for name in (*_OF_ATTENTION, *_OF_THE_MLP))
    else:
        hidden = sum(any(name in reading for name in names) for names in (_OF_ATTENTION, _OF_THE_MLP))
    copy_of_query = of.query if copied and not full and "o_proj" in reading else 0
    return width * (hidden * of.hidden + copy_of_query + (of.inner if "down_proj" in reading else 0))


def _is_adapted(config: RunConfig, name: str) -> bool:
    part = "mlp" if name in (*_OF_THE_MLP, "down_proj") else "self_attn"
    return is_adapted(f"model.layers.0.{part}.{name}", config.peft.target_modules)


def _of_the_head(config: RunConfig, of: Layers, tokens: int, numbers: Numbers) -> int:
    """Bytes of the head's backward pass: its input and the gradient of it, a tile of logits, the gradient of its weight."""
    tile = min(tokens, _TILE[0]) * _TILE[1] * numbers.compute
    trained = config.peft.kind == "none" or "lm_head" in config.peft.modules_to_save
    return tokens * of.hidden * (numbers.compute + 4) + tile + (of.vocabulary * of.hidden * 4 if trained else 0)
