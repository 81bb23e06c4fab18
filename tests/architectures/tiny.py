"""A tiny random model of every language model that the installed transformers registers, with towers or without, made by rule.

The rule: take the config's defaults, keep one layer of each kind, and shrink every size by the words in its name. Types that
need more are in quirks.py, each with its reason. What it costs is that a new model with an unusual name for a size needs a
line there; a size that slips through is refused before any memory is taken.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from quirks import QUIRKS
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from packtrain.model.towers import let_run_text
from packtrain.plan.model_types import UNTRAINABLE

VOCABULARY, WINDOW, LONGEST = 128, 8, 256
_MAX_PARAMETERS = 5_000_000
_STD = 0.15  # large enough that what a token sees shows in its outputs
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_LAYER_COUNTS += ("num_blocks",)
_LOCAL = r"sliding_window|window_size|attention_chunk_size|local_attention|^index_topk$|local_window"
_SIZES: tuple[tuple[str, int], ...] = (  # the first that matches counts; a value is never made larger
    (r"vocab|codebook_size", VOCABULARY),
    (r"max_position|n_positions|^n_ctx$|max_seq_len|max_target_positions|context_length", LONGEST),
    (r"head_dim|d_head|dim_head|headdim|head_size|d_kv|kv_channels|rotary_dim", 16),
    (r"index.*n_heads", 16),  # of fewer heads many keys have the score zero, and rounding chooses among them
    (r"heads|n_head$", 4),
    (r"dense_replace|dense_layers|topk_group", 1),
    (r"shared_experts", 1),
    (r"layer$|layers|_blocks$|^depth$", 2),
    (r"experts_per_tok|top_?k|moe_k$|expert_group|n_group", 2),
    (r"experts$|expert_num", 4),
    (r"rank|state_size|d_state|chunk_size|block_size", 16),
    (r"intermediate|ffn_dim|ffn_hidden|d_inner|^dff$|d_ff|ff_size|mlp_dim", 96),
    (r"hidden|embd|embed|d_model|emb_dim|width|d_ssm|dim$|size$|channels", 64),
)
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
_DERIVED = ("qk_head_dim",)  # made from other sizes where it is not given


@dataclasses.dataclass(frozen=True, slots=True)
class Unbuildable:
    """Why a type has no tiny model that trains on text."""

    reason: str


def model_types() -> list[str]:
    """Every type that transformers registers as a causal language model, or as a model that sees or hears, too."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def whole_types() -> list[str]:
    """The types with towers."""
    return sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)


def auto_class(model_type: str) -> type[AutoModelForCausalLM] | type[AutoModelForMultimodalLM]:
    """What makes the whole model of a type, with its towers."""
    return AutoModelForMultimodalLM if model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES else AutoModelForCausalLM


def tiny_model(model_type: str, window: int = WINDOW) -> PreTrainedModel | Unbuildable:
    """A model of `model_type` in float32 and eval mode, with two to four layers of width 64 and a vocabulary of 128.

    `window` is the reach in tokens of layers that see locally. Raises ValueError where a size slipped through the rule.
    """
    if model_type in UNTRAINABLE:
        return Unbuildable(UNTRAINABLE[model_type])
    config, auto = tiny_config(model_type, window), auto_class(model_type)
    try:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in auto.from_config(config).parameters())
    except ImportError as error:
        return Unbuildable(str(error).strip().split(". ")[0])
    if parameters > _MAX_PARAMETERS:
        raise ValueError(f"{model_type} would have {parameters:,} parameters: some size was not made small")
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = _STD * torch.randn_like(parameter)
            # scales stay near 1, nothing is equal
            parameter.copy_(noise if parameter.dim() >= 2 else parameter + noise)
    let_run_text(model)
    return model.eval()  # no dropout


def tiny_config(model_type: str, window: int = WINDOW) -> PreTrainedConfig:
    """The small config of `model_type`."""
    kind = CONFIG_MAPPING[model_type]
    names = {field.name for field in dataclasses.fields(kind)}
    # a window that is off by default is turned on, for every layer but the first
    local = {"use_sliding_window": True, "max_window_layers": 1} if "max_window_layers" in names else {}
    quirk = QUIRKS.get(model_type)
    full = kind(**{**local, **(quirk.full if quirk else {})})
    return kind(**{**local, **_small(full, window)})


def _small(config: PreTrainedConfig, window: int) -> dict[str, Any]:
    """The arguments that make `config` small, its quirks included, and those of the configs in it."""
    values = _values(config)
    count = next((values[name] for name in _LAYER_COUNTS if isinstance(values.get(name), int)), None)
    kept = _one_layer_of_each_kind([v for v in values.values() if _is_per_layer(v, count) and not _is_numbering(v)])
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = {"model_type": value.model_type, **_small(value, window)}
        elif kept and _is_per_layer(value, count):
            chosen = range(len(kept)) if _is_numbering(value) else kept
            small[name] = [_smaller(name, value[i], window) for i in chosen]
        elif kept and name in _LAYER_COUNTS:
            small[name] = len(kept)
        elif name not in _DERIVED and _smaller(name, value, window) != value:
            small[name] = _smaller(name, value, window)
    small |= _heads(values)
    if "is_decoder" in values:
        small["is_decoder"] = True  # encoders see both ways unless they are told
    quirk = QUIRKS.get(config.model_type)
    return small | (quirk.small if quirk else {})


def _values(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of `config`. Not by getattr, which refuses names whose value differs by layer."""
    own = {**vars(type(config)), **vars(config)}
    names = {field.name: config.attribute_map.get(field.name, field.name) for field in dataclasses.fields(config)}
    return {name: own[real] for name, real in names.items() if real in own}


def _is_per_layer(value: Any, count: int | None) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count


def _is_numbering(value: list[Any]) -> bool:
    """Whether a list says which layers are of some kind, and says all."""
    return list(value) == list(range(len(value)))


def _one_layer_of_each_kind(lists: list[Any]) -> list[int]:
    """Numbers of the layers to keep, at least two, so that every value of every per-layer list is still there."""
    kept: list[int] = []
    seen: set[tuple[int, str]] = set()
    for layer in range(len(lists[0]) if lists else 0):
        kinds = {(number, str(values[layer])) for number, values in enumerate(lists)}
        if not kinds <= seen:
            kept.append(layer)
            seen |= kinds
    return [*kept, *kept[:1]] if len(kept) == 1 else kept


def _heads(values: dict[str, Any]) -> dict[str, Any]:
    """Grouped queries stay grouped, and multi-head attention stays multi-head."""
    small: dict[str, Any] = {}
    heads, key_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(key_heads, int) and heads != key_heads:
        small["num_key_value_heads"] = min(key_heads, 2)
    if isinstance(heads, int) and "num_key_value_heads" in values and key_heads is None:
        small["num_key_value_heads"] = 2
    if "head_dim" in values and values["head_dim"] is None:
        small["head_dim"] = 16
    return small


def _smaller(name: str, value: Any, window: int) -> Any:
    if name == "sliding_window" and value is None:
        return window  # off by default, on in some released models
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name in _SPECIAL_TOKENS:
        return _SPECIAL_TOKENS[name]
    if re.search(r"token_(id|index)$|_idx$", name):
        return value  # of images and sounds: beyond the small vocabulary, where no text has them
    if re.search(_LOCAL, name):
        return min(value, window)
    return next((min(value, size) for pattern, size in _SIZES if re.search(pattern, name)), value)
