"""What documents begin with alike is in a row once: every token is found where it should be, and sees what it should."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.packing.prefixes import MIN_SHARED, SharedRow, rows_of
from packtrain.packing.segments import Segments

untimed = settings(deadline=None, max_examples=100)
FEW_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)  # so few that they often begin alike
BATCHES = st.lists(FEW_TOKENS, min_size=1, max_size=9)


def arrays(batch: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(one) for one in batch]


def one_row(documents: Sequence[np.ndarray], **options: int | bool) -> SharedRow:
    (row,) = rows_of(documents, 10_000, **options)  # type: ignore[arg-type]
    return row


def assert_laid_out(row: SharedRow, documents: Sequence[np.ndarray]) -> None:
    """Each document's tokens are at its places, each sees those before it and nothing else, and no token is nobody's."""
    ids = np.concatenate([documents[number] for number in row.documents])[row.sources]
    assert len(ids) == row.segments.tokens
    visible, positions = row.segments.visible().numpy(), row.segments.position_ids()[0].numpy()
    for number, places in zip(row.documents, row.places, strict=True):
        assert ids[places].tolist() == documents[number].tolist()
        assert positions[places].tolist() == list(range(len(places)))
        for at, place in enumerate(places):
            assert sorted(places[: at + 1]) == np.flatnonzero(visible[place]).tolist()


@untimed
@given(BATCHES)
def test_every_distinct_beginning_is_in_the_row_once(batch: list[list[int]]) -> None:
    row = one_row(arrays(batch), least=1)
    assert_laid_out(row, arrays(batch))
    beginnings = {tuple(one[: end + 1]) for one in batch for end in range(len(one))}
    assert row.segments.tokens == len(beginnings)


@untimed
@given(BATCHES, st.integers(0, 5))
def test_short_beginnings_are_repeated(batch: list[list[int]], least: int) -> None:
    row = one_row(arrays(batch), least=least)
    assert_laid_out(row, arrays(batch))
    continued = set(row.segments.shared) - {None}
    assert all(row.segments.lengths[number] >= least for number in continued if number is not None)
    assert all(list(row.segments.shared).count(number) > 1 for number in continued)  # else it needs no cut


@untimed
@given(BATCHES, st.integers(1, 30), st.booleans(), st.integers(1, 3))
def test_rows_hold_every_document_once_and_no_more_than_they_may(
    batch: list[list[int]], most: int, share: bool, least: int
) -> None:
    documents = arrays(batch)
    rows = rows_of(documents, most, share=share, least=least)
    assert sorted(number for row in rows for number in row.documents) == list(range(len(batch)))
    for row in rows:
        assert_laid_out(row, documents)
        if row.segments.tokens > most:  # a document that is larger, with what is the beginning of it
            assert row.segments.tokens == max(len(documents[number]) for number in row.documents)
        if not share:
            assert row.segments.lengths == tuple(len(batch[number]) for number in row.documents)
            assert not any(row.segments.prefix_lengths)


def test_a_batch_that_fits_is_one_row_and_a_tree_that_does_not_is_divided_with_its_prompt() -> None:
    prompt = np.arange(100)
    answers = [np.concatenate([prompt, [1000 + number] * 20]) for number in range(8)]
    (row,) = rows_of(answers, 260)
    assert row.segments == Segments((100, *[20] * 8), (None, *[0] * 8)) and row.documents == tuple(range(8))
    parts = rows_of(answers, 180)
    assert [part.segments for part in parts] == [Segments((100, *[20] * 4), (None, *[0] * 4))] * 2
    assert sorted(number for part in parts for number in part.documents) == list(range(8))


def test_a_document_with_no_other_that_branches_off_in_its_row_is_one_segment() -> None:
    turns = np.arange(400)
    documents = [np.append(turns[:end], 1000 + end) for end in range(20, 401, 20)]
    for row in rows_of(documents, 100):
        if len(row.documents) == 1:
            assert row.segments == Segments((len(documents[row.documents[0]]),), (None,))
        assert_laid_out(row, documents)
    assert [len(row.segments.lengths) for row in rows_of(documents, 100)][-10:] == [1] * 10


def test_the_order_is_that_of_the_documents_and_not_of_their_tokens() -> None:
    prompts = [np.full(MIN_SHARED, token) for token in (9, 2)]
    answers = [np.concatenate([prompts[number], [token]]) for number, token in ((0, 8), (1, 6), (0, 3), (1, 1))]
    row = one_row(answers)
    assert row.segments.prefixes == (None, 0, 0, None, 3, 3)
    assert [places[-1] for places in row.places] == [8, 18, 9, 19]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_tokens_of_any_size_differ(dtype: type) -> None:
    documents = [np.array(ids, dtype=dtype) for ids in ([255, 256, 1], [255, 256, 2], [0, 255, 256], [1])]
    row = one_row(documents, least=1)
    assert row.segments.tokens == 3 + 1 + 3 + 1
    assert_laid_out(row, documents)
