"""The built-in pictures: the same everywhere, held-out means held out, and the answers are right."""

from __future__ import annotations

import hashlib
import io
import random
import re
import subprocess
import sys
from typing import Any

import pytest
from PIL import Image

from packtrain.config.schema import Data, Model
from packtrain.data.prepare import prepare
from packtrain.data.sources import quickstart_pictures
from packtrain.data.sources.quickstart_pictures import COLOURS, SHAPES, Split, conversations, draw, tokenizer
from packtrain.errors import UserError

Scene = list[list[tuple[str, str] | None]]


@pytest.fixture(scope="module")
def scenes() -> dict[Split, list[tuple[Scene, dict[str, str]]]]:
    """What is in each picture, and the questions about it with their answers."""
    found: dict[Split, list[tuple[Scene, dict[str, str]]]] = {"train": [], "eval": []}
    with pytest.MonkeyPatch.context() as patch:
        for split, rows in found.items():
            patch.setattr(quickstart_pictures, "draw", lambda scene, rng, rows=rows: rows.append((scene, {})) or b"")
            for (_, turns), row in zip(rows, conversations(split, count=800), strict=True):
                texts = [message["content"] for message in row["messages"]]
                asked = (parts[-1]["text"] for parts in texts[::2])
                turns |= dict(zip(asked, texts[1::2], strict=True))
    return found


def test_another_process_makes_the_same_pictures_questions_and_tokenizer() -> None:
    code = (
        "import hashlib; from packtrain.data.sources.quickstart_pictures import *\n"
        "for text in (repr(conversations('train', 3, 50)), tokenizer().backend_tokenizer.to_str()):\n"
        "    print(hashlib.sha256(text.encode()).hexdigest())"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = (repr(conversations("train", 3, 50)), tokenizer().backend_tokenizer.to_str())
    assert made.stdout.split() == [hashlib.sha256(text.encode()).hexdigest() for text in here]
    assert conversations("train", 3, 20) == conversations("train", 3, 50)[:20]


def test_no_picture_of_eval_is_in_train_and_each_has_a_single_question(scenes) -> None:
    trained, held_out = ({repr(scene) for scene, _ in scenes[split]} for split in ("train", "eval"))
    assert trained.isdisjoint(held_out) and len(held_out) > 600
    assert {len(turns) for _, turns in scenes["eval"]} == {1}
    assert {len(turns) for _, turns in scenes["train"]} == {2, 3, 4}


def test_answers_are_those_of_the_shapes_in_the_picture(scenes) -> None:
    asked = set()
    for scene, turns in [*scenes["train"], *scenes["eval"]]:
        shapes = [found for places in scene for found in places if found]
        for question, answer in turns.items():
            if many := re.fullmatch(r"How many (?:(\w+) )?(\w+)s\?", question):
                fits = [all(word in ("shape", *found) for word in many.groups() if word) for found in shapes]
                assert answer.endswith(f": {sum(fits)}.")
            elif colour := re.fullmatch(r"What colour is the (\w+)\?", question):
                assert [f"The {shape} is {name}." for name, shape in shapes if shape == colour[1]] == [answer]
            elif beside := re.fullmatch(r"What is (left of|right of|above|below) the (\w+ \w+)\?", question):
                right, down = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}[beside[1]]
                places = {(x, y): found for y, row in enumerate(scene) for x, found in enumerate(row)}
                ((x, y),) = [at for at, found in places.items() if found and " ".join(found) == beside[2]]
                other = places[x + right, y + down]
                assert answer.endswith(f": {' '.join(other) if other else 'nothing'}.")
            else:
                assert question == "What is in the picture?"
                listed = re.findall(r"(\d) (\w+) (\w+?)s?(?=[,.])", answer)
                assert {(name, shape): int(count) for count, name, shape in listed} == {
                    one: shapes.count(one) for one in shapes
                }
            asked.add(re.split(r" (?:left|right|above|below|colour|in|many) ?", question)[0])
    assert asked == {"How", "What", "What is"}


def test_shapes_are_drawn_in_their_colours_at_their_places() -> None:
    scene: Scene = [[("red", "circle"), None, ("blue", "square")], [None, ("yellow", "triangle"), None]]
    image = Image.open(io.BytesIO(draw(scene, random.Random(0))))
    assert image.size == (84, 56)
    seen = [[image.getpixel((28 * x + 14, 28 * y + 14)) for x in range(3)] for y in range(2)]
    grey = quickstart_pictures.GREY
    assert seen == [[COLOURS["red"], grey, COLOURS["blue"]], [grey, COLOURS["yellow"], grey]]
    assert len(SHAPES) == 3


def test_pictures_take_a_token_for_each_place_and_only_answers_are_trained(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(quickstart_pictures.COUNTS, "train", 40)
    config: dict[str, Any] = {"model_type": "qwen3_vl", "image_token_id": 5, "vision_config": {"patch_size": 14}}
    model = Model(init="random", tokenizer="quickstart-pictures", config=config)
    data = Data(train="quickstart-pictures", eval="quickstart-pictures", cache_dir=str(tmp_path))
    made = prepare(data, tokenizer(), "sft", seed=0, model=model)
    assert made.eval is not None and (len(made.train), len(made.eval), made.train.report.dropped) == (40, 200, {})
    for number, row in enumerate(conversations("train", count=40)):
        document = made.train[number]
        (picture,) = document.pictures
        assert picture.end - picture.start == picture.width * picture.height // 28**2
        assert {*document.input_ids[picture.start : picture.end]} == {5}
        trained = tokenizer().decode(document.input_ids[document.loss_mask])
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert trained == "".join(f"{answer}<|im_end|>" for answer in answers)
    with pytest.raises(UserError) as raised:
        prepare(data, tokenizer(), "dpo", seed=0, model=model)
    assert raised.value.problems[0].code == "only-conversations"
