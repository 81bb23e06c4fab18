"""What became of every row: each row is either kept or dropped for a named reason.

The fate of each row is stored (48 bytes a row), so that a subset of the rows, such as the held-out one, can be counted too.
`rows == kept + sum(dropped.values())` holds for every report; the tests rely on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Fate(NamedTuple):
    """What became of one row: it gave `documents` documents, or was `dropped` for a reason; see RowCounts for the rest.

    `content` is a hash of the row itself (formats/columns.py), independent of template, tokenizer and data.max_length.
    `packtrain inspect` shows the faults `marker` (the text has control tokens of the template), `garbled` (text in a wrong
    encoding) and `unsaid` (the template leaves the system prompt out). `margin` is by how much the row says that the chosen
    answer is better (reward only). `desirable` says so of the row's first document (kto only), of a pair the chosen answer;
    the second one is not.
    """

    content: int
    cut_tokens: int = 0
    documents: int = 0
    dropped_chunks: int = 0
    dropped: str = ""
    truncated: bool = False
    split: bool = False
    apart: bool = False
    retold: bool = False
    unrolled: bool = False
    marker: bool = False
    garbled: bool = False
    unsaid: bool = False
    margin: float = 0.0
    desirable: bool = False


FATES = np.dtype("u8,i8,i4,i4,i2,?,?,?,?,?,?,?,?,f4,?", align=True)
FATES.names = Fate._fields
"""A Fate on disk; its `dropped` is the number of the reason, 0 where the row is not dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """What one pass over the rows counted. `kept` rows gave at least one document; `cut_tokens` were lost to data.max_length.

    `dropped` counts rows by reason; `dropped_chunks` counts parts of split documents that hold no trained token.
    `apart` counts kept rows with a token across the border between what is asked and an answer (see tokens/encode.py).
    `retold` counts kept rows that TRL's training version of the chat template renders, since the model's own gives no exact
    loss mask for them (Qwen3 strips the thoughts of earlier turns, GLM-4 ends no turn). `unrolled` counts kept rows that became
    a document for each question, as no template gives an exact loss mask for all of them (Mistral's with tools).
    """

    rows: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    split: int = 0
    dropped_chunks: int = 0
    cut_tokens: int = 0
    apart: int = 0
    retold: int = 0
    unrolled: int = 0


def count(fates: np.ndarray, reasons: Sequence[str]) -> RowCounts:
    """The counts of some rows; `fates` FATES[rows], whose `dropped` are numbers of `reasons`."""
    times = np.bincount(fates["dropped"], minlength=1).tolist()
    dropped = {reasons[number]: rows for number, rows in enumerate(times) if number and rows}
    sums = {
        name: int(fates[name].sum(dtype=np.int64)) for name in ("truncated", "split", "dropped_chunks", "cut_tokens")
    }
    kept = fates[fates["dropped"] == 0]
    sums |= {name: int(kept[name].sum()) for name in ("apart", "retold", "unrolled")}
    return RowCounts(rows=len(fates), kept=times[0], dropped=dropped, **sums)


def add(counts: Iterable[RowCounts]) -> RowCounts:
    """The sum of several counts, reasons merged."""
    total: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for figures in map(asdict, counts):
        dropped.update(figures.pop("dropped"))
        total.update(figures)
    return RowCounts(dropped=dict(dropped), **total)


@dataclass(frozen=True, slots=True)
class PairFigures:
    """What preference pairs are made of.

    `prompt_share` is the prompts' share of all tokens, each prompt counted in both documents of its pair; computing prompts
    once saves half of it. That is possible for `shareable` of the `pairs`: those with a prompt of at least two tokens.
    """

    pairs: int
    prompt_share: float
    shareable: int


@dataclass(frozen=True, slots=True)
class LabelFigures:
    """How many documents of an epoch are answers to give, and how many are not."""

    desirable: int
    undesirable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport(RowCounts):
    """What a data set is made of.

    The inherited counts cover all rows of its sources or, where data.eval is a fraction of data.train, the rows on this side
    of the split. `documents`, `tokens` and `trained_tokens` describe one epoch, with weights; `held_out` documents are on the
    other side. `seconds` is the time of tokenising (0 if all was cached). `pairs` describes preference pairs,
    `labels` answers that are desirable or not, `remarks` say what was decided about a source.
    """

    documents: int
    tokens: int
    trained_tokens: int
    held_out: int
    format: str
    sources: tuple[str, ...]
    seconds: float
    pairs: PairFigures | None = None
    labels: LabelFigures | None = None
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain containers, ready for json.dump."""
        return {**asdict(self), "sources": list(self.sources), "remarks": list(self.remarks)}
