"""trainer.restarts: whether a run that has failed is started again, and the record of it.

Machine 0 decides: after a dead or hung rank, or the loss of another machine, the run starts again from its newest checkpoint; not
after what another attempt would end in again (a wrong config, a failed check), nor after a signal. The launchers that live meet
again; without machine 0 there is no restart.

torchrun's elastic agent is not used for it: it restarts whatever the exit code, knows nothing of hung ranks and of checkpoints
that bring no progress, and keeps the arguments that were made for the machines of the first start.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from packtrain.errors import PeerFailed
from packtrain.launch.exit_status import BUG, Verdict
from packtrain.plan.origin import listed
from packtrain.redact import clean
from packtrain.run_folder import RunFolder, in_time, write_json

RESTARTED = (1, PeerFailed.exit_code)
"""The exit codes after which a run is started again."""
FRUITLESS = 2
"""Restarts in a row without a new checkpoint after which the run is ended."""


class Restarts:
    """The decision on each failure of a run that may be started `most` times again, and its record in the run folder: a list
    with, for each restart, `when` (local time), the `step` of the checkpoint that the run goes on from (0: its beginning), `why` in
    lines, and the `machines` that go on."""

    def __init__(self, most: int, folder: RunFolder) -> None:
        self._most, self._folder = most, folder
        self._steps: list[int] = []  # of the newest checkpoint at each failure
        self._next: dict[str, Any] | None = None  # the restart that is about to be made
        self._record: list[Mapping[str, Any]] = []

    def decide(self, verdict: Verdict, failed: str, living: tuple[int, ...] = (0,)) -> Verdict:
        """The verdict, with the `living` machines as those that restart, or a line that says why there is no restart; `failed` is
        the first failure in words."""
        if not self._most or verdict.code not in RESTARTED:
            return verdict
        step = in_time(lambda: newest_step(self._folder), 0)
        self._steps.append(step)
        if in_time(lambda: self._begun() and self._folder.status() == "done", False):
            why_not = "the run was done"
        elif self._steps[-FRUITLESS - 1 :] == [step] * (FRUITLESS + 1):
            why_not = f"{FRUITLESS} restarts in a row have brought no new checkpoint"
        elif len(self._steps) > self._most:
            why_not = f"trainer.restarts={self._most}, and there were as many"
        else:
            why = [clean(line) for line in verdict.lines if line != BUG] or [clean(failed)]
            self._next = {"when": time.strftime("%Y-%m-%d %H:%M:%S"), "step": step, "why": why}
            return replace(verdict, restart=living)
        return replace(verdict, lines=[*verdict.lines, f"not started again: {why_not}"])

    def resume(self, asked: str) -> str:
        """trainer.resume of the next start, where `asked` was that of the first: auto, once this run has a checkpoint."""
        return "auto" if self._next and self._begun() and newest_step(self._folder) else asked

    def keep(self, machines: list[str]) -> None:
        """Writes the record for a start with these machines, into the run folder that has been opened for it."""
        step = newest_step(self._folder)
        if self._next:
            self._record = [*self._record, {**self._next, "step": step, "machines": machines}]
            self._next = None
        elif step:  # the run goes on, perhaps after a requeue
            self._record = [*self._folder.restarts()]
        if self._record:
            write_json(self._folder.restarted, self._record)
        else:
            self._folder.restarted.unlink(missing_ok=True)

    def sentence(self) -> str:
        """What the terminal says of the restart that is about to be made."""
        step = self._steps[-1]
        place = f"the checkpoint of step {step}" if step else "the beginning, for there is no checkpoint"
        return f"restart {len(self._steps)} of {self._most}, from {place}"

    def _begun(self) -> bool:
        """Whether this run has begun to train: until then the run folder holds an earlier one."""
        return not self._folder.attempt.root.exists()


def newest_step(folder: RunFolder) -> int:
    """The step of the newest checkpoint, 0 where there is none."""
    return max(listed(folder.checkpoints), default=0)
