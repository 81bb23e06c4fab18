"""The verb `packtrain inspect`: shows the data on the terminal, as JSON or as a page."""

from __future__ import annotations

import json
import os
from pathlib import Path

from packtrain.config.schema import RunConfig
from packtrain.config.yaml_files import shown
from packtrain.errors import UserError
from packtrain.inspect.corpus import open_corpus
from packtrain.inspect.examples import lay_out_step, show_first, show_row
from packtrain.inspect.rendering import DataTerminal, data_page
from packtrain.inspect.summary import summarise

_FIRST = 2
"""Number of examples that are shown above the summary."""


def show_data(
    config: RunConfig,
    processes: int,
    title: str,
    *,
    rows: int | None,
    step: int | None,
    source: str | None,
    html: Path | None,
    as_json: bool,
) -> int:
    """Show the data of `config`, laid out for `processes`, by the options of the verb.

    Returns the exit code. Examples that are asked for are shown on the terminal at once, without the summary. Only the summary reads all
    tokens."""
    if source is not None and (step is not None or rows is not None):
        raise UserError("it shows one row, so it does not go with --rows or --step", where="--source")
    if html is not None:
        _check_page(html)
    corpus = open_corpus(config, progress=os.isatty(2))
    terminal, unit = DataTerminal(), corpus.spec.examples
    layout = examples = None
    if step is not None:
        layout = lay_out_step(corpus, processes, step, rows)
        batches = [batch for rank in layout["ranks"] for batch in rank["micro_batches"]]
        examples = [example for batch in batches for example in batch["shown"]]
    elif source is not None:
        examples = show_row(corpus, source)
    elif rows is not None:
        examples = show_first(corpus, rows)
    if html is None and not as_json and examples is not None:
        terminal.legend()
        terminal.examples(examples, unit) if layout is None else terminal.step(layout, unit)
        return 0
    summary = summarise(corpus, processes)
    summary |= {} if examples is None else {"shown": examples}
    summary |= {} if layout is None else {"step": layout}
    if html is not None:
        html.write_text(data_page(summary, title), encoding="utf-8")
    if as_json:
        print(json.dumps(summary, indent=2))
    elif html is not None:
        terminal.say(f"written: {shown(html)}")
    else:
        terminal.legend()
        terminal.examples(summary["shown"][:_FIRST], unit)
        terminal.say()
        terminal.summary(summary)
    return 0


def _check_page(file: Path) -> None:
    """Raise UserError if the page's folder is missing. Also if its name may belong to a config or data."""
    where = f"--html {shown(file)}"
    if not file.parent.is_dir():
        raise UserError("there is no such folder", where=where, fix="Make it first.")
    if os.path.lexists(file) and (file.suffix not in (".html", ".htm") or file.is_dir()):
        fix = "Give a name that ends in .html."
        raise UserError("this file is not an HTML page, so it is not overwritten", where=where, fix=fix)
