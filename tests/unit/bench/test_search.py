"""What `packtrain bench` tries, on machines whose speed and memory are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from packtrain.bench.search import Candidate, Failure, RunFigures, Trial, fastest_of, is_clear, search
from packtrain.config.schema import Batch, Packing

STEP = 16_000
"""Tokens of a step."""
CONFIGURED = Candidate("packed", None, 4096, None)


class Machine:
    """`speed` in tokens/s of a candidate, which needs a byte a token of a micro-batch; `memory` is what there is."""

    def __init__(self, speed: Callable[[Candidate], float], memory: int = 10**9, *, run_s: float = 4) -> None:
        self.speed, self.memory, self.run_s = speed, memory, run_s
        self.tried: list[Candidate] = []

    def measure(self, candidate: Candidate) -> RunFigures | Failure:
        self.tried.append(candidate)
        tokens = candidate.tokens or STEP
        if tokens < 512:
            return Failure("the longest document has 512 tokens")
        if min(tokens, STEP) > self.memory:
            return Failure("out of memory on cuda:0", memory=True)
        parts = max(STEP / tokens, 1)
        return RunFigures(self.speed(candidate), self.run_s, micro_batches=parts, shared=candidate.shared)

    def trials(self, configured: Candidate = CONFIGURED, *, pairs: bool = False, allowed: int = 10**9) -> list[Trial]:
        def why_not_larger(measured: RunFigures) -> str:
            return "" if STEP / measured.micro_batches <= allowed / 2 else "too much for the machine"

        return search(configured, self.measure, why_not_larger, seconds=120, examples=64, pairs=pairs)


def larger_is_faster(candidate: Candidate) -> float:
    speed = {"padding": 20_000, "padding_free": 40_000, "packed": 50_000}[candidate.mode]
    return speed * (1 + (candidate.tokens or 0) / 1e5)


def smaller_is_faster(candidate: Candidate) -> float:
    return 50_000 / (1 + (candidate.tokens or 0) / 4096)


@pytest.mark.parametrize(
    ("speed", "configured", "memory", "allowed", "packed", "best"),
    [
        (larger_is_faster, 4096, 10**9, 10**9, [4096, 8192, 16384], 16384),  # a row holds the step
        (larger_is_faster, 4096, 9000, 10**9, [4096, 8192, 16384], 8192),
        (larger_is_faster, 4096, 2500, 10**9, [4096, 2048, 1024], 2048),  # the configured rows do not fit
        (larger_is_faster, 4096, 10**9, 10**4, [4096, 8192, 16384], 8192),
        (smaller_is_faster, 4096, 10**9, 10**9, [4096, 8192, 2048, 1024, 512, 256], 512),
        # 2**15: the same rows
        (smaller_is_faster, 2**16, 10**9, 10**9, [2**16, 8192, 4096, 2048, 1024, 512, 256], 512),
    ],
)
def test_rows_grow_or_shrink_as_long_as_that_is_faster(speed, configured, memory, allowed, packed, best):
    machine = Machine(speed, memory)
    trials = machine.trials(replace(CONFIGURED, tokens=configured), allowed=allowed)
    assert [trial.candidate.tokens for trial in trials if trial.candidate.mode == "packed"] == packed
    fastest = fastest_of(trials)
    assert fastest and fastest.candidate.tokens == best
    others = {trial.candidate.mode: trial.candidate.tokens for trial in trials if trial.candidate.mode != "packed"}
    assert others == {"padding": best, "padding_free": best}
    assert not any(trial.why for trial in trials if trial.rounds)
    assert allowed == 10**9 or max(candidate.tokens or 0 for candidate in machine.tried) <= allowed


def test_the_best_are_compared_in_turn_until_the_time_ends() -> None:
    machine = Machine(lambda candidate: 40_000 + 10_000 * (candidate.mode == "packed") + (candidate.tokens or 0))
    trials = machine.trials()
    best = fastest_of(trials)
    assert best and best.candidate.tokens == 16384 and len(best.rounds) == 6 and is_clear(best, trials[0])
    assert [trial.candidate.tokens for trial in trials if len(trial.rounds) > 1] == [4096, 8192, 16384]
    turns = machine.tried[-6:]
    assert turns[:3] == turns[:2:-1]  # and back
    slow = Machine(machine.speed, run_s=25)
    assert {trial.candidate.mode for trial in slow.trials()} == {"padding", "padding_free", "packed"}
    assert len(slow.tried) * 25 <= 150  # seconds


def test_pairs_are_tried_with_shared_prompts_and_without() -> None:
    def kinds(share_prefix: bool | None) -> list[tuple[str, bool | None]]:
        configured = Candidate.of(Packing(share_prefix=share_prefix), Batch(tokens_per_device=STEP))
        trials = Machine(lambda _: 1.0).trials(configured, pairs=True)
        return [(trial.candidate.mode, trial.candidate.shared) for trial in trials if not trial.why]

    flat = ("padding_free", "packed")
    expected = {("padding", None), *((mode, shared) for mode in flat for shared in (True, False))}
    assert {*kinds(True)} == {*kinds(False)} == expected
    assert {*kinds(None)} == {("padding", None), *((mode, shared) for mode in flat for shared in (None, False))}


def test_best_in_each_of_three_rounds_is_clear() -> None:
    def trial(speeds: list[int]) -> Trial:
        return Trial(CONFIGURED, rounds={number: RunFigures(speed, 1.0) for number, speed in enumerate(speeds)})

    even = trial([100] * 12)
    for speeds, clear in (([200, 200], False), ([101, 101, 101], True), ([300, 300, 99], False)):
        assert is_clear(trial(speeds), even) == clear and not is_clear(even, even)
