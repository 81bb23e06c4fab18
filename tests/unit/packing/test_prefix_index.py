"""What documents of a step begin with alike is known without reading them again, and laid out over ranks at little work for each."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.config.schema import Batch, Packing
from packtrain.data.dataset import Document
from packtrain.packing.balance import MicroBatchLimits, work_of_ranks
from packtrain.packing.collate import IGNORE, collate_shared, part_of, shifted_labels
from packtrain.packing.prefixes import PrefixIndex, index_prefixes, lay_out_shared, work_of
from packtrain.packing.schedule import make_schedule

untimed = settings(deadline=None, max_examples=150)
FEW_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
LONG = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(lambda parts: [t for part in parts for t in [part] * 21])
BATCHES = st.lists(st.one_of(FEW_TOKENS, LONG), min_size=1, max_size=12)


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
@given(BATCHES, st.randoms())
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
        assert all(
            sorted(places[: at + 1]) == np.flatnonzero(visible[place]).tolist() for at, place in enumerate(places)
        )
        own = shifted_labels(document).numpy()
        trained = np.flatnonzero(own != IGNORE)
        assert labels[places[trained]].tolist() == own[trained].tolist()
        expected += places[trained].tolist()
    assert sorted(expected) == inputs["label_places"].tolist()  # as often as documents train it
    assert row.segments.tokens == index.forest(numbers)[0].tokens <= sum(map(len, (d.input_ids for d in chosen)))


@untimed
@given(BATCHES)
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
    assert (
        tokens < 0.36 * documents.lengths.sum()
    )  # a document for each of 6 turns has 3.5 times the tokens of the last


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
    schedule = make_schedule(
        documents.lengths,
        Packing(share_prefix=True),
        Batch(examples_per_step=16, tokens_per_device=1024),
        epochs=2,
        shuffle="by_prefix",
        prefixes=index,
    )
    families = index.families(16)
    steps = [schedule.documents(step) for step in range(schedule.total_steps)]
    assert [len(step) for step in steps] == [16] * 12
    for epoch in (steps[:6], steps[6:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(96))
        assert all(np.bincount(families[step])[np.unique(families[step])].tolist() == [4] * 4 for step in epoch)
    assert {frozenset(families[step]) for step in steps[:6]} != {frozenset(families[step]) for step in steps[6:]}
    assert schedule.summary(2).shared_fraction > 0.55


def test_an_index_is_planned_by_its_arrays_alone() -> None:
    documents = conversations(3, 2)
    index = index_prefixes(documents)
    copy = PrefixIndex(index.lengths.copy(), index.order.copy(), index.common.copy())
    numbers = np.array([5, 0, 3])
    assert copy.forest(numbers) == index.forest(numbers)
    assert SimpleNamespace(**vars(copy)).common[0] == 0
