"""Steps of a stream (data/streaming.py), made ahead of the training by a thread: each one is a data set and a schedule of its own.

So a step of a stream is laid out, collated and trained as any other step: the objective's `Steps` (train/loader.py) are those of the first
rows, and in `Steps.at` the feed puts the step at hand in their place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

import numpy as np
import torch

from packtrain.data.dataset import DataReport
from packtrain.data.streaming import Stream, Window
from packtrain.errors import UserError
from packtrain.monitor.heartbeat import progress, waiting
from packtrain.packing.schedule import Schedule

PLACE = "stream.json"
"""The file of a checkpoint with the place of the stream."""
AHEAD = 8
"""Steps that are ready before they are trained on."""
_TOLD = ("examples", "trained", "ended")
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamSchedule(Schedule):
    """The schedule of the first rows, over and over: for all that asks what steps are like. A stream has no epochs."""

    def epoch_of(self, step: int) -> float:
        """0: a stream is not gone through again."""
        return 0.0


@dataclass
class Feed:
    """Gives the steps of a `stream`; `slots` says what the examples of a data set take in a row.

    `place` is where the stream goes on after the step at hand, with the `examples` and trained tokens until there; `marks` are what this
    rank adds to the sums that `check_marks` gets.
    """

    stream: Stream
    slots: Callable[[Any], np.ndarray]
    say: Callable[[str], None]
    place: dict[str, Any] = field(default_factory=dict)
    examples: int = 0
    trained: int = 0
    ended: bool = False
    marks: tuple[int, ...] = ()
    current: Any = field(init=False)
    _window: Window = field(init=False)
    _stopping: Event = field(default_factory=Event)
    _thread: Thread | None = None

    def attach(self, steps: Any) -> Any:
        """`steps` of the first rows, which give those of the stream when they are loaded."""
        given = {name: value for name, value in steps.schedule.__dict__.items() if not name.startswith("_")}
        steps = replace(steps, schedule=StreamSchedule(**given), feed=self)
        self.current = steps
        return steps

    def go_on_from(self, checkpoint: Path, step: int) -> None:
        """The next steps are those after `checkpoint`, of `step`; after one of a run that was no stream they begin with the first rows."""
        new, file = {"step": step, "sources": {}, **dict.fromkeys(_TOLD, 0)}, checkpoint / PLACE
        self.place = json.loads(file.read_text()) if file.exists() else new
        self.examples, self.trained, self.ended = (self.place[name] for name in _TOLD)

    def load(self, steps: Any) -> Iterator[list[Any]]:
        """This rank's micro-batches of each step to come. Raises what ended the stream, but for its end."""
        ready: Queue[tuple[Window, Any, list[Any]] | BaseException | None] = Queue(AHEAD)
        self.close()
        self._stopping = stopping = Event()
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = Thread(target=self._make, args=(steps, ready, stopping, gpu), name="stream", daemon=True)
        self._thread.start()
        while True:
            item = self._await(ready)
            if isinstance(item, BaseException):
                raise item
            if item is None:
                fix = "Start over with trainer.resume=never, or name an earlier checkpoint."
                raise UserError("nothing is left of data.train after this checkpoint", where="trainer.resume", fix=fix)
            self._window, self.current, batches = item
            self.examples += len(self._window.rows)
            self.trained += int(self._window.data.trained.sum(dtype=np.int64))
            self.ended, mark = self._window.last, self._window.mark ^ self._window.last
            self.marks = mark, mark**2
            self.place = self._window.place | {name: getattr(self, name) for name in _TOLD}
            yield batches

    def end_after(self, step: int, planned: int) -> int:
        """The last step, once `step` is at hand: this one where the data has ended, else the `planned` one."""
        if not self.ended or step >= planned:
            return planned
        self.say(f"data.train has ended: step {step:,} is the last of {planned:,}")
        return step

    def check_marks(self, total: int, squares: int, ranks: int) -> None:
        """Raises UserError where the ranks' marks have a variance: then not all train on the same documents."""
        if ranks * squares != total**2:
            what = "the processes have read other documents: what data.train names is not the same on all machines"
            raise UserError(
                what, where="data.train", fix="Compare the files with sha256sum, or train on a shared disk."
            )

    def rows(self, numbers: list[int]) -> list[str]:
        """FILE:LINE of examples of the step at hand."""
        return [self._window.rows[number] for number in numbers]

    def report(self, tokens: int) -> DataReport:
        """What became of the rows so far."""
        figures = {"documents": self.examples, "tokens": tokens, "trained_tokens": self.trained}
        return self.stream.report_at(self.place, **figures) if self.place else self.stream.report

    def close(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _await(self, ready: Queue[Any]) -> Any:
        """The next step. Reading it may take a whole buffer of rows, so the watchdog is shown that rows come in."""
        read = -1
        with waiting("the stream of data.train"):
            while True:
                with suppress(Empty):
                    return ready.get(timeout=_POLL_S)
                if (now := sum(stream.chunks_read for stream in self.stream.streams)) != read:
                    read = now
                    progress()

    def _make(self, steps: Any, ready: Queue[Any], stopping: Event, gpu: int | None) -> None:
        def put(item: Any) -> None:
            while not stopping.is_set():
                try:
                    return ready.put(item, timeout=_POLL_S)
                except Full:
                    continue

        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)  # a thread has its own
            for window in self.stream.windows(self.place or None):
                own = self._steps_of(window, steps)
                batches = own[0]
                put((window, own, batches if gpu is None else [batch.pin_memory() for batch in batches]))
                if stopping.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    def _steps_of(self, window: Window, steps: Any) -> Any:
        """The one step of a window."""
        sizes: Any = {"total_steps": 1, "examples_per_step": len(window.rows), "shuffle": False}
        schedule = replace(steps.schedule, lengths=self.slots(window.data), _rows_by_epoch={}, _row_counts={}, **sizes)
        return replace(steps, data=window.data, schedule=schedule, feed=None)
