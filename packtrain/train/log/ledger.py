"""ledger.jsonl: the loss of each document, each time that it is trained. No step waits for it.

A step leaves the figures of its documents on the device. At a logged step one reduction brings those of all ranks together, and a thread of
rank 0 writes them: a line for each document, ordered by step and document. The lines are the same on any number of ranks, in any packing mode.
A checkpoint is complete only once the lines up to its step are written. A run that resumes from it cuts later lines, and writes them again.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch

from packtrain.data.dataset import PairDataset
from packtrain.inspect.corpus import RowPlaces
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import to_device
from packtrain.train.loader import Steps
from packtrain.train.objectives.loss import Loss
from packtrain.train.run_state import Listener, RunState


@dataclass(slots=True)
class StepDocuments:
    """Documents of step `number` (from 1), which is step `at` of `steps`.

    `found`: the numbers of the examples in this rank's micro-batches, and their figures (Loss.by_document).
    """

    number: int
    steps: Steps
    at: int
    found: list[tuple[np.ndarray, tuple[torch.Tensor, ...]]] = field(
        default_factory=list[tuple[np.ndarray, tuple[torch.Tensor, ...]]]
    )


class Ledger(Listener):
    """Writer of ledger.jsonl. All ranks make the same calls; the one with a `path` writes.

    Without `figures` (Loss.document_figures) there is no file. `read_places` reads FILE:LINE of all rows of the data.
    """

    def __init__(
        self,
        figures: Sequence[str] = (),
        path: Path | None = None,
        read_places: Callable[[], RowPlaces] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._figures, self._path, self._read_places, self._say = figures, path if figures else None, read_places, say
        self._places: RowPlaces | None = None
        self._thread, self._told = ThreadPoolExecutor(1, "ledger"), False

    def train_begin(self, state: RunState) -> None:
        """Keep the lines up to the step that the run starts from, and read where the rows are."""
        self.rolled_back(state)
        if self._path is not None and self._read_places is not None:
            self._thread.submit(self._do, self._read, self._read_places)

    def rolled_back(self, state: RunState) -> None:
        """Keep the lines up to the step that the run goes back to."""
        if self._path is not None:
            self._thread.submit(self._do, _cut, self._path, state.step)

    def gather(self, loss: Loss, steps: Sequence[StepDocuments]) -> None:
        """Gather the figures of these steps from all ranks, and write them in the background."""
        if not (self._figures and steps):
            return
        examples = [np.unique(_trained_in(step), return_counts=True) for step in steps]  # a mixture may repeat one
        firsts = np.cumsum([0, *(len(numbers) for numbers, _ in examples)])
        sums = torch.zeros(len(self._figures), int(firsts[-1]), dtype=torch.float64, device=loss.device)
        for step, first, (numbers, _) in zip(steps, firsts, examples, strict=False):
            for own, figures in step.found:
                if figures:
                    places = torch.from_numpy(first + np.searchsorted(numbers, own))
                    sums.index_add_(1, to_device(places, loss.device), torch.stack(figures).double())
        with waiting("the losses of all ranks' documents"):
            total = cast(torch.Tensor, loss.accelerator.reduce(sums, reduction="sum")).cpu().numpy()
        if self._path is not None:
            for step, (numbers, times), own in zip(steps, examples, np.split(total, firsts[1:-1], axis=1), strict=True):
                lines = np.repeat(numbers, times), np.repeat(own / times, times, axis=1)
                self._thread.submit(self._do, self._write, self._path, step, *lines)

    def wait(self) -> None:
        """Wait until all lines are written."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Write all lines, and end the thread."""
        self._thread.shutdown()

    def _do(self, job: Callable[..., None], *given: object) -> None:
        """Do a job of the thread. Says why the first one fails: the training goes on."""
        try:
            job(*given)
        except Exception as error:
            if not self._told:
                self._say(f"ledger.jsonl lacks lines, or names of rows: {error}")
            self._told = True

    def _read(self, read: Callable[[], RowPlaces]) -> None:
        self._places = read()

    def _write(self, path: Path, step: StepDocuments, numbers: np.ndarray, values: np.ndarray) -> None:
        """Write the lines of a step: of the examples `numbers` [n], with figures `values` [figures, n]."""
        documents, rows = self._name(step.steps, numbers)
        tokens, text = step.steps.data.trained[numbers], ""
        names = [name.removesuffix("_sum") for name in self._figures]
        sums = np.array([name.endswith("_sum") for name in self._figures])[:, None]
        figures = np.where(sums, values / np.maximum(tokens, 1), values).T
        for at in np.argsort(documents, kind="stable").tolist():
            line = {"step": step.number, "document": int(documents[at]), "row": rows[at], "tokens": int(tokens[at])}
            text += json.dumps(line)[:-1]
            for name, value in zip(names, figures[at].tolist(), strict=True):
                text += f', "{name}": {f"{value:.8g}" if math.isfinite(value) else "null"}'
            text += "}\n"
        before = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError:  # a full disk gets none of the lines
            os.truncate(path, before)
            raise

    def _name(self, steps: Steps, numbers: np.ndarray) -> tuple[np.ndarray, Sequence[str | None]]:
        """Return the numbers of documents (or pairs) as `packtrain inspect` counts them, and FILE:LINE of their rows."""
        if steps.rows:
            return steps.before + numbers, [steps.rows[number] for number in numbers]
        pairs = isinstance(steps.data, PairDataset)
        stored = steps.data.documents.rows[2 * numbers] if pairs else steps.data.rows[numbers]
        rows = self._places.of(stored) if self._places else [None] * len(numbers)
        return stored // 2 if pairs else stored, rows


def _trained_in(step: StepDocuments) -> np.ndarray:
    """Return the examples that a step trains on, over all ranks."""
    numbers = step.steps.schedule.documents(step.at)
    return np.array([number for number in numbers.tolist() if step.steps.trains_on(number, step.at)], np.int64)


def _cut(path: Path, step: int) -> None:
    """Cut the lines after `step`, and a line that is not whole."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb+") as file:
        for line in file:
            number = re.match(rb'{"step": (\d+), .*}\n', line)
            if number is None or int(number[1]) > step:
                break
            kept += len(line)
        file.truncate(kept)
