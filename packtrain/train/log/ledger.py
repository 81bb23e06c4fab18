"""ledger.jsonl: the loss of each document, each time that it is trained. No step waits for it.

A step leaves the figures of its documents on the device. At a logged step one reduction brings those of all ranks together, and a thread of
rank 0 writes them: a line for each document, ordered by step and document. The lines are the same on any number of ranks, in any packing mode.
A checkpoint is complete only once the lines up to its step are written. A run that resumes from it cuts later lines, and writes them again.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import cast

import numpy as np
import torch

from packtrain.data.dataset import PairDataset
from packtrain.inspect.corpus import RowPlaces
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import to_device
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.objectives.loss import Loss
from packtrain.train.run_state import Listener, RunState


@dataclass(slots=True)
class _Step:
    """Figures of step `number` (from 1), which is step `at` of `steps`.

    `found` has the examples of this rank's micro-batches with their figures. `rows`: FILE:LINE of a stream's examples, `before`: how many
    examples the stream gave before them.
    """

    number: int
    steps: Steps
    at: int
    rows: Sequence[str] = ()
    before: int = 0
    found: list[tuple[np.ndarray, torch.Tensor]] = field(default_factory=list[tuple[np.ndarray, torch.Tensor]])

    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the step's examples over all ranks, sorted, and how often the step has each."""
        numbers = self.steps.schedule.documents(self.at)
        if self.steps.skipped_from or self.steps.given_up:
            numbers = numbers[[self.steps.trains_on(int(number), self.at) for number in numbers]]
        return np.unique(numbers, return_counts=True)


class Ledger(Listener):
    """Figures of documents since the last logged line. All ranks make the same calls; the one with a `path` writes.

    Without `figures` (Loss.document_figures) nothing is kept. `read_places` reads FILE:LINE of all rows of the data.
    """

    def __init__(
        self,
        figures: Sequence[str] = (),
        path: Path | None = None,
        read_places: Callable[[], RowPlaces] = RowPlaces,
        say: Callable[[str], None] = print,
    ) -> None:
        self._figures, self._path, self._read_places, self._say = figures, path, read_places, say
        self._steps, self._jobs = list[_Step](), SimpleQueue[Callable[[], None] | None]()
        self._places: RowPlaces | None = None
        self._thread: Thread | None = None
        self._told = False

    def train_begin(self, state: RunState) -> None:
        """Keep the lines up to the step that the run starts from."""
        self._steps.clear()
        if self._figures and self._path is not None:
            self._do_later(partial(_cut, self._path, state.step))

    rolled_back = train_begin

    def begin(self, steps: Steps, step: int) -> None:
        """Begin `step` (from 0)."""
        if self._figures:
            (current, at), feed = steps.at(step), steps.feed
            rows = () if feed is None else feed.rows(range(len(current.data)))
            self._steps.append(_Step(step + 1, current, at, rows, feed.examples - len(rows) if feed else 0))

    def add(self, batch: MicroBatch, figures: Sequence[torch.Tensor]) -> None:
        """Add the figures of a micro-batch of the current step."""
        if self._figures and figures and batch.examples:
            self._steps[-1].found.append((np.asarray(batch.numbers), torch.stack([*figures])))

    def drop_step(self) -> None:
        """Drop the current step: its update is skipped."""
        del self._steps[-1:]

    def gather(self, loss: Loss) -> None:
        """Gather the figures of all ranks since the last call, and write them in the background."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        examples = [step.examples() for step in steps]
        firsts = np.cumsum([0, *(len(numbers) for numbers, _ in examples)])
        sums = torch.zeros(len(self._figures), int(firsts[-1]), device=loss.device)
        found = [
            (first + np.searchsorted(numbers, own), figures)
            for step, first, (numbers, _) in zip(steps, firsts, examples, strict=False)
            for own, figures in step.found
        ]
        if found:
            places = to_device(torch.from_numpy(np.concatenate([own for own, _ in found])), loss.device)
            sums.index_add_(1, places, torch.cat([figures for _, figures in found], dim=1).float())
        with waiting("the losses of all ranks' documents"):
            total = cast(torch.Tensor, loss.accelerator.reduce(sums, reduction="sum")).cpu().double().numpy()
        if self._path is not None:
            for step, (numbers, times), own in zip(steps, examples, np.split(total, firsts[1:-1], axis=1), strict=True):
                several = np.repeat(numbers, times), np.repeat(own / times, times, axis=1)
                self._do_later(partial(self._write, self._path, step, *several))

    def wait(self) -> None:
        """Wait until all lines are written."""
        if self._thread is not None:
            self._jobs.put((done := Event()).set)
            done.wait()

    def close(self) -> None:
        """Write all lines, and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _do_later(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._work, name="ledger", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # the training goes on
                self._tell(f"ledger.jsonl lacks lines: {error}")

    def _tell(self, fault: str) -> None:
        if not self._told:
            self._say(fault)
        self._told = True

    def _write(self, path: Path, step: _Step, numbers: np.ndarray, values: np.ndarray) -> None:
        """Write the lines of a step for its examples `numbers` [n] with figures `values` [figures, n]."""
        documents, rows = self._name(step, numbers)
        tokens, lines = step.steps.data.trained[numbers], list[str]()
        sums = np.array([name.endswith("_sum") for name in self._figures])[:, None]
        figures = np.where(sums, values / np.maximum(tokens, 1), values).T.tolist()
        for at in np.argsort(documents, kind="stable").tolist():
            known = {
                name.removesuffix("_sum"): f"{value:.7g}" if math.isfinite(value) else "null"
                for name, value in zip(self._figures, figures[at], strict=True)
            }
            given = {
                "step": step.number,
                "document": documents[at],
                "row": json.dumps(rows[at]),
                "tokens": tokens[at],
                **known,
            }
            lines.append(", ".join(f'"{name}": {value}' for name, value in given.items()))
        before = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{{{line}}}\n" for line in lines))
        except OSError:  # a full disk: none of it
            os.truncate(path, before)
            raise

    def _name(self, step: _Step, numbers: np.ndarray) -> tuple[np.ndarray, Sequence[str | None]]:
        """Return the numbers of documents (or pairs) as `packtrain inspect` counts them, and FILE:LINE of their rows."""
        if step.rows:
            return step.before + numbers, [step.rows[number] for number in numbers]
        data = step.steps.data
        documents, together = (data.documents, 2) if isinstance(data, PairDataset) else (data, 1)
        stored = documents.rows[numbers * together]
        if self._places is None:
            try:
                self._places = self._read_places()
            except Exception as error:  # the source is gone, or the network
                self._places = RowPlaces()
                self._tell(f"ledger.jsonl names no rows: {error}")
        return stored // together, self._places.of(stored)


def _cut(path: Path, step: int) -> None:
    """Cut the lines after `step`, and a line that is not whole. Lines are ordered by step, so few are read."""
    if not path.exists():
        return
    with path.open("rb+") as file:

        def step_from(place: int) -> float:
            """Return the step of the first line that begins at `place` or later."""
            file.seek(max(place - 1, 0))
            if place:
                file.readline()
            with suppress(ValueError, LookupError, TypeError):
                return float(json.loads(line)["step"]) if (line := file.readline()).endswith(b"\n") else math.inf
            return math.inf

        place = bisect(range(path.stat().st_size), step, key=step_from)
        file.seek(max(place - 1, 0))
        file.truncate(place and place - 1 + len(file.readline()))
