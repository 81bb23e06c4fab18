"""Steps of data.stages: each source's examples one after the other, by the shares, and the same from any step on and on any ranks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from packtrain.config.schema import Batch, Packing
from packtrain.data.dataset import Mixture
from packtrain.errors import UserError
from packtrain.packing.schedule import StagedSchedule, make_schedule, stage

SIZES = (50, 7)
SOURCE_OF = np.repeat(np.arange(2, dtype=np.int16), SIZES)
LENGTHS = np.random.default_rng(0).integers(5, 300, sum(SIZES)).astype(np.int32)


def staged(steps: int = 12, *, shuffle: bool = True, mode: str = "packed", seed: int = 0) -> StagedSchedule:
    batch = Batch(examples_per_step=5, tokens_per_device=512)
    packing = Packing(mode=mode)  # type: ignore[arg-type]
    plan = make_schedule(LENGTHS, packing, batch, max_steps=steps, seed=seed, shuffle=shuffle)
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
    assert plan.documents_before(3) == 15 and plan.epoch_of(12) == 60 / 57


def test_without_shuffling_sources_keep_their_order_and_another_seed_has_another() -> None:
    assert staged(shuffle=False).documents(1).tolist() == [5, 6, 7, 8, 9]
    assert staged(seed=1).documents(0).tolist() != staged().documents(0).tolist()


def test_a_stage_over_a_source_without_examples_is_refused() -> None:
    plan = make_schedule(LENGTHS[:50], Packing(), Batch(examples_per_step=5), max_steps=3)
    with pytest.raises(UserError, match="nothing to train on in b"):
        stage(plan, Mixture((0,), ((0.5, 0.5),), 0), SOURCE_OF[:50], ("a", "b"))


def test_steps_beyond_the_last_are_none() -> None:
    with pytest.raises(IndexError):
        staged().documents(12)
