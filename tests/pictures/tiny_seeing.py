"""Tiny random models that see, and documents with pictures of random pixels, as each family's image processor would make them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from packtrain.data.pictures.encoded import Picture
from packtrain.data.tokens.cache import Document

IMAGE = 120  # the id of a picture's token
TEXT = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
THREE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
VIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56}
VIT |= {"patch_size": 14}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3}
Pixels = dict[str, torch.Tensor]


def patches(config: Any, height: int, width: int, draw: torch.Generator) -> Pixels:
    """Patches of Qwen and its kin: a picture of `height` × `width` units of two patches."""
    vision, (rows, columns) = config.vision_config, (2 * height, 2 * width)
    values = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(rows * columns, values, generator=draw)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, columns]])}


def square(config: Any, height: int, width: int, draw: torch.Generator) -> Pixels:
    """A picture that is scaled to one size."""
    size = config.vision_config.image_size
    size = size[0] if isinstance(size, list | tuple) else size
    return {"pixel_values": torch.randn(1, 3, size, size, generator=draw)}


def tiles(config: Any, height: int, width: int, draw: torch.Generator) -> Pixels:
    """A picture cut into tiles, all in one tensor."""
    return {
        "pixel_values": square(config, 1, 1, draw)["pixel_values"]
        .repeat(height * width, 1, 1, 1)
        .normal_(generator=draw)
    }


def sized(config: Any, height: int, width: int, draw: torch.Generator) -> Pixels:
    """A picture of its own size, to be padded."""
    unit = 56
    size = (unit * height, unit * width)
    return {"pixel_values": torch.randn(1, 3, *size, generator=draw), "image_sizes": torch.tensor([size])}


def grid_of_tiles(config: Any, height: int, width: int, draw: torch.Generator) -> Pixels:
    """LLaVA-NeXT's overview and tiles, with the picture's own size."""
    size = (56 * height, 56 * width)
    pixels = torch.randn(1, 1 + height * width, 3, 56, 56, generator=draw)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([size])}


def masked_tiles(config: Any, height: int, width: int, draw: torch.Generator) -> Pixels:
    """Idefics' tiles with the mask of their pixels."""
    size = config.vision_config.image_size
    pixels = torch.randn(1, height * width, 3, size, size, generator=draw)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, height * width, size, size, dtype=torch.bool)}


def naflex(config: Any, height: int, width: int, draw: torch.Generator) -> Pixels:
    """Patches of SigLIP 2, padded to a fixed number."""
    rows, columns, most = 2 * height, 2 * width, 32
    pixels = torch.zeros(1, most, 3 * config.vision_config.patch_size**2)
    pixels[:, : rows * columns] = torch.randn(1, rows * columns, pixels.shape[2], generator=draw)
    mask = torch.zeros(1, most, dtype=torch.int64)
    mask[:, : rows * columns] = 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[rows, columns]])}


def placed_patches(config: Any, height: int, width: int, draw: torch.Generator) -> Pixels:
    """Gemma 4's patches with their places, padded to a fixed number."""
    vision, most = config.vision_config, 36
    rows, columns = 3 * height, 3 * width
    pixels = torch.zeros(1, most, 3 * vision.patch_size**2)
    pixels[0, : rows * columns] = torch.rand(rows * columns, pixels.shape[2], generator=draw)
    places = torch.full((1, most, 2), -1)
    places[0, : rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    return {"pixel_values": pixels, "image_position_ids": places}


@dataclass(frozen=True)
class Family:
    """A tiny config, and how its pictures are drawn."""

    config: dict[str, Any]
    draw: Callable[[Any, int, int, torch.Generator], Pixels]


FAMILIES = {
    "qwen2_vl": Family(
        {
            "text_config": TEXT | THREE,
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
        },
        patches,
    ),
    "qwen2_5_vl": Family(
        {"text_config": TEXT | THREE, "vision_config": QWEN | {"fullatt_block_indexes": [0]}}, patches
    ),
    "qwen3_vl": Family(
        {"text_config": TEXT | THREE, "vision_config": QWEN | {"deepstack_visual_indexes": [0]}}, patches
    ),
    "qwen3_vl_moe": Family(
        {"text_config": TEXT | THREE | EXPERTS, "vision_config": QWEN | {"deepstack_visual_indexes": [0]}}, patches
    ),
    "qwen3_5": Family({"text_config": TEXT | THREE | HYBRID, "vision_config": QWEN}, patches),
    "glm4v": Family(
        {"text_config": TEXT | THREE, "vision_config": QWEN | {"image_size": 56, "patch_size": 14}}, patches
    ),
    "llava": Family(
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VIT | {"model_type": "clip_vision_model"}},
        square,
    ),
    "llava_next": Family(
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": VIT | {"model_type": "clip_vision_model"},
            "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]],
        },
        grid_of_tiles,
    ),
    "mistral3": Family(
        {
            "spatial_merge_size": 2,
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": VIT | {"model_type": "pixtral", "image_size": 112},
            "vision_feature_layer": -1,
        },
        sized,
    ),
    "gemma3": Family(
        {
            "text_config": TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": VIT,
            "mm_tokens_per_image": 16,
        },
        square,
    ),
    "gemma4": Family(
        {
            "text_config": TEXT
            | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8}
            | {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
            "vision_config": VIT | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
            "audio_config": None,
        },
        placed_patches,
    ),
    "internvl": Family(
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": VIT | {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14]},
        },
        tiles,
    ),
    "idefics3": Family(
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VIT, "scale_factor": 2}, masked_tiles
    ),
    "smolvlm": Family(
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VIT, "scale_factor": 2}, masked_tiles
    ),
    "lfm2_vl": Family(
        {
            "text_config": TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "vision_config": VIT | {"num_patches": 16, "model_type": "siglip2_vision_model"},
            "projector_hidden_size": 32,
        },
        naflex,
    ),
    "aya_vision": Family(
        {
            "text_config": TEXT | {"model_type": "cohere2", "sliding_window": 8},
            "vision_config": VIT | {"model_type": "siglip_vision_model"},
            "downsample_factor": 2,
        },
        tiles,
    ),
}


