"""Steps of a stream (data/streaming.py), prepared by a thread during training.

Each step is a small data set with its own schedule. It is laid out, collated and trained like any other step: the objective's `Steps`
(train/loader.py) hold the first rows, and in `Steps.at` the feed replaces them with the current step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, replace
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch

from packtrain.data.dataset import DataReport
from packtrain.data.streaming import Place, Stream, Window
from packtrain.errors import UserError
from packtrain.monitor.heartbeat import progress, waiting
from packtrain.packing.schedule import Schedule

PLACE = "stream.json"
"""The file of a checkpoint that records the position in the stream."""
AHEAD = 8
"""Number of steps prepared ahead of training."""
_TOLD = ("examples", "documents", "trained", "ended")
_POLL_S = 0.5


class Pinnable(Protocol):
    """A micro-batch of an objective (train/loader.py)."""

    def pin_memory(self) -> Pinnable:
        """Return a copy in pinned memory."""
        ...


class StreamedSteps(Protocol):
    """The Steps of an objective (train/loader.py)."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def schedule(self) -> Schedule:
        """Documents of each step."""
        ...

    def __getitem__(self, step: int, /) -> Sequence[Pinnable]: ...


AnySteps = TypeVar("AnySteps", bound=StreamedSteps)
Prepared = tuple[Window, StreamedSteps, Sequence[Pinnable]] | BaseException | None
"""A step of the stream with its Steps and micro-batches, the error of the thread, or None at the end of the data."""


@dataclass
class Feed:
    """Source of streamed steps. `slots` returns how many slots the examples of a data set take in a row.

    `place` is the position after the current step, with the numbers of `examples`, documents and trained tokens so far. `marks` are this rank's
    terms of the two sums that `check_marks` takes.
    """

    stream: Stream
    slots: Callable[[object], np.ndarray]
    say: Callable[[str], None]
    place: Place = field(default_factory=Place)
    examples: int = 0
    documents: int = 0
    trained: int = 0
    ended: bool = False
    marks: tuple[int, ...] = ()
    current: StreamedSteps = field(init=False)
    _window: Window = field(init=False)
    _stopping: Event = field(default_factory=Event)
    _thread: Thread | None = None

    def attach(self, steps: AnySteps) -> AnySteps:
        """Return `steps` of the first rows with this feed, which replaces them by streamed steps."""
        self.current = steps = replace(steps, schedule=replace(steps.schedule, has_epochs=False), feed=self)
        return steps

    def go_on_from(self, checkpoint: Path, step: int) -> None:
        """Continue after `checkpoint`, written at `step`. A checkpoint of a run without a stream continues with the first rows."""
        new: Place = {"step": step, "sources": {}, **dict.fromkeys(_TOLD, 0)}
        file = checkpoint / PLACE
        self.place = json.loads(file.read_text()) if file.exists() else new
        self.examples, self.documents, self.trained, self.ended = (self.place.get(name, 0) for name in _TOLD)

    def load(self, steps: StreamedSteps) -> Iterator[Sequence[Pinnable]]:
        """Yield this rank's micro-batches of each step to come. Raises errors of the thread, and UserError if no rows are left."""
        ready: Queue[Prepared] = Queue(AHEAD)
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
                what = "nothing is left of data.train after this checkpoint"
                raise UserError(what, where="trainer.resume", fix=fix, code="stream-at-its-end")
            self._window, self.current, batches = item
            self.examples += self._window.examples
            self.documents += len(self._window.rows)
            self.trained += int(self._window.data.trained.sum(dtype=np.int64))
            self.ended, mark = self._window.last, self._window.mark ^ self._window.last
            self.marks = mark, mark**2
            self.place = self._window.place | {name: getattr(self, name) for name in _TOLD}
            yield batches

    def end_after(self, step: int, planned: int) -> int:
        """Return the number of the last step: `step` if the data has ended, else `planned`."""
        if not self.ended or step >= planned:
            return planned
        self.say(f"data.train has ended: step {step:,} is the last of {planned:,}")
        return step

    def check_marks(self, total: int, squares: int, ranks: int) -> None:
        """Raise UserError if the ranks' marks differ: then the ranks train on different documents."""
        if ranks * squares != total**2:
            what = "the processes have read other documents: what data.train names is not the same on all machines"
            fix = "Compare the files with sha256sum, or train on a shared disk."
            raise UserError(what, where="data.train", fix=fix, code="ranks-read-differently")

    def rows(self, numbers: list[int]) -> list[str]:
        """Return FILE:LINE of items of the current step."""
        return [self._window.rows[number] for number in numbers]

    def report(self, tokens: int) -> DataReport:
        """Report what happened to the rows read so far."""
        if not self.place:
            return self.stream.report
        return self.stream.report_at(
            self.place,
            documents=self.documents,
            examples=self.examples,
            tokens=tokens,
            trained_tokens=self.trained,
        )

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _await(self, ready: Queue[Prepared]) -> Prepared:
        """Wait for the next step. Reading may take a whole buffer of rows, so report incoming rows to the watchdog."""
        read = -1
        with waiting("the stream of data.train"):
            while True:
                with suppress(Empty):
                    return ready.get(timeout=_POLL_S)
                if (now := sum(stream.chunks_read for stream in self.stream.streams)) != read:
                    read = now
                    progress()

    def _make(self, steps: StreamedSteps, ready: Queue[Prepared], stopping: Event, gpu: int | None) -> None:
        def put(item: Prepared) -> None:
            while not stopping.is_set():
                try:
                    return ready.put(item, timeout=_POLL_S)
                except Full:
                    continue

        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)  # the current device is set for each thread
            before = self.documents
            for window in self.stream.windows(self.place or None):
                own = self._steps_of(window, steps, before)
                before += len(window.rows)
                batches = own[0]
                put((window, own, batches if gpu is None else [batch.pin_memory() for batch in batches]))
                if stopping.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    def _steps_of(self, window: Window, steps: StreamedSteps, before: int) -> StreamedSteps:
        """Return the single step of a window. The run had `before` items before it."""
        schedule = steps.schedule.over(window.data, self.slots(window.data))
        return replace(steps, data=window.data, schedule=schedule, feed=None, rows=window.rows, before=before)
