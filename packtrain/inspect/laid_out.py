"""The examples that are looked at: the first ones, those of a row of the source, or a step's as training lays them out."""

from __future__ import annotations

from typing import Any

import numpy as np

from packtrain.data.sources.chunks import RawRow
from packtrain.errors import UserError
from packtrain.inspect.mode_costs import schedule_of
from packtrain.inspect.places import row_at, rows_of
from packtrain.inspect.summary import Inspection
from packtrain.wording import counted


def first_examples(found: Inspection, number: int) -> list[dict[str, Any]]:
    """The first `number` examples in the order of the data. Raises UserError if there are not as many."""
    corpus = found.corpus
    documents = np.flatnonzero(corpus.in_train)[:: corpus.together]
    if not 0 <= number <= len(documents):
        what = f"{number:,} of {counted(len(documents), corpus.unit)}"
        raise UserError(what, where="--rows", fix=f"Give a number from 0 to {len(documents)}.")
    return _shown(found, documents[:number].tolist())


def examples_at(found: Inspection, place: str) -> list[dict[str, Any]]:
    """The examples of the row at `place` (FILE:LINE), or what became of it. Raises UserError if there is no such row."""
    corpus = found.corpus
    store, number, row = row_at(corpus, place)
    own = number + int(corpus.first_rows[store])
    documents = np.flatnonzero(corpus.row_of == own)[:: corpus.together].tolist()
    if documents:
        return _shown(found, documents, {own: (place, row)})
    reason = corpus.stores[store].reasons[int(corpus.fates["dropped"][own])]
    return [found.shower.row(store, place, row, reason)]


def step_laid_out(found: Inspection, step: int, most: int | None = None) -> dict[str, Any]:
    """What each rank does in `step` (from 1): its micro-batches, and the examples in each with their places in the row.

    `most` limits the examples of a micro-batch. Raises UserError if the run has no such step.
    """
    config, corpus = found.config, found.corpus
    packing = config.packing
    cost = found.attention_cost or 0.0
    schedule = schedule_of(corpus, packing, config.batch, config.trainer, config.data, cost)
    if not 1 <= step <= schedule.total_steps:
        what = f"step {step}, but the run has {counted(schedule.total_steps, 'steps')}"
        raise UserError(what, where="--step", fix=f"Give a number from 1 to {schedule.total_steps}.")
    layout = schedule.layout(step - 1, found.processes)
    numbers = {int(one) for parts in layout for part in parts for one in part[:most]}
    rows = corpus.train.rows.reshape(-1, corpus.together)[:, 0]
    read = rows_of(corpus, {int(corpus.row_of[rows[one]]) for one in numbers})
    ranks = []
    for rank, parts in enumerate(layout):
        micro_batches = [_micro_batch(found, part, schedule.lengths, read, most) for part in parts]
        ranks.append({"rank": rank, "micro_batches": micro_batches})
    return {
        "step": step,
        "steps": schedule.total_steps,
        "epoch": int(schedule.epoch_of(step - 1)) + 1,
        "mode": packing.mode,
        "examples": sum(len(part) for parts in layout for part in parts),
        "tokens_per_row": None if packing.mode != "packed" else int(schedule.limits.tokens),
        "guessed": found.attention_cost is None and found.processes > 1,
        "ranks": ranks,
    }


def _micro_batch(
    found: Inspection, part: np.ndarray, slots: np.ndarray, read: dict[int, tuple[str, RawRow]], most: int | None
) -> dict[str, Any]:
    """One forward pass: the examples with the first token of each of their parts in the row (0 in each row of padding)."""
    corpus, padded = found.corpus, found.config.packing.mode == "padding"
    rows = corpus.train.rows.reshape(-1, corpus.together)[:, 0]
    examples = found.examples([int(rows[one]) for one in part[:most]], read)
    at = 0
    for example in examples:
        for piece in example["parts"]:
            piece["start"] = 0 if padded else at
            at += piece["tokens"]
    longest = int(slots[part].max(initial=0))
    return {
        "examples": len(part),
        "slots": len(part) * longest if padded else int(slots[part].sum(dtype=np.int64)),
        "widths": slots[part].tolist(),
        "shown": examples,
    }


def _shown(
    found: Inspection, documents: list[int], read: dict[int, tuple[str, RawRow]] | None = None
) -> list[dict[str, Any]]:
    read = read or rows_of(found.corpus, {int(found.corpus.row_of[one]) for one in documents})
    return found.examples(documents, read)
