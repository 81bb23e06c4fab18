"""Tokenised data is made once, found again, never half, and mixed without a copy."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_tokenizers import tokenizer_of
from prepared import TOKENIZER, ready

import packtrain
from packtrain.config.schema import DataSource
from packtrain.data import prepare as module
from packtrain.data.tokens import cache
from packtrain.data.tokens.encode import Encoder
from packtrain.errors import PeerFailed, UserError
from tests.waiting import until


def write(path: Path, count: int, first: int = 0) -> str:
    """`count` texts that all differ, of different lengths."""
    rows = ({"text": f"Hello number {number}! " * (1 + number % 5)} for number in range(first, first + count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def stores(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in (tmp_path / "cache").glob("*/manifest.json"))


def documents(dataset: Any) -> list[tuple[int, ...]]:
    return [tuple(dataset[i].input_ids.tolist()) for i in range(len(dataset))]


@pytest.fixture
def encoded(monkeypatch):
    """Numbers of rows of the chunks that were tokenised."""
    calls: list[int] = []
    original = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda *given: (calls.append(len(given[1])), original(*given))[1])
    return calls


def test_a_second_start_tokenises_nothing_and_gives_the_same(tmp_path, encoded):
    path = write(tmp_path / "train.jsonl", 30)
    first = ready(tmp_path, path)
    assert sum(encoded) == 30
    second = ready(tmp_path, path)
    assert sum(encoded) == 30
    assert second.train.fingerprint == first.train.fingerprint
    assert documents(second.train) == documents(first.train)
    assert (first.train.report.seconds > 0, second.train.report.seconds) == (True, 0)


def test_a_moved_or_touched_file_is_still_known_and_changed_content_is_tokenised_anew(tmp_path, encoded):
    path = write(tmp_path / "train.jsonl", 3)
    first = ready(tmp_path, path)
    again = tmp_path / "elsewhere.jsonl"
    Path(path).rename(again)
    os.utime(again, (1, 1))
    assert ready(tmp_path, str(again)).train.fingerprint == first.train.fingerprint  # its hash is remembered now
    assert len(encoded) == 1
    again.write_text(again.read_text().replace("number 2", "number 9"))
    assert ready(tmp_path, str(again)).train.fingerprint != first.train.fingerprint
    assert len(encoded) == 2


@pytest.mark.parametrize(
    "keys",
    [{"max_length": 9}, {"overlong": "drop"}, {"bad_rows": "skip"}, {"loss_on": "all"}, {"columns": {"text": "text"}}],
)
def test_other_settings_and_another_tokenizer_are_another_cache(tmp_path, encoded, keys):
    path = write(tmp_path / "train.jsonl", 3)
    ready(tmp_path, path)
    ready(tmp_path, path, **keys)
    ready(tmp_path, path, tokenizer=tokenizer_of("gemma"))
    assert len(encoded) == 3


def test_padding_and_truncation_left_on_the_tokenizer_change_nothing(tmp_path, encoded):
    wanted = documents(ready(tmp_path, path := write(tmp_path / "train.jsonl", 3)).train)
    used = copy.deepcopy(TOKENIZER)
    used.backend_tokenizer.enable_truncation(2)
    used.backend_tokenizer.enable_padding(length=64)
    assert documents(ready(tmp_path, path, tokenizer=used).train) == wanted
    assert len(encoded) == 1


@pytest.mark.parametrize("name", ["tokens.bin", "manifest.json", "lengths.npy"])
def test_a_damaged_cache_is_noticed_and_made_anew(tmp_path, encoded, name):
    path = write(tmp_path / "train.jsonl", 30)
    wanted = documents(ready(tmp_path, path).train)
    damaged = stores(tmp_path)[0] / name
    if name == "lengths.npy":  # as a loss of power leaves a file whose bytes were not on the disk yet
        damaged.write_bytes(bytes(damaged.stat().st_size))
    else:
        damaged.write_bytes(damaged.read_bytes()[:-100])
    assert documents(ready(tmp_path, path).train) == wanted
    assert len(encoded) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch, error):
    path = write(tmp_path / "train.jsonl", 600)
    original = Encoder.encode
    calls: list[int] = []

    def breaks(self, chunk, form):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return original(self, chunk, form)

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode", breaks)
        with pytest.raises(error):
            ready(tmp_path, path)
    assert stores(tmp_path) == list((tmp_path / "cache").glob("*.building")) == []
    assert len(ready(tmp_path, path).train) == 600


PROGRAM = """
import os, sys, time
sys.path[:0] = {paths!r}
from data_tokenizers import tokenizer_of
from prepared import TOKENIZER, ready
from packtrain.config.schema import Data
from packtrain.data import prepare as module
from packtrain.data.tokens.encode import Encoder
original = Encoder.encode
def slow(self, chunk, form):
    print("tokenising", flush=True)
    while not os.path.exists({go_on!r}): time.sleep(0.01)
    return original(self, chunk, form)
