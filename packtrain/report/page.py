"""`packtrain report`: one HTML file that needs no network, made on request and after every run. jinja2 renders its texts
(escaped); plotly.js, compressed inside the file, draws its curves."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from jinja2 import Environment, TemplateError
from markupsafe import Markup

from packtrain import __version__, wording
from packtrain.config.yaml_files import shown
from packtrain.errors import UserError
from packtrain.inspect.rendering import DATA_CSS, data_section, percent, templates_in
from packtrain.mirror import fetch_record
from packtrain.report import figures as headline
from packtrain.report.figures import PHASES, points_of
from packtrain.report.run_record import RunRecord, harmless, read_run
from packtrain.run_folder import RunFolder
from packtrain.system import write_text

_HERE = Path(__file__).parent
GENERATOR = '<meta name="generator" content="packtrain'
_COMPRESSION = 5  # 1 % larger than with 9, in half the time
_KINDS = {
    "number": headline.number,
    "percent": percent,
    "seconds": headline.duration,
    "gib": lambda gib: f"{headline.number(gib)} GiB",
}


def report_runs(places: Sequence[str], output: Path | None) -> int:
    """Write the report of the runs in these folders. Prints its path, returns the exit code. Raises UserError if it cannot be written.

    By default one run's report goes into its folder; for several runs, or one in a bucket, into the current folder.
    """
    with ExitStack() as stack:
        folders = [RunFolder(place) for place in dict.fromkeys(_folder_of(name, stack) for name in places)]
        runs = read_runs(folders)
    file = output or (folders[0].report if len(folders) == 1 and "://" not in places[0] else Path("report.html"))
    write_page(file, text := page(runs))
    print(f"{harmless(shown(file))} ({len(text.encode()) / 1e6:.1f} MB)")
    return 0


def read_runs(folders: Sequence[RunFolder]) -> list[RunRecord]:
    """Read the records of runs. If names are equal, put the parent folders before them. Raises UserError like `read_run`."""
    runs = [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        above = [harmless(folder.root.resolve().parent.name) for folder in folders]
        runs = [replace(run, name=f"{name}/{run.name}") for run, name in zip(runs, above, strict=True)]
    return runs


def _folder_of(place: str, stack: ExitStack) -> Path:
    """Return the run folder at `place`. For a URL, download the files of the report; they exist until `stack` is closed."""
    if "://" not in place:
        return Path(os.path.expanduser(place))
    folder = Path(
        stack.enter_context(TemporaryDirectory(prefix="packtrain-report-")), place.rstrip("/").rpartition("/")[2]
    )
    folder.mkdir()
    fetch_record(place, folder)
    return folder


def report_at_end(folder: RunFolder) -> None:
    """Write the report of a run that has just ended into its folder. A failure is only printed."""
    if folder.attempt.root.is_dir() and folder.metrics.exists():
        return  # it ended before its first step, and the folder holds an earlier run
    try:
        write_page(folder.report, page([read_run(folder, over=True)]))
    except Exception as error:
        print(harmless(f"no report.html: {wording.first_line(error)}"), file=sys.stderr)


def page(runs: Sequence[RunRecord], *, live: bool = False) -> str:
    """Return the HTML of the runs. Several runs have their curves in the same figures. A `live` page asks its server for newer ones."""
    points = points_of(runs)
    figures = points["figures"]
    script, plotly, allowed = scripts() if figures or live else ("", "", "'none'")
    groups = groupby(range(len(figures)), key=lambda number: figures[number]["group"])
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            version=__version__,
            live=live,
            runs=runs,
            single=runs[0] if len(runs) == 1 else None,
            headline=headline,
            figures=figures,
            xs=points["xs"],
            groups=[(name, list(members)) for name, members in groups],
            phases=PHASES,
            differences=headline.compare_settings(runs) if len(runs) > 1 else [],
            answers=headline.answers(runs),
            allowed=Markup(allowed),
            data=[_describe_data(run) for run in runs],
            css=Markup(_read("page.css") + DATA_CSS),
            script=Markup(script),
            plotly=Markup(plotly),
            curves=_inline(points),
        )
    )


@cache
def scripts() -> tuple[str, str, str]:
    """Return the page's script, plotly.js packed, and the hashes that allow both to run."""
    from plotly.offline import get_plotlyjs

    script, plotly = _read("page.js"), get_plotlyjs()
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in (script, plotly)]
    packed = base64.b64encode(gzip.compress(plotly.encode(), _COMPRESSION, mtime=0)).decode()
    return script, packed, " ".join(f"'sha256-{one}'" for one in hashes)


@cache
def _templates() -> Environment:
    made = templates_in(_HERE, finalize=_finalize)
    made.filters |= {"number": headline.number, "duration": headline.duration, "size": wording.size}
    made.filters["written"] = lambda value, kind: _KINDS[kind](value)
    return made


def _describe_data(run: RunRecord) -> Markup | None:
    """Return the section on a run's data; None without data.json."""
    if run.data is None:
        return None
    try:
        return data_section(dict(run.data))
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return Markup('<p class="remark">data.json is not what packtrain writes, and cannot be shown.</p>')


def write_page(file: Path, text: str) -> None:
    """Write the report to a temporary file and rename it. Raises UserError if the existing file is no report."""
    fix = "Name another file with -o."
    try:
        file = Path(os.path.realpath(file))  # so that a link to it stays a link
        if file.exists() and not file.is_file():
            raise UserError("this is no regular file", where=str(file), fix=fix, code="not-a-file")
        with file.open("rb") if file.exists() else open(os.devnull, "rb") as old:
            head = old.read(512)
        if head and GENERATOR.encode() not in head:
            what = "this file is no report of packtrain, and stays as it is"
            raise UserError(what, where=str(file), fix=fix, code="not-made-by-packtrain")
        write_text(file, text)
    except OSError as error:
        what = f"the report cannot be written: {error.strerror}"
        raise UserError(what, where=str(file), fix=fix, code="file-not-writable") from error


def _finalize(value: object) -> object:
    return harmless(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _inline(values: object) -> Markup:
    """Return JSON that is safe inside a script element, with any texts."""
    text = json.dumps(values, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
