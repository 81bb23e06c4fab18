"""Pairs of packtrain reward: the tokens of TRL's RewardTrainer, and margins that stay with their pairs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import numpy as np
import pytest
from trl import RewardTrainer

from packtrain.config.schema import Data, DataSource
from packtrain.data.prepare import prepare
from packtrain.data.sources.quickstart import preferences, tokenizer
from packtrain.errors import UserError

CHATS = preferences("train", count=6)
PLAIN = [
    {"prompt": "Two and two make", "chosen": " four.", "rejected": " five, more or less."},
    {"prompt": "A ", "chosen": "B", "rejected": "C<|im_end|>"},  # which ends it already
]
IMPLICIT: list[dict[str, Any]] = [
    {side: [*row["prompt"], *cast(Any, row[side])] for side in ("chosen", "rejected")} for row in CHATS
]


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows") -> str:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / f"{name}.jsonl")


def of(folder: Path, rows: list[dict[str, Any]], **given: Any) -> Any:
    data = Data(train=written(folder, rows), cache_dir=str(folder / "cache"), **given)
    return prepare(data, tokenizer(), "reward", seed=0)


@pytest.mark.parametrize("rows", [CHATS, PLAIN, IMPLICIT], ids=["chats", "plain", "implicit"])
def test_the_tokens_are_those_of_trl(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    args: Any = SimpleNamespace(dataset_num_proc=None, max_length=None)
    dataset = datasets.Dataset.from_list(rows)
    theirs = RewardTrainer._prepare_dataset(cast(Any, None), dataset, tokenizer(), args, "train")
    ours = of(tmp_path, rows).train
    assert len(ours) == len(theirs) == len(rows)
    for pair, row in zip((ours[number] for number in range(len(ours))), theirs, strict=True):
        assert pair.chosen.input_ids.tolist() == row["chosen_ids"]
        assert pair.rejected.input_ids.tolist() == row["rejected_ids"]


def test_margins_stay_with_their_pairs(tmp_path: Path) -> None:
    rows = [{**row, "better_by": number / 2} for number, row in enumerate(CHATS)]
    same = {"prompt": "x", "chosen": "y", "rejected": "y", "better_by": 9.0}  # dropped
    del rows[2]["better_by"]
    rows[3]["better_by"] = cast(Any, None)
    train = written(tmp_path, [*rows[:2], cast(Any, same), *rows[2:]])
    other = written(tmp_path, [{**PLAIN[0], "margin": -1}], "other")
    columns = {"margin": "better_by"}
    data = Data(train=train, cache_dir=str(tmp_path / "cache"), columns=columns, eval=0.34)
    made = prepare(data, tokenizer(), "reward", seed=0)
    assert made.eval is not None and len(made.eval) == 2
    found = [*made.train.margins, *made.eval.margins]
    assert sorted(found) == [0, 0, 0, 0.5, 2, 2.5] and made.train.margins.dtype == np.float32
    for part in (made.train, made.eval):
        for number in range(len(part)):
            asked = tokenizer().decode(part[number].chosen.input_ids)
            row = next(one for one in rows if one["prompt"][-1]["content"] in asked)
            assert part.margins[number] == (row.get("better_by") or 0)
    sources: Any = [DataSource(path=other, weight=2), written(tmp_path, CHATS, "third")]
    mixed = prepare(Data(train=sources, cache_dir=str(tmp_path / "cache")), tokenizer(), "reward", seed=0).train
    assert mixed.margins.tolist() == [-1, -1, *[0] * 6]


def test_other_margins_are_other_data_and_preferences_have_none(tmp_path: Path) -> None:
    one, other = (of(tmp_path, [{**row, "margin": margin} for row in CHATS]).train for margin in (0, 1))
    assert one.fingerprint != other.fingerprint
    data = Data(train=written(tmp_path, [{**CHATS[0], "margin": "large"}]), cache_dir=str(tmp_path / "cache"))
    assert len(prepare(data, tokenizer(), "dpo", seed=0).train) == 1
    for margin in ("large", "nan", 1e300, True):
        with pytest.raises(UserError, match="margin: expected a number that float32 holds, found"):
            of(tmp_path, [{**CHATS[0], "margin": margin}])


def test_margins_of_csv_are_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected,margin\na,b,c,0.5\nd,e,f,\ng,h,i,-2\n")
    data = Data(train=str(tmp_path / "rows.csv"), cache_dir=str(tmp_path / "cache"))
    assert sorted(prepare(data, tokenizer(), "reward", seed=0).train.margins) == [-2, 0, 0.5]
