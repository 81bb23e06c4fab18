"""ledger.jsonl: the loss of each document, each time that it is trained. No step waits for it.

A step leaves the figures of its documents on the device. At a logged step one reduction sums the figures of all ranks, and a thread of rank 0
writes a line for each document, ordered by step and document. The lines are the same on any number of ranks, in any packing mode.
A checkpoint is complete only once the lines up to its step are written. A run that resumes from it cuts later lines, and writes them again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import torch

from packtrain.inspect.corpus import RowPlaces
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import to_device
from packtrain.train.loader import StepDocuments
from packtrain.train.objectives.loss import Loss
from packtrain.train.run_state import Listener, RunState


class Ledger(Listener):
    """Writer of ledger.jsonl. All ranks make the same calls. Only rank 0 has a `path`, and writes.

    `read_places` reads FILE:LINE of the rows of data.train; of a stream the steps have them.
    """

    def __init__(
        self, path: Path | None, read_places: Callable[[], RowPlaces | None], say: Callable[[str], None]
    ) -> None:
        self._path, self._read_places, self._say = path, read_places, say
        self._places: RowPlaces | None = None
        self._thread, self._bytes = ThreadPoolExecutor(1, "ledger"), 0

    def train_begin(self, state: RunState) -> None:
        """Keep the lines up to the step that the run starts from."""
        if self._path is not None:
            self._do_later(self._cut, self._path, state.step)
            self._do_later(self._read)

    rolled_back = train_begin

    def gather(self, loss: Loss, steps: Sequence[StepDocuments]) -> None:
        """Gather the figures of these steps from all ranks, and write them in the background."""
        firsts = np.cumsum([0, *(len(step.numbers) for step in steps)])
        sums = torch.zeros(len(loss.document_figures), int(firsts[-1]), dtype=torch.float64, device=loss.device)
        for step, first in zip(steps, firsts, strict=False):
            for numbers, figures in step.found:
                if figures:
                    places = torch.from_numpy(first + np.searchsorted(step.numbers, numbers))
                    sums.index_add_(1, to_device(places, loss.device), torch.stack(figures).double())
        with waiting("the losses of all ranks' documents"):
            total = cast(torch.Tensor, loss.accelerator.reduce(sums, reduction="sum")).cpu().numpy()
        if self._path is not None:
            for step, own in zip(steps, np.split(total, firsts[1:-1], axis=1), strict=True):
                place = np.searchsorted(step.numbers, step.numbers)  # a mixture may repeat a document in a step
                values = own[:, place] / np.bincount(place)[place]
                self._do_later(self._write, self._path, loss.document_figures, step, values)

    def wait(self) -> None:
        """Wait until all lines are written."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Write all lines, and end the thread."""
        self._thread.shutdown()

    def _do_later(self, job: Callable[..., None], *given: object) -> None:
        """Do a job in the thread. If it fails, training goes on; only the first failure is told."""

        def attempt() -> None:
            try:
                job(*given)
            except Exception as error:
                say, self._say = self._say, lambda _: None
                say(f"ledger.jsonl lacks lines, or the places of rows: {error}")

        self._thread.submit(attempt)

    def _write(self, path: Path, figures: Sequence[str], step: StepDocuments, values: np.ndarray) -> None:
        """Write the lines of a step; `values` [figures, documents]."""
        documents, tokens, lines = step.documents.tolist(), step.tokens.tolist(), list[str]()
        rows = step.rows or (self._places.of(step.documents) if self._places else [None] * len(documents))
        for at in np.argsort(step.documents, kind="stable").tolist():
            line = {"step": step.step, "document": documents[at], "row": rows[at], "tokens": tokens[at]}
            for name, value in zip(figures, values[:, at].tolist(), strict=True):
                value = value / max(tokens[at], 1) if name.endswith("_sum") else value
                line[name.removesuffix("_sum")] = float(f"{value:.8g}") if math.isfinite(value) else None
            lines.append(json.dumps(line) + "\n")
        with path.open("ab") as file:
            file.truncate(self._bytes)  # a full disk may have cut the lines before
            file.write(text := "".join(lines).encode())
        self._bytes += len(text)

    def _read(self) -> None:
        self._places = self._places or self._read_places()

    def _cut(self, path: Path, step: int) -> None:
        """Cut the lines after `step`, and a line that is not whole."""
        self._bytes = 0
        with path.open("a+b") as file:
            file.seek(0)
            for line in file:
                number = re.match(rb'{"step": (\d+), .*}\n', line)
                if number is None or int(number[1]) > step:
                    break
                self._bytes += len(line)
            file.truncate(self._bytes)
