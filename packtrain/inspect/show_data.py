"""The verb `packtrain inspect`: opens the data, and shows it on the terminal, as JSON or as a page."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.config.schema import RunConfig
from packtrain.config.yaml_files import shown
from packtrain.errors import UserError
from packtrain.inspect.laid_out import examples_at, first_examples, step_laid_out
from packtrain.inspect.summary import Inspection, inspection
from packtrain.inspect.terminal import DataTerminal

_FIRST = 2
"""Documents that are shown above the summary."""
_PAGE_HEAD = b"<!doctype html>"


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

    On the terminal, examples that are asked for come alone, and at once: only else are all tokens looked at.
    """
    if wanted.source is not None and (wanted.step is not None or wanted.rows is not None):
        what = "--source shows one row, so it does not go with --rows or --step"
        raise UserError(what, where="--source", fix="Leave one of them out.")
    if wanted.html is not None and not wanted.html.parent.is_dir():
        raise UserError("there is no such folder", where=f"--html {shown(wanted.html)}", fix="Make it first.")
    if wanted.html is not None and _is_something_else(wanted.html):
        what = "this file is no page, and is left alone"
        raise UserError(what, where=f"--html {shown(wanted.html)}", fix="Name another file.")
    found = inspection(config, processes, progress=os.isatty(2))
    unit, terminal = found.corpus.unit, DataTerminal()
    step = None if wanted.step is None else step_laid_out(found, wanted.step, wanted.rows)
    examples = _examples(found, wanted, step)
    if wanted.html is None and not wanted.as_json and examples is not None:
        terminal.legend()
        if step is not None:
            terminal.step(step, unit)
        else:
            terminal.examples(examples, unit)
        return 0
    summary = found.summary()
    if examples is not None:
        summary["shown"] = examples
    if step is not None:
        summary["step"] = step
    if wanted.html is not None:
        _write(wanted.html, summary, title)
    if wanted.as_json:
        print(json.dumps(summary, indent=2))
    elif wanted.html is None:
        terminal.legend()
        terminal.examples(summary["shown"][:_FIRST], unit)
        terminal.say()
        terminal.summary(summary)
    else:
        terminal.say(f"written: {shown(wanted.html)}")
    return 0


def _examples(found: Inspection, wanted: Wanted, step: dict[str, Any] | None) -> list[dict[str, Any]] | None:
    """The examples that are asked for; None for a choice of packtrain's own."""
    if step is not None:
        return [one for rank in step["ranks"] for batch in rank["micro_batches"] for one in batch["shown"]]
    if wanted.source is not None:
        return examples_at(found, wanted.source)
    return None if wanted.rows is None else first_examples(found, wanted.rows)


def _is_something_else(file: Path) -> bool:
    """Whether the file holds anything but a page: a config or data whose name was given by mistake."""
    if not os.path.isfile(file):  # False for a name that cannot be, too
        return False
    try:
        with file.open("rb") as old:
            head = old.read(len(_PAGE_HEAD))
    except OSError:
        return False
    return head not in (b"", _PAGE_HEAD)


def _write(file: Path, summary: dict[str, Any], title: str) -> None:
    from packtrain.inspect.html import page

    try:
        file.write_text(page(summary, title), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror or error}", where=f"--html {shown(file)}") from error
