"""`packtrain report`: one HTML file that needs no network, on request and at the end of every run. Its texts are made by jinja2
(escaped), its curves by plotly.js, which is in it compressed."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError
from markupsafe import Markup

from packtrain import __version__, wording
from packtrain.config.yaml_files import shown
from packtrain.durable import followed, write_text
from packtrain.errors import UserError
from packtrain.inspect.html import DATA_CSS, data_section
from packtrain.report import headline
from packtrain.report.figures import PHASES, drawn
from packtrain.report.run_record import RunRecord, harmless, read_run
from packtrain.run_folder import RunFolder

GENERATOR = '<meta name="generator" content="packtrain'
_HEAD_BYTES = 512


def report_runs(places: Sequence[str], output: Path | None) -> int:
    """Writes the report of the runs in these folders, prints where it is, returns the exit code. Raises UserError where it cannot be.

    By default the report of one run is in its folder, that of several in the current one.
    """
    folders = [RunFolder(place) for place in dict.fromkeys(Path(os.path.expanduser(name)) for name in places)]
    runs = [read_run(folder) for folder in folders]
    if len(runs) > 1:
        names = headline.distinct_names([folder.root for folder in folders])
        runs = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    file = output or (folders[0].report if len(folders) == 1 else Path("report.html"))
    if file.is_dir() or file.is_fifo():
        raise UserError("this is no regular file", where=str(file), fix="Name a file with -o.")
    write_page(file, text := page(runs))
    print(f"{harmless(shown(file))} ({len(text.encode()) / 1e6:.1f} MB)")
    for run in runs:
        if skipped := run.metrics.skipped:
            print(
                f"{run.name}: {skipped} lines of metrics.jsonl were skipped (torn, or repeated later)", file=sys.stderr
            )
    return 0


def report_at_end(folder: RunFolder) -> None:
    """The report of a run that has just ended, in its folder; a failure is printed, and changes nothing else."""
    if folder.attempt.root.is_dir() and folder.metrics.exists():
        return  # it ended before its first step, and what is in the folder is an earlier run's
    try:
        write_page(folder.report, page([read_run(folder, over=True)]))
    except Exception as error:
        print(harmless(f"no report.html: {wording.first_line(error)}"), file=sys.stderr)


def page(runs: Sequence[RunRecord]) -> str:
    """The HTML of one run, or of several over each other."""
    from plotly.offline import get_plotlyjs

    curves = drawn(runs)
    script, plotly = (_here("page.js"), get_plotlyjs()) if curves["figures"] else ("", "")
    allowed = " ".join(f"'sha256-{_hash(one)}'" for one in (script, plotly) if one)
    environment = Environment(
        loader=PackageLoader("packtrain.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    units = {"number": headline.number, "percent": headline.percent, "duration": headline.duration}
    environment.filters |= {**units, "size": wording.size}
    return environment.get_template("page.html.j2").render(
        version=__version__,
        runs=runs,
        one=runs[0] if len(runs) == 1 else None,
        headline=headline,
        figures=curves["figures"],
        readings=readings(curves),
        groups=_groups(curves),
        phases=PHASES,
        differences=headline.differences(runs) if len(runs) > 1 else [],
        answers=headline.answers(runs),
        allowed=Markup(allowed or "'none'"),
        data=[_data_of(run) for run in runs],
        css=Markup(_here("page.css") + DATA_CSS),
        script=Markup(script),
        plotly=Markup(base64.b64encode(gzip.compress(plotly.encode(), mtime=0)).decode() if plotly else ""),
        curves=_inline(curves),
    )


def readings(curves: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Of each curve in words what a drawing shows: by figure, {"run", "label", "first", "last", "low", "low_at", "high", "high_at"}."""
    units = {
        "percent": headline.percent,
        "seconds": headline.duration,
        "gib": lambda gib: f"{headline.number(gib)} GiB",
    }

    def reading(curve: dict[str, Any], write: Callable[[float], str]) -> dict[str, Any]:
        y, steps = curve["y"], curves["xs"][curve["x"]]["step"]
        low, high = y.index(min(y)), y.index(max(y))
        row = {"run": curves["runs"][curve["run"]], "label": curve["label"], "number": curve["run"]}
        row |= {"first": write(y[0]), "last": write(y[-1]), "low": write(y[low]), "high": write(y[high])}
        return row | {"low_at": steps[low], "high_at": steps[high]}

    return [
        [reading(curve, units.get(figure["kind"], headline.number)) for curve in figure["curves"]]
        for figure in curves["figures"]
    ]


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
            raise UserError("this file is no report of packtrain, and stays as it is", where=str(file), fix=fix)
        write_text(file, text)
    except OSError as error:
        what = f"the report cannot be written: {error.strerror}"
        raise UserError(what, where=str(file), fix="Name a file that can be written with -o.") from error


def _shown(value: Any) -> Any:
    return harmless(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _here(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a content security policy calls a script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inline(values: Any) -> Markup:
    """JSON that can stand in a script element whatever texts are in it."""
    text = json.dumps(values, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
