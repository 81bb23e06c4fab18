"""The teacher's records on disk: written in any order by any processes, read by document, damage noticed."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from packtrain.errors import CheckFailed
from packtrain.objectives.distill.teacher_cache import INDEX, TeacherCache, append

WIDTH = 6
TRAINED = np.array([3, 0, 5, 1, 4], np.int32)
BORDERS = np.append(0, np.cumsum(TRAINED, dtype=np.int64))
RECORDS = np.random.default_rng(0).integers(-(2**31), 2**31, (BORDERS[-1], WIDTH)).astype(np.int32)


def add(folder: Path, name: str, *targets: int) -> None:
    append(folder / name, BORDERS, np.array(targets, np.int64), RECORDS[[*targets]])


def opened(folder: Path, *, checked: bool = False) -> TeacherCache:
    return TeacherCache(folder, WIDTH, TRAINED, [file.stem for file in folder.glob("*.idx")], checked=checked)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """All documents, by two processes in rows whose targets are not in order; the third document is split between both."""
    add(tmp_path, "000000-0", 9, 3, 4, 10, 11, 12)
    add(tmp_path, "000000-1", 7, 6, 5, 8)
    add(tmp_path, "000000-0", 0, 1, 2)
    return tmp_path


def test_any_documents_are_read_in_the_order_asked_for_after_pickling_too(whole: Path) -> None:
    cache = opened(whole)
    assert cache.found.all()
    for read in (cache, pickle.loads(pickle.dumps(cache))):
        for documents in ([0, 1, 2, 3, 4], [4, 1, 0], [2], [1], [], [3, 3]):
            places = cache.number(documents)[:, 0]
            assert places.tolist() == [at for number in documents for at in range(*BORDERS[number : number + 2])]
            np.testing.assert_array_equal(read.read(documents), RECORDS[places])
    assert len(pickle.dumps(cache)) < 1000


def test_a_document_counts_only_if_one_attempt_has_all_of_it(tmp_path: Path) -> None:
    assert opened(tmp_path).found.tolist() == [False, True, False, False, False]  # nothing to write for a document without targets
    add(tmp_path, "000000-0", 3, 4, 5, 8)
    assert opened(tmp_path).found.tolist() == [False, True, False, True, False]
    add(tmp_path, "000001-0", 6, 7, 0, 1, 2)  # with the first attempt it would be whole
    assert opened(tmp_path).found.tolist() == [True, True, False, True, False]
    add(tmp_path, "000002-0", 3, 4, 5)
    add(tmp_path, "000002-5", 6, 7, 9, 10, 11, 12)
    cache = opened(tmp_path)
    assert cache.found.all()
    np.testing.assert_array_equal(cache.read([2, 4, 0]), RECORDS[cache.number([2, 4, 0])[:, 0]])


def test_a_torn_end_is_left_out_and_the_rest_is_kept(whole: Path) -> None:
    """Like after a kill: the last micro-batch of the first process has no index, half an index, or half its records."""
    index, records = whole / "000000-0.idx", whole / "000000-0.bin"
    content, numbers = records.read_bytes(), index.read_bytes()
    for cut, of in ((INDEX.itemsize, index), (INDEX.itemsize // 2, index), (1, records), (2 * 4 * WIDTH, records)):
        of.write_bytes((numbers if of is index else content)[:-cut])
        assert opened(whole).found.tolist() == [False, True, True, True, True], (cut, of)
        index.write_bytes(numbers)
        records.write_bytes(content)
    records.write_bytes(b"")
    assert opened(whole).found.tolist() == [False, True, False, True, False]
    records.unlink()
    assert opened(whole).found.tolist() == [False, True, False, True, False]


def test_every_changed_byte_is_noticed(whole: Path) -> None:
    """One in the records, or in the index: reading raises, or the document is not found; a check finds all others right."""
    for file in (whole / "000000-0.bin", whole / "000000-0.idx"):
        content = file.read_bytes()
        skipped = file.suffix == ".idx"
        for at in range(0, len(content), 3):
            if skipped and at % INDEX.itemsize < 16:  # part and row, which are not read
                continue
            file.write_bytes(content[:at] + bytes([content[at] ^ 0x81]) + content[at + 1 :])
            cache, checked = opened(whole), opened(whole, checked=True)
            assert not checked.found.all(), at
            right = np.flatnonzero(checked.found)
            np.testing.assert_array_equal(checked.read(right), RECORDS[checked.number(right)[:, 0]])
            if cache.found.all():
                with pytest.raises(CheckFailed) as refusal:
                    cache.read(range(len(TRAINED)))
                assert refusal.value.problems[0].code == "teacher-cache-damaged"
        file.write_bytes(content)
    assert opened(whole, checked=True).found.all()
