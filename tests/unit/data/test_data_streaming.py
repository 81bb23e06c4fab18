"""Streams of sources: everything once, in an order by the seed, the same from any step on, in memory that does not grow."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, islice
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizers import tokenizer_of

from packtrain.config.compose import faults_of
from packtrain.config.schema import Data, DataSource, Stage
from packtrain.data.prepare import PreparedData, prepare
from packtrain.data.sources.chunks import CHUNK_ROWS
from packtrain.data.sources.files import RemoteFile, read_file
from packtrain.data.streaming import Stream, Window, open_stream
from packtrain.errors import PacktrainError, PeerFailed, UserError

TOKENIZER = tokenizer_of("smollm")


@pytest.fixture
def open_(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def opened(train: Any, kind: Any = "sft", examples: int = 10, seed: int = 0, **keys: Any) -> PreparedData:
            how: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "shuffle_buffer": 300, **keys}
            data = Data(train=train if isinstance(train, list) else [train], streaming=True, **how)
            prepared = open_stream(data, TOKENIZER, kind, examples, seed=seed)
            stack.push(prepared.stream.stack)
            return prepared

        yield opened


def test_columns_that_nothing_reads_are_named_by_a_stream(tmp_path: Path, open_: Any) -> None:
    rows = [{"text": f"row {number}", "id": number} for number in range(600)] + [{"text": "late", "title": "of late"}]
    name, prepared = str(write(tmp_path / "x.jsonl", rows)), open_(str(tmp_path / "x.jsonl"), examples=100)
    assert any(line.endswith("about the rows only: id") for line in prepared.train.report.decisions())
    *_, last = prepared.stream.windows()
    assert prepared.stream.report_at(last.place).unread == {name: {"id": "note", "title": ""}}


def rows_of(name: str, count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"text": f"{name} {number}"} for number in range(first, first + count)]


def write(file: Path, rows: list[dict[str, str]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=700)
    else:
        text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return file


def source(folder: Path, name: str, count: int, **keys: Any) -> DataSource:
    return DataSource(path=str(write(folder / f"{name}.jsonl", rows_of(name, count))), name=name, **keys)


def texts(window: Window) -> list[str]:
    data = window.data
    return [str(TOKENIZER.decode(data[n].input_ids, skip_special_tokens=True)) for n in range(len(data))]


def read(stream: Stream, place: Any = None, most: int | None = None) -> list[list[str]]:
    return [texts(window) for window in islice(stream.windows(place), most)]


def test_every_row_of_files_of_all_kinds_comes_once_and_in_an_order_by_the_seed(tmp_path: Path, open_: Any) -> None:
    for number, name in enumerate(("a.jsonl", "b.parquet", "c.jsonl.gz")):
        write(tmp_path / "rows" / name, rows_of("row", 1000, 1000 * number))
    windows = read(open_(str(tmp_path / "rows")).stream)
    given = [row["text"] for row in rows_of("row", 3000)]
    assert sorted(chain(*windows)) == sorted(given) and {*map(len, windows)} == {10}
    assert read(open_(str(tmp_path / "rows")).stream, most=5) == windows[:5]
    assert read(open_(str(tmp_path / "rows"), seed=1).stream, most=5) != windows[:5]
    # shuffled within the buffer, up to the chunk that completes it
    places = [given.index(text) // (2 * CHUNK_ROWS) for text in chain(*windows)]
    assert windows[0] != given[:10] and places[:300] == [0] * 300
    in_order = read(open_(str(tmp_path / "rows"), shuffle=False).stream)
    assert [*chain(*in_order)] == given


def test_a_stream_goes_on_from_the_place_after_any_step(tmp_path: Path, open_: Any) -> None:
    given = [source(tmp_path, "many", 1500), source(tmp_path, "few", 90), source(tmp_path, "again", 7)]
    stages = [Stage(until=40, weights={"many": 2, "few": 1}), Stage(weights={"many": 1, "few": 1, "again": 1})]
    windows = [*islice(open_(given, stages=stages).stream.windows(), 150)]
    expected = [texts(window) for window in windows]
    assert Counter(chain(*expected))["few 3"] > 1 and Counter(chain(*expected))["again 3"] > 10
    assert not any("again" in text for text in chain(*expected[:40]))
    for step in (1, 12, 40, 77, 149):
        place = json.loads(json.dumps(windows[step - 1].place))
        assert read(open_(given, stages=stages).stream, place, 150 - step) == expected[step:]


def test_the_others_take_the_share_of_a_source_that_has_ended_and_the_last_step_may_be_smaller(tmp_path, open_):
    prepared = open_([source(tmp_path, "many", 303), source(tmp_path, "few", 5, weight=3)])
    windows = [*prepared.stream.windows()]
    assert [len(window.rows) for window in windows] == [10] * 30 + [8]
    assert [window.last for window in windows] == [False] * 30 + [True]
    assert Counter(text.split()[0] for text in chain(*map(texts, windows))) == {"many": 303, "few": 5}
    names = [window.data.source_of.tolist() for window in windows]
    assert [["many", "few"][number] for number in names[0]] == [text.split()[0] for text in texts(windows[0])]
    assert windows[0].rows[0].startswith(str(tmp_path)) and ".jsonl:" in windows[0].rows[0]
    report = prepared.stream.report_at(windows[-1].place, documents=308, tokens=0, trained_tokens=0)
    assert (report.rows, report.kept, report.dropped) == (308, 308, {})


def test_in_stages_a_source_begins_again_in_another_order(tmp_path: Path, open_: Any) -> None:
    given = [source(tmp_path, "many", 300), source(tmp_path, "few", 15)]
    stages = [Stage(until=3, weights={"few": 1}), Stage(weights={"many": 1})]
    first, *_, last = read(open_(given, examples=15, stages=stages).stream, most=4)
    second = read(open_(given, examples=15, stages=stages).stream, most=2)[1]
    assert sorted(first) == sorted(second) == sorted(row["text"] for row in rows_of("few", 15)) and first != second
    assert {text.split()[0] for text in last} == {"many"}


def test_what_decides_of_the_documents_is_in_the_fingerprint(tmp_path: Path, open_: Any) -> None:
    given = source(tmp_path, "x", 3000)
    prints = [open_(given).train.fingerprint, open_(given).train.fingerprint]
    assert prints[0] == prints[1]
    prints += [open_(given, **keys).train.fingerprint for keys in ({"max_length": 90}, {"bad_rows": "skip"})]
    with (tmp_path / "x.jsonl").open("a") as file:  # far behind the first rows
        file.write('{"text": "more"}\n')
    assert len({*prints, open_(given).train.fingerprint}) == 4


def test_sources_go_on_by_their_names_and_other_files_at_the_place_are_refused(tmp_path: Path, open_: Any) -> None:
    old, new = source(tmp_path, "old", 100), source(tmp_path, "new", 100)
    place = [*islice(open_(old, shuffle=False).stream.windows(), 5)][-1].place
    on = [*chain(*read(open_([new, old], shuffle=False).stream, place))]
    assert [text for text in on if "old" in text] == [f"old {number}" for number in range(50, 100)]
    assert sum("new" in text for text in on) == 100
    for name in ("a", "b"):
        write(tmp_path / "rows" / f"{name}.jsonl", rows_of(name, 400))
    place = [*islice(open_(str(tmp_path / "rows")).stream.windows(), 60)][-1].place
    assert place["sources"][str(tmp_path / "rows")]["name"].endswith("b.jsonl")
    (tmp_path / "rows" / "b.jsonl").rename(tmp_path / "rows" / "c.jsonl")
    with pytest.raises(UserError, match=r"\[files-changed\]"):
        read(open_(str(tmp_path / "rows")).stream, place)


def test_rows_that_are_dropped_are_counted_and_bad_ones_stop_the_stream(tmp_path: Path, open_: Any) -> None:
    rows: list[Any] = rows_of("row", 1800)
    rows[550] = {"text": ""}
    rows[1030:] = [{"text": ""}] * 770
    file = str(write(tmp_path / "x.jsonl", rows))
    with pytest.raises(UserError, match=r"x\.jsonl:551"):
        read(open_(file).stream)
    stream = open_(file, bad_rows="skip").stream
    last = [*stream.windows()][-1]
    assert stream.report_at(last.place).dropped == {"empty": 771}
    write(tmp_path / "x.jsonl", [{"text": ""}] * 20)
    with pytest.raises(UserError, match=r"\[no-document-remains\]"):
        open_(file, bad_rows="skip")
    again = open_(source(tmp_path, "y", 20), stages=[Stage(weights={"y": 1})]).stream
    write(tmp_path / "y.jsonl", [{"text": ""}] * 20)
    with pytest.raises(UserError, match=r"y\.jsonl:1"):
        read(again)


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.jsonl.gz"])
def test_chunks_from_a_number_on_are_those_of_the_whole_file(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, rows_of("row", 2000))
    whole = [list(chunk.rows()) for chunk in read_file(file)]
    for first in (0, 1, 3, 5, 9):
        assert [list(chunk.rows()) for chunk in read_file(file, first=first)] == whole[first:]


def test_pairs_are_streamed(tmp_path: Path, open_: Any) -> None:
    rows = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(30)]
    window = next(open_(str(write(tmp_path / "p.jsonl", rows)), "dpo").stream.windows())
    for number, row in enumerate(window.rows):
        pair, line = window.data[number], int(row.rpartition(":")[2]) - 1
        assert str(TOKENIZER.decode(pair.rejected.input_ids)).startswith(f"{line}?no {line}")
    assert len(window.data.source_of) == 10


def test_a_bucket_is_read_where_it_is_and_only_as_a_stream(tmp_path: Path, open_: Any) -> None:
    for name in ("a.jsonl", "b.parquet", "c.jsonl.gz"):
        write(tmp_path / "rows" / name, rows_of(name, 20))
    (tmp_path / "rows" / "README.md").write_text("words")
    for path, count in (("rows", 60), ("rows/*.parquet", 20), ("rows/a.jsonl", 20)):
        assert len([*chain(*read(open_(f"file://{tmp_path}/{path}").stream))]) == count
    fsspec.filesystem("memory").pipe("/bucket/x.jsonl", (tmp_path / "rows" / "a.jsonl").read_bytes())
    assert len([*chain(*read(open_("memory://bucket/*.jsonl").stream))]) == 20
    missing = dict.fromkeys(("none.jsonl", "rows@train"), r"\[bad-url\]")
    for path, what in (
        missing | {"rows/README.md": r"\[nothing-to-read\]", "rows/*.csv": r"\[nothing-to-read\]"}
    ).items():
        with pytest.raises(UserError, match=what):
            read(open_(f"file://{tmp_path}/{path}").stream)
    for name, split in (("x", "train"), ("y", "test"), ("z", ".hidden")):
        fsspec.filesystem("memory").pipe(f"/data/{split}/{name}.jsonl", (tmp_path / "rows" / "a.jsonl").read_bytes())
    for split in ("train", "test"):
        assert len([*chain(*read(open_(DataSource(path="memory://data", split=split)).stream))]) == 20
    with pytest.raises(UserError, match=r"\[no-splits\]"):
        open_(DataSource(path="memory://bucket/*.jsonl", split="test"))
    listed = {"some": {"file_name": "rows/a.jsonl", "num_samples": 5, "columns": {"prompt": "text"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(listed))
    with pytest.raises(UserError, match="num_samples"):
        open_(f"lf:{tmp_path}/dataset_info.json#some")
    with pytest.raises(UserError, match=r"\[only-as-stream\]"):
        prepare(Data(train=f"file://{tmp_path}/rows"), TOKENIZER, "sft", seed=0)
    with pytest.raises(UserError, match=r"\[bad-url\]"):
        open_("nosuchscheme://bucket/x.jsonl")


def test_reading_goes_on_where_a_server_failed_and_ends_where_it_stays_away(tmp_path, open_, monkeypatch):
    url = f"file://{write(tmp_path / 'x.jsonl', rows_of('row', 3000))}"
    opened, most = list[str](), 3

    class Failing(io.BytesIO):
        def readline(self, *_: Any) -> bytes:
            line = super().readline()
            if len(opened) < most and b"row 1500" in line:
                raise RuntimeError("the server is away")  # no OSError: as those of botocore and aiohttp
            return line

        def __next__(self) -> bytes:
            return self.readline() or next(iter(()))

    def open_failing(file: RemoteFile) -> Any:
        opened.append(file.url)
        return Failing((tmp_path / "x.jsonl").read_bytes())

    monkeypatch.setattr(RemoteFile, "open", open_failing)
    monkeypatch.setattr("packtrain.data.sources.files._WAITS_S", (0, 0, 0))
    assert sorted(chain(*read(open_(url).stream))) == sorted(row["text"] for row in rows_of("row", 3000))
    assert len(opened) == 3  # the first rows, those to the failure, and those after it
    most = 100
    with pytest.raises(PeerFailed, match=r"the server is away \[bad-data-file\]\n.*Check the network"):
        read(open_(url).stream)


@pytest.mark.parametrize("killed", ["a worker", "what workers are forked from"])
def test_a_tokenising_process_that_is_killed_ends_the_stream(killed, tmp_path, open_, monkeypatch):
    monkeypatch.setattr("packtrain.data.prepare.count_tokenising_processes", lambda: 2)
    stream = open_(source(tmp_path, "x", 3000), stages=[Stage(weights={"x": 1})]).stream
    windows = stream.windows()
    next(windows)
    pool = stream.streams[0].tokeniser.pool
    worker = next(iter(pool._processes))
    threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc", str(worker), "task").glob("*")]
    assert "jemalloc_bg_thd" not in threads  # with which forks may lock up
    server: Any = forkserver._forkserver
    os.kill(worker if killed == "a worker" else server._forkserver_pid, signal.SIGKILL)
    with pytest.raises(PacktrainError, match=r"\[tokenising-process-died\]"):
        [*islice(windows, 10_000)]
    stream.stack.close()  # ends, although workers ignore SIGTERM


def test_the_files_of_a_split_on_the_hub_are_streamed(tmp_path, open_, monkeypatch):
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl"):
        write(tmp_path / "hub" / name, rows_of(name, 15))
    real = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda path, subset: real(str(tmp_path / "hub"), subset))
    assert len([*chain(*read(open_("owner/name").stream))]) == 30
    assert len([*chain(*read(open_("owner/name@test").stream))]) == 15
    with pytest.raises(UserError, match="no files of the split 'dev'"):
        open_("owner/name@dev")


COMPLETE: dict[str, dict[str, Any]] = {
    "model": {"path": "x/y"},
    "data": {"train": "a/b", "streaming": True},
    "batch": {"examples_per_step": 4},
    "trainer": {"max_steps": 10},
}


NEEDS_ALL = [
    ("trainer", {"max_steps": None}, "trainer.max_steps"),
    ("trainer", {"on_spike": "rollback", "checkpoint_every": 1}, "trainer.on_spike"),
    ("data", {"eval": 0.1}, "data.eval"),
    ("data", {"shuffle": "by_prefix"}, "data.shuffle"),
    ("data", {"max_length": None}, "data.max_length"),
    ("data", {"train": [{"path": "a/b", "samples": 3}]}, "data.train"),
    ("data", {"streaming": False, "shuffle_buffer": 3}, "data.shuffle_buffer"),
    ("batch", {"examples_per_step": None, "tokens_per_step": 8192}, "batch.examples_per_step"),
    ("packing", {"share_prefix": True}, "packing.share_prefix"),
    ("objective", {"kind": "dpo", "reference": "precomputed"}, "objective.reference"),
    ("objective", {"kind": "kto"}, "objective.kind"),
    ("strategy", {"sequence_parallel": 2}, "strategy.sequence_parallel"),
]


def test_what_needs_the_whole_data_is_refused_by_name() -> None:
    assert faults_of(COMPLETE) == []
    for group, keys, at in NEEDS_ALL:
        faults = faults_of({**COMPLETE, group: {**COMPLETE.get(group, {}), **keys}})
        assert at in {fault.keys[0] for fault in faults}, (group, keys)


MEASURE = """
import sys
import psutil
from packtrain.config.schema import Data
from packtrain.data.sources.quickstart import tokenizer
from packtrain.data.streaming import open_stream

if __name__ == "__main__":
    data = Data(train=sys.argv[1], streaming=True, shuffle_buffer=500, cache_dir=sys.argv[2])
    stream, held = open_stream(data, tokenizer(), "sft", 64, seed=0).stream, []
    with stream.stack:
        for window in stream.windows():
            held.append(psutil.Process().memory_info().rss >> 20)
    print(len(held), max(held[:60]), max(held))
"""


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    (tmp_path / "measure.py").write_text(MEASURE)
    rows, most = 12_000, 1_000  # of 700 tokens: 42 MB in memory
    with (tmp_path / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": f"{10_000 + number} " * 115}) + "\n" for number in range(rows))
    command = [sys.executable, str(tmp_path / "measure.py"), str(tmp_path / "rows.jsonl"), str(tmp_path / "cache")]
    steps, early, late = map(int, subprocess.check_output(command, text=True).split())
    assert steps == -(-rows // 64) and early < most and late - early < 15, (early, late)
