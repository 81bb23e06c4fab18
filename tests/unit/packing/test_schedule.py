"""Steps: the same documents in every mode and on any number of ranks, each once per epoch, from any step on, by stages or not."""

from __future__ import annotations

import pickle
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.config.schema import Batch, Packing
from packtrain.data.dataset import Mixture
from packtrain.errors import UserError
from packtrain.packing.schedule import Schedule, StagedSchedule, make_schedule, stage

MODES = ["padding", "padding_free", "packed"]
STRATEGIES = ["best_fit", "in_order"]
WORLD_SIZES = [1, 2, 3, 7]
STEPS: dict[str, dict[str, int | None]] = {
    "examples": {"examples_per_step": 24, "tokens_per_step": None},
    "tokens": {"examples_per_step": None, "tokens_per_step": 5 * 2048},
}
LENGTHS = np.clip(np.random.default_rng(0).lognormal(5, 1, 301), 5, 1500).astype(np.int32)


def schedule(lengths: np.ndarray = LENGTHS, steps: str = "examples", **changes: Any) -> Schedule:
    """`changes` of packing, batch, or the schedule itself."""
    batch = {"examples_per_device": 8, "tokens_per_device": 2048, **STEPS[steps]}
    other = {"epochs": 2.0, "shuffle": True, "attention_cost": 1e-4}
    packing = {name: changes.pop(name) for name in ("mode", "strategy") if name in changes}
    batch |= {name: changes.pop(name) for name in batch if name in changes}
    return make_schedule(lengths, Packing(**packing), Batch(**batch), **{**other, **changes})


def laid_out(plan: Schedule, step: int, world_size: int) -> list[int]:
    batches = [[part for part, _ in plan.micro_batches(step, rank, world_size)] for rank in range(world_size)]
    assert len({len(rank) for rank in batches}) == 1, "ranks differ in their number of micro-batches"
    return sorted(chain.from_iterable(part.tolist() for rank in batches for part in rank))


def epoch_documents(plan: Schedule, epoch: int) -> list[int]:
    start = sum(plan.steps_per_epoch(e) for e in range(epoch))
    steps = range(start, start + plan.steps_per_epoch(epoch))
    return list(chain.from_iterable(plan.documents(step).tolist() for step in steps))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_has_the_same_documents_in_all_modes_and_on_any_number_of_ranks(steps: str, strategy: str):
    plans = [schedule(steps=steps, strategy=strategy, mode=mode) for mode in MODES]
    assert len({plan.total_steps for plan in plans}) == 1
    for step in range(plans[0].total_steps):
        expected = sorted(plans[0].documents(step).tolist())
        for plan in plans:
            assert np.array_equal(plan.documents(step), plans[0].documents(step))
            for world_size in WORLD_SIZES:
                assert laid_out(plan, step, world_size) == expected


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    size=st.integers(1, 30),
    mode=st.sampled_from(MODES),
    strategy=st.sampled_from(STRATEGIES),
    by_tokens=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_epoch_has_every_document_once(lengths, size, mode, strategy, by_tokens, shuffle, seed):
    step = {"examples_per_step": None if by_tokens else size, "tokens_per_step": size * 40 if by_tokens else None}
    how = {"mode": mode, "strategy": strategy, "shuffle": shuffle, "seed": seed, "epochs": 3}
    plan = schedule(np.array(lengths, dtype=np.int32), examples_per_device=4, tokens_per_device=40, **step, **how)
    for epoch in range(3):
        assert sorted(epoch_documents(plan, epoch)) == list(range(len(lengths)))
    assert plan.epoch_of(plan.total_steps) == 3.0
    assert all(laid_out(plan, step, 3) == sorted(plan.documents(step).tolist()) for step in range(plan.total_steps))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_epoch_and_every_seed_has_other_neighbours(steps: str, strategy: str):
    plan = schedule(steps=steps, strategy=strategy, epochs=2)
    other = schedule(steps=steps, strategy=strategy, epochs=2, seed=1)
    first, second = epoch_documents(plan, 0), epoch_documents(plan, 1)
    assert first != second and first != epoch_documents(other, 0)
    step = sorted(plan.documents(0).tolist())
    assert sum(one == two for one, two in zip(first, second, strict=True)) < 0.1 * len(first)
    assert step != sorted(plan.documents(plan.steps_per_epoch(0)).tolist())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", STEPS)
