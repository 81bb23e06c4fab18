"""From rows with pictures to documents, by small processors of real families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eyes import FAMILIES, encoded, make_processor, picture
from prepared import trained_runs, write
from transformers.image_utils import load_image

from packtrain.config.schema import Data, Model
from packtrain.data.pictures.pixels import PictureReader
from packtrain.data.pictures.processor import PictureProcessor, load_processor
from packtrain.data.prepare import PreparedData, prepare
from packtrain.data.tokens.pretrained import load_tokenizer

SIZES = ((40, 60), (120, 50), (57, 56))
COLOURS = {"cat.png": "PNG", "dog.jpg": "JPEG", "cow.webp": "WEBP"}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("models")
    return {name: Model(path=make_processor(folder / name, name)) for name in FAMILIES if name != "smolvlm"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three pictures beside the data."""
    for number, (name, kind) in enumerate(COLOURS.items()):
        (tmp_path / name).write_bytes(encoded(picture(*SIZES[number], seed=number), kind))
    return tmp_path


def shown(*names: str, text: str = "What is this?", **keys: Any) -> dict[str, Any]:
    """A user's turn with pictures in front of the text."""
    parts = [{"type": "image", "path": name} for name in names]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}], **keys}


def said(text: str = "A cat.") -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def see(folder: Path, model: Model, *rows: Any, kind: str = "sft", **keys: Any) -> PreparedData:
    path = write(folder / "train.jsonl", *rows)
    data = Data(train=path, cache_dir=str(folder / "cache"), **keys)
    return prepare(data, load_tokenizer(model), kind, seed=0, model=model)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava", "llava_next", "gemma3", "idefics3"])
def test_tokens_are_those_of_the_models_own_processor(models: dict[str, Model], folder: Path, name: str) -> None:
    model = models[name]
    turns = [
        shown("cat.png", "dog.jpg"),
        said(),
        {"role": "user", "content": "Are you sure?"},
        said("Yes."),
        shown("cow.webp", text="And this?"),
        said("A cow."),
    ]
    document = see(folder, model, {"messages": turns}).train[0]
    given = [
        {**turn, "content": [{"type": "text", "text": turn["content"]}] if isinstance(turn["content"], str) else [
            {**part, "path": str(folder / part["path"])} if "path" in part else part for part in turn["content"]]}
        for turn in turns
    ]  # fmt: skip
    processor = load_processor(model, load_tokenizer(model))
    wanted = processor.apply_chat_template(
        given, tokenize=True, return_dict=True, processor_kwargs={"add_special_tokens": False}
    )
    assert document.input_ids.tolist() == np.asarray(wanted["input_ids"]).ravel().tolist()
    assert [Path(own.file).name for own in document.pictures] == [*COLOURS]
    assert [(own.height, own.width) for own in document.pictures] == [*SIZES]
    for own in document.pictures:
        text = PictureProcessor(model).text_of(own.height, own.width)
        inside = processor.tokenizer.decode(document.input_ids[own.start : own.end])
        assert inside.strip() == text.strip()
    end = FAMILIES[name]["end"]
    runs = [run.strip() for run in trained_runs(processor.tokenizer, document.input_ids, document.loss_mask)]
    assert runs == [f"A cat.{end}", f"Yes.{end}", f"A cow.{end}"]


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "idefics3", "internvl"])
def test_pixels_are_those_of_the_image_processor_bit_for_bit(models: dict[str, Model], folder: Path, name: str) -> None:
    document = see(folder, models[name], {"messages": [shown(*COLOURS), said()]}).train[0]
    read = PictureReader(PictureProcessor(models[name])).read(document.pictures)
    processor = load_processor(models[name], load_tokenizer(models[name]))
    for own, file in zip(read, COLOURS, strict=True):
        wanted = processor(text=[processor.image_token], images=[load_image(str(folder / file))], return_tensors="pt")
        wanted = {key: value for key, value in wanted.items() if key in processor.image_processor.model_input_names}
        assert own.keys() == wanted.keys()
        assert all(torch.equal(own[key], wanted[key]) for key in own)
