"""The teacher's records on disk are read by document, and damage is noticed."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from packtrain.objectives.distill.teacher_cache import TeacherCache

WIDTH = 6
TRAINED = np.array([3, 0, 5, 1, 4], np.int32)
BORDERS = [0, *np.cumsum(TRAINED).tolist()]
ROWS = np.random.default_rng(0).integers(-(2**31), 2**31, (BORDERS[-1], WIDTH)).astype(np.int32)


@pytest.fixture
def cache(tmp_path: Path) -> TeacherCache:
    """A file without rows."""
    file = tmp_path / "records.bin"
    with file.open("wb") as opened:
        opened.truncate(BORDERS[-1] * 4 * (WIDTH + 1))
    return TeacherCache(file, WIDTH, np.array(BORDERS))


def write(cache: TeacherCache, *targets: int) -> None:
    cache.write(np.array(targets, np.int64), ROWS[[*targets]])


def test_any_documents_are_read_in_the_order_asked_for_after_pickling_too(cache: TeacherCache) -> None:
    write(cache, 9, 3, 4, 10, 11, 12)  # rows of several documents, one of them split
    write(cache)
    write(pickle.loads(pickle.dumps(cache)), 7, 6, 5, 8)  # by another process
    write(cache, 0, 1, 2)
    assert cache.find().all()
    for read in (cache, pickle.loads(pickle.dumps(cache))):
        for documents in ([0, 1, 2, 3, 4], [4, 1, 0], [2], [1], [], [3, 3]):
            targets = cache.number(documents)[:, 0]
            assert targets.tolist() == [at for number in documents for at in range(*BORDERS[number : number + 2])]
            np.testing.assert_array_equal(read.read(documents), ROWS[targets])
    assert len(pickle.dumps(cache)) < 1000


def test_a_document_is_found_if_all_of_its_rows_are_written(cache: TeacherCache) -> None:
    assert cache.find().tolist() == [False, True, False, False, False]  # nothing to write for one without targets
    write(cache, 3, 4, 5, 8)
    assert cache.find().tolist() == [False, True, False, True, False]
    write(cache, 6, 0, 1, 2)
    assert cache.find().tolist() == [True, True, False, True, False]
    write(cache, 9, 10, 11, 12, 7)
    assert cache.find().all()


def test_a_row_that_is_cut_short_or_changed_by_a_bit_is_noticed(cache: TeacherCache, tmp_path: Path) -> None:
    write(cache, *range(BORDERS[-1]))
    file, each = tmp_path / "records.bin", 4 * (WIDTH + 1)
    content = file.read_bytes()
    documents = np.repeat(np.arange(len(TRAINED)), TRAINED)
    for at in range(0, len(content), 3):
        for changed in (
            content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :],
            content[:at] + bytes(-at % each) + content[at - at % each + each :] if at % each else content,
        ):
            file.write_bytes(changed)
            expected = np.arange(len(TRAINED)) != documents[at // each] if changed != content else True
            assert (cache.find() == expected).all(), at
    rows = np.frombuffer(content, np.uint32).reshape(-1, WIDTH + 1)
    file.write_bytes(rows[[1, 0, *range(2, BORDERS[-1])]].tobytes())  # at other places
    assert cache.find().tolist() == [False, True, True, True, True]
