"""Figures of logged lines, and listeners: metrics.jsonl, the terminal, early stopping. No weight changes here.

The times of all ranks show a slow one (`StepClock`, `RankTimes`). A step takes equally long on all ranks, since they wait for each other. They
differ in loading data and in the forward passes, which wait for no other rank (except with sharded weights, where the ranks look alike). The
backward pass includes the waiting for slower ranks. Every EXCHANGE_EVERY steps or more, the times are sent with the counts, in the reduction that a
step makes anyway: four integers for each rank, and no further operation.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import psutil
import torch
from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from trl.trainer.utils import get_peak_flops_per_device

from packtrain.config.keys import suggest
from packtrain.errors import Json, UserError
from packtrain.model.flops import training_flops
from packtrain.monitor.heartbeat import Heartbeat, Phase, TimeLimits, own_heartbeat
from packtrain.objectives.spec import RIGHT_ANSWERS, Figure, task_figures
from packtrain.packing.collate import to_device
from packtrain.run_folder import losses_of_sets
from packtrain.system import write_text
from packtrain.train.loader import StepDocuments, Steps
from packtrain.train.log.console import Log
from packtrain.train.run_state import Listener, RunState
from packtrain.train.sync import limit_collectives

_WIDE = 112
"""Columns of a terminal with room for a bar and all figures beside the step and the time left."""
SOURCES = ("source_examples", "source_tokens")
"""Keys of a source's sums in a line begin with one of these: source_tokens/NAME."""
_MEASURED: dict[Phase, str] = {
    "forward": "forward_seconds",
    "backward": "backward_seconds",
    "data": "data_seconds",
    "counts": "wait_seconds",
}
_PARTS = len(_MEASURED)
_FORWARD = list(_MEASURED).index("forward")
_STEP_PHASES: tuple[Phase, ...] = ("data", "counts", "forward", "backward", "optimizer", "step end")
_GPU_PHASES = ("forward", "backward", "counts")
_REMEMBERED = 16
_STEPS_AHEAD = 2  # the most a process leads its GPU: it reads a step's counts before the next step (loop.py)
EXCHANGE_EVERY = 10
"""Minimum number of steps between two exchanges of the ranks' times: each makes a reduction longer."""


class StepSums:
    """Named lists of integers, added up over all ranks in one reduction.

    The sums are on the device under their names. They are also copied to the host, behind the device's queued work.
    """

    def __init__(self, accelerator: Accelerator, device: torch.device, parts: Mapping[str, Sequence[int]]) -> None:
        own = torch.tensor([number for numbers in parts.values() for number in numbers])
        total = cast(torch.Tensor, accelerator.reduce(to_device(own, device), reduction="sum"))
        self._lengths = {name: len(numbers) for name, numbers in parts.items()}
        self._host, self._arrived = total, None
        if total.is_cuda:
            self._host = torch.empty(total.shape, dtype=total.dtype, pin_memory=True)
            self._host.copy_(total, non_blocking=True)
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()
        self.on_device = dict(zip(parts, total.split([*self._lengths.values()]), strict=True))

    def read(self) -> dict[str, list[int]]:
        """Return the sums on the host. Waits for their copy, but not for later work of the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers = iter(self._host.tolist())
        return {name: [*itertools.islice(numbers, length)] for name, length in self._lengths.items()}


class StepMetrics:
    """Exact counts and time since the last logged line, and the rates from them."""

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, dtype: torch.dtype, steps: Steps, *, forwards: int
    ) -> None:
        """`dtype`: the compute dtype. `forwards`: a step's forward passes besides the trained one (Loss.extra_forwards)."""
        self._sum = torch.zeros(4, dtype=torch.int64, device=accelerator.device)  # counts since the last line
        self.forget()
        named = str(dtype).removeprefix("torch.")
        self.peak = get_peak_flops_per_device(accelerator, named) if accelerator.device.type == "cuda" else None
        """FLOP/s of a device in dense matrix products, from TRL's table; None if unknown."""
        self._steps, self._devices = steps, accelerator.num_processes
        self._flops = training_flops(model, forwards=forwards) if self.peak else None

    def open(self, counts: torch.Tensor, step: int) -> None:
        """Begin `step` with its global counts, int64 [4]: trained targets, tokens, slots, examples."""
        self._sum = self._sum + counts
        if self._flops is not None:
            self._flops_made += self._flops.of(*self._steps.documents_of(step))
        self._since = time.perf_counter() if self._since is None else self._since

    def add_waiting(self, seconds: float) -> None:
        """Add the seconds that a step waited for its data. The time of a line begins with its first wait."""
        self._waited += seconds
        self._since = time.perf_counter() - seconds if self._since is None else self._since

    def exclude_time(self, seconds: float) -> None:
        """Exclude `seconds` from the training time."""
        self._since = None if self._since is None else self._since + seconds

    def forget(self) -> None:
        """Drop the figures since the last line."""
        self._since = cast("float | None", None)
        self._flops_made, self._waited = 0.0, 0.0
        self._sum = torch.zeros_like(self._sum)

    def close(self) -> Json:
        """Return the figures of the steps since the last line, and begin the next line."""
        _, tokens, slots, examples = self._sum.tolist()
        seconds = max(time.perf_counter() - (self._since or time.perf_counter()), 1e-9)
        device, made, waited = self._sum.device, self._flops_made, self._waited
        self.forget()
        # peak memory of torch on this GPU so far, or the resident memory of this process
        on_gpu = device.type == "cuda"
        held = torch.cuda.max_memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss
        return {
            "tokens_per_second": tokens / seconds,
            "padding_fraction": 1 - tokens / max(slots, 1),
            "examples": examples,
            "mfu": None if self.peak is None or self._flops is None else made / seconds / (self.peak * self._devices),
            "data_fraction": min(waited / seconds, 1.0),
            "memory_bytes": held,
        }