Encoder.encode = slow
data = Data(train={path!r}, cache_dir={cache!r})
prepared = module.prepare(data, tokenizer_of("smollm"), "sft", seed=0, progress=True)
print(prepared.train.fingerprint)
"""


def start(tmp_path: Path, path: str, **pipes: Any) -> subprocess.Popen[str]:
    """Tokenises `path` as soon as there is a file `go-on`."""
    paths = [str(Path(__file__).parents[1]), str(Path(packtrain.__file__).parents[1])]
    program = PROGRAM.format(paths=paths, path=path, cache=str(tmp_path / "cache"), go_on=str(tmp_path / "go-on"))
    usual: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", program], **usual | pipes)


def test_two_processes_that_start_together_make_it_once(tmp_path):
    path = write(tmp_path / "train.jsonl", 20)
    errors = [tmp_path / f"{number}.err" for number in range(2)]
    pair = [start(tmp_path, path, stderr=file.open("w")) for file in errors]

    def waiting() -> int:
        return sum("is tokenising this data; waiting for it" in " ".join(file.read_text().split()) for file in errors)

    until(lambda: waiting() or any(process.poll() is not None for process in pair))
    (tmp_path / "go-on").touch()
    outputs = [process.communicate(timeout=120)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], [file.read_text() for file in errors]
    assert sorted(out.count("tokenising") for out in outputs) == [0, 1]
    assert len({out.split()[-1] for out in outputs}) == 1
    assert waiting() == 1


def test_what_a_killed_process_left_is_removed_by_the_next_build_of_the_same(tmp_path):
    process = start(tmp_path, write(tmp_path / "killed.jsonl", 20))
    assert process.stdout is not None and process.stdout.readline() == "tokenising\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(list((tmp_path / "cache").glob("*.building"))) == 1
    assert len(ready(tmp_path, str(tmp_path / "killed.jsonl")).train) == 20
    assert list((tmp_path / "cache").glob("*.building")) == []


def test_a_process_that_stalls_with_the_lock_is_not_awaited_forever(tmp_path, monkeypatch):
    process = start(tmp_path, path := write(tmp_path / "train.jsonl", 20))
    assert process.stdout is not None and process.stdout.readline() == "tokenising\n"
    monkeypatch.setattr(cache, "STALLED_S", 0.1)
    with pytest.raises(PeerFailed, match=r"\.building: .*\[tokenising-stalled\]"):
        ready(tmp_path, path)
    (tmp_path / "go-on").touch()
    assert process.wait(120) == 0
    assert len(ready(tmp_path, path).train) == 20


def test_many_processes_give_the_same_as_one_and_an_error_in_one_arrives_whole(tmp_path, monkeypatch):
    path, bad = write(tmp_path / "train.jsonl", 700), write(tmp_path / "bad.jsonl", 700)
    lines = Path(bad).read_text().splitlines()
    Path(bad).write_text("\n".join([*lines[:650], '{"text": 5}', *lines[650:]]))
    alone = ready(tmp_path / "alone", path).train
    monkeypatch.setattr(module, "FEW_ROWS", 100)
    monkeypatch.setattr(module, "count_tokenising_processes", lambda: 2)
    with pytest.raises(UserError, match=r"bad.jsonl:651, text: expected a string, found a number: 5"):
        ready(tmp_path / "parallel", [path, bad])
    parallel = ready(tmp_path / "parallel", path).train
    assert parallel.fingerprint == alone.fingerprint
    assert (parallel.report.rows, parallel.report.seconds) == (700, 0)  # what the two processes made


def test_a_dataset_travels_by_path_and_arrays_agree_with_documents(tmp_path):
    train = ready(tmp_path, write(tmp_path / "train.jsonl", 600)).train
    loaded = pickle.loads(pickle.dumps(train))
    assert documents(loaded) == documents(train)
    assert loaded.fingerprint == train.fingerprint
    assert train.lengths.tolist() == [len(train[i].input_ids) for i in range(600)]
    assert train.trained.tolist() == [int(train[i].loss_mask.sum()) for i in range(600)]
    assert train[599].input_ids.dtype == train.lengths.dtype == np.int32 and train[599].loss_mask.dtype == bool
    assert (train.report.tokens, train.report.trained_tokens) == (train.lengths.sum(), train.trained.sum())


@pytest.mark.parametrize("weight, total", [(1.0, 40), (0.5, 20), (2.25, 90)])
def test_a_weight_is_how_often_each_document_appears_and_one_that_takes_nothing_an_error(tmp_path, weight, total):
    other = write(tmp_path / "other.jsonl", 10, first=1000)
    sources = [DataSource(path=write(tmp_path / "train.jsonl", 40), weight=weight), other]
    train = ready(tmp_path, sources).train
    times = np.unique(train.rows[:total], return_counts=True)[1]
    assert len(train) == total + 10
    assert set(times.tolist()) <= {int(weight), int(weight) + 1} - {0}
    assert (train.rows[total:] == np.arange(40, 50)).all()
    assert ready(tmp_path, sources).train.fingerprint == train.fingerprint
    if weight != 1.0:
        assert ready(tmp_path, sources, seed=1).train.fingerprint != train.fingerprint
    with pytest.raises(UserError, match="selects none of the 10"):
        ready(tmp_path, [DataSource(path=other, weight=1e-3)])


def test_a_complete_cache_is_used_where_nothing_can_be_written(tmp_path, monkeypatch):
    path = write(tmp_path / "train.jsonl", 5)
    os.utime(path, (1, 1))
    wanted = ready(tmp_path, path).train.fingerprint
    shutil.rmtree(tmp_path / "cache" / "hashes")

    def refuses(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(cache, "FileLock", refuses)
    monkeypatch.setattr(Path, "write_text", refuses)
    assert ready(tmp_path, path).train.fingerprint == wanted
    with pytest.raises(UserError, match=r"data.cache_dir: .*\[cache-not-writable\]"):
        ready(tmp_path, path, max_length=5)
