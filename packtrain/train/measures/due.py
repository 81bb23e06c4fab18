"""When tasks and answers are measured, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from packtrain.config.schema import Trainer
from packtrain.model.spread import max_over_ranks
from packtrain.train.run_state import Measure, RunState


@dataclass(frozen=True, slots=True)
class Deadline:
    """End of the time for all figures of an evaluation, in seconds of time.monotonic()."""

    device: torch.device
    ends_at: float = float("inf")

    def is_over(self) -> bool:
        """Return whether the time is over on this rank."""
        return time.monotonic() > self.ends_at

    def is_over_anywhere(self) -> bool:
        """Return whether the time is over on any rank. Every rank calls it, and all get the same answer."""
        return max_over_ranks(self.is_over(), self.device) > 0


class MeasuredPart(Protocol):
    """A part of the measures: answers, or tasks. `advice` says how it takes less time."""

    advice: str

    def measure(self, state: RunState, deadline: Deadline) -> dict[str, float] | None:
        """Return figures by name. None if the time is over. Every rank calls it; all return the same."""
        ...


@dataclass(slots=True)
class Measures(Measure):
    """Parts with one time limit, trainer.measure_timeout. Figures that are not ready then are left out."""

    trainer: Trainer
    device: torch.device
    say: Callable[[str], None]
    parts: Sequence[MeasuredPart]
    _warned: set[str] = field(default_factory=set[str])

    def is_due(self, state: RunState) -> bool:
        """Return whether figures are due: every trainer.measure_every, and before and after all steps."""
        every = self.trainer.measure_every or 1
        return state.step % every == 0 or state.step >= state.last_step or state.stops

    def figures(self, state: RunState) -> dict[str, float]:
        """See Measure."""
        found = dict[str, float]()
        deadline = Deadline(self.device, time.monotonic() + self.trainer.measure_timeout)
        for part in self.parts if self.is_due(state) else ():
            measured = part.measure(state, deadline)
            found |= measured or {}
            if measured is None and part.advice not in self._warned:
                self._warned.add(part.advice)
                limit = f"trainer.measure_timeout={self.trainer.measure_timeout:g}"
                self.say(
                    f"figures are left out after step {state.step}: they take longer than {limit} s; {part.advice}"
                )
        return found
