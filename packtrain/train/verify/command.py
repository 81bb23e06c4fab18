"""`packtrain verify` on the command line: runs in a temporary folder, and shows the report.

Only the report goes to stdout; output of libraries goes to stderr. This file imports no torch.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from packtrain.config.schema import RunConfig, Topology
from packtrain.errors import CheckFailed, Json
from packtrain.objectives.spec import OBJECTIVES
from packtrain.plan.launch_plan import LaunchPlan, plan_launch
from packtrain.plan.surroundings import detect_surroundings
from packtrain.run_folder import RunFolder
from packtrain.strategies.spec import STRATEGIES
from packtrain.system import fast_imports, stdout_on_stderr
from packtrain.wording import counted, listed

_ISOLATION_FIGURES = {
    "documents before a changed one move by": "max_abs_diff_before",
    "documents after a changed one move by": "max_abs_diff_after",
    "a document in a row and alone differ by": "max_abs_diff_alone",
}
_COLOURS = {"exact": "green", "leaks": "red", "unsupported": "yellow"}
Row = tuple[str, float | None, float | None]


def run_verification(config: RunConfig, execute: Callable[[LaunchPlan, RunConfig], int], *, as_json: bool) -> int:
    """Run the proof on this machine, and show the report; return the exit code.

    It takes as many processes as `config` trains in here. `execute` carries out the plan, in this process if there is only one.
    trainer.output_dir is not touched."""
    folder = tempfile.mkdtemp(prefix="packtrain-verify-")
    aside = replace(config, trainer=replace(config.trainer, output_dir=folder, resume="never", mirror=None))
    launch = on_this_machine(aside, "verify")
    logs_are_named = not launch.in_process  # an error message names the logs, so keep them
    try:
        with stdout_on_stderr():
            code = execute(launch, aside)
        logs_are_named = code not in (0, CheckFailed.exit_code)
        report = RunFolder.of(aside.trainer).verification
        if report.exists():  # under another launcher only the first process writes it
            print_verdicts(json.loads(report.read_text()), as_json=as_json)
        return code
    finally:
        if not logs_are_named:
            shutil.rmtree(folder, ignore_errors=True)


def run_on_collator(config: RunConfig, spec: str, *, attention: str | None, attached: bool, as_json: bool) -> int:
    """Prove a foreign collator in this process, and show the report; return the exit code. See `verify_collator`."""
    with stdout_on_stderr(), fast_imports():
        from packtrain.train.verify.foreign_collator import verify_collator
    with stdout_on_stderr():
        parts = config.model, config.peft, config.trainer
        code, report = verify_collator(*parts, spec, attention=attention, attached=attached)
    print_verdicts(cast(Json, finite(report)), as_json=as_json)
    return code


def on_this_machine(config: RunConfig, verb: str) -> LaunchPlan:
    """Plan the launch of `verb` on this machine only. With several machines, all would prove the same."""
    surroundings = detect_surroundings()
    launch = plan_launch(config, surroundings, verb)
    if launch.nodes == 1 or launch.in_process:
        return launch
    here = Topology(kind="local" if surroundings.gpus else "single")
    own = {name: value for name, value in surroundings.env.items() if name.startswith(("CUDA_", "OMP_"))}
    return plan_launch(replace(config, topology=here), replace(surroundings, env=own), verb)


def print_verdicts(report: Json, *, as_json: bool) -> None:
    """Print the report of measure.py or foreign_collator.py as a JSON document or a table."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console, table = Console(highlight=False, soft_wrap=True), Table()
    for name, text in _head(report):
        console.print(f"[bold]{name:<11}[/]{escape(text)}")
    for name in ("measured", "figure", "tolerance", ""):
        table.add_column(name, justify="right" if name in ("figure", "tolerance") else "left", no_wrap=True)
    for what, figure, limit in _rows(report):
        least = what.startswith(("control", "updates"))
        fine = figure is not None and limit is not None and (figure >= limit if least else figure <= limit)
        mark = "[green]ok[/]" if fine else "[yellow]weak[/]" if least else "[red]no[/]"
        table.add_row(what, _number(figure), (">= " if least else "<= ") + _number(limit), mark)
    console.print(table)
    if report["verdict"] == "exact" and not report.get("controls_see", True):
        weak = "Controls are weak: outputs hardly depend on the context."
        console.print(f"{weak} Documents that run alone need no control.")
    several = report.get("processes", 1) > 1 and report["verdict"] != "exact"
    where = f" (rank {report['rank']} of {report['processes']})" if several else ""
    problem = f": {escape(report['problem'])}" if report["problem"] else ""
    console.print(f"[bold {_COLOURS[report['verdict']]}]{report['verdict']}[/]{where}{problem}")
    if report["fix"]:
        console.print(f"  → {escape(report['fix'])}")


