"""Files as people have them: running text, compressed, in any Unicode, with any separator; read, or named with what to do."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pytest
from prepared import ready

from packtrain.config.schema import DataSource
from packtrain.data.sources import files
from packtrain.data.sources.chunks import BadRow
from packtrain.errors import UserError

TEXT = "One\ntwo\n\n \nthree\n  four\n\n"
AS_FILES = {  # the same two rows, on lines 2 and 4
    "x.jsonl": '\n{"text": "a\\nb"}\r\n\r\n{"text": "ä"}\n',
    "x.json": '[\n{"text": "a\\nb"},\r\n\r\n{"text": "ä"}]',
    "x.csv": 'text,n\r\n"a\nb",1\r\nä,2\r\n',
    "x.tsv": 'text\tn\n"a\nb"\t1\nä\t2\n',
    "x.txt": "\na\r\nb\n\n",
}


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(content)
    return sink.getvalue().to_pybytes()


def rows(path: Path, content: bytes, split: Any = "document") -> list[tuple[str, Any]]:
    """(line, text) of each row of a file; in place of the text of a bad row, what is said about it."""
    path.write_bytes(content)
    found = [row for chunk in files.read_file(path, split) for row in chunk.rows()]
    assert all(where.startswith(str(path)) for where, _ in found)
    return [
        (where.removeprefix(str(path)).strip(":"), str(row.problem("")) if isinstance(row, BadRow) else row["text"])
        for where, row in found
    ]


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ("document", [("1", "One\ntwo\n\n \nthree\n  four")]),
        ("line", [("1", "One"), ("2", "two"), ("5", "three"), ("6", "  four")]),
        ("paragraph", [("1", "One\ntwo"), ("5", "three\n  four")]),
    ],
)
def test_running_text_is_a_document_or_its_lines_or_its_paragraphs(tmp_path, split, wanted):
    for name, content in (
        ("x.txt", TEXT.encode()),
        ("X.TXT", TEXT.replace("\n", "\r\n").encode("utf-8-sig")),
        ("x.txt.gz", gzip.compress(TEXT.encode())),
        ("x.txt.zst", zstd(TEXT.encode())),
    ):
        assert rows(tmp_path / name, content, split) == wanted
    assert rows(tmp_path / "blank.txt", b"\n \n\n", split) == []


def test_each_way_to_split_a_text_has_its_own_cache_and_is_remarked(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("One two.\n\nThree.\nFour.\n")
    for split, count in (("document", 1), ("line", 3), ("paragraph", 2), ("document", 1)):
        report = ready(tmp_path, path, split_text=split).train.report
        assert (report.rows, report.documents, report.format) == (count, count, "text")
        assert len(report.remarks) == 1 and "data.split_text" in report.remarks[0]
    other = tmp_path / "x.jsonl"
    other.write_text('{"text": "One two."}\n')
    ready(tmp_path, other)
    assert not (report := ready(tmp_path, other, split_text="line").train.report).remarks and not report.seconds


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_running_text_that_is_too_long_is_split(tmp_path, name):
    words = " ".join(f"word{n}" for n in range(50))
    (tmp_path / name).write_text(words if name == "x.txt" else json.dumps({"text": words}))
    whole = ready(tmp_path, tmp_path / name, max_length=None).train[0].input_ids.tolist()
    data = ready(tmp_path, tmp_path / name, max_length=32)
    assert [token for at in range(len(data.train)) for token in data.train[at].input_ids.tolist()] == whole
    assert (data.train.report.split, data.train.report.truncated, data.train.report.cut_tokens) == (1, 0, 0)
    cut = ready(tmp_path, tmp_path / name, max_length=32, overlong="truncate").train.report
    assert (cut.split, cut.truncated, cut.cut_tokens) == (0, 1, len(whole) - 32)


def test_a_folder_of_texts_is_read_and_what_is_about_the_data_is_not(tmp_path):
    folder = tmp_path / "books"
    for hidden in ("deep", ".ipynb_checkpoints"):
        (folder / hidden).mkdir(parents=True)
    for name in ("a.txt", "deep/b.TXT", "README.txt", "LICENSE.txt", ".ipynb_checkpoints/a.txt", "._a.txt"):
        (folder / name).write_text("Hello there!\n")
    (folder / "dataset_info.json").write_text("{}")
    report = ready(tmp_path, folder).train.report
    assert (report.rows, report.remarks[0].split(": ")[1][:24]) == (2, "each .txt file is a row ")
    assert ready(tmp_path, folder / "*.txt").train.report.rows == 1


@pytest.mark.parametrize("name", AS_FILES)
def test_utf_8_is_read_with_and_without_a_mark_and_any_other_encoding_refused(tmp_path, name):
    wanted = [("row 1" if name == "x.json" else "2", "a\nb"), ("row 2" if name == "x.json" else "4", "ä")]
    for encoding in ("utf-8", "utf-8-sig"):
        found = rows(tmp_path / name, AS_FILES[name].encode(encoding), "paragraph")
        assert [(where.removeprefix(", "), text) for where, text in found] == wanted[: len(found)] and found
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"):
        (tmp_path / name).write_bytes((AS_FILES[name] + "ä").encode(encoding))
        with pytest.raises(UserError, match=name):
            ready(tmp_path, tmp_path / name)


def test_compressed_files_are_read_frame_by_frame_and_damage_is_an_error_and_zeros_a_bad_row(tmp_path):
    first, second = b'{"text": "one"}\n', b'{"text": "two"}\n'
    for name, packed in (("x.jsonl.zst", zstd), ("x.JSONL.GZ", gzip.compress), ("x.ndjson.zst", zstd)):
        assert rows(tmp_path / name, packed(first) + packed(second)) == [("1", "one"), ("2", "two")]
    for name, content in (
        ("cut.jsonl.zst", zstd(first)[:-3]),
        ("plain.jsonl.zst", first),
        ("plain.csv.gz", first),
        ("more.json.zst", zstd(b"[]") + b"more"),
        ("half.csv", b"text\n\xe4"),
    ):
        with pytest.raises(UserError, match=rf"{name}: "):
            rows(tmp_path / name, content)
    for name, content in (("x.txt", b"fine\nda\0mage\n"), ("x.csv", b"text\nda\0mage\n")):
        ((_, said),) = rows(tmp_path / name, content)
        assert said.startswith(", text: the text holds NUL bytes")


def test_a_csv_is_read_with_the_separator_of_its_first_line_and_rows_have_their_own_lines(tmp_path):
    for separator in (",", ";", "\t"):
        lines = [f"id{separator}text", f'1{separator}"one{separator} and ""two"""', f"2{separator}three"]
        content = "\r\n".join(lines).encode("utf-8-sig")  # what Excel writes
        assert rows(tmp_path / "x.csv", content) == [("2", f'one{separator} and "two"'), ("3", "three")]
    assert rows(tmp_path / "x.tsv", b"text\none, two; three\n") == [("2", "one, two; three")]
    found = rows(tmp_path / "x.csv", b'\n\ntext,n\n\na,1\n"b"x,2\nc,3\nd\n\ne,4\n')  # blank and broken ones
    assert [(line, text) for line, text in found if len(text) == 1] == [("5", "a"), ("7", "c"), ("10", "e")]
    assert ["broken csv" in found[1][1], "not as many fields" in found[3][1]] == [True, True]
    assert [found[1][0], found[3][0]] == ["6", "8"]


