"""The report of `packtrain bench` for people: a table, and the best settings to copy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_WIDTH = 100


def print_report(report: dict[str, Any], given: Sequence[str], *, as_json: bool) -> None:
    """Print the report (launches.py) to stdout. `given` are the arguments that named the config."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True, width=_WIDTH)  # lines wrap, so that cells are not cut
    several = f"{report['processes']} processes ({report['strategy']}), each on " if report["processes"] > 1 else ""
    step, best = report["step"], report["best"]
    cut = f"; measured on {step['part']:.0%} of it, as a whole one takes too long here" if step["part"] < 1 else ""
    head = {
        "model": f"{report['model']}, {report['precision']}, on {several}{report['device']}",
        "attention": report["attention"] or "the model's own",
        "a step": f"{step['size']}, about {step['tokens']:,.0f} tokens{cut}",
    }
    if cost := report["attention_cost"]:
        head[""] = (
            f"{cost['token_seconds'] * 1e6:.3g} µs · (l + {cost['attention_cost']:.2g} · l²) for l tokens; planned with "
            f"packing.attention_cost={cost['planned']:.2g}"
        )
    for name, text in head.items():
        console.print(f"[bold]{name:<10}[/]{escape(text)}")
    console.print(_table(report["trials"], best))
    for trial in report["trials"]:
        if trial["why"]:
            name = f"{_mode(trial)} {_number(trial['tokens_per_device'])}".strip()
            line = f"not measured: {name}: {trial['why']}"
            console.print(f"[yellow]{escape(line)}[/]")
    command = shlex.join(["packtrain", report["objective"], *given, *([] if best["configured"] else best["overrides"])])
    console.print(f"[bold]{'best':<10}[/]{escape(_describe_best(best))}")
    console.print(f"[bold]{'run':<10}[/][green]{escape(command)}[/]")


def _table(trials: Sequence[dict[str, Any]], best: dict[str, Any]) -> Table:
    table, most_rounds = Table(box=None, pad_edge=False), max(trial["rounds"] for trial in trials)
    for trial in trials:
        if trial["tokens_per_second"] is None:
            continue
        is_best = trial["overrides"] == best["overrides"]
        cells = {
            "mode": _mode(trial),
            "tokens": _number(trial["tokens_per_device"]),
            "docs": _number(trial["examples_per_device"]),
            "tokens/s": f"{trial['tokens_per_second']:,.0f}",
            "spread": "" if trial["spread"] is None else f"{trial['spread']:.0%}",
            # the ratio of two single runs at different moments is not worth much
            "ratio": f"{trial['ratio']:.2f}" if trial["ratio"] and (trial["rounds"] > 1 or most_rounds == 1) else "",
            "MFU": "" if trial["mfu"] is None else f"{trial['mfu']:.1%}",
            "peak": f"{trial['peak_memory'] / 2**30:.2f} GiB",
            "padding": f"{trial['padding']:.0%}",
            "first": f"{trial['first_step_seconds']:.2f} s",
            "": ", ".join(["best"] * is_best + ["config"] * trial["configured"]),
        }
        if not table.columns:
            for name in cells:
                table.add_column(name, justify="left" if name in ("mode", "") else "right", no_wrap=True)
        table.add_row(*cells.values(), style="bold" if is_best else None)
    return table


def _describe_best(best: dict[str, Any]) -> str:
    speed = f"{best['tokens_per_second']:,.0f} tokens/s"
    if best["configured"]:
        return f"the configured settings, {speed}"
    if best["ratio"] is None:
        return f"{speed}; the configured settings could not be measured"
    unclear = "" if best["clear"] else "; not in every round: try more --seconds"
    return f"{speed}, {best['ratio']:.2f} times the configured speed{unclear}"


def _mode(trial: dict[str, Any]) -> str:
    return trial["mode"] + {None: "", True: ", shared", False: ", unshared"}[trial["share_prefix"]]


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
