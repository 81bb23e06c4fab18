"""The verb `packtrain inspect`: opens the data, and shows it on the terminal, as JSON or as HTML."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from packtrain.config.schema import RunConfig
from packtrain.config.yaml_files import shown
from packtrain.errors import UserError
from packtrain.inspect.summary import inspection


@dataclass(frozen=True)
class Wanted:
    """The options of the verb."""

    rows: int | None = None
    step: int | None = None
    source: str | None = None
    html: Path | None = None
    as_json: bool = False


def show_data(config: RunConfig, wanted: Wanted, processes: int, title: str) -> int:
    """Does what is wanted with the data of `config`, laid out for `processes`; returns the exit code."""
    found = inspection(config, processes, progress=os.isatty(2))
    summary = found.summary()
    if wanted.html is not None:
        from packtrain.inspect.html import page

        try:
            wanted.html.write_text(page(summary, title), encoding="utf-8")
        except OSError as error:
            what = f"cannot be written: {error.strerror or error}"
            raise UserError(what, where=f"--html {shown(wanted.html)}") from error
    if wanted.as_json:
        print(json.dumps(summary, indent=2))
    return 0
