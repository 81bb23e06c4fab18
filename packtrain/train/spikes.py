"""Spikes: steps whose loss or gradient norm is not finite or far above recent medians.

Each step is judged before its update. `trainer.on_spike` says what follows: the run stops, it skips the update (`skip`), or it returns to its
newest checkpoint (`rollback`, as for PaLM: Chowdhery et al. 2022, arXiv 2204.02311, section 5.1). A rollback leaves out the steps from there
to the spike, and the spike's documents for good. All ranks decide alike: the figures cover the global step. spikes.jsonl records each decision
with the documents of its step; a resumed run repeats the decisions.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.distributed.tensor import DTensor

from packtrain.errors import CheckFailed, Json
from packtrain.monitor.heartbeat import waiting
from packtrain.system import write_text
from packtrain.train.loader import Steps

STATE = "spikes.json"
"""File of a checkpoint with loss and gradient norm of the steps before it."""
_WINDOW, _MIN_RECENT = 64, 8
"""The median covers at most _WINDOW recent steps. With fewer than _MIN_RECENT, no step counts as far above it."""
_DECIDED = "decided before"
Norm = torch.Tensor | float
"""Norm of the gradients of a step."""
IN_A_ROW = 10
"""Number of spikes in a row that ends the run under any `trainer.on_spike`: the weights are ruined."""


@dataclass(frozen=True, slots=True)
class SpikeRules:
    """Settings of the judge. `action` is trainer.on_spike, `factor` trainer.spike_factor, `file` spikes.jsonl; `places` gives FILE:LINE of
    examples."""

    action: str
    factor: float | None
    file: Path
    places: Callable[[list[int]], list[str]]


class RecentFigures:
    """Loss and gradient norm of the last updated steps."""

    def __init__(self, figures: list[list[float]] | None = None) -> None:
        self.figures: deque[list[float]] = deque(figures or [], maxlen=_WINDOW)

    def spike_reason(self, loss: float, norm: float, factor: float | None) -> str:
        """Return why a step with this loss and gradient norm is a spike, else ""."""
        for at, (name, value) in enumerate((("loss", loss), ("gradient norm", norm))):
            if not math.isfinite(value):
                return f"the {name} is {value:g}"
            if factor is not None and len(self.figures) >= _MIN_RECENT:
                median = statistics.median(figures[at] for figures in self.figures)
                if value > factor * median > 0:
                    return f"the {name} is {value:.4g}, the median of recent steps is {median:.4g}"
        return ""

    def last(self) -> list[float]:
        """Return loss and gradient norm of the last updated step."""
        return self.figures[-1] if self.figures else [0.0, 0.0]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Outcome of a step. `loss`: this rank's part of the loss; None if the step gets no update. `norm`: the gradient norm of the step, or of the
    last updated step if this one gets no update. `rollback_to`: step and folder of the checkpoint that the run returns to."""

    loss: torch.Tensor | None
    norm: Norm
    rollback_to: tuple[int, Path] | None = None