def test_a_last_step_with_fewer_documents_than_ranks_leaves_ranks_with_nothing(mode: str, steps: str):
    sizes = {"examples_per_step": 4} if steps == "examples" else {"tokens_per_step": 3 * 2048}
    plan = schedule(np.full(5, 1400, dtype=np.int32), steps, mode=mode, epochs=1, **sizes)
    last = plan.total_steps - 1
    batches = [[part for part, _ in plan.micro_batches(last, rank, 7)] for rank in range(7)]
    assert [len(rank) for rank in batches] == [1] * 7
    assert sum(len(rank[0]) == 0 for rank in batches) == 7 - len(plan.documents(last)) > 0


def test_tokens_per_step_takes_full_rows_whose_number_is_counted_epoch_by_epoch():
    plan = schedule(steps="tokens", epochs=1)
    fill = [LENGTHS[plan.documents(step)].sum() / (5 * 2048) for step in range(plan.total_steps - 1)]
    assert max(fill) <= 1 and sum(share < 0.98 for share in fill) <= 1  # the last row of the epoch may be emptier
    plan = schedule(steps="tokens", strategy="in_order", epochs=6, tokens_per_step=2048)
    counts = [plan.steps_per_epoch(epoch) for epoch in range(6)]
    assert len(set(counts)) > 1 and plan.total_steps == sum(counts)
    assert [plan.epoch_of(sum(counts[:epoch])) for epoch in range(7)] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("steps", STEPS)
def test_without_shuffle_and_in_order_documents_come_in_the_order_of_the_data(steps: str):
    plan = schedule(steps=steps, strategy="in_order", shuffle=False, epochs=2)
    assert epoch_documents(plan, 0) == epoch_documents(plan, 1) == list(range(301))
    layout = plan.layout(0, 3)
    reading = [layout[rank][m] for m in range(len(layout[0])) for rank in range(3)]
    assert np.array_equal(np.concatenate(reading), plan.documents(0))


def test_epochs_may_be_fractions_rounded_up_to_a_step_and_a_pickled_schedule_gives_the_same_steps():
    for epochs, steps in {1: 13, 1.5: 20, 0.5: 7, 0.01: 1, 3: 39, 2.0000001: 27}.items():
        assert schedule(epochs=epochs).total_steps == steps
    plan = schedule(steps="tokens", strategy="in_order")
    plan.documents(0)
    copy = pickle.loads(pickle.dumps(plan))
    assert [copy.documents(step).tolist() for step in range(3)] == [plan.documents(step).tolist() for step in range(3)]


def test_max_steps_counts_before_epochs_and_runs_over_as_many_epochs_as_needed():
    plan = schedule(max_steps=30, epochs=1)
    assert plan.steps_per_epoch(0) == 13
    assert [len(plan.documents(step)) for step in (11, 12, 13)] == [24, 301 - 12 * 24, 24]
    assert plan.total_steps == 30 and len(plan.documents(29)) == 24
    assert plan.epoch_of(0) == 0.0 and plan.epoch_of(13) == 1.0 and plan.epoch_of(30) == pytest.approx(2 + 4 / 13)
    with pytest.raises(IndexError, match="step 30 of 30"):
        plan.documents(30)


