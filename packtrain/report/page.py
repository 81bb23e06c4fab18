"""The report as one HTML file that needs no network: texts by jinja2 (escaped), curves by plotly.js, which lies in it compressed."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError
from markupsafe import Markup

from packtrain import __version__
from packtrain.durable import followed, write_text
from packtrain.errors import UserError
from packtrain.inspect.html import DATA_CSS, data_section
from packtrain.report import headline, units
from packtrain.report.comparison import answers, differences
from packtrain.report.figures import PHASES, drawn
from packtrain.report.run_record import RunRecord, harmless

GENERATOR = '<meta name="generator" content="packtrain'
_HEAD_BYTES = 512
_FILTERS = {"number": units.number, "percent": units.percent, "duration": units.duration, "size": units.size}


def page(runs: Sequence[RunRecord]) -> str:
    """The HTML of one run, or of several over each other."""
    curves = drawn(runs)
    script, plotly = (_here("page.js"), _plotly()) if curves["figures"] else ("", "")
    allowed = " ".join(f"'sha256-{_hash(one)}'" for one in (script, plotly) if one)
    environment = Environment(
        loader=PackageLoader("packtrain.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    return environment.get_template("page.html.j2").render(
        version=__version__,
        runs=runs,
        one=runs[0] if len(runs) == 1 else None,
        headline=headline,
        figures=curves["figures"],
        readings=readings(curves),
        groups=_groups(curves),
        phases=PHASES,
        differences=differences(runs) if len(runs) > 1 else [],
        answers=answers(runs),
        allowed=Markup(allowed or "'none'"),
        data=[_data_of(run) for run in runs],
        css=Markup(_here("page.css") + DATA_CSS),
        script=Markup(script),
        plotly=Markup(base64.b64encode(gzip.compress(plotly.encode(), mtime=0)).decode() if plotly else ""),
        curves=_inline(curves),
    )


def readings(curves: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Of each curve in words what a drawing shows: by figure, {"run", "label", "first", "last", "low", "low_at", "high", "high_at"}."""
    found = []
    for figure in curves["figures"]:
        show = {"percent": units.percent, "seconds": units.duration, "gib": _gib}.get(figure["kind"], units.number)
        rows = []
        for curve in figure["curves"]:
            y, steps = curve["y"], curves["xs"][curve["x"]]["step"]
            low, high = y.index(min(y)), y.index(max(y))
            row = {"run": curves["runs"][curve["run"]], "label": curve["label"], "number": curve["run"]}
            row |= {"first": show(y[0]), "last": show(y[-1]), "low": show(y[low]), "high": show(y[high])}
            rows.append(row | {"low_at": steps[low], "high_at": steps[high]})
        found.append(rows)
    return found


def _data_of(run: RunRecord) -> Markup | None:
    """The section on a run's data; None without data.json, or with one that is none."""
    if run.data is None:
        return None
    try:
        return data_section(dict(run.data))
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError):
        return Markup('<p class="remark">data.json is not what packtrain writes, and cannot be shown.</p>')


def _groups(curves: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """The headings of the curves, and the numbers of the figures under each."""
    groups: dict[str, list[int]] = {}
    for number, figure in enumerate(curves["figures"]):
        groups.setdefault(figure["group"], []).append(number)
    return [*groups.items()]


def write_page(file: Path, text: str) -> None:
    """Writes the report aside and renames it; into a device or pipe as it is. Raises UserError where the file is no report."""
    try:
        if file.exists() and not file.is_file():  # renaming would put a file in the place of /dev/null, or of a pipe
            file.write_text(text, encoding="utf-8", errors="replace")
            return
        file = followed(file)  # a link stays, such as /dev/stdout
        with file.open("rb") if file.exists() else open(os.devnull, "rb") as old:
            head = old.read(_HEAD_BYTES)
        if head and GENERATOR.encode() not in head:
            fix = "Name another file with -o."
            raise UserError("this file is no report of packtrain, and is left alone", where=str(file), fix=fix)
        write_text(file, text)
    except OSError as error:
        what = f"the report cannot be written: {error.strerror}"
        raise UserError(what, where=str(file), fix="Name a file that can be written with -o.") from error


def _shown(value: Any) -> Any:
    return harmless(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _gib(value: float) -> str:
    return f"{units.number(value)} GiB"


def _here(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _plotly() -> str:
    """plotly.js as a text."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _hash(text: str) -> str:
    """What a content security policy calls a script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inline(values: Any) -> Markup:
    """JSON that can stand in a script element whatever texts are in it."""
    text = json.dumps(values, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
