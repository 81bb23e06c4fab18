"""What `packtrain bench` found, for people: a table, and the best settings to copy."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_COLUMNS = ("mode", "tokens", "docs", "tokens/s", "spread", "ratio", "MFU", "peak", "padding", "first", "")
_WIDTH = 100


def show(report: dict[str, Any], given: Sequence[str], *, as_json: bool) -> None:
    """The report (trials.py) on stdout; `given` are the arguments that named the config."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    if console.width < _WIDTH:
        console = Console(highlight=False, soft_wrap=True, width=_WIDTH)  # a line that wraps, not cells that are cut
    for name, text in _head(report):
        console.print(f"[bold]{name:<10}[/]{escape(text)}")
    console.print(_table(report))
    for line in _not_measured(report["trials"]):
        console.print(f"[yellow]{escape(line)}[/]")
    best = report["best"]
    if best is None:
        console.print("[bold red]nothing could be measured[/]")
        return
    console.print(f"[bold]{'best':<10}[/]{escape(_verdict(best))}")
    command = shlex.join(["packtrain", report["objective"], *given, *([] if best["configured"] else best["overrides"])])
    console.print(f"[bold]{'run':<10}[/][green]{escape(command)}[/]")


def _head(report: dict[str, Any]) -> list[tuple[str, str]]:
    several = f"{report['processes']} processes ({report['strategy']}), each on " if report["processes"] > 1 else ""
    step = report["step"]
    cut = f"; measured on {step['part']:.0%} of it, as a whole one takes too long here" if step["part"] < 1 else ""
    return [
        ("model", f"{report['model']}, {report['precision']}, on {several}{report['device']}"),
        ("attention", report["attention"] or "the model's own"),
        ("a step", f"{step['size']}, about {step['tokens']:,.0f} tokens{cut}"),
    ]


def _table(report: dict[str, Any]) -> Table:
    known = any(one["mfu"] is not None for one in report["trials"])
    columns = [name for name in _COLUMNS if known or name != "MFU"]
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("mode", "") else "right", no_wrap=True)
    best, rounds = report["best"] or {}, max(one["rounds"] for one in report["trials"])
    for one in report["trials"]:
        if one["tokens_per_second"] is None:
            continue
        is_best = one["overrides"] == best.get("overrides")
        cells = {
            "mode": _mode(one),
            "tokens": _number(one["tokens_per_device"]),
            "docs": _number(one["examples_per_device"]),
            "tokens/s": f"{one['tokens_per_second']:,.0f}",
            "spread": "" if one["spread"] is None else f"{one['spread']:.0%}",
            # one round beside another moment's is not worth much
            "ratio": f"{one['ratio']:.2f}" if one["ratio"] and (one["rounds"] > 1 or rounds == 1) else "",
            "MFU": "" if one["mfu"] is None else f"{one['mfu']:.1%}",
            "peak": f"{one['peak_memory'] / 2**30:.2f} GiB",
            "padding": f"{one['padding']:.0%}",
            "first": f"{one['first_step_seconds']:.2f} s",
            "": ", ".join(["best"] * is_best + ["config"] * one["configured"]),
        }
        table.add_row(*(cells[name] for name in columns), style="bold" if is_best else None)
    return table


def _verdict(best: dict[str, Any]) -> str:
    speed = f"{best['tokens_per_second']:,.0f} tokens/s"
    if best["configured"]:
        return f"the configured settings, {speed}"
    if best["ratio"] is None:
        return f"{speed}; the configured settings could not be measured"
    times = f"{speed}, {best['ratio']:.2f} times as configured"
    if best["clear"]:
        return times
    why = "faster in too few rounds" if best["rounds"] > 2 else "too few rounds (--seconds)"
    return f"{times}; not clear: {why}"


def _not_measured(trials: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The reasons why candidates have no figures, each with those."""
    named = [(one["why"], f"{_mode(one)} {_number(one['tokens_per_device'])}".strip()) for one in trials if one["why"]]
    for why in dict.fromkeys(why for why, _ in named):
        given = "; ".join(name for reason, name in named if reason == why)
        yield from textwrap.wrap(f"not measured: {given}: {why}", _WIDTH, subsequent_indent="  ")


def _mode(one: dict[str, Any]) -> str:
    return one["mode"] + ("" if one["share_prefix"] is None else ", shared" if one["share_prefix"] else ", apart")


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
