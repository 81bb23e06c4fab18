"""Rows over an epoch: complete, within capacity, as few as plain best-fit-decreasing makes, and new in every epoch."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.packing.bins import Rows, best_fit, in_order

PLANNERS = {
    "best_fit": lambda lengths, capacity: best_fit(lengths, capacity, np.random.default_rng(0)),
    "in_order": in_order,
}


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Lengths of 0 … capacity, often equal, and the capacity."""
    capacity = draw(st.integers(1, 60))
    lengths = draw(st.lists(st.integers(0, capacity), max_size=80))
    return np.array(lengths, dtype=np.int32), capacity


def tokens_of_rows(rows: Rows, lengths: np.ndarray) -> list[int]:
    return [int(lengths[rows[row]].sum()) for row in range(len(rows))]


def naive_best_fit_decreasing(lengths: np.ndarray, capacity: int) -> int:
    """The definition: each document, longest first, into the fullest row with room. Returns the number of rows."""
    spaces: list[int] = []
    count = 0
    for length in sorted(lengths.tolist(), reverse=True):
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces.pop(at)
        else:
            space, count = capacity, count + 1
        insort(spaces, space - length)
    return count


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_every_document_is_in_exactly_one_row_and_no_row_overflows(planner: str, problem: tuple[np.ndarray, int]):
    lengths, capacity = problem
    rows = PLANNERS[planner](lengths, capacity)
    assert sorted(rows.documents.tolist()) == list(range(len(lengths)))
    assert rows.documents.dtype == rows.offsets.dtype == np.int64
    assert rows.offsets[0] == 0 and rows.offsets[-1] == len(lengths) and (np.diff(rows.offsets) > 0).all()
    assert max(tokens_of_rows(rows, lengths), default=0) <= capacity


@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_best_fit_makes_exactly_as_many_rows_as_plain_best_fit_decreasing(problem: tuple[np.ndarray, int]):
    lengths, capacity = problem
    expected = naive_best_fit_decreasing(lengths, capacity)
    assert len(PLANNERS["best_fit"](lengths, capacity)) == expected


@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_in_order_starts_a_row_only_where_the_next_document_does_not_fit(problem: tuple[np.ndarray, int]):
    lengths, capacity = problem
    rows = in_order(lengths, capacity)
    assert rows.documents.tolist() == list(range(len(lengths)))
    tokens = tokens_of_rows(rows, lengths)
    assert all(tokens[row] + lengths[rows[row + 1][0]] > capacity for row in range(len(rows) - 1))


@pytest.mark.parametrize("planner", PLANNERS)
def test_edge_cases_take_the_rows_one_counts_by_hand(planner: str):
    for lengths, capacity, rows in (
        ([], 5, 0),
        ([3], 5, 1),
        ([5, 5, 5], 5, 3),
        ([1, 1, 1], 1, 3),
        ([0, 0, 0], 4, 1),
        ([0, 4, 0], 4, 1),
        ([1] * 10, 4, 3),
    ):
        assert len(PLANNERS[planner](np.array(lengths, dtype=np.int64), capacity)) == rows
        with pytest.raises(ValueError, match=f"document {len(lengths)} "):
            PLANNERS[planner](np.array([*lengths, capacity + 1]), capacity)


def lognormal(count: int) -> np.ndarray:
    return np.clip(np.random.default_rng(3).lognormal(5.5, 1, count), 16, 4096).astype(np.int32)


def neighbours(rows: Rows) -> dict[int, set[int]]:
    members = [set(rows[row].tolist()) for row in range(len(rows))]
    return {document: row - {document} for row in members for document in row if len(row) > 1}


@pytest.mark.parametrize(("count", "kept"), [(500, 0.35), (5_000, 0.35), (100_000, 0.15)])
def test_another_seed_gives_other_neighbours_in_as_many_rows(count: int, kept: float):
    """A document keeps few of its neighbours; at least those of the 16-token documents, hundreds of which share a row."""
    one, two = (best_fit(lognormal(count), 4096, np.random.default_rng(seed)) for seed in (0, 1))
    assert len(one) == len(two)
    before, after = neighbours(one), neighbours(two)
    assert np.mean([len(before[i] & after.get(i, set())) / len(before[i]) for i in before]) < kept