def test_the_summary_adds_up_over_an_epoch_that_is_looked_at_in_full():
    plans = {mode: schedule(mode=mode, epochs=1) for mode in MODES}
    summaries = {mode: plan.summary(2, sample_steps=99) for mode, plan in plans.items()}
    for summary in summaries.values():
        assert summary.documents == 301 and summary.steps == 13
        assert summary.tokens == LENGTHS.sum()
        assert summary.micro_batches_min <= summary.micro_batches_max
    assert 0 < summaries["padding"].padding_fraction < 1
    assert summaries["packed"].padding_fraction == summaries["padding_free"].padding_fraction == 0


SIZES = (50, 7)
SOURCE_OF = np.repeat(np.arange(2, dtype=np.int16), SIZES)
STAGED_LENGTHS = np.random.default_rng(0).integers(5, 300, sum(SIZES)).astype(np.int32)


def staged(steps: int = 12, *, shuffle: bool = True, mode: str = "packed", seed: int = 0) -> StagedSchedule:
    batch = Batch(examples_per_step=5, tokens_per_device=512)
    packing = Packing(mode=mode)  # type: ignore[arg-type]
    plan = make_schedule(STAGED_LENGTHS, packing, batch, max_steps=steps, seed=seed, shuffle=shuffle)
    return stage(plan, Mixture((0, 20), ((1.0, 0.0), (0.5, 0.5)), seed), SOURCE_OF, ("a", "b"))


def test_stages_take_from_their_sources_and_repeat_one_when_all_of_it_came() -> None:
    plan = staged(40)
    drawn = np.concatenate([plan.documents(step) for step in range(40)])
    assert (SOURCE_OF[drawn[:20]] == 0).all() and (SOURCE_OF[drawn[20:]] == 1).any()
    for source, size in enumerate(SIZES):
        own = drawn[SOURCE_OF[drawn] == source]
        for start in range(0, len(own) - size + 1, size):
            assert {*own[start : start + size].tolist()} == {*np.flatnonzero(source == SOURCE_OF).tolist()}
    small = drawn[SOURCE_OF[drawn] == 1]
    assert len(small) > 2 * SIZES[1] and not np.array_equal(small[: SIZES[1]], small[SIZES[1] : 2 * SIZES[1]])


@pytest.mark.parametrize("mode", ["padding", "padding_free", "packed"])
def test_a_step_is_the_same_alone_in_a_longer_run_in_another_process_and_on_any_ranks(mode: str) -> None:
    plan, longer = staged(mode=mode), staged(30, mode=mode)
    for step in reversed(range(12)):
        expected = plan.documents(step).tolist()
        assert longer.documents(step).tolist() == expected
        assert pickle.loads(pickle.dumps(plan)).documents(step).tolist() == expected
        for ranks in (1, 2, 3):
            parts = [part for rank in range(ranks) for part, _ in plan.micro_batches(step, rank, ranks)]
            assert sorted(np.concatenate(parts).tolist()) == sorted(expected)
    assert plan.examples_before(3) == 15 and plan.epoch_of(12) == 60 / 57


def test_without_shuffling_sources_keep_their_order_and_another_seed_has_another() -> None:
    assert staged(shuffle=False).documents(1).tolist() == [5, 6, 7, 8, 9]
    assert staged(seed=1).documents(0).tolist() != staged().documents(0).tolist()


def test_a_stage_over_a_source_without_examples_is_refused_and_steps_beyond_the_last_are_none() -> None:
    plan = make_schedule(STAGED_LENGTHS[:50], Packing(), Batch(examples_per_step=5), max_steps=3)
    with pytest.raises(UserError, match=r"in b.*\[stage-without-data\]"):
        stage(plan, Mixture((0,), ((0.5, 0.5),), 0), SOURCE_OF[:50], ("a", "b"))
    with pytest.raises(IndexError):
        staged().documents(12)


def test_a_document_longer_than_a_row_is_refused_with_the_key_and_a_fix():
    with pytest.raises(UserError) as refused:
        schedule(tokens_per_device=1000)
    (problem,) = refused.value.problems
    assert problem.where == "batch.tokens_per_device" and problem.fix