def seeing_model(family: str) -> PreTrainedModel:
    """Return a tiny model with weights large enough that what a token sees shows in its outputs."""
    torch.manual_seed(0)
    settings: dict[str, Any] = copy.deepcopy(FAMILIES[family].config)  # configs write into it
    kind = CONFIG_MAPPING[family]
    config: Any = kind(**settings)
    config.image_token_id = IMAGE
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.15)
    return model


@dataclass(frozen=True)
class RandomReader:
    """Draws the pixels of a picture by its `offset`."""

    family: str
    config: Any

    def read(self, pictures: Sequence[Picture]) -> list[Pixels]:
        """Return the tensors of each picture alone."""
        draw = FAMILIES[self.family].draw
        return [
            draw(self.config, picture.height, picture.width, torch.Generator().manual_seed(picture.offset))
            for picture in pictures
        ]

    def padded(self, pictures: Sequence[Picture]) -> Pixels:
        """Return the tensors of pictures together; smaller ones are padded with zeros at their ends."""
        joined: Pixels = {}
        for one in self.read(pictures):
            for name, values in one.items():
                before = joined.get(name, values[:0])
                shape = [max(sizes) for sizes in zip(before.shape[1:], values.shape[1:], strict=True)]
                both = values.new_zeros(len(before) + len(values), *shape)
                both[(slice(len(before)), *map(slice, before.shape[1:]))] = before
                both[(slice(len(before), None), *map(slice, values.shape[1:]))] = values
                joined[name] = both
        return joined


def picture_tokens(model: PreTrainedModel, pixels: Pixels) -> int:
    """Return the number of tokens of a picture, as the model itself counts its features."""
    with torch.no_grad():
        features: Any = model.get_image_features(**pixels, return_dict=True)
    features = features.pooler_output if features.pooler_output is not None else features.last_hidden_state
    parts = features if isinstance(features, list | tuple) else [features]
    return sum(part.numel() // part.shape[-1] for part in parts)


def document(
    model: PreTrainedModel, reader: RandomReader, layout: Sequence[int | tuple[int, int]], seed: int
) -> Document:
    """Return a document: a number in `layout` stands for as many random tokens, a pair for a picture of this size."""
    draw = np.random.default_rng(seed)
    ids, pictures = list[int](), list[Picture]()
    for part in layout:
        if isinstance(part, int):
            ids += draw.integers(3, 100, part).tolist()
            continue
        blank = Picture("", 100 * seed + len(ids), 0, *part, 0, 0)
        number = picture_tokens(model, reader.read([blank])[0])
        pictures.append(Picture("", blank.offset, 0, *part, len(ids), len(ids) + number, hash=blank.offset))
        ids += [IMAGE] * number
    mask = draw.random(len(ids)) < 0.7
    mask[0] = False
    for picture in pictures:
        mask[picture.start : picture.end] = False
    return Document(np.array(ids, np.int32), mask, tuple(pictures))
