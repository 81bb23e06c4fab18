"""The memory of models that see, as plans know it, against the models that transformers makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_seeing import FAMILIES
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from packtrain.config.compose import load_config
from packtrain.model.towers import towers_of
from packtrain.plan.fit import Memory
from packtrain.plan.memory import estimate
from packtrain.plan.vision import count_tower, read_tower

MADE = ["model.tokenizer=quickstart", "data.train=owner/data", "batch.examples_per_step=4"]


def made(family: str) -> Any:
    config = CONFIG_MAPPING[family](**FAMILIES[family].config)
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return kind(config)


def planned(folder: Path, *more: str) -> Memory:
    found = estimate(load_config(None, [*MADE, f"model.path={folder}", *more]), 1)
    assert isinstance(found, Memory), found
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_towers_have_weights_alone(family: str, tmp_path: Path) -> None:
    """No gradients and no states; names are those of published files."""
    model = made(family)
    model.save_pretrained(tmp_path)
    towers = tuple(f"{name}." for name in towers_of(model))
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    seeing = sum(size for name, size in sizes.items() if name.startswith(towers))
    frozen, trained = planned(tmp_path), planned(tmp_path, "model.towers=trained")
    beside = 64  # single vectors between tiles, and buffers in the files, which belong to no module of the towers
    assert frozen.parameters == trained.parameters == trained.trained == pytest.approx(sum(sizes.values()), abs=beside)
    assert seeing > 0 and frozen.trained == pytest.approx(sum(sizes.values()) - seeing, abs=beside)
    assert (frozen.gradients, frozen.optimizer) == (4 * frozen.trained, 8 * frozen.trained)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "mistral3"])
def test_layers_of_the_language_part_are_known(family: str, tmp_path: Path) -> None:
    made(family).save_pretrained(tmp_path)
    few, many = (planned(tmp_path, f"batch.tokens_per_device={tokens}").activations for tokens in (2048, 4096))
    assert few and many and few < many


GROWN = {"hidden_size": 64, "embed_dim": 64, "intermediate_size": 256, "num_heads": 4, "num_attention_heads": 4}
LAYERS = ("depth", "num_hidden_layers")


def kept_by_a_tower(family: str, layers: int) -> tuple[int, int, Any]:
    """(bytes that the tower keeps for its backward pass, tokens of a picture, the config)."""
    given = FAMILIES[family]
    vision = {**given.config["vision_config"]}
    own = {
        name: value
        for name, value in GROWN.items()
        if name in vision and not (name == "hidden_size" and "embed_dim" in vision)
    }
    vision |= own | {name: layers for name in LAYERS if name in vision}
    config: Any = CONFIG_MAPPING[family](**{**given.config, "vision_config": vision})
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    model = kind(config).train()
    held, kept = (
        {weight.untyped_storage().data_ptr() for weight in [*model.parameters(), *model.buffers()]},
        dict[int, Any](),
    )

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    pixels = given.draw(config, 3, 4, torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = model.model.get_image_features(**pixels, return_dict=True)
    size = sum(one.untyped_storage().nbytes() for place, one in kept.items() if place not in held)
    features = made.pooler_output
    return (
        size,
        sum(map(len, features)) if isinstance(features, tuple | list) else features.flatten(0, -2).shape[0],
        config,
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "mistral3", "internvl"])
def test_layers_of_trained_towers_keep_what_is_planned(family: str) -> None:
    two, four = (kept_by_a_tower(family, layers) for layers in (2, 4))
    planned = []
    for _, tokens, config in (two, four):
        tower = read_tower(config.to_dict())
        assert tower is not None
        planned.append(count_tower(tower, tokens, 4, 0)[1])
    assert 0.85 < (planned[1] - planned[0]) / (four[0] - two[0]) < 1.3


def test_pixels_and_towers_count_in_the_plan(tmp_path: Path) -> None:
    made("qwen2_5_vl").save_pretrained(tmp_path)
    tokens = "batch.tokens_per_device=4096"
    frozen, trained = planned(tmp_path, tokens), planned(tmp_path, tokens, "model.towers=trained")
    pixels = 4 * 4 * 4096 * 3 * 14 * 14 * 2  # two frames of 14×14 in three colours, four patches a token
    assert pixels <= frozen.pictures < trained.pictures
    assert frozen.activations and trained.activations and frozen.slots == 4096
    assert trained.activations - frozen.activations == trained.pictures - frozen.pictures > 0
    assert "4,096 tokens of a micro-batch are of pictures" in trained.sentence()
    again = planned(tmp_path, tokens, "model.towers=trained", "trainer.gradient_checkpointing=full")
    assert pixels < again.pictures < trained.pictures
