"""`packtrain inspect --ledger RUN`: rows in the order of their losses, with their texts."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packtrain.config.yaml_files import shown
from packtrain.data.sources.chunks import RawRow
from packtrain.data.sources.left_out import read_places, real_name, split_place
from packtrain.data.sources.locate import Source
from packtrain.errors import UserError
from packtrain.inspect.document_losses import Sort, read_ledger
from packtrain.inspect.rendering import DataTerminal
from packtrain.run_folder import RunFolder
from packtrain.system import write_text
from packtrain.wording import counted, visible

_TOP = 20
"""Rows that are shown if nothing says how many."""
_HALF = 160
"""Characters of a row's text that are shown from its beginning, and from its end."""


def show_by_ledger(
    run: str,
    train: Iterable[Source],
    sort: Sort,
    top: int | None,
    above: float | None,
    write: Path | None,
    *,
    as_json: bool,
) -> int:
    """Show rows by the ledger of the folder `run`, and write their places.

    Their texts are in the sources `train`. Returns the exit code. Raises UserError without a ledger, or if the file cannot be written.
    """
    if (ledger := read_ledger(RunFolder(Path(run).expanduser()).ledger)) is None:
        fix = "Name the folder of a run (trainer.output_dir) that trained with trainer.ledger=true."
        raise UserError("there is no ledger.jsonl with a line", where=f"--ledger {run}", fix=fix, code="no-ledger")
    top = _TOP if top is None and above is None else top
    rows = ledger.choose(sort, top=top, above=-math.inf if above is None else above)
    places = [row["row"] for row in rows if split_place(row["row"])]
    if write is not None:
        _write(write, places)
    texts = read_texts(places, train)
    if as_json:
        shown_rows = [{**row, "text": texts.get(row["row"])} for row in rows]
        print(json.dumps({"documents": len(ledger.rows), "rows": shown_rows}, indent=2))
        return 0
    terminal = DataTerminal()
    for row in rows:
        losses = " → ".join(f"{loss:.4g}" for loss in row["losses"])
        margin = f", margin {row['margin']:.4g}" if "margin" in row else ""
        terminal.say(f"{visible(row['row'])} · loss {losses}, {row['excess']:+.4g} over the median{margin}", "bold")
        terminal.say(f"   {visible(texts.get(row['row'], '(not in the data now)'))}", "dim")
    written = f"; their places are in {shown(write)}" if write else ""
    terminal.say(f"{counted(len(rows), 'rows')} of {counted(len(ledger.rows), 'documents')}, {sort} first{written}")
    return 0


def _write(file: Path, places: Iterable[str]) -> None:
    """Write a list for data.leave_out. Raises UserError if the file is another one, or cannot be written."""
    fix = "Name another file."
    try:
        real = Path(os.path.realpath(file))  # so that a link to it stays a link
        if real.exists() and not real.is_file():
            raise UserError("this is no regular file", where=f"--write {file}", fix=fix, code="not-a-file")
        if real.exists():
            read_places(str(file))
        write_text(real, "".join(f"{place}\n" for place in places))
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise UserError(what, where=f"--write {file}", fix=fix, code="file-not-writable") from error


def read_texts(places: Iterable[str], sources: Iterable[Source]) -> dict[str, str]:
    """Read the texts of the rows at `places`, each shortened to a line."""
    wanted: dict[str, dict[int, str]] = defaultdict(dict)
    for place in places:
        if parts := split_place(place):
            wanted[real_name(parts[0])][parts[1]] = place
    texts = dict[str, str]()
    for name, read in (file for source in sources for file in source.files):
        own = dict(wanted.get(real_name(name), {}))
        for chunk in read(0) if own else ():
            if own.keys() & {*chunk.numbers}:
                rows = dict(zip(chunk.numbers, chunk.rows(), strict=True))
                texts |= {own.pop(number): _shorten(rows[number][1]) for number in own.keys() & rows.keys()}
            if not own:
                break
    return texts


def _shorten(row: RawRow) -> str:
    text = " ".join(" · ".join(_texts_in(row)).split())
    return text if len(text) <= 2 * _HALF + 3 else f"{text[:_HALF]} … {text[-_HALF:]}"


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(part)
