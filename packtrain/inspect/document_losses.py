"""Reader of ledger.jsonl: the losses of each document in a run.

All losses fall during a run, so losses of different steps do not compare. `excess` is a document's loss above the median of the documents that
were trained at the same time, as a mean over its passes. It finds wrong rows: a model learns them by heart, but later than the others.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from packtrain.data.sources.left_out import split_place
from packtrain.errors import Json

_AT_ONCE = 16
"""Smaller steps than this are compared together."""
Sort = Literal["hardest", "easiest", "forgotten", "alike"]
_KEYS = {"hardest": ("excess", -1), "easiest": ("excess", 1), "forgotten": ("forgotten", -1), "alike": ("change", 1)}
"""The figure to sort by, and whether the largest (-1) or the smallest ones come first."""


@dataclass(frozen=True, slots=True)
class DocumentLosses:
    """Documents of a run with their figures.

    `rows` are FILE:LINE, `losses` the losses of all passes. Each of the `figures` is float64 [documents], NaN for a document without it.
    `first` and `last` are losses. `forgotten` is how much the last loss is above the best one, if the best one was nearer to the last losses of
    all documents than to their first ones. `change` is 1 - best / worst loss, after several passes. `margin` is a pair's last one.
    """

    rows: Sequence[str]
    losses: Sequence[np.ndarray]
    figures: Mapping[str, np.ndarray]

    def choose(self, sort: Sort, *, top: int | None = None, above: float = -math.inf) -> list[Json]:
        """Return the first `top` rows by `sort`, each by its first document. `above`: only if the last loss is larger."""
        name, sign = _KEYS[sort]
        order, first_of = np.argsort(sign * self.figures[name], kind="stable"), dict[str, int]()
        for at in map(int, order[(np.isfinite(self.figures[name]) & (self.figures["last"] > above))[order]]):
            first_of.setdefault(self.rows[at], at)
        return [*map(self._entry, islice(first_of.values(), top))]

    def _entry(self, at: int) -> Json:
        known = {name: round(float(values[at]), 6) for name, values in self.figures.items() if np.isfinite(values[at])}
        losses = self.losses[at].round(6).tolist()
        return {"row": self.rows[at], "losses": losses, **known, "tokens": int(known["tokens"])}

    def by_source(self) -> list[Json]:
        """Return documents and mean losses of each file or data set, by name."""
        places = map(split_place, self.rows)
        names, source = np.unique([place[0] if place else "" for place in places], return_inverse=True)
        count = np.bincount(source)
        means = {name: np.bincount(source, self.figures[name]) / count for name in ("first", "last", "excess")}
        columns = {"source": names, "documents": count, **means}
        return [{name: values[at].item() for name, values in columns.items()} for at in range(len(names))]


def read_ledger(file: Path) -> DocumentLosses | None:
    """Read a run's ledger, even if it is torn. None without a whole line, or without the file."""
    numbers, names = array("d"), dict[str, int]()
    if not file.is_file():
        return None
    with file.open("rb") as lines:
        for line in lines:
            with suppress(ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
                entry = json.loads(line)
                own = [float(entry[name]) for name in ("step", "document", "tokens", "loss")]  # null: it was no number
                own.append(float(entry.get("margin", math.nan)))
                row = str(entry["row"] or f"document {entry['document']}")
                numbers.extend([*own, names.setdefault(row, len(names))])
    table = np.frombuffer(numbers).reshape(-1, 6)
    table = table[np.isfinite(table[:, :4]).all(axis=1)]
    return _summarise(table, [*names]) if len(table) else None


def _summarise(table: np.ndarray, names: Sequence[str]) -> DocumentLosses:
    """Make the figures of all documents. `table` is float64 [lines, 6]: step, document, tokens, loss, margin, number of the row's name."""
    ordered = table[np.lexsort((table[:, 1], table[:, 0]))]
    last_written = np.append((np.diff(ordered[:, :2], axis=0) != 0).any(axis=1), True)
    step, document, tokens, loss, margin, row = ordered[last_written].T
    together = np.searchsorted(step, step) // _AT_ONCE
    _, first, count = np.unique(together, return_index=True, return_counts=True)
    sorted_losses = loss[np.lexsort((loss, together))]
    medians = (sorted_losses[first + (count - 1) // 2] + sorted_losses[first + count // 2]) / 2
    excess = loss - np.repeat(medians, count)
    if (np.diff(document) > 0).all():  # a stream numbers the documents of each pass anew
        document = row * (tokens.max() + 1) + tokens
    order = np.argsort(document, kind="stable")
    starts = np.flatnonzero(np.diff(document[order], prepend=np.nan) != 0)
    passes, ends, losses = np.diff(starts, append=len(order)), np.append(starts[1:], len(order)) - 1, loss[order]
    last, best, worst = losses[ends], np.minimum.reduceat(losses, starts), np.maximum.reduceat(losses, starts)
    learned = (np.median(losses[starts]) + np.median(last)) / 2
    figures = {
        "tokens": tokens[order][ends],
        "first": losses[starts],
        "last": last,
        "excess": np.add.reduceat(excess[order], starts) / passes,
        "forgotten": np.where((last > best) & (best < learned), last - best, np.nan),
        "change": np.where((passes > 1) & (worst > 0), 1 - best / np.where(worst > 0, worst, 1), np.nan),
        "margin": margin[order][ends],
    }
    rows = [names[int(number)] for number in row[order][ends]]
    return DocumentLosses(rows, np.split(losses, starts[1:]), figures)