class SpikeJudge:
    """Judge of a run's steps by `rules` (None: it judges no step). All ranks decide alike."""

    def __init__(self, rules: SpikeRules | None, accelerator: Accelerator, say: Callable[[str], None]) -> None:
        self.rules, self._accelerator, self._say = rules, accelerator, say
        self.judges_every_step = rules is not None and (rules.action != "stop" or rules.factor is not None)
        """Whether each step is judged before its update. Otherwise a loss that is not finite is noticed when it is logged."""
        self.recent = RecentFigures()
        self.decided: dict[int, Json] = {}
        """Decision by step with a spike: a line of spikes.jsonl."""
        self.spike_reason = ""
        """Why the current step gets no update, "" if it gets one."""
        self._figures = (0.0, 0.0)
        self._skipped = 0

    def read(self, checkpoint: Path | None) -> None:
        """Restore the recent figures from the resumed `checkpoint`, and later decisions, on all ranks."""
        if self.rules is None or not self.judges_every_step:
            return
        main = self._accelerator.is_main_process
        found = _load_decisions(self.rules.file, checkpoint) if checkpoint is not None and main else []
        with waiting("rank 0 to read spikes.jsonl"):
            lines = cast(list[list[Json]], broadcast_object_list([found]))[0]
        self.decided = {line["step"]: line for line in lines if line["action"] != "stop"}
        self.roll_back(checkpoint)

    def roll_back(self, checkpoint: Path | None) -> None:
        """Restore the recent figures from `checkpoint`."""
        state = checkpoint and checkpoint / STATE
        self.recent = RecentFigures(json.loads(state.read_text()) if state and state.is_file() else None)
        self._skipped = 0

    def judge(self, step: int, part: torch.Tensor, norm: Norm, counts: torch.Tensor) -> bool:
        """Judge `step` (from 1) by this rank's `part` of its loss and the norm. Return whether it gets no update."""
        assert self.rules is not None
        full_norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
        figures = torch.stack([part.double(), full_norm.to(part.device).double()])
        with waiting("the loss of all ranks"):
            figures = cast(torch.Tensor, self._accelerator.reduce(figures, reduction="mean"))
        (loss, mean_norm), examples = figures.tolist(), int(counts[3])
        given_up = step in self.decided or not examples
        self.spike_reason = _DECIDED if given_up else self.recent.spike_reason(loss, mean_norm, self.rules.factor)
        if self.spike_reason:
            self._figures = (loss, mean_norm)
        else:
            self.recent.figures.append([loss, mean_norm])
        return bool(self.spike_reason)

    def decide(
        self,
        step: int,
        newest: Callable[[], tuple[int, Path] | None],
        losses: Callable[[], list[tuple[int, float]]],
    ) -> tuple[int, Path] | None:
        """Decide what follows the spike of `step`. Record it with the `losses` of its examples by number.

        Return the step and folder of the checkpoint that the run goes back to, None if it goes on. `newest` finds this checkpoint. Raises
        CheckFailed if the run stops.
        """
        assert self.rules is not None
        reason, self.spike_reason = self.spike_reason, ""
        self._skipped += 1
        if reason == _DECIDED:
            return None
        too_many = all(step - before in self.decided for before in range(1, IN_A_ROW))
        action, back = "stop" if too_many else self.rules.action, None
        if action == "rollback":
            back = newest()
            action = "rollback" if back else "skip"
        line = {"step": step, "action": action, "from": back and back[0], "why": reason}
        line |= dict(zip(("loss", "grad_norm"), map(_number, self._figures), strict=True))
        self._write(line, losses())
        if action == "stop":
            fix = "lower it, or raise trainer.spike_factor" if self.rules.factor else "lower it"
            if too_many:
                reason += f", for the {IN_A_ROW}th step in a row,"
                fix += ", and go on from a checkpoint before these steps"
            else:
                fix += ", or set trainer.on_spike=skip; the checkpoints before this step are kept"
            what = f"{reason} at step {step} (spikes.jsonl)"
            raise CheckFailed(what, where="optim.learning_rate", fix=fix, code="spike")
        self.decided[step] = line
        then = "its update is skipped"
        then += ", as there is no checkpoint to go back to yet" if action != self.rules.action else ""
        if back is not None:
            then = f"the run goes back to the checkpoint of step {back[0]} and leaves out the steps since then"
        self._say(f"step {step}: {reason}; {then}. spikes.jsonl names its documents")
        return back

    def stop_at(self, step: int, loss: float, documents: Sequence[int]) -> NoReturn:
        """Raise CheckFailed on every process: `loss` is not finite, and has ruined the weights.

        First adds a line to spikes.jsonl with the `documents` of the step, without their losses.
        """
        if self.rules is not None:
            line = {"step": step, "action": "stop", "from": None, "why": f"the loss is {loss:g}", "loss": _number(loss)}
            self._write({**line, "grad_norm": None}, [(number, None) for number in documents])
        what = f"the loss is {loss:g} at step {step}"
        fix = "lower it, warm up, or clip (optim.max_grad_norm); the checkpoints before this step are kept"
        raise CheckFailed(what, where="optim.learning_rate", fix=fix, code="loss-not-finite")

    def pop_metrics(self) -> dict[str, int]:
        """Return `skipped`, the number of updates skipped since the last logged line, if any."""
        number, self._skipped = self._skipped, 0
        return {"skipped": number} if number else {}

    def without_skipped(self, steps: Steps) -> Steps:
        """Return `steps` without the steps that rollbacks gave up. After a rollback it also leaves out the spike's documents."""
        skipped_from, given_up = dict[int, int](), set[int]()
        for line in self.decided.values():
            if line["action"] == "rollback":
                given_up.update(range(line["from"], line["step"]))
                for number in steps.schedule.documents(line["step"] - 1).tolist():
                    skipped_from[number] = min(line["from"], skipped_from.get(number, line["from"]))
        return replace(steps, skipped_from=skipped_from, given_up=frozenset(given_up)) if skipped_from else steps

    def _write(self, line: Json, losses: Sequence[tuple[int, float | None]]) -> None:
        """Add a line to spikes.jsonl, on the main process."""
        if self.rules is None or not self._accelerator.is_main_process:
            return
        places = self.rules.places([number for number, _ in losses])
        documents = [{"place": place, "loss": _number(loss)} for place, (_, loss) in zip(places, losses, strict=True)]
        try:
            with self.rules.file.open("a") as file:
                file.write(json.dumps({**line, "documents": documents}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._say(f"{self.rules.file.name} cannot be written: {error}")


def _load_decisions(file: Path, checkpoint: Path) -> list[Json]:
    """Return the lines of spikes.jsonl that the run continues with. If `file` is missing, read the run folder of `checkpoint`.

    Then `file` has only these lines: a kill may have cut its last one, and a power loss may have damaged any.
    """
    text, lines = "", list[Json]()
    for place in (checkpoint.parent.parent / file.name, file):
        with suppress(OSError):
            text = place.read_text(errors="replace")
    for line in text.splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    if lines:
        with suppress(OSError):  # an unwritable file changes nothing in this run
            write_text(file, "".join(f"{json.dumps(line)}\n" for line in lines))
    return lines


def _number(value: float | None) -> float | str | None:
    """Return a figure as JSON can hold it: NaN and infinity become text."""
    return value if value is None or math.isfinite(value) else f"{value:g}"
