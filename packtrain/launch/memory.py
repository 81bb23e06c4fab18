"""What weights, gradients and optimizer take on each device, from the shapes of the weights alone: no torch, no hub.

The shapes come from the headers of safetensors files in a local folder or in the hub's cache; for a model that is not
there, from the sizes in its config, where the layers of its type are known (llama's and their kin). Where neither is at
hand the answer says what is missing. Activations are left out: they depend on kernels and lengths, and a guess would be
wrong by a factor.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packtrain.config.schema import Model, Peft, RunConfig

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ADAPTER_BYTES = 4  # peft keeps adapters in float32
SHARDED = {  # what a strategy spreads over the processes
    "ddp": (),
    "zero1": ("optimizer",),
    "zero2": ("gradients", "optimizer"),
    "zero3": ("weights", "gradients", "optimizer"),
    "zero3_offload": ("weights", "gradients", "optimizer"),
    "fsdp2": ("weights", "gradients", "optimizer"),
}
LLAMA_KIN = ("llama", "mistral", "qwen2", "qwen3")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_HEADER_LIMIT = 100 * 2**20

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Memory:
    """`parameters` of the model, `trained` ones (adapters included), and bytes on each device (zero3_offload: its host).

    `reference` is that of a DPO run that keeps a model of its own for it, taken to be as large as the trained one.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    reference: int = 0

    def sentence(self) -> str:
        """The estimate in words."""
        names = ("weights", "gradients", "optimizer", *(["reference"] if self.reference else []))
        parts = ", ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in names)
        total = sum(getattr(self, name) for name in names) / GIB
        trained = "all trained" if self.trained == self.parameters else f"{self.trained / 1e6:.1f} million trained"
        size = f"{self.parameters / 1e6:.1f} million parameters, {trained}"
        return f"{total:.2f} GiB per device before activations: {parts} ({size})"

    def to_json(self) -> dict[str, Any]:
        """The figures, and the sentence as `summary`."""
        return {**asdict(self), "summary": self.sentence()}


def estimate(config: RunConfig, processes: int) -> Memory | str:
    """The memory of a run on `processes` devices, or a sentence on what is missing to know it."""
    shapes, stored_bytes = weights_of(config.model)
    if isinstance(shapes, str):
        return shapes
    width = BYTES.get(config.model.dtype, stored_bytes)
    parameters = sum(map(math.prod, shapes.values()))
    weights = parameters * width
    reference = weights if _keeps_a_reference(config) else 0
    if config.peft.kind == "lora":
        trained = list(_adapters(shapes, config.peft))
        if not trained:
            return "no layer of the model has a name of peft.target_modules"
        width = ADAPTER_BYTES
        weights += sum(map(math.prod, trained)) * width
    else:
        trained = list(shapes.values())
    count = sum(map(math.prod, trained))
    parts = {
        "weights": weights,
        "gradients": count * width,
        "optimizer": sum(_state_bytes(config.optim.name, shape, width) for shape in trained),
        "reference": reference,
    }
    shared = SHARDED[config.strategy.name]
    split = {name: math.ceil(size / processes) if name in shared else size for name, size in parts.items()}
    return Memory(parameters, count, **split)


def _keeps_a_reference(config: RunConfig) -> bool:
    """Whether a second model is in memory (as train/reference.py decides)."""
    reference = config.objective.reference
    if reference == "auto":
        reference = "adapters_off" if config.peft.kind == "lora" else "model"
    return config.objective.kind == "dpo" and reference not in ("adapters_off", "precomputed")


def weights_of(model: Model) -> tuple[Shapes | str, int]:
    """The shapes of a model's weights by name, or what is missing to know them; and the bytes of a stored number."""
    folder = _folder(model)
    if model.init == "pretrained":
        if model.path and model.path.endswith(".gguf"):
            return "not known before loading: a .gguf file is read while loading only", 0
        if folder is None:
            return f"not known before loading: {model.path} is not on this machine yet", 0
        return _headers(folder)
    stored = _read(folder / "config.json") if folder else {}
    return _from_sizes({**stored, **model.config}), 4


