"""What became of every row: a row is kept or dropped under a named reason, and nothing is lost between the two.

`rows == kept + sum(dropped.values())` holds for every report; the tests lean on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one pass over rows. `kept` rows gave at least one document; `cut_tokens` were lost to data.max_length.

    `dropped` counts rows by reason; `dropped_chunks` counts parts of split documents that hold no trained token.
    `pairs_apart` are prompt/completion pairs whose parts had to be tokenised one by one (see tokenise.py).
    """

    rows: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    split: int = 0
    dropped_chunks: int = 0
    cut_tokens: int = 0
    pairs_apart: int = 0


def add(counts: Iterable[Counts]) -> Counts:
    """The sum of several counts, reasons merged."""
    total: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for one in counts:
        figures = asdict(one)
        dropped.update(figures.pop("dropped"))
        total.update(figures)
    return Counts(dropped=dict(dropped), **total)


@dataclass(frozen=True, slots=True)
class DataReport:
    """What a data set is made of.

    `rows`, `kept`, `dropped`, `truncated`, `split`, `dropped_chunks`, `cut_tokens` and `pairs_apart` describe the
    reading of the sources (see Counts). `documents`, `tokens` and `trained_tokens` describe one epoch, after weights
    and after documents were held out; `held_out` documents went to the eval set made of a fraction of data.train.
    `seconds` is the time that tokenising took (0 when it all came from the cache).
    """

    rows: int
    kept: int
    dropped: dict[str, int]
    truncated: int
    split: int
    dropped_chunks: int
    cut_tokens: int
    pairs_apart: int
    documents: int
    tokens: int
    trained_tokens: int
    held_out: int
    format: str
    sources: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain containers, ready for json.dump."""
        return {**asdict(self), "sources": list(self.sources)}
