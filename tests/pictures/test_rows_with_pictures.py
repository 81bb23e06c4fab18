"""From rows with pictures to documents, by small processors of real families."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from eyes import FAMILIES, PICTURES, encoded, picture, said, see, shown
from PIL import Image
from prepared import trained_runs
from transformers.image_utils import load_image

from packtrain.config.schema import Data, Model
from packtrain.data.formats.columns import REQUIRED
from packtrain.data.pictures.processor import PictureProcessor, PictureReader, load_processor
from packtrain.data.sources.files import read_file
from packtrain.data.streaming import open_stream
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import UserError
from packtrain.packing.prefixes import count_common
from tests.train import forked


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
    assert [Path(own.file).name for own in document.pictures] == [*PICTURES]
    assert [(own.height, own.width) for own in document.pictures] == [*PICTURES.values()]
    for own in document.pictures:
        text = PictureProcessor(model).text_of(own.height, own.width)
        inside = processor.tokenizer.decode(document.input_ids[own.start : own.end])
        assert inside.strip() == text.strip()
    end = FAMILIES[name]["end"]
    runs = [run.strip() for run in trained_runs(processor.tokenizer, document.input_ids, document.loss_mask)]
    assert runs == [f"A cat.{end}", f"Yes.{end}", f"A cow.{end}"]


def test_by_turns_each_answer_has_the_pictures_of_its_prompt(models: dict[str, Model], folder: Path) -> None:
    row = {"messages": [shown("cat.png", "dog.jpg"), said(), shown("cow.webp", text="And this?"), said("A cow.")]}
    once = see(folder, models["qwen2_vl"], row, render="conversation").train[0]
    turns = see(folder, models["qwen2_vl"], row, render="turns").train
    assert [turns[at].pictures for at in range(len(turns))] == [once.pictures[:2], once.pictures]
    for at in range(2):
        ids, mask = turns[at].input_ids, turns[at].loss_mask
        assert ids.tolist() == once.input_ids[: len(ids)].tolist()
        assert mask.tolist() == [*np.zeros(len(ids) - mask.sum(), bool), *np.ones(mask.sum(), bool)]
        assert once.loss_mask[: len(ids)][mask].all()


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "idefics3", "internvl"])
def test_pixels_are_those_of_the_image_processor_bit_for_bit(models: dict[str, Model], folder: Path, name: str) -> None:
    document = see(folder, models[name], {"messages": [shown(*PICTURES), said()]}).train[0]
    read = PictureReader(PictureProcessor(models[name])).read(document.pictures)
    processor = load_processor(models[name], load_tokenizer(models[name]))
    for own, file in zip(read, PICTURES, strict=True):
        wanted = processor(text=[processor.image_token], images=[load_image(str(folder / file))], return_tensors="pt")
        wanted = {key: value for key, value in wanted.items() if key in processor.image_processor.model_input_names}
        assert own.keys() == wanted.keys()
        assert all(torch.equal(own[key], wanted[key]) for key in own)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "smolvlm"])
def test_the_number_of_tokens_comes_from_the_size_alone(models: dict[str, Model], name: str) -> None:
    processor, own = load_processor(models[name], load_tokenizer(models[name])), PictureProcessor(models[name])
    for size in [(40, 60), (90, 200), (30, 300), (10, 12), (333, 222), (1, 1), (113, 57)]:
        black = Image.new("RGB", size[::-1])
        wanted = np.asarray(processor(text=[processor.image_token], images=[black])["input_ids"]).ravel().tolist()
        assert processor.tokenizer(own.text_of(*size), add_special_tokens=False)["input_ids"] == wanted, size


def forms(folder: Path) -> dict[str, Any]:
    """One conversation about two pictures in all forms that data sets use."""
    cat, dog = ((folder / name).read_bytes() for name in ("cat.png", "dog.jpg"))
    fsspec.filesystem("memory").pipe("/bucket/cat.png", cat)
    text, plain = "And?", [base64.b64encode(content).decode() for content in (cat, dog)]

    def parts(first: Any, second: Any) -> dict[str, Any]:
        content = [{"type": "text", "text": "See "}, first, second, {"type": "text", "text": text}]
        return {"messages": [{"role": "user", "content": content}, said()]}

    def of_type(one: Any, other: Any) -> dict[str, Any]:
        return parts({"type": "image", **one}, {"type": "image", **other})

    asked = f"See <image><image>{text}"
    both = {"images": ["cat.png", "dog.jpg"]}
    holes = parts({"type": "image"}, {"type": "image", "image": None})["messages"]
    urls = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}} for one in plain]
    return {
        "image": of_type({"image": "cat.png"}, {"image": str(folder / "dog.jpg")}),
        "url": of_type({"url": f"file://{folder}/cat.png"}, {"url": "./dog.jpg"}),
        "bucket": of_type({"url": "memory://bucket/cat.png"}, {"path": "dog.jpg"}),
        "base64": of_type({"base64": plain[0]}, {"bytes": plain[1]}),
        "openai": parts(*urls),
        "a string": parts(
            {"type": "image_url", "image_url": "cat.png"}, {"type": "image", "image": {"path": "dog.jpg"}}
        ),
        "tags": {"messages": [{"role": "user", "content": asked}, said()], **both},
        "tags in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": asked}]}, said()], **both},
        "trl": {"messages": holes, "images": [{"bytes": plain[0], "path": None}, {"bytes": None, "path": "dog.jpg"}]},
        "sharegpt": {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": "A cat."}], **both},
        "alpaca": {"instruction": asked, "output": "A cat.", "images": json.dumps(both["images"])},
        "alpaca's input": {"instruction": "", "input": asked, "output": "A cat.", **both},
        "prompt": {"prompt": [{"role": "user", "content": asked}], "completion": [said()], **both},
    }


def test_all_forms_give_the_same_tokens_and_pictures(models: dict[str, Model], folder: Path) -> None:
    rows = forms(folder)
    for format in ("messages", "sharegpt", "alpaca", "prompt_completion"):
        own = {name: row for name, row in rows.items() if REQUIRED[format][0] in row}
        data = see(folder, models["qwen2_vl"], *own.values(), format=format)
        for name, document in zip(own, (data.train[at] for at in range(len(own))), strict=True):
            found = [(one.hash, one.height, one.width, one.start, one.end) for one in document.pictures]
            if name == "image":
                wanted = found, document.input_ids.tolist(), document.loss_mask.tolist()
            assert (found, document.input_ids.tolist(), document.loss_mask.tolist()) == wanted, name
    assert [size[1:3] for size in wanted[0]] == [PICTURES["cat.png"], PICTURES["dog.jpg"]]


def test_tables_hold_pictures_as_bytes_and_columns_may_have_other_names(models: dict[str, Model], folder: Path) -> None:
    cat = (folder / "cat.png").read_bytes()
    turns = [{"role": "user", "content": "What?"}, said()]
    table = pa.table(
        {
            "messages": [turns] * 3,
            "picture": [{"bytes": cat, "path": "x.png"}, {"bytes": None, "path": "cat.png"}, None],
        }
    )
    pq.write_table(table, folder / "train.parquet")
    data = see(folder, models["llava"], train=str(folder / "train.parquet"), columns={"images": "picture"})
    first, second, bare = (data.train[at] for at in range(3))
    assert first.input_ids.tolist() == second.input_ids.tolist() and not bare.pictures
    assert first.pictures[0].hash == second.pictures[0].hash
    assert first.pictures[0].file.startswith(str(folder / "cache")) and second.pictures[0].file == str(
        folder / "cat.png"
    )
    reader = pickle.loads(pickle.dumps(PictureReader(PictureProcessor(models["llava"]))))
    one, other = reader.read([first.pictures[0], second.pictures[0]])
    assert torch.equal(one["pixel_values"], other["pixel_values"])
    assert len(bare.input_ids) < len(first.input_ids)


def test_tables_with_large_pictures_come_in_chunks_of_few_rows(folder: Path, monkeypatch: Any) -> None:
    """A chunk that is skipped counts as one that is read."""
    monkeypatch.setattr("packtrain.data.sources.files._TABLE_CHUNK_BYTES", 40_000)
    rows = [
        {"text": f"row {number}", "image": bytes(np.random.default_rng(number).bytes(10_000))} for number in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=10)
    with (
        pa.OSFile(str(folder / "rows.arrow"), "wb") as file,
        pa.ipc.new_stream(file, pa.Table.from_pylist(rows).schema) as stream,
    ):
        stream.write_table(pa.Table.from_pylist(rows))
    for name in ("rows.parquet", "rows.arrow"):
        chunks = [*read_file(folder / name)]
        assert max(map(len, chunks)) <= 4 and [number for chunk in chunks for number in chunk.numbers] == [
            *range(1, 21)
        ]
        for first in range(len(chunks) + 1):
            assert [[*one.numbers] for one in read_file(folder / name, first=first)] == [
                [*one.numbers] for one in chunks[first:]
            ]


def test_pictures_without_a_place_stand_before_the_first_question(models: dict[str, Model], folder: Path) -> None:
    turns = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What?"}, said()]
    rows = [{"messages": turns, "image": "cat.png"}, {"messages": [turns[0], shown("cat.png", text="What?"), said()]}]
    data = see(folder, models["qwen2_vl"], *rows)
    assert data.train[0].input_ids.tolist() == data.train[1].input_ids.tolist()


def test_pairs_and_labelled_answers_share_the_pictures_of_their_prompt(models: dict[str, Model], folder: Path) -> None:
    """Documents with equal ids differ in their keys, from the picture on."""
    same = encoded(picture(*PICTURES["cat.png"], seed=9))
    (folder / "twin.png").write_bytes(same)
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>What?"}],
            "chosen": [said()],
            "rejected": [said("A dog.")],
            "images": [name],
        }
        for name in ("cat.png", "twin.png")
    ]
    pairs = see(folder, models["qwen2_vl"], *rows, kind="dpo").train
    for at, name in enumerate(("cat.png", "twin.png")):
        pair = pairs[at]
        (seen,) = pair.chosen.pictures
        assert pair.chosen.pictures == pair.rejected.pictures and Path(seen.file).name == name
        assert (
            seen.end <= pair.prompt
            and pair.chosen.input_ids[: pair.prompt].tolist() == pair.rejected.input_ids[: pair.prompt].tolist()
        )
    assert np.array_equal(pairs[0].chosen.input_ids, pairs[1].chosen.input_ids)
    assert count_common(*(pairs[at].chosen.keys for at in range(2))) == pairs[0].chosen.pictures[0].start
    content = pairs.documents.stores[0].fates["content"]
    assert content[0] != content[1]
    labelled = [{"messages": [shown(name), said()], "label": True} for name in ("cat.png", "twin.png")]
    answers = see(folder, models["qwen2_vl"], *labelled, kind="kto").train
    assert [Path(answers[at].pictures[0].file).name for at in range(2)] == ["cat.png", "twin.png"]


@pytest.mark.parametrize("overlong, wanted", [("truncate", 1), ("split", 3)])
def test_no_cut_goes_through_a_picture(models: dict[str, Model], folder: Path, overlong: Any, wanted: int) -> None:
    turns = [shown("dog.jpg"), said("A dog, I think, and it is brown."), shown("cat.png"), said("A cat.")]
    whole = see(folder, models["qwen2_vl"], {"messages": turns}).train[0]
    dog, cat = whole.pictures
    tokenizer = load_tokenizer(models["qwen2_vl"])
    tokens = {one.hash: one.end - one.start for one in (dog, cat)}
    for limit in (int(whole.loss_mask.argmax()) + 2, cat.start - 1, cat.start, cat.start + 1, cat.end - 1, cat.end):
        data = see(folder, models["qwen2_vl"], {"messages": turns}, max_length=limit, overlong=overlong).train
        documents = [data[at] for at in range(len(data))]
        assert len(documents) <= wanted
        for document in documents:
            assert len(document.input_ids) <= limit
            pads = np.flatnonzero(document.input_ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).tolist()
            assert pads == [at for one in document.pictures for at in range(one.start, one.end)]
            assert all(one.end - one.start == tokens[one.hash] for one in document.pictures)
        if dog.end < limit < cat.end and overlong == "truncate":
            assert len(documents[0].input_ids) == min(limit, cat.start - 1)  # <|vision_start|> stays with its picture


def test_max_picture_tokens_scales_tokens_and_pixels_alike(models: dict[str, Model], folder: Path) -> None:
    (folder / "large.png").write_bytes(encoded(picture(110, 220)))
    row = {"messages": [shown("large.png", "cat.png"), said()]}
    model = models["qwen2_vl"]
    whole = see(folder, model, row).train[0].pictures
    data = see(folder, model, row, max_picture_tokens=8).train
    scaled = data[0].pictures
    assert whole[0].end - whole[0].start > 8 >= scaled[0].end - scaled[0].start > 4
    assert whole[1].end - whole[1].start == scaled[1].end - scaled[1].start
    assert (scaled[0].height, scaled[0].width) == (110, 220)
    processor = PictureProcessor(model, 8)
    first, second = PictureReader(processor).read(scaled)
    assert int(first["image_grid_thw"].prod()) // 4 == scaled[0].end - scaled[0].start
    plain = PictureReader(PictureProcessor(model)).read(scaled)[1]
    assert torch.equal(second["pixel_values"], plain["pixel_values"])
    height, width = processor.scale(110, 220)
    assert height < 110 and abs(width / height - 2) < 0.1
    with pytest.raises(UserError, match=r"\[picture-tokens\]"):
        see(folder, models["llava"], row, max_picture_tokens=3)


def test_a_store_is_found_again_and_knows_the_processor(models: dict[str, Model], folder: Path) -> None:
    row = {"messages": [shown("cat.png", "dog.jpg"), said()]}
    made = [see(folder, models["qwen2_vl"], row, **keys).train for keys in ({}, {}, {"max_picture_tokens": 2})]
    assert made[0].stores[0].folder == made[1].stores[0].folder != made[2].stores[0].folder
    assert made[0].fingerprint == made[1].fingerprint != made[2].fingerprint
    assert made[1][0].pictures == made[0][0].pictures
    assert pickle.loads(pickle.dumps(made[1]))[0].pictures == made[0][0].pictures
    (folder / "cat.png").write_bytes(encoded(picture(41, 60)))
    reader = PictureReader(PictureProcessor(models["qwen2_vl"]))
    with pytest.raises(UserError, match=r"cat.png.*60×40.*\[picture-changed\]"):
        reader.read(made[0][0].pictures)
    (folder / "cat.png").write_bytes(encoded(picture(40, 60))[:200])
    with pytest.raises(UserError, match=r"cat.png.*\[picture-broken\]"):
        reader.read(made[0][0].pictures)
    (folder / "cat.png").unlink()
    with pytest.raises(UserError, match=r"cat.png.*\[picture-gone\]"):
        reader.read(made[0][0].pictures)


def test_a_stream_reads_the_same_pictures_in_other_processes(
    models: dict[str, Model], folder: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("packtrain.data.prepare.count_tokenising_processes", lambda: 1)
    forked.tokenise_in_forks(monkeypatch)
    rows = [forms(folder)[name] for name in ("image", "url", "base64", "openai")] * 2
    model = models["qwen2_vl"]
    here = see(folder, model, *rows).train
    data = Data(train=str(folder / "train.jsonl"), cache_dir=str(folder / "other"), shuffle=False, streaming=True)
    streamed = open_stream(data, load_tokenizer(model), "sft", 4, seed=0, model=model)
    window = next(streamed.stream.windows())
    streamed.stream.stack.close()
    reader = PictureReader(PictureProcessor(model))
    for at in range(4):
        assert window.data[at].input_ids.tolist() == here[at].input_ids.tolist()
        assert [own.hash for own in window.data[at].pictures] == [own.hash for own in here[at].pictures]
        read = zip(reader.read(window.data[at].pictures), reader.read(here[at].pictures), strict=True)
        assert all(torch.equal(one["pixel_values"], other["pixel_values"]) for one, other in read)
