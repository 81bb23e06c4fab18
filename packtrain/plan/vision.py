"""The memory of pictures: their pixels, and what towers keep for the backward pass.

An upper bound: all tokens of the fullest micro-batch are of pictures. Only trained towers keep tensors; frozen ones work in one layer at a
time, before the language part has any. A layer is counted as 12 tensors of its width and 2 to 4 of its inner one, which is 0.96 to 1.25 times
what the towers of Qwen2-VL, 2.5 and 3, CLIP, SigLIP, Pixtral and InternViT keep in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packtrain.plan.known_model import Sizes

_OUTER = 12
_INNER = {"silu": 4, "gelu": 2, "gelu_pytorch_tanh": 2}
"""Tensors of the inner width in an MLP, by its activation: with a gate, and without. 3 for quick_gelu, which others have by default."""


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower. `hidden` is its width, `inner` the numbers that an MLP keeps for a patch, `pixels` the numbers of a patch.

    A token of the language part is made of `patches`.
    """

    number: int
    hidden: int
    inner: int
    pixels: int
    patches: float


def read_tower(sizes: Sizes) -> Tower | None:
    """Return the vision tower of a model's config. None without one, or if its sizes are unknown."""
    own = sizes.get("vision_config")
    if not isinstance(own, Mapping):
        return None

    def first(*names: str, default: float = 0) -> float:
        found = [value for name in names if isinstance(value := own.get(name, sizes.get(name)), (int, float))]
        return next((value for value in found if value), default)

    def side(name: str) -> float:
        value = own.get(name)
        return value[0] if isinstance(value, list) and value else first(name)

    hidden, number = (
        (own.get("embed_dim") or own.get("hidden_size")),
        (own.get("depth") or own.get("num_hidden_layers")),
    )
    patch = side("patch_size")
    if not (isinstance(hidden, int) and isinstance(number, int) and patch):
        return None
    inner = own.get("intermediate_size") or hidden * first("mlp_ratio", default=4)
    kept = 4 if own.get("model_type") == "pixtral" else _INNER.get(str(own.get("hidden_act")), 3)
    merged = first("spatial_merge_size", "scale_factor", "downsample_factor", "pooling_kernel_size", default=1) ** 2
    if ratio := first("downsample_ratio"):
        merged = ratio**-2
    if tokens := first("mm_tokens_per_image"):
        merged = (side("image_size") / patch) ** 2 / tokens
    pixels = first("in_channels", "in_chans", "num_channels", default=3) * patch**2
    return Tower(number, hidden, int(kept * inner), int(pixels * first("temporal_patch_size", default=1)), merged)


def count_tower(tower: Tower, tokens: int, width: int, every: int) -> tuple[int, int, int]:
    """Return three numbers of bytes for pictures of `tokens` tokens.

    They are for the pixels, for all activations that trained layers keep, and for one layer at work. Activations take `width` bytes, pixels 4.
    With `every` above 0 each `every`-th layer keeps only its input (trainer.gradient_checkpointing).
    """
    patches = round(tokens * tower.patches)
    again = -(-tower.number // every) if every else 0
    layer = patches * (_OUTER * tower.hidden + tower.inner) * width
    kept = (tower.number - again) * layer + again * patches * tower.hidden * width
    return 4 * patches * tower.pixels, kept, layer
