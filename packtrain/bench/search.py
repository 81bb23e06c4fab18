"""The order of trials of `packtrain bench` (`search`). Pure: the caller makes the runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from packtrain.config.schema import DEFAULT_ROW_TOKENS, Batch, Packing, PackingMode
from packtrain.errors import Json

ROUNDS, MIN_ROUNDS = 6, 3
MAX_COMPARED = 4
RISE, NEAR = 1.02, 0.85
"""Ratios of speeds. A size is kept if RISE times as fast as the best so far. Trials of NEAR times the best or more run again."""
EXPLORING = 0.5
"""Share of the time for trying sizes; later no further sizes are tried."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try. `shared` is packing.share_prefix; `tokens` and `examples` limit a micro-batch (None: no limit)."""

    mode: PackingMode
    shared: bool | None
    tokens: int | None
    examples: int | None

    @classmethod
    def of(cls, packing: Packing, batch: Batch) -> Candidate:
        """Return the configured settings."""
        examples, tokens = batch.limits(packing.mode)
        return cls(packing.mode, packing.share_prefix, tokens, examples)

    def scaled(self, factor: float) -> Candidate | None:
        """Return these settings with micro-batches `factor` times as large; None if they would be empty."""
        tokens, examples = (None if limit is None else int(limit * factor) for limit in (self.tokens, self.examples))
        return None if tokens == 0 or examples == 0 else replace(self, tokens=tokens, examples=examples)

    def in_mode(self, mode: PackingMode, shared: bool | None, most: int | None) -> Candidate:
        """Return another mode with micro-batches of this size. `most` is the number of examples of a step."""
        if mode == "packed":
            return Candidate(mode, shared, self.tokens or DEFAULT_ROW_TOKENS, None)
        return Candidate(mode, shared, self.tokens, most if self.mode == "packed" else self.examples)

    def overrides(self) -> list[str]:
        """Return the settings as command-line overrides."""
        given = {
            "packing.mode": self.mode,
            "packing.share_prefix": self.shared if self.shared is None else str(self.shared).lower(),
            "batch.tokens_per_device": self.tokens,
            "batch.examples_per_device": self.examples,
        }
        return [f"{key}={value}" for key, value in given.items() if value is not None]


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of a short run (measured_run.py), over all steps but the first.

    `tokens_per_second` counts tokens of documents. `peak_memory`: of the fullest process, in bytes. `padding`: a share of the slots. `shared`:
    prompts of pairs were computed once (None: no pairs).
    """

    tokens_per_second: float
    seconds: float
    first_step_seconds: float = 0.0
    peak_memory: int = 0
    padding: float = 0.0
    micro_batches: float = 2.0
    mfu: float | None = None
    shared: bool | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a run: the reason, its exit code and its message. `memory`: it ran out of memory."""

    why: str
    code: int = 2
    text: str = ""
    memory: bool = False


