"""One step over ranks and micro-batches: complete, within limits, in the fewest micro-batches, evenly."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.config.schema import PackingMode
from packtrain.packing.balance import (
    Layout,
    MicroBatchLimits,
    SplitLayout,
    costs,
    deal,
    imbalance,
    lay_out,
    part_costs,
    parts_of_rank,
)
from packtrain.packing.bins import best_fit

MODES: list[PackingMode] = ["padding", "padding_free", "packed"]


def lognormal(count: int, seed: int = 0, longest: int = 4096) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(5.5, 1, count), 16, longest).astype(np.int32)


def slots(part: np.ndarray, lengths: np.ndarray, mode: PackingMode) -> int:
    return len(part) * int(lengths[part].max(initial=0)) if mode == "padding" else int(lengths[part].sum())


def in_reading_order(layout: Layout) -> list[np.ndarray]:
    return list(chain.from_iterable(zip(*layout, strict=True)))


@st.composite
def steps(draw: st.DrawFn) -> dict:
    tokens = draw(st.integers(1, 60))
    mode = draw(st.sampled_from(MODES))
    return {
        "lengths": np.array(draw(st.lists(st.integers(0, tokens), max_size=60)), dtype=np.int32),
        "mode": mode,
        "world_size": draw(st.sampled_from([1, 2, 3, 7, 64])),
        "limits": MicroBatchLimits(
            draw(st.just(math.inf) | st.integers(1, 9)),
            tokens if mode == "packed" else draw(st.sampled_from([math.inf, tokens])),
        ),
        "attention_cost": draw(st.sampled_from([0.0, 1e-3, 0.5])),
        "keep_order": draw(st.booleans()),
    }


@settings(max_examples=400, deadline=None)
@given(step=steps())
def test_every_document_is_laid_out_once_within_the_limits_and_ranks_have_equally_many_micro_batches(step: dict):
    lengths, limits, mode = step["lengths"], step["limits"], step["mode"]
    layout = lay_out(**step)
    assert len(layout) == step["world_size"]
    assert len({len(parts) for parts in layout}) == 1
    parts = in_reading_order(layout)
    documents = list(chain.from_iterable(part.tolist() for part in parts))
    assert (documents if step["keep_order"] else sorted(documents)) == list(range(len(lengths)))
    assert all(part.dtype == np.int64 for part in parts)
    assert max((slots(part, lengths, mode) for part in parts), default=0) <= limits.tokens
    if mode != "packed":
        assert max((len(part) for part in parts), default=0) <= limits.examples


def fewest_padded_parts(lengths: np.ndarray, limits: MicroBatchLimits) -> int:
    """By hand: longest first, as many as go beside it."""
    rest, parts = sorted(lengths.tolist(), reverse=True), 0
    while rest:
        beside = len(rest) if rest[0] == 0 else limits.tokens // rest[0]
        rest, parts = rest[int(min(limits.examples, beside, len(rest))) :], parts + 1
    return parts


@settings(max_examples=200, deadline=None)
@given(step=steps())
def test_micro_batches_are_as_few_as_the_limits_allow(step: dict):
    lengths, limits, world_size = step["lengths"], step["limits"], step["world_size"]
    micro_batches = len(lay_out(**{**step, "keep_order": False})[0])
    if step["mode"] == "padding":
        assert micro_batches == math.ceil(fewest_padded_parts(lengths, limits) / world_size)
    elif limits.tokens == math.inf:
        assert micro_batches == math.ceil(math.ceil(len(lengths) / min(limits.examples, 99)) / world_size)
    elif step["mode"] == "packed":
        fewest = math.ceil(max(int(lengths.sum()) / limits.tokens, min(len(lengths), 1)) / world_size)
        fitted = len(best_fit(lengths, limits.tokens, np.random.default_rng(0)))
        assert fewest <= micro_batches <= math.ceil(fitted / world_size)


def test_rows_that_only_best_fit_can_fill_are_filled_and_parts_of_similar_cost_dealt_side_by_side():
    """Longest-first by cost fails here; 4 rows of exactly 10 exist."""
    lengths = np.array([8, 7, 6, 5, 5, 4, 3, 2])
    layout = lay_out(lengths, mode="packed", world_size=2, limits=MicroBatchLimits(tokens=10), attention_cost=1.0)
    assert [[int(lengths[part].sum()) for part in parts] for parts in layout] == [[10, 10], [10, 10]]
    parts = [np.array([part]) for part in range(6)]
    layout = deal(parts, np.array([9.0, 5.0, 1.0, 4.0, 8.0, 2.0]), world_size=2)
    assert [[int(part[0]) for part in rank] for rank in layout] == [[0, 3, 5], [4, 1, 2]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep_order", [False, True])
def test_few_documents_leave_empty_micro_batches_and_long_ones_are_refused(mode: PackingMode, keep_order: bool):
    given = {"mode": mode, "limits": MicroBatchLimits(4, 10), "attention_cost": 0.1, "keep_order": keep_order}
    layout = lay_out(np.array([9, 9]), world_size=5, **given)  # type: ignore[arg-type]
    assert [len(parts) for parts in layout] == [1] * 5
    assert sorted(len(parts[0]) for parts in layout) == [0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="11 tokens"):
        lay_out(np.array([3, 11]), world_size=2, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, 8, 64])
@pytest.mark.parametrize("attention_cost", [0.0, 1e-4])
def test_ranks_with_many_lognormal_documents_work_equally_long(mode, world_size: int, attention_cost: float):
    lengths = lognormal(128 * world_size)
    limits = MicroBatchLimits(32, 16384) if mode == "padding_free" else MicroBatchLimits(tokens=8192)
    layout = lay_out(lengths, mode=mode, world_size=world_size, limits=limits, attention_cost=attention_cost)
    assert imbalance(layout, lengths, attention_cost, mode) < (0.03 if mode == "padding" else 0.02)
    work = np.array([part_costs(parts, lengths, mode, attention_cost) for parts in layout])
    if mode == "padding":
        assert lengths.sum() / sum(slots(part, lengths, mode) for part in in_reading_order(layout)) > 0.88
    else:  # what ranks wait for the slowest in every micro-batch
        assert work.max(axis=0).sum() / work.mean(axis=0).sum() - 1 < 0.03


def test_imbalance_is_the_excess_of_the_busiest_rank_over_the_mean():
    lengths = np.array([10, 20, 30])
    layout = [[np.array([0]), np.array([1])], [np.array([2]), np.array([], dtype=np.int64)]]
    assert imbalance(layout, lengths, 0.0) == 0.0
    assert imbalance(layout, lengths, 0.1) == pytest.approx(120 / ((30 + 50 + 120) / 2) - 1)
    assert imbalance([[np.array([0, 1])], [np.array([2])]], lengths, 0.0, "padding") == pytest.approx(40 / 35 - 1)
    assert costs(np.array([10]), 0.1).tolist() == [20.0]


@pytest.mark.parametrize("ranks_per_row", [2, 4])
@pytest.mark.parametrize(("mode", "keep_order"), [("packed", False), ("padding_free", True)])
def test_split_rows_have_every_document_once_and_even_the_work_out(ranks_per_row, mode, keep_order):
    rng, world, limits = np.random.default_rng(0), 64, MicroBatchLimits(16, 4096)
    how: Any = {"mode": mode, "world_size": world, "attention_cost": 2e-5, "keep_order": keep_order}
    lengths = np.clip(rng.lognormal(5.5, 1, 16 * world), 16, 4096).astype(int)
    lengths[:3] = 8000, 6000, 4097
    layout = lay_out(lengths, limits=limits, ranks_per_row=ranks_per_row, **how)
    assert isinstance(layout, SplitLayout) and sorted(np.concatenate([*chain(*layout)])) == [*range(len(lengths))]
    assert len({len(parts) for parts in layout}) == 1
    ranks = [parts_of_rank(layout, rank) for rank in range(world)]
    groups = [ranks[first : first + ranks_per_row] for first in range(0, world, ranks_per_row)]
    for group in groups:
        for rows in zip(*group, strict=True):
            if rows[0][1]:  # all have the same row, of which each takes a part
                assert all(is_split and row is rows[0][0] for row, is_split in rows)
                assert lengths[rows[0][0]].sum() <= limits.tokens * ranks_per_row
            for row, is_split in rows:
                fits = lengths[row].sum() <= limits.tokens and (mode == "packed" or len(row) <= limits.examples)
                assert is_split or fits
    assert imbalance(layout, lengths, 2e-5) < 0.01
    split = [row for group in groups for row, is_split in group[0] if is_split]
    assert {0, 1, 2} <= {*np.concatenate(split).tolist()}
    with pytest.raises(ValueError, match="ranks take"):
        lay_out(np.append(lengths, 4096 * ranks_per_row + 1), limits=limits, ranks_per_row=ranks_per_row, **how)
