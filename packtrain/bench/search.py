"""What is tried, in which order: a generator of visits that is sent what each measured. Pure, and the same on every process.

1. Parts of a step, from a small one on, tell how much of it fits into the time.
2. Each mode is tried as configured; then each, the fastest first, with larger micro-batches until memory or time ends, the layout
   stays the same or two in a row are slower than the best, and with smaller ones.
3. The configured settings, the best of each mode and all that come near the best are visited again in turn, on the same
   documents. So a moment's other work on the machine hits all of them, and its size is seen.

Whoever sends the same outcomes again gets the same visits: a launch that ran out of memory is replayed by the next one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

from packtrain.config.schema import DEFAULT_ROW_TOKENS, Batch, Packing, PackingMode
from packtrain.errors import UserError

ROUNDS = 12
MOST_SIZES = 5
FEWEST, CHANCE = 3, 0.05
_MOST_VISIT_S, _MOST_STEPS = 1.0, 50
_SHORT_STEP_S = 0.25
"""Steps that are short beside what it takes to switch from one layout to another."""
_EXPLORING = 0.5
"""The share of the time after which no further sizes are tried."""
_NEAR, _SLOWER = 0.85, 0.95
"""Shares of the best speed: what comes near it is visited again; below the other, growing has stopped to pay."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try; `shared`: prompts of pairs once (None: no pairs), `tokens` and `examples` of a device (None: no limit)."""

    mode: PackingMode
    shared: bool | None
    tokens: int | None
    examples: int | None

    def packing(self, packing: Packing) -> Packing:
        """The config's group with these settings."""
        return replace(packing, mode=self.mode, share_prefix=self.shared)

    def batch(self, batch: Batch) -> Batch:
        """The config's group with these settings."""
        return replace(batch, tokens_per_device=self.tokens, examples_per_device=self.examples)

    def overrides(self) -> list[str]:
        """The settings as they are written on the command line."""
        given = {"tokens": self.tokens, "examples": self.examples if self.mode != "packed" else None}
        shared = [] if self.shared is None else [f"packing.share_prefix={str(self.shared).lower()}"]
        sizes = [f"batch.{name}_per_device={size}" for name, size in given.items() if size is not None]
        return [f"packing.mode={self.mode}", *shared, *sizes]


@dataclass(frozen=True, slots=True)
class Visit:
    """`warm` and then `steps` optimizer steps by a candidate, from data step `first` on, each of a `part` (0 to 1) of a step."""

    candidate: Candidate
    first: int
    warm: int
    steps: int
    part: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a visit measured: `tokens` in `seconds`, all steps but the warm ones; `elapsed` seconds of the whole command by then.

    `peak` is the largest memory of a process in bytes, `padding` the share of slots, `mfu` None if not known; `failed` is why it
    did not end.
    """

    tokens: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    peak: int = 0
    padding: float = 0.0
    micro_batches: float = 0.0
    mfu: float | None = None
    elapsed: float = 0.0
    failed: str = ""


@dataclass(slots=True)
class Trial:
    """A candidate and its outcomes, one for each visit that ended; `why` it was not tried, or has none."""

    candidate: Candidate
    configured: bool = False
    why: str = ""
    outcomes: dict[int, Measured] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Tokens per second, the median of its visits; 0 if there is none."""
        return statistics.median([one.tokens / one.seconds for one in self.outcomes.values()] or [0.0])

    @property
    def spread(self) -> float | None:
        """The range of its speeds over their median; None for a single visit."""
        speeds = [one.tokens / one.seconds for one in self.outcomes.values()]
        return (max(speeds) - min(speeds)) / statistics.median(speeds) if len(speeds) > 1 else None

    def beside(self, other: Trial) -> list[float]:
        """How many times as fast as `other`, in each round in which both were visited."""
        both = sorted(self.outcomes.keys() & other.outcomes.keys())
        return [_speed(self.outcomes[at]) / _speed(other.outcomes[at]) for at in both]