def _head(report: Json) -> Iterator[tuple[str, str]]:
    """Yield name and text of the lines above the table."""
    mixed = report.get("mixed_precision", "no")
    precision = report["dtype"] + (f", computed in {mixed}" if mixed != "no" else "")
    adapters = f", {report['peft']}" if report.get("peft", "none") != "none" else ""
    on = f"{report['processes']} processes, this one on " if report.get("processes", 1) > 1 else ""
    yield "model", f"{report['model']} ({report['architecture']}, {precision}{adapters}) on {on}{report['device']}"
    yield "attention", (report["backend"] or "none") + (f": {report['why']}" if "why" in report else "")
    if "collator" in report:
        (rows, tokens), lengths = report["rows"], listed([str(length) for length in report["documents"]])
        documents = f"{counted(len(report['documents']), 'documents')} of {lengths} tokens"
        yield "collator", f"{report['collator']}: {documents} in {counted(rows, 'rows')} of {tokens}"
        yield "positions", report["positions"]
        return
    if report["pairs"]:
        why = report["pairs"]["why"]
        documents = OBJECTIVES[report["objective"]].examples == "documents"
        once = "computed once in a micro-batch" if documents else "computed once for both answers"
        each = "document" if documents else "answer"
        yield "prefixes" if documents else "prompts", f"computed for each {each} ({why})" if why else once
    if STRATEGIES[report["strategy"]].shards_weights:
        whole = ", but for losses and gradients: those are of the whole model" if report["modes_on"] == "whole" else ""
        yield "strategy", f"on the model as {report['strategy']} spreads it over processes{whole}"
    if OBJECTIVES[report["objective"]].reference and not report["start"]:
        yield "first loss", "not checked: the reference is another model"
    lengths = report["reference"]["documents"]
    yield "documents", f"{len(lengths)} of {', '.join(map(str, lengths))} random tokens; {report['seconds']} s"


def _isolation_rows(report: Json, proof: str = "isolation") -> Iterator[Row]:
    """Yield the table's rows for the proof `isolation`, `pairs` or `pictures`."""
    figures, of = report[proof], "" if proof == "isolation" else f", {proof}"
    for what, name in _ISOLATION_FIGURES.items():
        yield what + of, figures[name], figures["tolerance"]
    for leak in report.get("leaks", ()):
        yield f"  document {leak['changed']} changed: {leak['moved']} moves by", leak["by"], figures["tolerance"]
    yield f"control: the same without borders{of}", figures["control"], figures["least_control"]


def _rows(report: Json) -> Iterator[Row]:
    """Yield each measurement, its figure and its tolerance. For a control the tolerance is the least figure it must show."""
    yield from _isolation_rows(report)
    if "collator" in report:
        return
    if report["pictures"]:
        yield from _isolation_rows(report, "pictures")
        if (reach := report["pictures"]["gradients_of_others"]) is not None:
            yield "gradients that reach pictures of others", reach, report["pictures"]["tolerance"]
    if report["pairs"] and report["pairs"]["prompts_shared"]:
        yield from _isolation_rows(report, "pairs")
    if start := report["start"]:
        off, right = abs(start["loss"] - start["zero_margin"]), _number(start["zero_margin"], 7)
        yield f"first loss {_number(start['loss'], 7)} (of a zero margin: {right})", off, start["tolerance"]
    tolerances = report["tolerances"]
    shared = "prompts" if OBJECTIVES[report["objective"]].pairs else "prefixes"
    more = {f"packed with shared {shared}": report["prefix_shared"], "packed, split over processes": report["split"]}
    for mode, figures in {**report["modes"], **{mode: figures for mode, figures in more.items() if figures}}.items():
        yield f"{mode}: loss {_number(figures['loss'], 6)}", figures["loss_rel_diff"], tolerances["loss"]
        yield f"{mode}: gradients", figures["grad_rel_diff"], tolerances["grad_rel_diff"]
    yield "control: gradients without borders", report["control"]["grad_rel_diff"], tolerances["control"]
    if report["updates_seen"] is not None:
        yield "updates that the model sees (docs/precision.md)", report["updates_seen"], tolerances["updates_seen"]


def finite(value: object) -> object:
    """Replace nan and inf in `value` by null, because JSON has no number for them."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None, digits: int = 2) -> str:
    return "none" if value is None else f"{value:.{digits}g}"