@dataclass(slots=True)
class Trial:
    """A candidate and its measurements by round. `why` explains that there are none, or no more."""

    candidate: Candidate
    why: str = ""
    rounds: dict[int, RunFigures] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Tokens per second, the median over rounds; 0 without rounds."""
        return statistics.median([run.tokens_per_second for run in self.rounds.values()] or [0.0])

    @property
    def spread(self) -> float | None:
        """The range of its speeds over their median; None for a single round."""
        speeds = [run.tokens_per_second for run in self.rounds.values()]
        return (max(speeds) - min(speeds)) / statistics.median(speeds) if len(speeds) > 1 else None

    def ratios(self, other: Trial) -> list[float]:
        """Return its speed relative to `other`, in each round that both have."""
        both = sorted(self.rounds.keys() & other.rounds.keys())
        return [self.rounds[at].tokens_per_second / other.rounds[at].tokens_per_second for at in both]


Measure = Callable[[Candidate], RunFigures | Failure]
WhyNot = Callable[[RunFigures], str]
"""Returns why micro-batches twice as large as measured must not be tried ("": they may)."""


def search(
    configured: Candidate, measure: Measure, why_not: WhyNot, *, seconds: float, examples: int | None, pairs: bool
) -> list[Trial]:
    """Return all trials after training for about `seconds`, the configured one first. A step has at most `examples`.

    1. Micro-batches of the configured mode are doubled as long as that is faster; if it never is, halved.
    2. The other modes (for pairs also with shared prompts and without) run once, at the best size. If one of them is faster, its
       size is tried, too.
    3. The configured settings and all near the best run again in turn, on the same documents: other work on
       the machine then disturbs all of them alike, and its effect shows.
    """
    state = _Search(measure, why_not, seconds)
    first = state.attempt(configured)
    best = state.best_size(first)
    for mode, shared in other_modes(configured, first, pairs=pairs):
        state.attempt(best.candidate.in_mode(mode, shared, examples))
    best = max(state.trials.values(), key=lambda trial: trial.speed)
    if best.rounds and best.candidate.mode != configured.mode:
        state.best_size(best)
    state.compare(first)
    return list(state.trials.values())


@dataclass(slots=True)
class _Search:
    """Trials so far, and the seconds that they have `spent` training."""

    measure: Measure
    why_not: WhyNot
    seconds: float
    trials: dict[Candidate, Trial] = field(default_factory=dict)
    spent: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def attempt(self, candidate: Candidate, number: int = 0) -> Trial:
        """Make a run for round `number` of a candidate's trial, and return the trial."""
        trial, outcome = self.trials.setdefault(candidate, Trial(candidate)), self.measure(candidate)
        if isinstance(outcome, Failure):
            trial.why = outcome.why
            trial.rounds.clear()
        else:
            trial.rounds[number] = outcome
            self.spent += outcome.seconds
        return trial

    def best_size(self, first: Trial) -> Trial:
        """Try sizes of a mode from `first` on, and return the fastest."""
        best = self._try_sizes(first, 2)
        return best if best is not first else self._try_sizes(first, 0.5)

    def _try_sizes(self, first: Trial, factor: float) -> Trial:
        best, candidate = first, first.candidate.scaled(factor)
        while candidate is not None and candidate not in self.trials and self.spent < EXPLORING * self.seconds:
            if factor > 1:
                if not best.rounds or best.rounds[0].micro_batches <= 1:  # a micro-batch holds the whole step
                    break
                if why := self.why_not(best.rounds[0]):
                    self.trials[candidate] = Trial(candidate, why)
                    break
            trial = self.attempt(candidate)
            if trial.rounds and best.rounds and trial.rounds[0].micro_batches == best.rounds[0].micro_batches:
                del self.trials[candidate]  # the same micro-batches as before
            elif trial.speed > RISE * best.speed:
                best = trial
            elif best.rounds or "memory" not in trial.why:
                break
            candidate = candidate.scaled(factor)
        return best

    def compare(self, configured: Trial) -> None:
        """Make further rounds of the relevant trials, as long as there is time."""
        fastest = max(trial.speed for trial in self.trials.values())
        near = [trial for trial in self.trials.values() if trial.rounds and trial.speed >= NEAR * fastest]
        compared = sorted(near, key=lambda trial: -trial.speed)[:MAX_COMPARED]
        if configured.rounds and configured not in compared:
            compared.append(configured)
        for number in range(1, ROUNDS):
            compared = [trial for trial in compared if not trial.why]
            if len(compared) < 2 or self.spent + sum(trial.rounds[0].seconds for trial in compared) > self.seconds:
                break
            # starting the runs may take longer than training
            if number >= MIN_ROUNDS and time.monotonic() - self.began > self.seconds:
                break
            for trial in compared if number % 2 else compared[::-1]:
                self.attempt(trial.candidate, number)


def other_modes(configured: Candidate, first: Trial, *, pairs: bool) -> list[tuple[PackingMode, bool | None]]:
    """Return all modes but the configured one. For pairs, flat rows are tried with share_prefix as configured and without it (or with it);
    for documents that share, packed rows without it."""
    other = configured.shared is False
    unshared = any(run.shared is False for run in first.rounds.values()) and not other  # sharing is not possible
    shares = [configured.shared] if unshared or not pairs else [configured.shared, other]
    flat: tuple[PackingMode, ...] = ("padding_free", "packed")
    kinds: list[tuple[PackingMode, bool | None]] = [("padding", None)]
    if pairs or not configured.shared:
        kinds.extend((mode, shared) for mode in flat for shared in shares)
    else:  # only packed rows share
        kinds += [("padding_free", None), ("packed", False)]
    own = (configured.mode, None if configured.mode == "padding" else configured.shared)
    return [kind for kind in kinds if kind != own]


def fastest_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest trial that was compared to the end; None if nothing was measured."""
    rounds = max(len(trial.rounds) for trial in trials)
    last = [trial for trial in trials if trial.rounds and len(trial.rounds) == rounds]
    return max(last, key=lambda trial: trial.speed, default=None)


def is_clear(best: Trial, configured: Trial) -> bool:
    """Return whether the best was faster than the configured settings in every round. There must be MIN_ROUNDS or more: between equal
    settings, that happens by chance once in eight."""
    ratios = best.ratios(configured)
    return best is not configured and len(ratios) >= MIN_ROUNDS and min(ratios) > 1


def trial_json(trial: Trial, configured: Trial) -> Json:
    """Return a trial in plain values. The keys are a promise to users."""
    runs, candidate, ratios = list(trial.rounds.values()), trial.candidate, trial.ratios(configured)
    last = runs[-1] if runs else None
    return {
        "mode": candidate.mode,
        "share_prefix": last.shared if last else candidate.shared,
        "tokens_per_device": candidate.tokens,
        "examples_per_device": candidate.examples,
        "overrides": candidate.overrides(),
        "configured": trial is configured,
        "why": trial.why,
        "tokens_per_second": trial.speed if last else None,
        "spread": trial.spread,
        "ratio": statistics.median(ratios) if ratios else None,
        "rounds": len(runs),
        "mfu": last and last.mfu,
        "peak_memory": max((run.peak_memory for run in runs), default=None),
        "padding": last and last.padding,
        "micro_batches": last and last.micro_batches,
        "first_step_seconds": runs[0].first_step_seconds if runs else None,
    }