class SourceCounts:
    """Examples and tokens trained from each source, if there are several. All ranks count the global steps."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names if len(names) > 1 else ()
        self._counts = {f"{kind}/{name}": 0 for name in self._names for kind in SOURCES}

    def add(self, steps: Steps, documents: StepDocuments) -> None:
        """Add the `documents` of a step of `steps`."""
        if self._names:
            for number in documents.numbers.tolist():
                name = self._names[steps.data.source_of[number]]
                self._counts[f"source_examples/{name}"] += 1
                self._counts[f"source_tokens/{name}"] += int(steps.data.lengths[number])

    def metrics(self) -> dict[str, int]:
        """Return the sums of the run so far, for a line of metrics.jsonl."""
        return dict(self._counts)

    def restore(self, lines: Sequence[Json]) -> None:
        """Continue from the last of these logged lines that has sums."""
        last = next((line for line in reversed(lines) if next(iter(self._counts), "") in line), {})
        self._counts = {key: last.get(key, 0) for key in self._counts}

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return the sums by source name, for summary.json."""
        counts = self._counts
        return {
            name: {"examples": counts[f"source_examples/{name}"], "tokens": counts[f"source_tokens/{name}"]}
            for name in self._names
        }


class StepClock:
    """Clock of this rank's phases, reported to the heartbeat. `device` runs the forward passes; a GPU times its own. `limits`: timeouts."""

    def __init__(
        self,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        heartbeat: Heartbeat | None = None,
        limits: TimeLimits | None = None,
    ) -> None:
        self._heartbeat = heartbeat or own_heartbeat()
        self._limits, self._limit_s = limits, 0.0
        self._rank, self._world_size = rank, world_size
        self._phase: Phase = "start"
        self._since = self._heartbeat.enter(self._heartbeat.phase)
        self._spent: dict[Phase, float] = {}
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._first = True
        self._sums = [0] * _PARTS
        self.steps = 0
        """Number of steps that the next `reduction_values` covers; equal on all ranks."""
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[Phase, torch.cuda.Event]] = []
        self._unfinished: deque[tuple[dict[Phase, float], list[tuple[Phase, torch.cuda.Event]]]] = deque()

    def enter(self, phase: Phase, *, step: int | None = None, micro: int = 0) -> None:
        """Enter `phase`: the rank is in it from now on."""
        if phase == "data":
            self._close_step()
        now = self._heartbeat.enter(phase, step=step, micro=micro)
        if self._limits and (limit_s := self._limits.collective_s(phase)) != self._limit_s:
            self._limit_s = limit_s
            limit_collectives(limit_s)
        self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._since
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((phase, event))
        self._phase, self._since = phase, now

    def reduction_values(self) -> list[int]:
        """Return microseconds since the last call, zeros in other ranks' places. A sum over ranks then holds all times."""
        slots = [0] * (_PARTS * self._world_size)
        slots[_PARTS * self._rank : _PARTS * (self._rank + 1)] = self._sums
        self._sums, self.steps = [0] * _PARTS, 0
        return slots

    def _close_step(self) -> None:
        spent, self._spent = self._spent, {}
        events, self._events = self._events, []
        if "forward" not in spent:
            return
        if self._first:  # the first step compiles and fills caches
            self._first = False
            return
        self._steps.append(sum(spent.get(phase, 0.0) for phase in _STEP_PHASES))
        self._heartbeat.usual_s = statistics.median(self._steps)
        self._unfinished.append((spent, events))
        if not self._on_gpu or len(self._unfinished) > _STEPS_AHEAD:
            done, events = self._unfinished.popleft()
            on_gpu: dict[Phase, float] = {}  # seconds of GPU work
            for (phase, start), (_, end) in itertools.pairwise(events):
                if phase in _GPU_PHASES and end.query():
                    on_gpu[phase] = on_gpu.get(phase, 0.0) + start.elapsed_time(end) / 1000
            seconds = {**done, **on_gpu}
            added = [int(1e6 * seconds.get(phase, 0.0)) for phase in _MEASURED]
            self._sums = [total + more for total, more in zip(self._sums, added, strict=True)]
            self.steps += 1


