"""When tasks and answers are measured, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from packtrain.config.schema import Trainer
from packtrain.model.spread import max_over_ranks
from packtrain.train.run_state import Measure, RunState, StopRequest


@dataclass(frozen=True, slots=True)
class Deadline:
    """End of the time for all figures of an evaluation, in seconds of time.monotonic(). A signal ends it at once."""

    device: torch.device
    ends_at: float = float("inf")
    stop: StopRequest = field(default_factory=StopRequest)

    def is_over(self) -> bool:
        """Return whether the time is over on this rank."""
        return time.monotonic() > self.ends_at or self.stop.signal > 0

    def is_over_anywhere(self) -> bool:
        """Return whether the time is over on any rank. Every rank calls it, and all get the same answer."""
        return max_over_ranks(self.is_over(), self.device) > 0


@dataclass(slots=True)
class Measures(Measure):
    """Answers and tasks with one time limit. Figures that are not ready then are left out.

    Every rank calls a part, and gets the same figures by name; None if the time is over.
    """

    trainer: Trainer
    device: torch.device
    stop: StopRequest
    say: Callable[[str], None]
    parts: Sequence[Callable[[Deadline], dict[str, float] | None]]
    warned: bool = False

    def figures(self, state: RunState) -> dict[str, float]:
        """See Measure. Figures are due every trainer.measure_every, and before and after all steps."""
        every, limit_s = self.trainer.measure_every or 1, self.trainer.measure_timeout
        due = state.step % every == 0 or state.step >= state.last_step or state.stops
        deadline = Deadline(self.device, time.monotonic() + limit_s, self.stop)
        found = [part(deadline) for part in self.parts] if due else []
        if None in found and not self.warned and not self.stop.signal:
            self.warned = True
            what = f"figures are left out after step {state.step}: trainer.measure_timeout={limit_s:g} s was over"
            self.say(f"{what}; lower trainer.measured_rows or trainer.answer_tokens, or raise trainer.measure_every")
        return {name: value for part in found for name, value in (part or {}).items()}