def test_files_of_arrow_are_read_with_and_without_an_index(tmp_path):
    table = pa.table({"text": [f"row {n}" for n in range(600)]})
    feather.write_feather(table, tmp_path / "indexed.arrow", compression="zstd")
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("indexed.arrow", "stream.arrow"):
        chunks = list(files.read_file(tmp_path / name))
        assert [len(chunk) for chunk in chunks] == [256, 256, 88]
        assert len(pickle.dumps(chunks[2])) < 4_000  # not the whole table
        assert list(chunks[2].rows())[-1] == (f"{tmp_path / name}, row 600", {"text": "row 599"})
    with pytest.raises(UserError, match=r"\[bad-data-file\]"):
        rows(tmp_path / "other.arrow", b"hello")


def test_a_json_file_that_is_no_list_of_rows_is_named(tmp_path):
    for content, where in (
        ('{"train": [{"text": "a"}], "test": [{"text": "b"}]}', "x.json"),
        ('{"text": "a"}\n{\n', "x.json:2"),
        ("12", "x.json:1"),
    ):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(UserError) as caught:
            ready(tmp_path, tmp_path / "x.json")
        assert caught.value.problems[0].where.endswith(where)


VALUES = {
    "a list": '[{"text": "a"}, {"text": "b"}]',
    "a list on lines": '\n[\n{"text": "a"},\n{"text": "b"}\n]\n',
    "an object": '{"version": 1, "authors": ["x"], "data": [{"text": "a"}, {"text": "b"}]}',
    "an object on lines": '{\n  "rows": [\n    {"text": "a"},\n    {"text": "b"}\n  ],\n  "version": {"of": 1}\n}\n',
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.ndjson.gz", "x.json.zst"])
def test_a_file_that_is_one_value_is_read_whatever_its_name(tmp_path, name, value):
    packed = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix, bytes)
    assert rows(tmp_path / name, packed(b"\xef\xbb\xbf" + value.encode())) == [(", row 1", "a"), (", row 2", "b")]


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_one_row_alone_is_a_row_though_it_has_a_list(tmp_path, name):
    row = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "you"}]}
    for columns, value in (({}, row), ({"messages": "chat"}, {"chat": row["messages"]})):
        for indent in (None, 1):
            (tmp_path / name).write_text(json.dumps(value, indent=indent))
            assert len(ready(tmp_path, tmp_path / name, columns=columns).train) == 1


