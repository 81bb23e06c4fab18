"""The verb `packtrain inspect`: opens the data, and shows it on the terminal, as JSON or as a page.

The examples that are shown are the first ones, those of a row of the source, or a step's as training lays them out.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.config.schema import RunConfig
from packtrain.config.yaml_files import shown
from packtrain.data.sources.chunks import RawRow
from packtrain.errors import UserError
from packtrain.inspect.corpus import Corpus, read_rows
from packtrain.inspect.mode_costs import schedule_of
from packtrain.inspect.summary import Inspection, inspection
from packtrain.inspect.terminal import DataTerminal
from packtrain.wording import counted, shortened, whole

_FIRST = 2
"""Documents that are shown above the summary."""


@dataclass(frozen=True)
class Wanted:
    """The options of the verb: which examples (the first, those of a step, those of a row), and in what form."""

    rows: int | None = None
    step: int | None = None
    source: str | None = None
    html: Path | None = None
    as_json: bool = False


def show_data(config: RunConfig, wanted: Wanted, processes: int, title: str) -> int:
    """Does what is wanted with the data of `config`, laid out for `processes`; returns the exit code.

    On the terminal, examples that are asked for come alone, and at once: only else are all tokens read.
    """
    if wanted.source is not None and (wanted.step is not None or wanted.rows is not None):
        what = "--source shows one row, so it does not go with --rows or --step"
        raise UserError(what, where="--source", fix="Leave one of them out.")
    if wanted.html is not None:
        _check_page(wanted.html)
    opened = inspection(config, processes, progress=os.isatty(2))
    terminal, unit = DataTerminal(), opened.corpus.unit
    step = examples = None
    if wanted.step is not None:
        step = lay_out_step(opened, wanted.step, wanted.rows)
        batches = [batch for rank in step["ranks"] for batch in rank["micro_batches"]]
        examples = [example for batch in batches for example in batch["shown"]]
    elif wanted.source is not None:
        examples = show_row(opened, wanted.source)
    elif wanted.rows is not None:
        examples = show_first(opened, wanted.rows)
    if wanted.html is None and not wanted.as_json and examples is not None:
        terminal.legend()
        terminal.examples(examples, unit) if step is None else terminal.step(step, unit)
        return 0
    summary = opened.summary()
    summary |= {} if examples is None else {"shown": examples}
    summary |= {} if step is None else {"step": step}
    if wanted.html is not None:
        from packtrain.inspect.html import page

        try:
            wanted.html.write_text(page(summary, title), encoding="utf-8")
        except OSError as error:
            what = f"cannot be written: {error.strerror or error}"
            raise UserError(what, where=f"--html {shown(wanted.html)}") from error
    if wanted.as_json:
        print(json.dumps(summary, indent=2))
    elif wanted.html is not None:
        terminal.say(f"written: {shown(wanted.html)}")
    else:
        terminal.legend()
        terminal.examples(summary["shown"][:_FIRST], unit)
        terminal.say()
        terminal.summary(summary)
    return 0


def _check_page(file: Path) -> None:
    """Raises UserError for a page that has no folder, and a name that may be that of a config or data."""
    where = f"--html {shown(file)}"
    if not file.parent.is_dir():
        raise UserError("there is no such folder", where=where, fix="Make it first.")
    if file.suffix not in (".html", ".htm") and os.path.lexists(file):
        raise UserError(
            "this file is no page, and is not overwritten", where=where, fix="Give a name that ends in .html."
        )


def show_first(inspection: Inspection, number: int) -> list[dict[str, Any]]:
    """The first `number` examples in the order of the data. Raises UserError if there are not as many."""
    corpus = inspection.corpus
    documents = np.flatnonzero(corpus.in_train)[:: corpus.together]
    if not 0 <= number <= len(documents):
        what = f"{number:,} of {counted(len(documents), corpus.unit)}"
        raise UserError(what, where="--rows", fix=f"Give a number from 0 to {len(documents)}.")
    chosen = documents[:number].tolist()
    return inspection.examples(chosen, read_rows(corpus, set(corpus.row_of[chosen].tolist())))


def show_row(inspection: Inspection, place: str) -> list[dict[str, Any]]:
    """The examples of the row at `place` (FILE:LINE), or what became of it. Raises UserError if there is no such row."""
    corpus = inspection.corpus
    store, number, row = _find_row(corpus, place)
    own = number + int(corpus.first_rows[store])
    documents = np.flatnonzero(corpus.row_of == own)[:: corpus.together].tolist()
    if documents:
        return inspection.examples(documents, {own: (place, row)})
    reason = corpus.stores[store].reasons[int(corpus.fates["dropped"][own])]
    return [inspection.view.show_dropped(store, place, row, reason)]


def _find_row(corpus: Corpus, place: str) -> tuple[int, int, RawRow]:
    """The store, the number in it and the content of the row at `place` (FILE:LINE). Raises UserError if there is none."""
    file, colon, line = place.rpartition(":")
    if not colon or whole(line) is None or not file:
        what = f"{shortened(place)} is no place of a row"
        raise UserError(what, where="--source", fix="Write FILE:LINE, as in chats.jsonl:12 (of a table FILE:ROW).")
    origins = dict[str, bool]()  # whether each is the file that is named: by its path, its end, or its bare name
    for store in range(len(corpus.stores)):
        first = 0
        for chunk in corpus.source(store).chunks():
            name = chunk.origin
            if name not in origins:
                same = os.path.realpath(name) == os.path.realpath(os.path.expanduser(file))
                origins[name] = same or name == file or name.endswith(f"/{file}")
            for at, (where, row) in enumerate(chunk.rows() if origins[name] else ()):
                if where in (f"{name}:{line}", f"{name}, row {line}"):
                    return store, first + at, row
            first += len(chunk)
    if not any(origins.values()):
        fix = f"Files of the data: {', '.join([*origins][:4])}{' …' if len(origins) > 4 else ''}."
        raise UserError(f"the data has no file {file!r}", where="--source", fix=fix)
    fix = "Lines count from 1, blank ones too; of a .json list and a table, rows."
    raise UserError(f"{file} has no row on line {line}", where="--source", fix=fix)


def lay_out_step(inspection: Inspection, step: int, most: int | None = None) -> dict[str, Any]:
    """What each rank does in `step` (from 1): its micro-batches, and the examples in each with their places in the row.

    `most` limits the examples of a micro-batch. Raises UserError if the run has no such step.
    """
    config, corpus = inspection.config, inspection.corpus
    packing = config.packing
    schedule = schedule_of(corpus, packing, config.batch, config.trainer, config.data, inspection.attention_cost or 0.0)
    if not 1 <= step <= schedule.total_steps:
        what = f"step {step}, but the run has {counted(schedule.total_steps, 'steps')}"
        raise UserError(what, where="--step", fix=f"Give a number from 1 to {schedule.total_steps}.")
    layout = schedule.layout(step - 1, inspection.processes)
    firsts = corpus.train.rows.reshape(-1, corpus.together)[:, 0]  # the first document of each example
    numbers = {int(number) for parts in layout for part in parts for number in part[:most]}
    rows = read_rows(corpus, {int(corpus.row_of[firsts[number]]) for number in numbers})

    def show(part: np.ndarray) -> dict[str, Any]:
        """One forward pass: the examples with the first token of each of their parts in the row (0 in each row of padding)."""
        padded, slots = packing.mode == "padding", schedule.lengths[part]
        examples = inspection.examples(firsts[part[:most]].tolist(), rows)
        at = 0
        for piece in (piece for example in examples for piece in example["parts"]):
            piece["start"] = 0 if padded else at
            at += piece["tokens"]
        return {
            "examples": len(part),
            "slots": len(part) * int(slots.max(initial=0)) if padded else int(slots.sum(dtype=np.int64)),
            "shown": examples,
        }

    return {
        "step": step,
        "steps": schedule.total_steps,
        "epoch": int(schedule.epoch_of(step - 1)) + 1,
        "mode": packing.mode,
        "examples": sum(len(part) for parts in layout for part in parts),
        "tokens_per_row": None if packing.mode != "packed" else int(schedule.limits.tokens),
        "guessed": inspection.attention_cost is None and inspection.processes > 1,
        "ranks": [{"rank": rank, "micro_batches": [show(part) for part in parts]} for rank, parts in enumerate(layout)],
    }
