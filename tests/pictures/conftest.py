"""Models that take pictures, and a folder with pictures beside the data."""

from __future__ import annotations

from pathlib import Path

import pytest
from eyes import FAMILIES, PICTURES, encoded, make_processor, picture

from packtrain.config.schema import Model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    return {name: Model(path=make_processor(folder / name, name)) for name in FAMILIES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kinds = {".png": "PNG", ".jpg": "JPEG", ".webp": "WEBP"}
    for number, (name, size) in enumerate(PICTURES.items()):
        (tmp_path / name).write_bytes(encoded(picture(*size, seed=number), kinds[Path(name).suffix]))
    return tmp_path
