"""Measure where each rank spends its time, so that a slow rank shows.

A step calls `StepClock.enter` at each change of phase; it reports the phase (monitor/heartbeat.py) and sums the time.
A step takes equally long on all ranks, since they wait for each other. They differ in loading data and in the forward passes,
which wait for no other rank (except with sharded weights, where the ranks look alike). The backward pass includes the waiting
for slower ranks. Every EXCHANGE_EVERY steps or more, the times are sent with the counts, in the reduction that a step makes
anyway: four integers for each rank, and no further operation.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque

import torch

from packtrain.monitor.heartbeat import Heartbeat, Phase, TimeLimits, own_heartbeat
from packtrain.train.sync import limit_collectives

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


class StepClock:
    """Clock of this rank. `device`: where its forward passes run; a GPU times its own. `limits`: per-phase timeouts."""

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
