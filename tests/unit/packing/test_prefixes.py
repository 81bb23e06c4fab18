"""A row holds each common beginning once: tokens see and predict the right ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.config.schema import Batch, Packing
from packtrain.data.dataset import Document
from packtrain.packing.balance import MicroBatchLimits, work_of_ranks
from packtrain.packing.collate import IGNORE, collate_shared, part_of, shifted_labels
from packtrain.packing.prefixes import (
    MIN_SHARED,
    PrefixIndex,
    SharedRow,
    index_prefixes,
    lay_out_shared,
    rows_of,
    work_of,
)
from packtrain.packing.schedule import make_schedule
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
def test_rows_hold_every_document_once_and_no_more_than_they_may(batch, most, share, least):
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


def test_tokens_of_any_size_differ_and_an_index_is_planned_by_its_arrays_alone() -> None:
    for dtype in (np.int32, np.int64, np.uint16):
        documents = [np.array(ids, dtype=dtype) for ids in ([255, 256, 1], [255, 256, 2], [0, 255, 256], [1])]
        row = one_row(documents, least=1)
        assert row.segments.tokens == 3 + 1 + 3 + 1
        assert_laid_out(row, documents)
    index = index_prefixes(conversations(3, 2))
    copy = PrefixIndex(index.lengths.copy(), index.order.copy(), index.common.copy())
    numbers = np.array([5, 0, 3])
    assert copy.forest(numbers) == index.forest(numbers) and copy.common[0] == 0


FEW_LONGER = st.lists(st.integers(0, 2), min_size=1, max_size=12)
LONG = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(lambda parts: [t for part in parts for t in [part] * 21])
LONGER_BATCHES = st.lists(st.one_of(FEW_LONGER, LONG), min_size=1, max_size=12)


class Documents(list[Document]):
    """A data set in memory."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(document.input_ids) for document in self], np.int32)


def documents_of(batch: list[list[int]], seed: int = 0) -> Documents:
    random = np.random.default_rng(seed)
    return Documents(Document(np.array(ids, np.int32), random.random(len(ids)) < 0.6) for ids in batch)


