"""The memory of models that see, as plans know it, against the models that transformers makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_seeing import FAMILIES
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from packtrain.config.compose import load_config
from packtrain.model.towers import towers_of
from packtrain.plan.memory import Memory, estimate

MADE = ["model.tokenizer=quickstart", "data.train=owner/data", "batch.examples_per_step=4"]


def made(family: str) -> Any:
    config = CONFIG_MAPPING[family](**FAMILIES[family].config)
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config)


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
