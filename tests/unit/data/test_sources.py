"""Data that is damaged, odd or out of reach: an error that names it, or a row that is counted; never a traceback."""

from __future__ import annotations

import gzip
import json
import threading
import time
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from data_tokenizers import tokenizer_of
from prepared import ready, texts

from packtrain.config.schema import DataSource
from packtrain.config.schema import sources as named
from packtrain.data.sources import locate as sources
from packtrain.data.sources import quickstart
from packtrain.data.tokens import pretrained as hub
from packtrain.data.tokens.cache import StoreWriter
from packtrain.errors import UserError

QUESTION, ANSWER = {"role": "user", "content": "Hello there!"}, {"role": "assistant", "content": "How are you?"}


def text_table(*values: bytes) -> pa.Table:
    """A column of strings made of bytes that nobody checked."""
    ends = [0]
    for value in values:
        ends.append(ends[-1] + len(value))
    borders = pa.array(ends, pa.int32()).buffers()[1]
    return pa.table({"text": pa.StringArray.from_buffers(len(values), borders, pa.py_buffer(b"".join(values)))})


DEEP, LONG_NUMBER = "[" * 100_000, "1" * 5000


@pytest.mark.parametrize(
    "content, where",
    [
        (f'{{"text": "a b", "n": {LONG_NUMBER}}}\n', "x.jsonl:1"),
        (f'{{"text": {DEEP}}}\n', "x.jsonl:1"),
        (f"[\n{DEEP}]", "x.json"),
        (b'[{"text": "fine"},\n{"text": "caf\xe9"}]', "x.json"),
        ('[\n{"text": "a"},\n{"text": }\n]', "x.json"),
        ('[{"text": "a"}]\n\n[1]', "x.json"),
        ('[{"text": "a", "text": "b"}]', "x.json"),
        ('[{"text": "a"},\n7]', "x.json, row 2"),
        (f"messages\n{DEEP}\n", "x.csv:2, messages"),
        ('text\nfine\n"open\nlost\nlost too\n', "x.csv:3"),
        ('text\n"a"b\nfine\n', "x.csv:2"),
        ("text,id\na,1\nonly one\n", "x.csv:3"),
        ("text,id,text\na,1,b\n", "x.csv:1"),
        (gzip.compress(b"")[:10] + b"\xff" * 30, "x.jsonl.gz"),
        ('{"input_ids": [5, 6, 7], "completion_mask": [0, 5, 1]}', "x.jsonl:1, completion_mask[1]"),
        ('{"input_ids": [5, 6], "labels": [5, 7]}', "x.jsonl:1, labels[1]"),
        ('{"input_ids": [5, 6], "labels": [5]}', "x.jsonl:1, labels"),
        ('{"input_ids": [5, 1000000]}', "x.jsonl:1, input_ids[1]"),
        ('{"input_ids": [5, "6"]}', "x.jsonl:1, input_ids[1]"),
        ('{"input_ids": [5, 6], "attention_mask": [1, 0]}', "x.jsonl:1, attention_mask"),
    ],
    ids=range(20),
)
def test_a_damaged_file_is_an_error_that_names_the_place(tmp_path, content, where):
    path = tmp_path / where.split(",")[0].split(":")[0]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        ready(tmp_path, path)
    assert [problem.where for problem in caught.value.problems] == [f"{tmp_path}/{where}"]


def test_a_row_of_a_table_that_cannot_be_read_is_a_bad_row_and_spoils_no_other(tmp_path):
    pq.write_table(text_table(b"fine", b"\xff\xfe"), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="row 2, text: "):
        ready(tmp_path, tmp_path / "x.parquet")
    assert texts(ready(tmp_path, tmp_path / "x.parquet", bad_rows="skip")) == ["fine<|im_end|>"]


FAR = {
    "date": pa.array([0, 2**60], pa.timestamp("us")),
    "zone": pa.array([0, 2**60], pa.timestamp("us", "Moon/Base")),
    "days": pa.array([0, 2**30], pa.date32()),
    "bytes": text_table(b"fine", b"\xff\xfe")["text"].chunk(0),
    "list": pa.array([[0], [0, 2**60]], pa.list_(pa.timestamp("us"))),
}