class RankTimes:
    """Last exchanged times of all ranks, and their sums over the run."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._last: tuple[torch.Tensor, int] | None = None
        self._whole, self._whole_steps = torch.zeros(world_size, _PARTS, dtype=torch.float64), 0

    def store(self, slots: torch.Tensor, steps: int) -> None:
        """Store int64 [4 x ranks] from StepClock.reduction_values, summed over ranks, for `steps` steps."""
        self._last = (slots, steps) if steps else None

    def pop_metrics(self) -> dict[str, float | int]:
        """Return each phase's seconds a step over ranks, and the slowest rank; {} without news.

        Each phase has its minimum, median and maximum."""
        last, self._last = self._last, None
        if self._world_size == 1 or last is None:
            return {}
        times, steps = last[0].cpu().double().view(self._world_size, _PARTS) / 1e6, last[1]
        figures: dict[str, float | int] = {"slowest_rank": int(times[:, _FORWARD].argmax())}
        for part, name in enumerate(_MEASURED.values()):
            values = sorted((times[:, part] / steps).tolist())
            for kind, value in (("min", values[0]), ("median", statistics.median(values)), ("max", values[-1])):
                figures[f"{name}/{kind}"] = value
        self._whole, self._whole_steps = self._whole + times, self._whole_steps + steps
        return figures

    def means(self) -> dict[str, list[float]] | None:
        """Return seconds a step in each phase, by rank. The mean is over all exchanged steps; None without any."""
        if not self._whole_steps:
            return None
        means = (self._whole / self._whole_steps).T.tolist()
        return {phase: [round(mean, 6) for mean in ranks] for phase, ranks in zip(_MEASURED, means, strict=True)}


class MetricsFile(Listener):
    """Writer of metrics.jsonl, a line for every logged step and evaluation, on the main process.

    A run that resumes first removes the lines of steps and evaluations that it will repeat. `seconds` of a line is the time of the run until
    then, evaluations included; a resumed run continues from the last kept line.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = print) -> None:
        self._path, self._since = path, time.perf_counter()
        self._say, self._lost = say, 0

    def train_begin(self, state: RunState) -> None:
        """Keep the lines up to the step that the run starts from."""
        self._since = time.perf_counter()
        if not self._path.exists():
            return
        text = self._path.read_text(errors="replace")  # a power loss may leave anything
        lines = text.splitlines() if state.step else []
        evaluated = any("eval_loss" in line for line in state.lines if line["step"] == state.step)
        lines = [line for line in lines if _place_of(line) <= (state.step, evaluated)]
        if (kept := "".join(f"{line}\n" for line in lines)) != text:
            write_text(self._path, kept)
        before = json.loads(lines[-1]).get("seconds") if lines else None
        if isinstance(before, (int, float)) and math.isfinite(before):
            self._since -= before

    rolled_back = train_begin

    def log(self, state: RunState, line: Json) -> None:
        """Write the line. On a full disk write none of it, and warn once."""
        renamed = {"lr" if name == "learning_rate" else name: value for name, value in line.items() if name != "epoch"}
        written = {"step": state.step, "epoch": state.epoch, **renamed}
        written["seconds"] = round(time.perf_counter() - self._since, 3)
        before = self._path.stat().st_size if self._path.exists() else 0
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(written) + "\n")
        except OSError as error:
            if not self._lost:
                self._say(f"{self._path.name} lacks lines from here on, until there is space: {error}")
            self._lost += 1
            with suppress(OSError):
                os.truncate(self._path, before)


def _place_of(line: str) -> tuple[float, bool]:
    """Return the step of a line, and whether it is an evaluation's. Half a line comes last: (∞, False)."""
    try:
        figures = json.loads(line)
        return float(figures["step"]), "eval_loss" in figures
    except (ValueError, LookupError, TypeError):  # half a line of a killed run
        return math.inf, False


