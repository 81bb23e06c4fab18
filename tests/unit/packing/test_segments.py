"""Segments as a forest: what a token sees, where it stands, and the same documents without sharing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.packing.segments import Segments

untimed = settings(deadline=None, max_examples=60)  # timings are for benchmarks


@st.composite
def forests(draw: st.DrawFn, most: int = 7) -> Segments:
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=most))
    prefixes = [draw(st.none() | st.integers(0, number - 1)) if number else None for number in range(len(lengths))]
    return Segments(tuple(lengths), tuple(prefixes))


def tokens_up_to(segments: Segments, number: int) -> list[int]:
    """Where the tokens of a segment's path are in the row, by the definition of a path."""
    prefix, start = segments.shared[number], segments.starts[number]
    before = [] if prefix is None else tokens_up_to(segments, prefix)
    return [*before, *range(start, start + segments.lengths[number])]


@untimed
@given(forests(), st.none() | st.integers(1, 6))
def test_a_token_sees_what_is_before_it_on_its_path_and_nothing_else(segments: Segments, window: int | None) -> None:
    visible, positions = segments.visible(window), segments.position_ids()[0].tolist()
    for number, length in enumerate(segments.lengths):
        path = tokens_up_to(segments, number)
        for at in range(len(path) - length, len(path)):
            expected = path[max(0, at + 1 - window) if window else 0 : at + 1]
            assert visible[path[at]].nonzero()[:, 0].tolist() == sorted(expected)
            assert positions[path[at]] == at


@untimed
@given(forests())
def test_paths_lead_from_the_root_to_the_segment(segments: Segments) -> None:
    for number, prefix in enumerate(segments.shared):
        assert segments.paths[number] == ((number,) if prefix is None else (*segments.paths[prefix], number))
        assert segments.prefix_lengths[number] == sum(segments.lengths[one] for one in segments.paths[number][:-1])
        assert segments.tokens_along([number]).tolist() == tokens_up_to(segments, number)
    assert set(segments.leaves) == set(range(len(segments.lengths))) - set(segments.shared)


@untimed
@given(forests())
def test_unrolled_every_document_is_whole_and_every_token_of_the_row_has_one_output(segments: Segments) -> None:
    unrolled = segments.unrolled()
    assert not any(unrolled.segments.prefix_lengths)
    documents = np.split(unrolled.tokens, unrolled.segments.starts[1:])
    assert [one.tolist() for one in documents] == [tokens_up_to(segments, leaf) for leaf in segments.leaves]
    assert unrolled.tokens[unrolled.outputs].tolist() == list(range(segments.tokens))
    positions = unrolled.segments.position_ids()[0]
    assert positions[unrolled.outputs].tolist() == segments.position_ids()[0].tolist()


def test_a_tree_of_thousands_of_segments_is_no_work() -> None:
    """A prompt with 2,000 answers, and 2,000 turns each of which continues the one before."""
    wide = Segments((512, *[100] * 2000), (None, *[0] * 2000))
    assert wide.unrolled().segments.tokens == 2000 * 612 and len(wide.leaves) == 2000
    deep = Segments((1,) * 2000, (None, *range(1999)))
    assert deep.unrolled().segments == Segments((2000,)) and deep.prefix_lengths[-1] == 1999


def test_a_segment_has_tokens_and_continues_an_earlier_one_or_none() -> None:
    forests = [((3, 4), prefixes) for prefixes in ((None,), (1, None), (None, 1), (None, -1), (None, 2))]
    for lengths, prefixes in [*forests, *((lengths, ()) for lengths in ((), (3, 0), (-1,)))]:
        with pytest.raises(ValueError, match=r"segment|at least one token"):
            Segments(lengths, prefixes)