def _folder(model: Model) -> Path | None:
    """The local folder of the model: its path, else what the hub's cache holds of it."""
    if model.path is None:
        return None
    path = Path(os.path.expanduser(model.path))
    if path.is_dir():
        return path
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub"))).expanduser()
    repository = cache / f"models--{model.path.replace('/', '--')}"
    revision = model.revision or "main"
    with contextlib.suppress(OSError):  # a revision may be a commit itself
        revision = (repository / "refs" / revision).read_text().strip()
    snapshot = repository / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def _headers(folder: Path) -> tuple[Shapes | str, int]:
    """The shapes in the safetensors files of a folder; those of a sharded model are named by its index."""
    index = _read(folder / "model.safetensors.index.json").get("weight_map", {})
    files = sorted(set(index.values())) or ["model.safetensors"]
    shapes: dict[str, tuple[int, ...]] = {}
    width = 4
    for file in files:
        try:
            with open(folder / file, "rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(size, _HEADER_LIMIT)))
            header.pop("__metadata__", None)
            shapes |= {name: tuple(one["shape"]) for name, one in header.items()}
            width = 2 if any(one["dtype"] in ("BF16", "F16") for one in header.values()) else 4
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"not known before loading: {folder / file} cannot be read as safetensors", 0
    return shapes, width


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _from_sizes(sizes: Mapping[str, Any]) -> Shapes | str:
    """The weights of a llama, mistral, qwen2 or qwen3 model of these sizes."""
    kind = sizes.get("model_type")
    if kind not in LLAMA_KIN:
        return f"not known before loading: the layers of model type {kind} are not among those that packtrain knows"
    needed = _SIZES if kind == "llama" else (*_SIZES, "num_key_value_heads")
    needed = (*needed, "head_dim") if kind == "qwen3" else needed
    missing = [name for name in needed if not isinstance(sizes.get(name), int) or sizes[name] < 1]
    if missing:
        return f"not known before loading: model.config.{missing[0]} is left to the {_left_to(missing[0])}"
    hidden, inner, layers, heads, vocabulary = (sizes[name] for name in _SIZES)
    head = sizes.get("head_dim") or hidden // heads
    query, shared = heads * head, (sizes.get("num_key_value_heads") or heads) * head
    bias = kind == "qwen2" or (kind != "mistral" and sizes.get("attention_bias", False))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not sizes.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, rows in (("q_proj", query), ("k_proj", shared), ("v_proj", shared)):
            shapes[f"{at}.self_attn.{name}.weight"] = (rows, hidden)
            if bias:
                shapes[f"{at}.self_attn.{name}.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, query)
        if bias and kind != "qwen2":
            shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        if kind == "qwen3":
            shapes |= {f"{at}.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{at}.mlp.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes


def _left_to(name: str) -> str:
    return "tokenizer" if name == "vocab_size" else "model type"


def _adapters(shapes: Shapes, peft: Peft) -> Iterator[tuple[int, ...]]:
    """The shapes of the trained weights of LoRA: two matrices per adapted layer, and layers trained in full."""
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if len(shape) == 2 and _is_adapted(layer, peft.target_modules):
            yield from ((peft.r, shape[1]), (shape[0], peft.r))
        if any(_ends_with(layer.removesuffix(".bias"), one) for one in peft.modules_to_save):
            yield shape


def _is_adapted(layer: str, targets: str | list[str]) -> bool:
    if targets == "all-linear":
        return not re.search(r"embed|lm_head|\bwte\b|\bwpe\b", layer)
    if isinstance(targets, list):
        return any(_ends_with(layer, one) for one in targets)
    try:
        return re.fullmatch(targets, layer) is not None  # as in peft, text is a pattern
    except re.error:
        return False


def _ends_with(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")


def _state_bytes(optimizer: str, shape: tuple[int, ...], width: int) -> int:
    """Optimizer state of one trained weight whose numbers have `width` bytes."""
    if optimizer == "sgd":
        return 0
    if optimizer == "adafactor":  # a row and a column in place of a matrix
        return 4 * (sum(shape) if len(shape) >= 2 else math.prod(shape))
    return 2 * math.prod(shape) * (1 if "8bit" in optimizer else width)
