"""The verb `packtrain inspect`: opens the data, and shows it on the terminal, as JSON or as a page."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from packtrain.config.schema import RunConfig
from packtrain.config.yaml_files import shown
from packtrain.errors import UserError
from packtrain.inspect.corpus import open_corpus
from packtrain.inspect.examples import lay_out_step, show_first, show_row
from packtrain.inspect.rendering import DataTerminal, data_page
from packtrain.inspect.summary import summarise

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
    corpus = open_corpus(config, progress=os.isatty(2))
    terminal, unit = DataTerminal(), corpus.traits.unit
    step = examples = None
    if wanted.step is not None:
        step = lay_out_step(corpus, processes, wanted.step, wanted.rows)
        batches = [batch for rank in step["ranks"] for batch in rank["micro_batches"]]
        examples = [example for batch in batches for example in batch["shown"]]
    elif wanted.source is not None:
        examples = show_row(corpus, wanted.source)
    elif wanted.rows is not None:
        examples = show_first(corpus, wanted.rows)
    if wanted.html is None and not wanted.as_json and examples is not None:
        terminal.legend()
        terminal.examples(examples, unit) if step is None else terminal.step(step, unit)
        return 0
    summary = summarise(corpus, processes)
    summary |= {} if examples is None else {"shown": examples}
    summary |= {} if step is None else {"step": step}
    if wanted.html is not None:
        try:
            wanted.html.write_text(data_page(summary, title), encoding="utf-8")
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
        fix = "Give a name that ends in .html."
        raise UserError("this file is no page, and is not overwritten", where=where, fix=fix)
