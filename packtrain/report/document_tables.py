"""Section of a report on documents: hard, easy, forgotten ones, and the rows of spikes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np

from packtrain.config.schema import BUILT_IN, DataSource, SplitText
from packtrain.data.sources.left_out import split_place
from packtrain.data.sources.locate import Source, locate
from packtrain.errors import Json, PacktrainError
from packtrain.inspect.by_ledger import read_texts
from packtrain.inspect.document_losses import read_ledger
from packtrain.run_folder import RunFolder, text_of
from packtrain.wording import whole

_ROWS = 10
_LARGEST_LEDGER, _LARGEST_FILE = 1 << 26, 1 << 30
"""Bytes that are read in some seconds: every run makes a report at its end."""


def tabulate_documents(folder: RunFolder, settings: Mapping[str, tuple[str, str]]) -> Json | None:
    """Return `tables` of rows with losses and texts, and the `sources` with mean losses.

    None if there are none. `settings` are the ones of RunRecord. Rows of files that are still there have a text, rows of the hub have none.
    """
    is_small = folder.ledger.is_file() and folder.ledger.stat().st_size <= _LARGEST_LEDGER
    ledger, tables = read_ledger(folder.ledger) if is_small else None, list[Json]()
    if ledger is not None:
        middle = float(np.median(ledger.figures["last"]))
        tables = [
            {"title": "Hardest", "rows": ledger.choose("hardest", top=_ROWS)},
            {"title": "Never learned", "rows": ledger.choose("alike", top=_ROWS, above=middle)},
            {"title": "Most forgotten", "rows": ledger.choose("forgotten", top=_ROWS)},
            {"title": "Easiest", "rows": ledger.choose("easiest", top=_ROWS)},
        ]
    tables = [table for table in [*tables, *_read_spikes(folder)] if table["rows"]]
    places, texts = {row["row"] for table in tables for row in table["rows"]}, dict[str, str]()
    for file in {found[0] for found in map(split_place, places) if found}:
        with suppress(PacktrainError, OSError, LookupError):  # it is another file now, or of an objective that is gone
            if file in BUILT_IN or os.path.getsize(file) <= _LARGEST_FILE:
                texts |= read_texts(places, [_open(file, settings)])
    for row in (row for table in tables for row in table["rows"]):
        row["text"] = texts.get(row["row"], "")
    return {"tables": tables, "sources": ledger.by_source() if ledger else []} if tables else None


def _open(file: str, settings: Mapping[str, tuple[str, str]]) -> Source:
    seed, kind, split = (settings.get(key, ("",))[0] for key in ("trainer.seed", "objective.kind", "data.split_text"))
    splits: dict[str, SplitText] = {"line": "line", "paragraph": "paragraph"}
    return locate(DataSource(path=file), "train", whole(seed) or 0, kind, splits.get(split, "document"))


def _read_spikes(folder: RunFolder) -> Iterator[Json]:
    """Yield a table for each of the first spikes, the largest losses first."""
    for line in text_of(folder.spikes).splitlines()[:_ROWS]:
        with suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
            spike = json.loads(line)
            found = ((one["place"], "nan" if one["loss"] is None else one["loss"]) for one in spike["documents"])
            rows = [{"row": str(place), "losses": [float(loss)]} for place, loss in found]
            rows.sort(key=lambda row: -row["losses"][0] if math.isfinite(row["losses"][0]) else -math.inf)
            yield {"title": f"Spike at step {spike['step']}", "why": str(spike["why"]), "rows": rows[:_ROWS]}