def conversations(count: int, turns: int, seed: int = 0) -> Documents:
    """Conversations of several turns, one document for each turn, in random order: each begins with the one before it."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = np.zeros(0, np.int32)
        for _ in range(turns):
            ids = np.concatenate([ids, random.integers(0, 1000, 30, dtype=np.int32)])
            found.append(Document(ids, np.arange(len(ids)) >= len(ids) - 15))
    random.shuffle(found)
    return Documents(found)


@untimed
@given(LONGER_BATCHES, st.randoms())
def test_a_row_of_any_documents_has_their_tokens_and_one_label_for_each_place(batch, random) -> None:
    documents = documents_of(batch)
    index = index_prefixes(documents)
    numbers = np.array(random.sample(range(len(documents)), random.randint(1, len(documents))))
    chosen = [documents[number] for number in numbers]
    row = index.row(numbers)
    inputs = collate_shared(chosen, row)
    ids, labels = inputs["input_ids"][0].numpy(), inputs["shift_labels"][0].numpy()
    visible = row.segments.visible().numpy()
    expected = []
    for document, places in zip(chosen, row.places, strict=True):
        assert ids[places].tolist() == document.input_ids.tolist()
        for at, place in enumerate(places):
            assert sorted(places[: at + 1]) == np.flatnonzero(visible[place]).tolist()
        own = shifted_labels(document).numpy()
        trained = np.flatnonzero(own != IGNORE)
        assert labels[places[trained]].tolist() == own[trained].tolist()
        expected += places[trained].tolist()
    assert sorted(expected) == inputs["label_places"].tolist()  # as often as documents train it
    assert row.segments.tokens == index.forest(numbers)[0].tokens <= sum(map(len, (d.input_ids for d in chosen)))


@untimed
@given(LONGER_BATCHES)
def test_what_neighbours_have_in_common_is_all_there_is(batch) -> None:
    documents = documents_of(batch)
    index = index_prefixes(documents)
    keys = [tuple(documents[number].input_ids.tolist()) for number in index.order]
    assert keys == sorted(keys)
    assert sorted(index.order.tolist()) == list(range(len(documents)))
    everywhere = index.repeated(np.arange(len(documents)))
    assert documents.lengths.sum() - everywhere.sum() == index.forest(np.arange(len(documents)))[0].tokens


def test_the_parts_of_a_split_row_have_each_label_as_often_as_the_row() -> None:
    documents = conversations(2, 4)
    inputs = collate_shared(documents, index_prefixes(documents).row(np.arange(8)))
    parts = [part_of(inputs, part, 3) for part in range(3)]
    starts = np.cumsum([0, *(part["input_ids"].shape[1] for part in parts)])
    places = np.concatenate([part["label_places"] + start for part, start in zip(parts, starts, strict=False)])
    assert places.tolist() == inputs["label_places"].tolist()
    assert torch.equal(torch.cat([part["shift_labels"] for part in parts], 1), inputs["shift_labels"])


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_document_is_laid_out_once_within_the_limit_and_ranks_work_alike(world: int) -> None:
    documents = conversations(40, 6)
    index, numbers = index_prefixes(documents), np.arange(240)
    limits = MicroBatchLimits(tokens=512)
    layout = lay_out_shared(index, numbers, world_size=world, limits=limits, attention_cost=1e-3)
    parts = [part for rank in layout for part in rank]
    assert sorted(np.concatenate(parts).tolist()) == numbers.tolist()
    assert len({len(rank) for rank in layout}) == 1
    assert max(index.forest(numbers[part])[0].tokens for part in parts if len(part)) <= 512
    work = work_of_ranks(layout, lambda part: work_of(index, numbers[part], attention_cost=1e-3))
    assert work.max() / work.mean() < 1.1
    tokens = sum(index.forest(numbers[part])[0].tokens for part in parts if len(part))
    # a document for each of 6 turns has 3.5 times the tokens of the last
    assert tokens < 0.36 * documents.lengths.sum()


def test_many_questions_about_one_text_are_divided_where_ranks_would_wait() -> None:
    random = np.random.default_rng(0)
    text = random.integers(0, 1000, 400, dtype=np.int32)
    documents = Documents(
        Document(np.concatenate([text, random.integers(0, 1000, 40, dtype=np.int32)]), np.arange(440) >= 400)
        for _ in range(64)
    )
    index, numbers, limits = index_prefixes(documents), np.arange(64), MicroBatchLimits(tokens=4096)
    for world in (1, 4):
        layout = lay_out_shared(index, numbers, world_size=world, limits=limits, attention_cost=0.0)
        work = work_of_ranks(layout, lambda part: work_of(index, numbers[part], attention_cost=0.0))
        assert work.max() <= 1.05 * (400 * world + 64 * 41) / world  # the text once on each rank


def test_families_are_conversations_and_a_common_system_prompt_makes_none() -> None:
    plain, system = conversations(30, 4), np.arange(200, dtype=np.int32)
    prompted = Documents(
        Document(np.concatenate([system, d.input_ids]), np.concatenate([np.zeros(200, bool), d.loss_mask]))
        for d in plain
    )
    families = index_prefixes(plain).families(16)
    assert np.bincount(families).tolist() == [4] * 30
    assert (index_prefixes(prompted).families(16) == families).all()
    for a, b in ((a, b) for a in range(40) for b in range(40)):
        alike = (plain[a].input_ids[:30] == plain[b].input_ids[:30]).all()
        assert alike == (families[a] == families[b])
    same = Documents([plain[0]] * 9)
    assert np.bincount(index_prefixes(same).families(4)).tolist() == [9]  # nothing tells them apart


def test_families_are_drawn_into_a_step_anew_in_every_epoch() -> None:
    documents = conversations(24, 4)
    index = index_prefixes(documents)
    packing, batch = Packing(share_prefix=True), Batch(examples_per_step=16, tokens_per_device=1024)
    how = {"epochs": 2, "shuffle": "by_prefix", "prefixes": index}
    schedule = make_schedule(documents.lengths, packing, batch, **how)
    families = index.families(16)
    steps = [schedule.documents(step) for step in range(schedule.total_steps)]
    assert [len(step) for step in steps] == [16] * 12
    for epoch in (steps[:6], steps[6:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(96))
        assert all(np.bincount(families[step])[np.unique(families[step])].tolist() == [4] * 4 for step in epoch)
    assert {frozenset(families[step]) for step in steps[:6]} != {frozenset(families[step]) for step in steps[6:]}
    assert schedule.summary(2).shared_fraction > 0.55