def test_the_only_line_of_a_jsonl_is_a_row_with_a_list_of_objects_and_lines_are_lines_though_they_are_lists(tmp_path):
    row = {"q": "Hello", "a": "you", "refs": [{"text": "a"}, {"text": "b"}]}  # two texts as a holder of rows
    for name, packed in (("x.jsonl", bytes), ("x.jsonl.gz", gzip.compress)):
        (path := tmp_path / name).write_bytes(packed(json.dumps(row).encode()))
        report = ready(tmp_path, path, columns={"instruction": "q", "output": "a"}).train.report
        assert (report.rows, report.format) == (1, "alpaca")
    bad = "expected an object, found a list"
    found = rows(tmp_path / "x.jsonl", b'[{"text": "a"}]\n{"text": "b"}\n[1]\n')
    assert [line for line, said in found if bad in said] == ["1", "3"] and ("2", "b") in found


def test_of_a_folder_with_splits_the_one_that_is_asked_for_is_read(tmp_path):
    folder = tmp_path / "repo"
    counts = {"data/train-00000-of-00002.jsonl": 1, "data/train-00001-of-00002.jsonl": 2, "test/a.jsonl": 4}
    for name, count in counts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "Hello there!"}\n' * count)

    def report(**source: Any) -> Any:
        return ready(tmp_path, DataSource(path=str(folder), **source)).train.report

    assert (report().rows, report().remarks) == (3, (f"{folder} [train]: 2 of 3 files, by their names",))
    assert report(split="eval").rows == 4
    with pytest.raises(UserError, match=r"no file is of the split 'validation'[\s\S]*one of train, test"):
        report(split="validation")
    (folder / "test/a.jsonl").unlink()
    assert (report().rows, report().remarks) == (3, ())