@dataclass(frozen=True, slots=True)
class Family:
    """A packing mode (of pairs with shared prompts or without): settings as configured, then `larger` and `smaller` micro-batches.

    `why` it cannot be had, "" if it can.
    """

    own: Candidate
    larger: tuple[Candidate, ...] = ()
    smaller: tuple[Candidate, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """`seconds` for all, the most `memory` of a process (None: until it runs out), and the `tokens` of a whole step."""

    seconds: float
    memory: int | None
    tokens: float
    probe: float
    """The part of a step that is surely small: a document or two for each process."""


LayoutOf = Callable[[Candidate, float], str]
"""What names the layout of the first steps by a candidate, of a part of a step each; raises UserError if it cannot be."""
Visits = Generator[Visit, Measured, list[Trial]]


def families(
    batch: Batch, packing: Packing, least: int, *, pairs: bool, refused: Callable[[PackingMode, bool], str]
) -> list[Family]:
    """All modes, the configured one first. `least` is the smallest batch.tokens_per_device; `refused` says why a mode, with shared
    prompts or without, cannot be had ("" if it can)."""
    flat: tuple[PackingMode, ...] = ("padding_free", "packed")
    kinds: list[tuple[PackingMode, bool | None]] = [("padding", None)]
    kinds = kinds + [(mode, shared) for mode in flat for shared in ((False, True) if pairs else (None,))]
    kinds.sort(key=lambda kind: (kind[0] != packing.mode, kind[1] == (packing.share_prefix is False)))
    return [_family(batch, mode, shared, least, refused(mode, bool(shared))) for mode, shared in kinds]


def _family(batch: Batch, mode: PackingMode, shared: bool | None, least: int, why: str) -> Family:
    documents, tokens = batch.limits(mode)
    own = Candidate(mode, shared, tokens, batch.examples_per_device)
    if why:
        return Family(own, why=why)
    base = max(tokens or min(least, DEFAULT_ROW_TOKENS), least)
    # rows of documents are limited by tokens alone, the other modes by documents too: by as many as a step has
    most = batch.examples_per_device if mode == "packed" else batch.examples_per_step or max(documents or 0, 1024)
    sizes = [base * 2**power for power in range(MOST_SIZES + 1)]
    larger = [replace(own, tokens=size, examples=most) for size in sizes]
    smaller = [replace(own, tokens=base // divisor, examples=most) for divisor in (2, 4) if base // divisor >= least]
    return Family(own, tuple(one for one in larger if one != own)[:MOST_SIZES], tuple(smaller))


def search(found: Sequence[Family], limits: Limits, layout: LayoutOf) -> Visits:
    """The visits; the list of all trials at the end, the configured one first."""
    state = _Search(limits, layout)
    configured = found[0].own
    trials = {configured: Trial(configured, configured=True, why=found[0].why)}
    probe = next((one.own for one in found if not one.why), None)
    if probe is None:
        return list(trials.values())
    yield from state.size_up(probe)
    for family in found:
        yield from state.as_configured(family, trials)
    for family in sorted(found, key=lambda one: -trials[one.own].speed):
        yield from state.explore(family, trials)
    yield from state.compare(list(trials.values()))
    return list(trials.values())


@dataclass(slots=True)
class _Search:
    """What is known so far."""

    limits: Limits
    layout: LayoutOf
    part: float = 1.0
    step_s: float = 1.0
    elapsed: float = 0.0
    per_visit: int = 1
    cursor: int = 0
    too_many: int | None = None
    seen: dict[tuple[str, bool | None], dict[str, Trial]] = field(default_factory=dict)

    def size_up(self, probe: Candidate) -> Generator[Visit, Measured, None]:
        """Finds how much of a step a visit takes, from small parts upwards, and how many of them."""
        self.part, cold = self.limits.probe, True
        while True:
            outcome = yield Visit(probe, 0, int(cold), 1, self.part)
            self.elapsed, self.step_s = outcome.elapsed, max(outcome.seconds, 1e-6)
            larger = min(self.part * min(self._most_step_s / self.step_s, 8), 1.0)
            if outcome.failed or (larger < 1.3 * self.part and not cold):
                break
            if larger >= 1.3 * self.part:  # else the first may have been slow for another reason
                self.part = larger if larger < 0.7 else 1.0
            cold = False
        if outcome.failed:  # nothing is known: the smallest steps, once
            self.step_s = self._most_step_s
        visit_s = min(self.limits.seconds / 120, _MOST_VISIT_S)
        self.per_visit = min(max(round(visit_s / self.step_s), 1), _MOST_STEPS)

    @property
    def _most_step_s(self) -> float:
        """What a step may take, so that there is time for two dozen."""
        return self.limits.seconds / 24

    def as_configured(self, family: Family, trials: dict[Candidate, Trial]) -> Generator[Visit, Measured, None]:
        """The first visit of a family, for which there is always time."""
        own = trials.setdefault(family.own, Trial(family.own, why=family.why))
        if not own.why:
            yield from self._try(own, self._seen(family))

    def explore(self, family: Family, trials: dict[Candidate, Trial]) -> Generator[Visit, Measured, None]:
        """Visits the other sizes of a family once, as far as memory, time and sense go."""
        own, seen = trials[family.own], self._seen(family)
        if family.why:
            return
        best = own.speed
        for sizes in (family.larger, family.smaller):
            slower = 0
            for candidate in sizes:
                trial = Trial(candidate)
                if why := self._why_not(candidate, seen):
                    trial.why = why
                else:
                    yield from self._try(trial, seen)
                if trial.why == _SAME:
                    if sizes is family.larger and (own.candidate.tokens or 0) < (candidate.tokens or 0):
                        break  # a row that holds the whole step
                    continue
                trials[candidate] = trial
                if trial.why:
                    break
                slower = slower + 1 if trial.speed < _SLOWER * best else 0
                best = max(best, trial.speed)
                if slower == 2:
                    break

    def _seen(self, family: Family) -> dict[str, Trial]:
        """The trials of a family by their layouts."""
        return self.seen.setdefault((family.own.mode, family.own.shared), {})

    def _why_not(self, candidate: Candidate, seen: dict[str, Trial]) -> str:
        if self.too_many is not None and (candidate.tokens or 0) >= self.too_many:
            return f"{self.too_many:,} tokens of another mode ran out of memory"
        if self.elapsed > _EXPLORING * self.limits.seconds:
            return "no time left for it (--seconds)"
        peak = max((outcome.peak for one in seen.values() for outcome in one.outcomes.values()), default=0)
        if self.limits.memory is not None and 2 * peak > self.limits.memory:
            return f"it might take more than {self.limits.memory / 2**30:.1f} GiB, a process's share of the free memory"
        return ""

    def _try(self, trial: Trial, seen: dict[str, Trial]) -> Generator[Visit, Measured, None]:
        """The first visit, unless the layout is that of another trial, or there cannot be one."""
        try:
            name = self.layout(trial.candidate, self.part)
        except UserError as error:
            trial.why = error.problems[0].what
            return
        if name in seen:
            trial.why = _SAME
            return
        seen[name] = trial
        yield from self._visit(trial, 0, warm=1 if self.step_s < self.limits.seconds / 40 else 0)

    def _visit(self, trial: Trial, number: int, *, warm: int) -> Generator[Visit, Measured, None]:
        outcome = yield Visit(trial.candidate, self.cursor, warm, self.per_visit, self.part)
        self.elapsed = outcome.elapsed
        if outcome.failed:
            trial.why = outcome.failed
            trial.outcomes.clear()
            tokens = trial.candidate.tokens
            self.too_many = tokens if self.too_many is None else min(tokens or self.too_many, self.too_many)
        else:
            trial.outcomes[number] = outcome

    def compare(self, trials: list[Trial]) -> Generator[Visit, Measured, None]:
        """Visits those that matter again, in turn."""
        measured = [one for one in trials if one.outcomes]
        best = max((one.speed for one in measured), default=0.0)
        kinds = {(one.candidate.mode, one.candidate.shared): one for one in sorted(measured, key=lambda one: one.speed)}
        again = [one for one in measured if one.configured or one in kinds.values() or one.speed >= _NEAR * best]
        again.sort(key=lambda one: (not one.configured, -one.speed))
        for number in range(1, ROUNDS):
            again = [one for one in again if not one.why]
            warm = 1 if self.step_s < _SHORT_STEP_S else 0
            while sum((warm + self.per_visit) * self._tokens() / one.speed for one in again) > self._left():
                again = again[:-1]
            if len(again) < 2:
                return
            self.cursor += self.per_visit + 1
            for trial in again if number % 2 else again[::-1]:
                yield from self._visit(trial, number, warm=warm)

    def _left(self) -> float:
        return max(self.limits.seconds - self.elapsed, 0.0)

    def _tokens(self) -> float:
        return self.limits.tokens * self.part


_SAME = "the same layout as another"


def _speed(outcome: Measured) -> float:
    return outcome.tokens / max(outcome.seconds, 1e-9)


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The fastest; None if nothing was measured."""
    measured = [one for one in trials if one.outcomes]
    rounds = max((len(one.outcomes) for one in measured), default=0)
    last = [one for one in measured if len(one.outcomes) == rounds]  # those that were compared to the end
    return max(last, key=lambda one: one.speed, default=None)


def is_clear(best: Trial, configured: Trial) -> bool:
    """Whether the best is faster than the configured settings: in each of three rounds or more, or in so many of them that two equal
    ones would do that once in CHANCE."""
    ratios = best.beside(configured)
    wins, number = sum(ratio > 1 for ratio in ratios), len(ratios)
    if best is configured or number < FEWEST:
        return False
    by_chance = sum(math.comb(number, more) for more in range(wins, number + 1)) / 2**number  # the sign test
    return wins == number or by_chance <= CHANCE
