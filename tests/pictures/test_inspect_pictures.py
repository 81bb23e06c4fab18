"""`packtrain inspect` on data with pictures: what it shows, counts and finds odd."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from eyes import encoded, make_processor, picture, said, shown

from packtrain.config.compose import load_config
from packtrain.inspect.corpus import open_corpus
from packtrain.inspect.summary import show_data, summarise

IMAGE = "<|image_pad|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "qwen2_vl"
    make_processor(folder, "qwen2_vl")
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    config = {"model_type": "qwen2_5_vl", "image_token_id": ids[IMAGE]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def looks(folder: Path, model: str, rows: list[Any], *more: str) -> Any:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = (f"model.path={model}", f"data.train={data}", f"data.cache_dir={folder / 'cache'}", "data.eval=null")
    return load_config(None, [*where, "batch.examples_per_step=4", *more])


def row(*names: str, text: str = "What is this?", answer: str = "A cat.") -> dict[str, Any]:
    return {"messages": [shown(*names, text=text), said(answer)]}


def found(folder: Path, model: str, rows: list[Any], *more: str) -> dict[str, tuple[int, list[str]]]:
    summary = summarise(open_corpus(looks(folder, model, rows, *more)), 1)
    json.dumps(summary)
    return {
        finding["name"]: (finding["count"], [re.sub(r"\S*/rows.jsonl", "", place) for place in finding["where"]])
        for finding in summary["audit"]
    }


def test_pictures_are_shown_with_size_and_tokens(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = looks(folder, model, [row("cat.png", "dog.jpg"), row("cow.webp", text="<b>And</b> this?")])
    asked: dict[str, Any] = {"rows": 2, "step": None, "source": None, "html": None, "as_json": False}
    show_data(config, 1, "t", **asked)
    said = " ".join(capsys.readouterr().out.split())
    assert "[picture 60×40] (2 tokens)" in said and "[picture 50×120] (8 tokens)" in said and IMAGE not in said
    page = folder / "page.html"
    show_data(config, 1, "t", **{**asked, "html": page, "as_json": True})
    html, summary = page.read_text(), json.loads(capsys.readouterr().out)
    thumbnails = re.findall(r'<img class="data-picture" src="data:image/jpeg;base64,[\w+/=]+" alt="\[picture ', html)
    assert len(thumbnails) == 3 and "<script" not in html and "<b>And" not in html and len(html) < 60_000
    seen = summary["pictures"]
    assert (seen["number"], seen["different"], seen["documents"], seen["tokens"]) == (3, 3, 2, 2 + 8 + 4)
    assert seen["share"] == round(seen["tokens"] / summary["tokens"], 4)
    assert (seen["smallest"], seen["median"], seen["largest"]) == ([60, 40], [56, 57], [50, 120])
    (folder / "cow.webp").unlink()
    show_data(config, 1, "t", **{**asked, "html": page})
    assert page.read_text().count('<img class="data-picture"') == 2


def test_text_alone_has_no_pictures(folder: Path, model: str) -> None:
    summary = summarise(open_corpus(looks(folder, model, [row(), row(text="And this?")])), 1)
    assert summary["pictures"] is None and summary["audit"] == []


def test_rows_with_other_pictures_are_no_duplicates(folder: Path, model: str) -> None:
    for number in range(3):
        (folder / f"{number}.png").write_bytes(encoded(picture(40, 60, seed=number % 2)))
    assert found(folder, model, [row("0.png"), row("1.png"), row("2.png"), row("0.png", "cow.webp")]) == {
        "exact_duplicates": (1, [":3 (as :1)"]),
        "shared_pictures": (2, [":3 (as :1)", ":4 (as :1)"]),
    }
    held_out = folder / "held.jsonl"
    (folder / "3.png").write_bytes(encoded(picture(40, 60, seed=9)))
    held_out.write_text(json.dumps(row("2.png")) + "\n" + json.dumps(row("3.png")) + "\n")
    findings = found(folder, model, [row("0.png"), row("1.png")], f"data.eval={held_out}")
    assert findings["eval_in_train"] == (1, [f"{held_out}:1 (as :1)"])


def test_odd_pictures_are_found_with_their_places(folder: Path, model: str) -> None:
    stray = row("cat.png", answer="A cat.")
    stray["messages"][0]["content"] = f"What is this? {IMAGE}"
    misplaced = {**row(text="<image> and <image>"), "images": ["cat.png"]}
    findings = found(
        folder,
        model,
        [
            row("cat.png", "cat.png"),
            stray,
            row("dog.jpg", "cow.webp", text="So?"),
            misplaced,
            {"messages": [*row("cow.webp", text="So? " * 40)["messages"], shown("dog.jpg"), said()]},
        ],
        "data.bad_rows=skip",
        "data.max_length=195",
        "data.max_picture_tokens=4",
    )
    assert findings["same_picture_twice"] == (1, [":1"])
    assert findings["tokens_without_pictures"] == (1, [":2"])
    assert findings["pictures_scaled_down"] == (1, [":3"])
    assert findings["pictures_without_tokens"] == (1, [":4"])
    assert findings["pictures_cut_off"] == (1, [":5"])
    assert findings["shared_pictures"] == (1, [":5 (as :3)"])


def test_tokens_of_pictures_in_tokenised_rows_are_found(folder: Path, model: str) -> None:
    image = json.loads((Path(model) / "config.json").read_text())["image_token_id"]
    rows = [{"input_ids": [40, 41, token, 43]} for token in (42, image)]
    assert found(folder, model, rows)["tokens_without_pictures"] == (1, [":2"])
