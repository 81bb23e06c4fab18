"""Examples of several documents are drawn whole, and divided only if too large."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from packtrain.config.schema import Batch, DataSource, Packing, PackingMode
from packtrain.data.dataset import Mixture, TokenDataset, Tokenised, mix_sources
from packtrain.data.tokens.cache import FATES, Fate, MemoryStore
from packtrain.packing.prefixes import MIN_SHARED, cut_examples, index_prefixes
from packtrain.packing.schedule import Schedule, make_schedule, stage

MODES: tuple[PackingMode, ...] = ("padding", "padding_free", "packed")
ROW = 160


def store_of(rows: int, *, seed: int = 0, most: int = 5) -> MemoryStore:
    """Rows with a document for each of 1 to `most` answers. Every third row is one document, or two parts."""
    rng = np.random.default_rng(seed)
    documents, fates = list[np.ndarray](), list[tuple[object, ...]]()
    for row in range(rows):
        history, answers = rng.integers(0, 50, rng.integers(1, 20)), int(rng.integers(1, most + 1))
        turns = row % 3 > 0
        for _ in range(answers if turns else 1 + row % 2):
            answer = rng.integers(0, 50, rng.integers(2, 15))
            documents.append(np.concatenate([history, answer]))
            history = np.concatenate([history, answer[len(answer) // 2 :], rng.integers(0, 50, rng.integers(1, 9))])
        made = Fate(content=row, documents=answers if turns else 1 + row % 2, split=not turns and row % 2 == 1)
        fates.append(tuple(made._replace(turns=int(turns), dropped=0)))  # type: ignore[arg-type]
    lengths = np.array([len(one) for one in documents], np.int32)
    mask = np.concatenate([np.arange(len(one)) >= len(one) - 2 for one in documents])
    return MemoryStore(np.concatenate(documents).astype(np.int32), mask, lengths, np.array(fates, FATES), "messages")


def data_of(store: MemoryStore, weight: float = 1.0) -> TokenDataset:
    return mix_sources([Tokenised(DataSource(path="chats.jsonl", weight=weight), store, False)], "data.train", 0)


def schedule_of(data: TokenDataset, mode: PackingMode, *, shares: bool = True, **batch: int) -> Schedule:
    limits = {"examples_per_device": 4} if mode != "packed" else {}
    sizes = Batch(tokens_per_device=ROW, **limits, **batch)  # type: ignore[arg-type]
    within = index_prefixes(data, data.examples)
    how = {"examples": data.examples, "within": within, "shares_within": shares, "shuffle": True, "epochs": 2.0}
    return make_schedule(data.lengths, Packing(mode=mode), sizes, **how)  # type: ignore[arg-type]


def example_of(data: TokenDataset) -> np.ndarray:
    assert data.examples is not None
    return np.repeat(np.arange(len(data.examples) - 1), np.diff(data.examples))


def test_documents_of_a_row_by_turns_are_one_example_and_others_are_their_own() -> None:
    store = store_of(30)
    data, fates = data_of(store), store.fates
    assert data.examples is not None
    expected = [size for fate in fates for size in ([fate["documents"]] if fate["turns"] else [1] * fate["documents"])]
    assert np.diff(data.examples).tolist() == expected and data.report.examples == len(expected)
    fates["turns"] = 0
    plain = data_of(store)
    assert plain.examples is None and plain.fingerprint != data.fingerprint


@pytest.mark.parametrize("weight", [2.0, 1.5, 0.5])
def test_weights_repeat_whole_examples(weight: float) -> None:
    once, data = data_of(store_of(40)), data_of(store_of(40), weight)
    assert data.examples is not None and once.examples is not None
    known = {tuple(once.rows[first:end].tolist()) for first, end in pairwise(once.examples.tolist())}
    drawn = [tuple(data.rows[first:end].tolist()) for first, end in pairwise(data.examples.tolist())]
    count = int(weight) * len(known) + round(weight % 1 * len(known))
    assert set(drawn) <= known and len(drawn) == count == data.report.examples


@pytest.mark.parametrize("size", [{"examples_per_step": 6}, {"tokens_per_step": 4 * ROW}])
def test_the_documents_of_a_step_are_whole_examples_in_every_mode_on_any_ranks(size: dict[str, int]) -> None:
    data = data_of(store_of(50), 1.5)
    schedules = [schedule_of(data, mode, shares=shares, **size) for mode, shares in product(MODES, (True, False))]
    total, of = schedules[0].total_steps, example_of(data)
    for step in range(total):
        drawn = sorted(schedules[0].documents(step).tolist())
        sizes = np.bincount(of, minlength=of[-1] + 1)
        here = np.bincount(of[drawn], minlength=len(sizes))
        assert set(here[here > 0] == sizes[here > 0]) == {True}
        if "examples_per_step" in size:
            assert np.count_nonzero(here) <= 6
        for schedule, ranks in product(schedules, (1, 3)):
            parts = [part for rank in schedule.layout(step, ranks) for part in rank]
            assert sorted(np.concatenate(parts).tolist()) == drawn
            assert all(schedule.slots(part) <= ROW for part in parts if len(part) and schedule.packing.mode == "packed")
    assert schedules[0].examples_before(total) == 2 * (of[-1] + 1)
    if "examples_per_step" in size:
        assert total == 2 * -(-(of[-1] + 1) // 6)
    seen = np.bincount(np.concatenate([schedules[0].documents(step) for step in range(total)]))
    assert set(seen.tolist()) == {2}


def test_only_documents_of_an_example_share_and_a_row_holds_the_tree() -> None:
    store = store_of(40)
    data = data_of(store, 2.0)  # every example twice: equal documents of two examples share nothing
    assert data.examples is not None
    index = index_prefixes(data, data.examples)
    units, sizes = cut_examples(index, data.examples, ROW)
    assert len(units) == len(data.examples) - 1
    for (first, end), size in zip(pairwise(data.examples.tolist()), sizes, strict=True):
        alone = index_prefixes(data).forest(np.arange(first, end))[0].tokens
        assert size == alone == index.forest(np.arange(first, end))[0].tokens
    everything = np.arange(len(data))
    assert index.forest(everything)[0].tokens == sizes.sum() > index_prefixes(data).forest(everything)[0].tokens
    found = schedule_of(data, "packed", examples_per_step=6).example_slots()
    assert found["repeated"] == data.lengths.sum() and found["examples"] == len(units)
    assert found["once"] <= found["shared"] <= sizes.sum() <= found["shared"] + MIN_SHARED * len(data)


def test_a_tree_larger_than_a_row_is_divided_between_documents() -> None:
    data = data_of(store_of(12, most=30))
    assert data.examples is not None
    room = int(data.lengths.max())
    units, sizes = cut_examples(index_prefixes(data, data.examples), data.examples, room)
    of = example_of(data)
    assert sorted(units.documents.tolist()) == list(range(len(data))) and sizes.max() <= room
    parts = np.bincount([of[units[number][0]] for number in range(len(units))])
    assert parts.max() > 2 and all(len({*of[units[number]].tolist()}) == 1 for number in range(len(units)))


def test_stages_draw_examples_whole() -> None:
    stores = [store_of(20), store_of(20, seed=1)]
    parts = [
        Tokenised(DataSource(path=f"{name}.jsonl"), store, False) for name, store in zip("ab", stores, strict=True)
    ]
    data = mix_sources(parts, "data.train", 0, weigh=False)
    mixture = Mixture((0,), ((0.25, 0.75),), 0)
    staged = stage(schedule_of(data, "packed", examples_per_step=8), mixture, data.source_of, ("a", "b"))
    of = example_of(data)
    sizes = np.bincount(of)
    for step in range(staged.total_steps):
        drawn = of[staged.documents(step)]
        numbers, counts = np.unique(drawn, return_counts=True)
        assert len(numbers) <= 8 and (counts % sizes[numbers] == 0).all() and (counts // sizes[numbers]).sum() == 8
    assert staged.epoch_of(3) == pytest.approx(24 / len(sizes))


def test_families_are_of_examples() -> None:
    data = data_of(store_of(24), 2.0)
    how = {"shuffle": "by_prefix", "epochs": 1.0, "examples": data.examples, "prefixes": index_prefixes(data)}
    schedule = make_schedule(data.lengths, Packing(), Batch(examples_per_step=10, tokens_per_device=ROW), **how)  # type: ignore[arg-type]
    of = example_of(data)
    steps = [{*of[schedule.documents(step)].tolist()} for step in range(schedule.total_steps)]
    assert sum(map(len, steps)) == of[-1] + 1  # no example is in two steps
    copies = [number for step in steps for number in step if number + (of[-1] + 1) // 2 in step]
    assert len(copies) >= (of[-1] + 1) // 2 - len(steps)  # a copy is in the step of the other