@pytest.mark.parametrize("column", FAR.values(), ids=FAR.keys())
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_what_python_cannot_hold_in_a_column_that_nobody_reads_stops_nothing(tmp_path, column, kind):
    message = {"role": ["user", "assistant"] * 2, "content": ["fine"] * 2 + ["late"] * 2}
    message["at"] = pa.concat_arrays([column] * 2)
    turns = pa.StructArray.from_arrays([pa.array(part) for part in message.values()], names=[*message])
    turns = pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), turns)
    table = pa.table({"messages": turns, "at": column})
    path = tmp_path / f"x.{kind}"
    pq.write_table(table, path) if kind == "parquet" else feather.write_feather(table, path, "uncompressed")
    found = texts(ready(tmp_path, path))
    assert ["fine" in found[0], "late" in found[1]] == [True, True]


def called(name: str, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in arguments}
    tool = {"name": name, "parameters": {"type": "object", "properties": properties}}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"messages": messages, "tools": [{"type": "function", "function": tool}]}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tool_calls_from_a_table_are_not_filled_up_with_the_fields_of_others(tmp_path, kind):
    rows, tokenizer = [called("weather", city="Paris"), called("add", a="1", b="2")], tokenizer_of("qwen2_5")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    else:
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "x.arrow")
    wanted = texts(ready(tmp_path, tmp_path / "x.jsonl", tokenizer=tokenizer), tokenizer)
    assert texts(ready(tmp_path, tmp_path / f"x.{kind}", tokenizer=tokenizer), tokenizer) == wanted


@pytest.mark.parametrize("wanted", [{"split": "test"}, {"subset": "en"}])
def test_a_split_of_plain_files_is_refused_rather_than_ignored(tmp_path, wanted):
    (tmp_path / "x.jsonl").write_text('{"text": "Hello there!"}\n')
    with pytest.raises(UserError, match=f"no {next(iter(wanted))}s to choose"):
        ready(tmp_path, DataSource(path=str(tmp_path / "x.jsonl"), **wanted))


@pytest.mark.parametrize("step", ["read", "write"])
def test_a_file_that_may_not_be_read_and_a_full_disk_are_errors_for_the_user(tmp_path, monkeypatch, step):
    (tmp_path / "x.jsonl").write_text('{"text": "Hello there!"}\n')

    def fails(*_: object, **__: object) -> None:
        raise OSError(13 if step == "read" else 28, "it may not be", "the file")

    where = "packtrain.data.prepare.hash_file" if step == "read" else f"{StoreWriter.__module__}.StoreWriter.add"
    monkeypatch.setattr(where, fails)
    with pytest.raises(UserError, match="it may not be"):
        ready(tmp_path, tmp_path / "x.jsonl")
    assert not list((tmp_path / "cache").glob("*.building"))


@pytest.mark.parametrize("name", ["chats.docx", "data/chats.unheard", "data/train"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_file_that_is_not_read_or_not_there_is_no_hub_id(tmp_path, monkeypatch, name, exists):
    monkeypatch.setattr(sources, "load_from_hub", lambda source, where: pytest.fail(f"{source.path} is no hub id"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    if exists:
        (tmp_path / name).write_text("Hello")
    with pytest.raises(UserError, match=name):
        ready(tmp_path, name)


@pytest.fixture
def unasked():
    """The hub as if nobody had asked it yet."""
    hub.is_reachable.cache_clear()
    yield
    hub.is_reachable.cache_clear()


class Silent:
    """A hub that is looked for and never found."""

    def head(self, *_: Any, **__: Any) -> None:
        threading.Event().wait(300)


def test_a_hub_that_does_not_answer_fails_soon_with_one_message(tmp_path, monkeypatch, unasked):
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: Silent())
    monkeypatch.setattr(hub, "ANSWER_S", 0.2)
    before = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        ready(tmp_path, "owner/name")
    assert time.monotonic() - started < 60
    assert "owner/name" in str(caught.value) and "HF_HUB_OFFLINE=1" in str(caught.value)
    assert before == (huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)


def test_the_quickstarts_name_stands_for_the_split_of_its_role_and_another_split_is_refused():
    for role, other in (
        ("eval", {"split": "train"}),
        ("train", {"split": "validation"}),
        ("train", {"subset": "small"}),
    ):
        with pytest.raises(UserError, match=f"quickstart has no .* for data.{role}"):
            sources.locate(DataSource(path="quickstart", **other), role, 0, "sft", "document")
        (source,) = named("quickstart", role)
        first = next(iter(next(sources.locate(source, role, 0, "sft", "document").chunks()).rows()))[1]
        assert first == quickstart.conversations(role, 0, 1)[0]