class TerminalProgress(Listener):
    """Live bar with the time left, or plain lines without a terminal (main process only). Every rank's log has the lines."""

    def __init__(self, log: Log, figures: Sequence[Figure] = ()) -> None:
        """`figures` of the objective, whose headlines are shown of each evaluation."""
        self._log, self._figures = log, figures
        self._narrow = log.console.width < _WIDE
        columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(10), TextColumn("{task.fields[figures]}")
        columns = [column for column in columns if not (self._narrow and isinstance(column, BarColumn))]
        self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=log.console)

    def train_begin(self, state: RunState) -> None:
        """Show the bar."""
        if self._log.console.is_terminal and not self._log.console.quiet:
            self._bar.add_task("train", total=state.last_step, completed=state.step, figures="")
            self._bar.start()

    def close(self) -> None:
        """Stop the bar, however training ended."""
        self._bar.stop()

    def step_end(self, state: RunState) -> None:
        """Move the bar on."""
        for task in self._bar.task_ids:
            self._bar.update(task, completed=state.step)

    def log(self, state: RunState, line: Json) -> None:
        """Show the figures of a logged step or of an evaluation."""
        place = f"step {state.step}/{state.last_step}"
        if "eval_loss" in line:
            of_sets = ", ".join(f"{name} {loss:.4f}" for name, loss in losses_of_sets(line).items())
            words = f"{line['eval_loss']:.4f}{of_sets and f' ({of_sets})'}"
            self._log.say(f"{place}  eval loss {words}{self._sum_up(line)}")
        elif "loss" in line:
            short = f"loss {line['loss']:.4f}  {line['tokens_per_second']:,.0f} tokens/s"
            figures = f"{short}  padding {line['padding_fraction']:.1%}  lr {line['learning_rate']:.2e}"
            for task in self._bar.task_ids:
                self._bar.update(task, figures=short if self._narrow else figures)
            write = self._log.note if self._bar.task_ids else self._log.say
            write(f"{place}  {figures}")

    def _sum_up(self, line: Json) -> str:
        """Return the headlines of an evaluation in words. All are 0 of a policy that still equals its reference: nothing is said."""
        measured = task_figures(line, self._figures)
        headlines = [one for one in (*self._figures, *measured) if one.headline]
        known = {one: line[key] for one in headlines if (key := f"eval_{one.name}") in line}
        words = [f"  {one.words} {one.written(value)}" for one, value in known.items()]
        return "".join(words) if any(known.values()) or measured or RIGHT_ANSWERS in known else ""


class EarlyStop(Listener):
    """Listener that stops after `patience` evaluations in a row without a new best (trainer.best_by).

    Each new best is checkpointed. Evaluations without the figure do not count, nor does the one before training: final/ must hold a
    trained model.
    """

    def __init__(self, patience: int, best_by: str, log: Log) -> None:
        order, _, self._figure = best_by.partition(" ")
        self._sign, self._patience, self._log, self._since = 1 if order == "highest" else -1, patience, log, 0

    def train_begin(self, state: RunState) -> None:
        """Forget the best by another figure."""
        best = {line.get(self._figure) for line in state.lines if line["step"] == state.best_step}
        if state.best_step and state.best_value not in best:
            self._log.warn(f"trainer.best_by has changed: the best weights are sought from step {state.step} on")
            self._since, state.best_value, state.best_step = state.step, None, None

    rolled_back = train_begin

    def evaluate(self, state: RunState, figures: dict[str, float]) -> None:
        """Keep a new best, or stop the run if the best is too long ago. Raises UserError if the first one lacks the figure."""
        value, best = figures.get(self._figure), state.best_value
        if state.step == 0 and value is None:
            what, fix = f"the first evaluation has no {self._figure}", suggest(self._figure, figures, str([*figures]))
            fix = f"{fix} Or its time was over: see trainer.measure_timeout."
            raise UserError(what, where="trainer.best_by", fix=fix, code="no-such-figure")
        if state.step == 0 or value is None:
            return
        since = max(state.best_step or 0, self._since)
        if math.isfinite(value) and (best is None or self._sign * value > self._sign * best):
            state.best_value, state.best_step, state.saves = value, state.step, True
        elif sum(self._figure in line and line["step"] > since for line in state.lines) >= self._patience:
            if not state.stops and state.step < state.last_step:
                was = "was never a number" if best is None else f"was best at step {state.best_step}, {best:.4f}"
                self._log.warn(f"stopping early after step {state.step}: {self._figure} {was}")
            state.stops = True
