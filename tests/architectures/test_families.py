"""docs/models.md agrees with docs/architectures.md, with adapters as made, and with TRL's templates."""

from __future__ import annotations

import pytest
from families import (
    FAMILIES,
    MADE_WITH,
    PAGE,
    ROOT,
    measured_lora,
    measured_template,
    page,
    written_lora,
    written_template,
    written_versions,
)
from tiny import model_types

TYPES = sorted({one for family in FAMILIES for one in family.types})
TEMPLATES = sorted({one for family in FAMILIES for one in family.templates})
FEW = ("deepseek_v3", "granitemoehybrid", "gptoss", "qwen3", "gemma3")
"""Layers beside experts of the same names, a hybrid, and a template of each kind. Others are measured by hand."""


def in_ci(names: list[str]) -> list[object]:
    return [one if one in FEW else pytest.param(one, marks=pytest.mark.exhaustive) for one in names]


def test_the_page_is_made_of_the_families_and_of_the_measured_architectures() -> None:
    assert PAGE.read_text() == page(written_lora, written_template, written_versions())
    assert {*TYPES} <= {*model_types()}
    recipes = [name for family in FAMILIES for name in family.recipes]
    assert all((ROOT / "recipes" / f"{name}.yaml").is_file() for name in recipes)


@pytest.mark.skipif(written_versions() != MADE_WITH, reason="the page is about other versions")
@pytest.mark.parametrize("model_type", in_ci(TYPES))
def test_adapters_are_where_the_page_says(model_type: str) -> None:
    assert measured_lora(model_type) == written_lora(model_type)


@pytest.mark.skipif(written_versions() != MADE_WITH, reason="the page is about other versions")
@pytest.mark.parametrize("template", in_ci(TEMPLATES))
def test_templates_train_as_the_page_says(template: str) -> None:
    assert measured_template(template) == written_template(template)
