"""What `packtrain bench` tries, on machines whose speed and memory are made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from packtrain.bench.search import (
    Candidate,
    Family,
    Limits,
    Measured,
    Trial,
    Visit,
    best_of,
    families,
    is_clear,
    search,
)
from packtrain.config.schema import Batch, Packing
from packtrain.errors import UserError

BATCH = Batch(examples_per_step=64, tokens_per_device=4096)
STEP = 64 * 250
LIMITS = Limits(seconds=120, memory=None, tokens=STEP, probe=2 / 64)


class Machine:
    """`speed` in tokens/s of a candidate, which needs `memory` bytes a token of a micro-batch; `most` is what there is."""

    def __init__(self, speed: Callable[[Candidate], float], most: int = 10**9) -> None:
        self.speed, self.most, self.visits, self.now = speed, most, list[Visit](), 0.0

    def run(self, found: list[Family], limits: Limits = LIMITS) -> list[Trial]:
        trials = search(found, limits, self.layout)
        try:
            visit = next(trials)
            while True:
                self.visits.append(visit)
                visit = trials.send(self.outcome(visit))
        except StopIteration as end:
            return end.value

    def layout(self, candidate: Candidate, part: float) -> str:
        if candidate.tokens and candidate.tokens < 512:
            raise UserError("the longest document has 512 tokens")
        return f"{candidate.mode} {candidate.shared} {min(candidate.tokens or 10**9, int(STEP * part))}"

    def outcome(self, visit: Visit) -> Measured:
        tokens = int(STEP * visit.part * visit.steps)
        seconds = tokens / self.speed(visit.candidate)
        self.now += seconds * (visit.steps + visit.warm) / visit.steps
        peak = min(visit.candidate.tokens or 0, int(STEP * visit.part)) * 1000
        if peak > self.most:
            return Measured(failed="out of memory", elapsed=self.now)
        return Measured(tokens=tokens, seconds=seconds, peak=peak, elapsed=self.now)


def all_families(batch: Batch = BATCH, *, pairs: bool = False, least: int = 512, refused: str = "") -> list[Family]:
    packing = Packing(mode="packed", share_prefix=True if pairs else None)
    return families(batch, packing, least, pairs=pairs, refused=lambda mode, _: refused if mode == "padding" else "")


def larger_is_faster(candidate: Candidate) -> float:
    return {"padding": 20_000, "padding_free": 40_000, "packed": 50_000}[candidate.mode] * (
        1 + (candidate.tokens or 0) / 1e5
    )


def test_the_largest_rows_that_memory_takes_win_where_larger_is_faster() -> None:
    machine = Machine(larger_is_faster, most=9_000_000)
    trials = machine.run(all_families())
    best = best_of(trials)
    assert best and best.candidate == Candidate("packed", None, 8192, None)
    assert best.candidate.overrides() == ["packing.mode=packed", "batch.tokens_per_device=8192"]
    out = [(one.candidate.mode, one.candidate.tokens) for one in trials if one.why == "out of memory"]
    assert out == [("packed", 16384)]
    spared = [one.candidate.mode for one in trials if one.why == "16,384 tokens of another mode ran out of memory"]
    assert sorted(spared) == ["padding", "padding_free"]
    assert trials[0].configured and min(best.beside(trials[0])) > 1 and len(best.outcomes) > 2
    assert machine.now < LIMITS.seconds


def test_growing_ends_where_two_in_a_row_are_slower_and_where_a_row_holds_the_step() -> None:
    trials = Machine(lambda one: 50_000 / (1 + (one.tokens or 0) / 4096)).run(all_families())
    packed = [one.candidate.tokens for one in trials if one.candidate.mode == "packed"]
    assert packed == [4096, 8192, 16384, 2048, 1024]  # 16384 is the third, and already holds all
    wide = Machine(lambda one: 50_000).run(all_families())
    assert max(one.candidate.tokens or 0 for one in wide) == 16384


def test_comparisons_take_turns_on_the_same_documents() -> None:
    machine = Machine(larger_is_faster)
    trials = machine.run(all_families())
    compared = [one for one in machine.visits if one.first]
    by_first: dict[int, list[Candidate]] = {}
    for visit in compared:
        by_first.setdefault(visit.first, []).append(visit.candidate)
    turns = list(by_first.values())
    assert len(turns) >= 3
    assert all(set(later) <= set(turn) for turn, later in itertools.pairwise(turns))  # the slowest leave as time ends
    assert turns[0] == turns[1][::-1]
    assert {one.candidate.mode for one in trials if len(one.outcomes) > 2} == {"padding", "padding_free", "packed"}


def test_a_slow_machine_takes_parts_of_steps_and_keeps_to_the_time() -> None:
    machine = Machine(lambda one: larger_is_faster(one) / 500)  # a whole step would take minutes
    trials = machine.run(all_families())
    assert machine.visits[-1].part < 0.2
    assert machine.now < 1.2 * LIMITS.seconds
    assert all(one.outcomes for one in trials if one.candidate in {family.own for family in all_families()})
    best = best_of(trials)
    assert best and best.candidate.mode == "packed"


def test_a_cpu_does_not_grow_into_what_the_machine_needs() -> None:
    trials = Machine(larger_is_faster).run(all_families(), replace(LIMITS, memory=10_000_000))
    why = [one.why for one in trials if one.candidate == Candidate("packed", None, 16384, None)]
    assert len(why) == 1 and why[0].startswith("it might take more than 0.0 GiB")


def test_modes_that_cannot_be_had_are_listed_with_their_reason() -> None:
    trials = Machine(larger_is_faster).run(all_families(refused="longrope"))
    assert [one.why for one in trials if one.candidate.mode == "padding"] == ["longrope"]
    assert best_of(trials)


def test_pairs_are_tried_with_shared_prompts_and_without() -> None:
    found = all_families(pairs=True, least=1024)
    kinds = [(one.own.mode, one.own.shared) for one in found]
    assert kinds[:2] == [("packed", True), ("packed", False)] and len(kinds) == 5
    assert found[0].own.overrides() == [
        "packing.mode=packed",
        "packing.share_prefix=true",
        "batch.tokens_per_device=4096",
    ]
    assert all((one.tokens or 0) >= 1024 for family in found for one in family.smaller)


def test_what_was_measured_before_is_replayed_to_the_same_visits() -> None:
    first, again = Machine(larger_is_faster, most=9_000_000), Machine(larger_is_faster, most=9_000_000)
    first.run(all_families())
    again.run(all_families())
    assert first.visits == again.visits


def test_a_machine_where_even_the_configured_settings_do_not_fit_finds_smaller_ones() -> None:
    trials = Machine(lambda _: 50_000, most=3_000_000).run(all_families())
    assert trials[0].why == "out of memory"
    best = best_of(trials)
    assert best and best.candidate.tokens == 2048


def test_what_chance_could_do_is_not_clear() -> None:
    def trial(speeds: list[int]) -> Trial:
        made = Trial(Candidate("packed", None, speeds[0], None))
        made.outcomes = {at: Measured(tokens=one, seconds=1.0) for at, one in enumerate(speeds)}
        return made

    even = trial([100] * 12)
    for speeds, clear in (
        ([200, 200], False),  # too few
        ([101, 101, 101], True),
        ([300, 300, 99], False),
        ([110] * 10 + [90] * 2, True),
        ([110] * 8 + [90] * 4, False),
    ):
        assert is_clear(trial(speeds), even) == clear
    assert not is_clear(even, even)
