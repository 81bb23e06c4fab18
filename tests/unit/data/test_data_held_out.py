"""A fraction of the rows is held out by what they say, whatever becomes of them, and both sides have counts of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_tokenizers import tokenizer_of

from packtrain.config.schema import Data
from packtrain.data.dataset import TokenDataset
from packtrain.data.prepare import prepare
from packtrain.errors import UserError


def rows(count: int) -> list[dict[str, Any]]:
    """Conversations that all differ, of very different lengths."""
    return [
        {
            "id": number,
            "messages": [
                {"role": "user", "content": f"Question number {number}?"},
                {"role": "assistant", "content": " ".join(f"{number}-{word}" for word in range(1 + number % 30))},
            ],
        }
        for number in range(count)
    ]


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def sides(tmp_path: Path, path: str, style: str = "smollm", seed: int = 0, **keys: Any) -> list[TokenDataset]:
    """The train and the held-out side."""
    keys = {"eval": 0.2, "max_length": None, **keys}
    prepared = prepare(Data(train=path, cache_dir=str(tmp_path / "cache"), **keys), tokenizer_of(style), seed=seed)
    assert prepared.eval is not None
    return [prepared.train, prepared.eval]


def said(side: TokenDataset, style: str = "smollm") -> set[int]:
    """The numbers of the questions in a side."""
    texts = (tokenizer_of(style).decode(side[index].input_ids) for index in range(len(side)))
    return {int(text.split("Question number ")[1].split("?")[0]) for text in texts if "Question number" in text}


@pytest.mark.parametrize(
    "style, keys",
    [
        ("smollm", {"chat_template": "chatml"}),
        ("llama3", {}),
        ("smollm", {"max_length": 100}),
        ("smollm", {"max_length": 120, "overlong": "drop"}),
        ("smollm", {"max_length": 90, "overlong": "split"}),
        ("smollm", {"seed": 1}),
    ],
)
def test_the_same_rows_are_held_out_whatever_is_made_of_them(tmp_path, style, keys):
    path = write(tmp_path / "x.jsonl", rows(100))
    train, held = map(said, sides(tmp_path, path))
    assert (len(train), len(held)) == (80, 20)
    other_train, other_held = (said(side, style) for side in sides(tmp_path, path, style, **keys))
    assert other_train <= train and other_held <= held
    assert len(other_train) + len(other_held) >= 30


def test_each_side_counts_its_own_rows(tmp_path):
    unanswered = [{"messages": [{"role": "user", "content": f"Nobody answers {number}."}]} for number in range(30)]
    path = write(tmp_path / "x.jsonl", [*rows(100), *unanswered, *[{"messages": []}] * 5])
    keys: dict[str, Any] = {"max_length": 100, "bad_rows": "skip"}
    whole = prepare(Data(train=path, cache_dir=str(tmp_path / "cache"), **keys), tokenizer_of("smollm"), seed=0).train
    train, held = sides(tmp_path, path, **keys)
    for side in (train, held):
        report = side.report
        assert report.rows == report.kept + sum(report.dropped.values())
        assert (report.documents, report.tokens) == (report.kept, side.lengths.sum())
        assert report.trained_tokens == side.trained.sum()
        assert 0 < report.truncated < whole.report.truncated
        assert 0 < report.dropped["no trained token"] < 30
    for figure in ("rows", "kept", "truncated", "cut_tokens", "documents", "tokens", "trained_tokens"):
        assert getattr(train.report, figure) + getattr(held.report, figure) == getattr(whole.report, figure)
    assert train.report.held_out == len(held) and 22 <= held.report.rows <= 31


def test_copies_of_a_row_and_the_parts_of_a_row_are_on_one_side(tmp_path):
    copies = [{**row, "id": number + 1000} for number, row in enumerate(rows(60))]
    path = write(tmp_path / "x.jsonl", [*rows(60), *copies])
    train, held = sides(tmp_path, path, max_length=40, overlong="split")
    whole = [said(side) for side in sides(tmp_path, path)]
    assert not whole[0] & whole[1]
    assert len(train) + len(held) > 200
    content = [set() for _ in range(2)]
    (store,) = train.stores
    of_row = [row for row, fate in enumerate(store.fates) for _ in range(fate["documents"])]
    for found, side in zip(content, (train, held), strict=True):
        found.update(int(store.fates["content"][of_row[document]]) for document in side.rows)
    assert not content[0] & content[1] and len(content[0]) + len(content[1]) == 60


def test_holding_out_the_only_document_is_an_error(tmp_path):
    with pytest.raises(UserError, match="none would be left"):
        sides(tmp_path, write(tmp_path / "x.jsonl", rows(1)), eval=0.5)


def test_holding_out_only_what_is_dropped_is_an_error(tmp_path):
    lines = [*rows(1), *({"messages": [{"role": "user", "content": f"Nobody answers {n}."}]} for n in range(30))]
    with pytest.raises(UserError, match=r"no document would be held out|none would be left"):
        sides(tmp_path, write(tmp_path / "x.jsonl", lines), eval=0.1)
