"""Settings, stop request and progress of a run, and its listeners."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from packtrain.config.schema import Optim, Trainer
from packtrain.errors import Json
from packtrain.monitor.heartbeat import TimeLimits
from packtrain.strategies.spec import DEFAULT, STRATEGIES
from packtrain.train.loader import Steps
from packtrain.train.spikes import SpikeRules

RUN_STATE = "trainer_state.json"
"""File of a checkpoint. Name and fields follow transformers' TrainerState, because other tools read it."""
# our field: theirs
_FIELDS = {
    "step": "global_step",
    "last_step": "max_steps",
    "epoch": "epoch",
    "tokens": "num_input_tokens_seen",
    "lines": "log_history",
    "best_value": "best_metric",
    "best_step": "best_global_step",
}


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings of a training loop.

    `origin`: values that must be equal in a resumed run and its checkpoint. `strategy`: strategy.name. `autocast`: the format of mixed precision (None: the weights' format). `backend`: the attention backend
    of packed rows (None: the model's own attention). `trainer` and `optim`: the config's groups.
    `say` and `fact` log a warning and a decision.
    """

    steps: Steps
    evaluation: Mapping[str, Steps]
    """One pass over each set of data.eval, by name; {} for none."""
    stop: StopRequest
    checkpoints: Path
    origin: Json
    first_step: int = 0
    say: Callable[[str], None] = print
    fact: Callable[[str, str], None] = print
    strategy: str = DEFAULT
    autocast: torch.dtype | None = None
    backend: str | None = None
    trainer: Trainer = field(default_factory=Trainer)
    optim: Optim = field(default_factory=Optim)
    limits: TimeLimits | None = None
    spikes: SpikeRules | None = None
    largest_first: bool = False
    unused_at_times: bool = False
    """Whether some weights (experts) get no gradient in some batches."""

    @property
    def eval_every(self) -> int | None:
        """trainer.eval_every, None without an evaluation set."""
        return self.trainer.eval_every if self.evaluation else None

    @property
    def sharded(self) -> bool:
        """Whether no process has all weights."""
        return STRATEGIES[self.strategy].shards_weights


class StopRequest:
    """Request to stop: this process's `signal` (0: none), and the signal `agreed` by all ranks.

    Signals reach processes at different times. So each rank notes its own signal and sends it with the counts of the next step. At
    the end of that step all ranks read the counts, log the step, write a checkpoint and exit with 128 + the signal's number. A single
    process stops after the current step.
    """

    def __init__(self, grace_s: float | None = None) -> None:
        """`grace_s` is topology.grace."""
        self.signal = self.agreed = 0
        self._grace_s, self._ends_at = grace_s, math.inf

    def shortage_of_time(self, seconds: float) -> str:
        """Return why `seconds` of work exceed the grace time; "" if they do not."""
        left = self._ends_at - time.monotonic()
        if seconds <= left:
            return ""
        return f"the last one took {seconds:.0f} s, and {max(left, 0):.0f} of the {self._grace_s:g} s after SIGTERM are left (topology.grace)"

    def counts(self) -> list[int]:
        """Return [SIGINT, SIGTERM], 1 for this process's signal. Ranks sum these counts."""
        return [int(self.signal == signal.SIGINT), int(self.signal == signal.SIGTERM)]

    def listen(self) -> None:
        """Start to note SIGTERM and SIGINT. A SIGINT after another signal ends the process at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
        self._count_down(number)

    def agree(self, interrupts: int, terminations: int) -> None:
        """Set the agreed signal from the numbers of ranks that received SIGINT and SIGTERM."""
        if not self.agreed and (interrupts or terminations):
            self.agreed = signal.SIGTERM if terminations else signal.SIGINT
            self._count_down(self.agreed)

    def _count_down(self, number: int) -> None:
        """Start the grace time at the first known SIGTERM. Another process may have received it."""
        if number == signal.SIGTERM and self._grace_s is not None:
            self._ends_at = min(self._ends_at, time.monotonic() + self._grace_s)


@dataclass(slots=True)
class RunState:
    """Progress of a run, equal on all ranks."""

    step: int = 0
    """Steps done."""
    last_step: int = 0
    """Number of the last step, where the run ends."""
    epoch: float = 0.0
    """Passes over the data, with a fraction."""
    tokens: int = 0
    """Tokens trained on, padding and virtual tokens excluded."""
    lines: list[Json] = field(default_factory=list[Json])
    """Logged lines, evaluations included. Each has its `step`."""
    best_value: float | None = None
    """The best value of trainer.best_by. None: no evaluation has it yet, or trainer.early_stop_patience is not set."""
    best_step: int | None = None
    stops: bool = False
    """Whether no further step follows."""
    saves: bool = False
    """Whether this step gets a checkpoint even if none is due."""

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint."""
        fields = {theirs: getattr(self, ours) for ours, theirs in _FIELDS.items()}
        (folder / RUN_STATE).write_text(json.dumps(fields, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> RunState:
        """Read the state of a checkpoint."""
        fields = json.loads((folder / RUN_STATE).read_text())
        return cls(**{ours: fields[theirs] for ours, theirs in _FIELDS.items() if theirs in fields})


class Listener:
    """A listener that does nothing; subclasses override what they need. All ranks have listeners."""

    def train_begin(self, state: RunState) -> None:
        """The steps begin, from the start or after a checkpoint."""

    def rolled_back(self, state: RunState) -> None:
        """A spike was rolled back: the steps after `state` follow once more."""

    def step_end(self, state: RunState) -> None:
        """A step was made."""

    def log(self, state: RunState, line: Json) -> None:
        """A line was logged; `line` has its figures by name, and the epoch."""

    def evaluate(self, state: RunState, figures: dict[str, float]) -> None:
        """An evaluation was made; its line was logged before."""


class Measure:
    """Measurement of the model with evaluations, beside the held-out loss."""

    def figures(self, state: RunState) -> dict[str, float]:
        """Return figures by name, without `eval_`; {} if none are due. Every rank calls it, with the model in eval mode."""
        raise NotImplementedError
