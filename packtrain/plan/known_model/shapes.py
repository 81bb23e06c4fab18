"""The shapes of a model's weights, and the sizes in its config, before it is loaded: no torch, no hub.

They come from the headers of safetensors files in a local folder or in the hub's cache; for a model that is not there, from
the sizes in its config (or in model.config), for llama and models like it, whose layers are known. If neither is available, the
error says what is missing; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from packtrain.config.schema import Model, Peft
from packtrain.errors import UserError, read_json
from packtrain.plan.reference_choice import base_of

_LLAMA_KIN = ("llama", "mistral", "qwen2", "qwen3")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_HEADER_LIMIT = 100 * 2**20
MOST_LAYERS = 10_000
"""Far more than any model has; a plan of all that a typo asks for would not be instant."""

SCORE = "score.weight"
"""The head of a reward model."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Weights:
    """`shapes` by name, the bytes of a `stored` number, and the known values of the model's own config (`sizes`)."""

    shapes: Shapes
    stored: int
    sizes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layers:
    """A llama-like model by its widths in numbers: those of the residual stream, the inside of the MLP, all queries
    together, and all keys."""

    kind: str
    number: int
    heads: int
    hidden: int
    inner: int
    query: int
    key: int
    head: int
    vocabulary: int


def weights_of(model: Model, *, scores: bool = False) -> Weights:
    """The weights of a model, without adapters; with `scores` those of a reward model, which has a score for its output head.

    Raises UserError with what is missing to know them before it is loaded.
    """
    found = _weights_of(model)
    if not scores:
        return found
    widths = [shape[1] for name, shape in found.shapes.items() if re.search(r"embed_tokens|\bwte\b|embed_in", name)]
    head = {SCORE: (1, widths[0])} if widths else {}
    kept = {name: shape for name, shape in found.shapes.items() if not re.search(r"\b(lm_head|embed_out)\b", name)}
    return replace(found, shapes={**head, **kept})


def _weights_of(model: Model) -> Weights:
    model = replace(model, path=_base(model))
    folder, sizes = _folder(model), known_sizes(model)
    if model.init == "random":
        return Weights(_from_sizes(sizes), 4, sizes)
    if model.path and model.path.endswith(".gguf"):
        raise UserError("a .gguf file is read while loading only")
    if folder is not None:
        return _stored(folder, sizes)
    if "model_type" in sizes:
        return Weights(_from_sizes(sizes), 2, sizes)  # what model.dtype=auto finds on the hub is bfloat16
    how = "its sizes can be given: model.config.model_type=…, model.config.hidden_size=… (docs/planning.md has all)"
    raise UserError(f"{model.path} is not on this machine yet; {how}")


def known_sizes(model: Model) -> dict[str, Any]:
    """The values of the model's own config that are known: those of its config.json, where it is on this machine, and of model.config.

    Raises UserError for a file that is no config.
    """
    folder = _folder(replace(model, path=_base(model)))
    return {**(_read(folder / "config.json") if folder else {}), **model.config}


def _base(model: Model) -> str | None:
    return (base_of(model.path) if model.init == "pretrained" else None) or model.path


def layers_of(sizes: Mapping[str, Any]) -> Layers:
    """The layers of a llama, mistral, qwen2 or qwen3 model of these sizes. Raises UserError with what is missing."""
    kind = sizes.get("model_type")
    if kind not in _LLAMA_KIN:
        raise UserError(f"the layers of model type {kind} are not among those that packtrain knows")
    needed = _SIZES if kind == "llama" else (*_SIZES, "num_key_value_heads")
    needed = (*needed, "head_dim") if kind == "qwen3" else needed
    missing = [name for name in needed if not isinstance(sizes.get(name), int) or sizes[name] < 1]
    if missing:
        whose = "tokenizer" if missing[0] == "vocab_size" else "model type"
        raise UserError(f"model.config.{missing[0]} is left to the {whose}")
    if odd := [name for name in ("head_dim", "num_key_value_heads") if not isinstance(sizes.get(name) or 0, int)]:
        raise UserError(f"model.config.{odd[0]} is no whole number")
    hidden, inner, number, heads, vocabulary = (sizes[name] for name in _SIZES)
    if number > MOST_LAYERS:
        raise UserError(f"model.config.num_hidden_layers={number:,}: up to {MOST_LAYERS:,} are counted")
    head = sizes.get("head_dim") or hidden // heads
    shared = (sizes.get("num_key_value_heads") or heads) * head
    return Layers(kind, number, heads, hidden, inner, heads * head, shared, head, vocabulary)


