"""data.leave_out: listed rows of any source are dropped and counted, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from data_tokenizers import tokenizer_of
from prepared import ready, texts

from packtrain.config.schema import Data, DataSource
from packtrain.data.streaming import open_stream
from packtrain.errors import UserError

ROWS = [{"text": f"row {number}"} for number in range(1, 9)]


def as_jsonl(file: Path) -> str:
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return str(file)


def as_json(file: Path) -> str:
    file.write_text(json.dumps(ROWS, indent=1))
    return str(file)


def as_csv(file: Path) -> str:
    file.write_text("text\n" + "\n".join(row["text"] for row in ROWS))
    return str(file)


def as_parquet(file: Path) -> str:
    pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=3)
    return str(file)


def as_arrow(file: Path) -> str:
    feather.write_feather(pa.Table.from_pylist(ROWS), str(file))
    return str(file)


def as_saved(file: Path) -> str:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(file))
    return str(file)


def listed(folder: Path, *places: str) -> str:
    (folder / "bad.txt").write_text("".join(f"{place}\n" for place in places))
    return str(folder / "bad.txt")


KINDS = {
    "a.jsonl": as_jsonl,
    "a.json": as_json,
    "a.csv": as_csv,
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
    "saved": as_saved,
}


@pytest.mark.parametrize("name", KINDS)
def test_listed_rows_of_every_kind_of_file_are_dropped_under_either_form_of_their_place(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, head = KINDS[name](tmp_path / name), name == "a.csv"
    where = listed(tmp_path, f"{name}:{2 + head}", f"{source}, row {5 + head}", "", f"./{name}:{2 + head}")
    data = ready(tmp_path, source, leave_out=where)
    assert texts(data) == [f"row {n}<|im_end|>" for n in (1, 3, 4, 6, 7, 8)]
    report = data.train.report
    assert (report.rows, report.kept, report.dropped, report.remarks) == (8, 6, {"left out": 2}, ())
    assert len(ready(tmp_path, source).train) == 8, "the list is part of the cache's key"
    assert ready(tmp_path, source, leave_out=where).train.fingerprint == data.train.fingerprint


def test_only_the_named_file_of_a_source_loses_rows_and_eval_loses_none(tmp_path):
    one, two = as_jsonl(tmp_path / "one.jsonl"), as_jsonl(tmp_path / "two.jsonl")  # the same bytes
    data: Any = ready(tmp_path, str(tmp_path / "*.jsonl"), leave_out=listed(tmp_path, f"{two}:1"), eval=two)
    assert (len(data.train), len(data.eval)) == (15, 8)
    data = ready(tmp_path, [one, DataSource(path=two, weight=2)], leave_out=listed(tmp_path, f"{two}:1"))
    assert len(data.train) == 8 + 2 * 7 and data.train.report.dropped == {"left out": 1}


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_rows_keep_their_side_of_a_held_out_fraction(kind, tmp_path):
    rows = [{"prompt": f"{n}:", "chosen": f" yes {n}", "rejected": f" no {n}"} for n in range(60)]
    rows = rows if kind == "dpo" else [{"text": row["prompt"] + row["chosen"]} for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    places = listed(tmp_path, *(f"{tmp_path}/a.jsonl:{n}" for n in range(1, 21)))

    def sides(**keys: Any) -> list[set[str]]:
        data: Any = ready(tmp_path, tmp_path / "a.jsonl", kind, eval=0.3, **keys)
        documents = [side.documents if kind == "dpo" else side for side in (data.train, data.eval)]
        return [{str(side[at].input_ids.tolist()) for at in range(len(side))} for side in documents]

    before, after = sides(), sides(leave_out=places)
    assert all(now < then for now, then in zip(after, before, strict=True))
    assert sum(map(len, after)) * 3 == sum(map(len, before)) * 2


def test_a_row_that_cannot_be_read_may_be_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": 2}\n{"text": "three"}\n')
    data = ready(tmp_path, tmp_path / "a.jsonl", leave_out=listed(tmp_path, f"{tmp_path}/a.jsonl:2"))
    assert (len(data.train), data.train.report.dropped) == (2, {"left out": 1})


def test_a_stream_leaves_the_rows_out_and_counts_them(tmp_path):
    places = [f"{as_jsonl(tmp_path / 'a.jsonl')}:1", f"{tmp_path}/a.jsonl:4", f"{tmp_path}/other.jsonl:4"]
    keys: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "leave_out": listed(tmp_path, *places)}
    data = Data(train=[str(tmp_path / "a.jsonl")], streaming=True, **keys)
    stream = open_stream(data, tokenizer_of("smollm"), "sft", 3, seed=0).stream
    assert stream is not None
    with stream.stack:
        *rest, last = stream.windows()
    assert sorted(row for window in (*rest, last) for row in window.rows) == [
        f"{tmp_path}/a.jsonl:{n}" for n in (2, 3, 5, 6, 7, 8)
    ]
    report = stream.report_at(last.place)
    assert report.dropped == {"left out": 2} and "other.jsonl:4" in "".join(report.remarks)


def test_places_without_a_row_are_named_and_an_error_if_none_has_one(tmp_path):
    source = as_jsonl(tmp_path / "a.jsonl")
    data = ready(tmp_path, source, leave_out=listed(tmp_path, f"{source}:1", f"{source}:9", "no.jsonl:1"))
    (remark,) = data.train.report.decisions()
    assert "2 of the 3 places" in remark and "a.jsonl:9" in remark and "no.jsonl:1" in remark
    assert len(data.train) == 7
    with pytest.raises(UserError) as caught:
        ready(tmp_path, source, leave_out=listed(tmp_path, f"{source}:9", "no.jsonl:1"))
    assert [(one.where, one.code) for one in caught.value.problems] == [("data.leave_out", "no-such-row")]


@pytest.mark.parametrize(
    ("content", "where", "code"),
    [
        (b"a.jsonl:1\na.jsonl\n", "bad.txt:2", "not-file-and-line"),
        (b"a.jsonl:one\n", "bad.txt:1", "not-file-and-line"),
        (b"\xff\xfe", "bad.txt", "bad-list-of-rows"),
        (None, "bad.txt", "bad-list-of-rows"),
    ],
)
def test_a_list_that_cannot_be_read_is_an_error_with_its_line(content, where, code, tmp_path):
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(UserError) as caught:
        ready(tmp_path, as_jsonl(tmp_path / "a.jsonl"), leave_out=str(tmp_path / "bad.txt"))
    assert [(one.where, one.code) for one in caught.value.problems] == [(str(tmp_path / where), code)]