def adapter_shapes(shapes: Shapes, peft: Peft) -> list[tuple[int, ...]]:
    """The shapes of the trained weights of LoRA: two matrices per adapted layer, and layers trained in full."""
    found: list[tuple[int, ...]] = []
    targets = peft.target_modules if isinstance(peft.target_modules, str) else {*peft.target_modules}
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if name == SCORE:  # trained in full
            found.append(shape)
            continue
        if len(shape) == 2 and is_adapted(layer, targets):
            found += [(peft.r, shape[1]), (shape[0], peft.r)]
        if any(ending in peft.modules_to_save for ending in _endings(layer.removesuffix(".bias"))):
            found.append(shape)
    return found


def is_adapted(layer: str, targets: str | Collection[str]) -> bool:
    """Whether peft gives an adapter to the linear layer of this name."""
    if targets == "all-linear":
        return not re.search(r"embed|lm_head|\bwte\b|\bwpe\b", layer)
    if not isinstance(targets, str):
        return any(ending in targets for ending in _endings(layer))
    with contextlib.suppress(re.error):
        return re.fullmatch(targets, layer) is not None  # as in peft, text is a pattern
    return False


def _folder(model: Model) -> Path | None:
    """The local folder of the model: its path, else its snapshot in the hub's cache; None if there is none."""
    if model.path is None:
        return None
    path = Path(os.path.expanduser(model.path))
    if path.is_dir():
        return path
    repository = Path(constants.HF_HUB_CACHE) / f"models--{model.path.replace('/', '--')}"
    revision = model.revision or "main"
    with contextlib.suppress(OSError):  # a revision may be a commit itself
        revision = (repository / "refs" / revision).read_text().strip()
    snapshot = repository / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def _stored(folder: Path, sizes: Mapping[str, Any]) -> Weights:
    """What the safetensors files of a folder hold; those of a sharded model are named by its index."""
    index = _read(folder / "model.safetensors.index.json").get("weight_map", {})
    named = index.values() if isinstance(index, dict) else ()
    files = sorted({str(one) for one in named}) or ["model.safetensors"]
    shapes: dict[str, tuple[int, ...]] = {}
    width = 4
    for file in files:
        if not (folder / file).is_file():
            raise UserError("there are no weights, or they are no regular file", where=str(folder / file))
        try:
            with open(folder / file, "rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(size, _HEADER_LIMIT)))
            header.pop("__metadata__", None)
            shapes |= {name: tuple(one["shape"]) for name, one in header.items()}
            width = 2 if any(one["dtype"] in ("BF16", "F16") for one in header.values()) else 4
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{folder / file} cannot be read as safetensors") from error
    return Weights(shapes, width, sizes)


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} where there is none. Raises UserError for anything else."""
    if not os.path.lexists(path):
        return {}
    return read_json(path)


def _from_sizes(sizes: Mapping[str, Any]) -> Shapes:
    """The weights of a llama, mistral, qwen2 or qwen3 model of these sizes."""
    of = layers_of(sizes)
    bias = of.kind == "qwen2" or (of.kind != "mistral" and sizes.get("attention_bias", False))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (of.vocabulary, of.hidden),
        "model.norm.weight": (of.hidden,),
    }
    if not sizes.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (of.vocabulary, of.hidden)
    for layer in range(of.number):
        at = f"model.layers.{layer}"
        for name, rows in (("q_proj", of.query), ("k_proj", of.key), ("v_proj", of.key)):
            shapes[f"{at}.self_attn.{name}.weight"] = (rows, of.hidden)
            if bias:
                shapes[f"{at}.self_attn.{name}.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (of.hidden, of.query)
        if bias and of.kind != "qwen2":
            shapes[f"{at}.self_attn.o_proj.bias"] = (of.hidden,)
        if of.kind == "qwen3":
            shapes |= {f"{at}.self_attn.{name}.weight": (of.head,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{at}.mlp.{name}.weight": (of.inner, of.hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{at}.mlp.down_proj.weight"] = (of.hidden, of.inner)
        shapes |= {f"{at}.{name}.weight": (of.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes


def _endings(layer: str) -> Iterator[str]:
    """The names by which peft finds a layer: a.b.c, b.c and c."""
    while layer:
        yield layer
        layer = layer.partition(".")[2]
