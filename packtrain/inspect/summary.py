"""The verb `packtrain inspect`, and the summary of data that it and reports show."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np

from packtrain.config.schema import Packing, PackingMode, RunConfig
from packtrain.config.yaml_files import shown
from packtrain.data.tokens.encode import TOO_LONG
from packtrain.errors import UserError
from packtrain.inspect.audit import audit, audit_json, rows_named, scan
from packtrain.inspect.corpus import Corpus, estimate_attention_cost, find_places, open_corpus, schedule_of
from packtrain.inspect.examples import lay_out_step, show_example, show_first, show_row
from packtrain.inspect.rendering import DataTerminal, Shown, data_page
from packtrain.packing.schedule import Schedule
from packtrain.wording import visible

SAMPLED_STEPS = 48
"""Steps of an epoch that are laid out. In a longer epoch they are spread evenly."""
SHOWN = 3
_CANDIDATES = 200
"""Number of examples from the start of the data to choose the shown ones from."""
PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)
BINS = 24
LIMITS = tuple(512 * 2**power for power in range(12))


def summarise(corpus: Corpus, processes: int) -> Shown:
    """Summarise the data as plain containers, for a run on this many processes."""
    config, spec, report = corpus.config, corpus.spec, corpus.train.report
    findings = audit(corpus, scan(corpus))
    shown = _choose_typical(corpus)
    bad = corpus.bad_rows()
    places = find_places(corpus, rows_named(findings) | {int(corpus.row_of[document]) for document in shown} | {*bad})
    labels = None
    if corpus.labels is not None:
        desirable = int(corpus.labels[corpus.train.rows].sum())
        labels = {"desirable": desirable, "undesirable": len(corpus.train) - desirable}
    cost = estimate_attention_cost(corpus)
    percentiles = np.percentile(corpus.train.lengths, PERCENTILES).astype(int).tolist()
    return {
        "rows": report.rows,
        "kept": report.kept,
        "dropped": sum(report.dropped.values()),
        "dropped_for": dict(report.dropped),
        "skipped": [{"where": visible(places[row]), "reason": reason} for row, reason in bad.items()],
        "truncated": report.truncated,
        "split": report.split,
        "cut_tokens": report.cut_tokens,
        "documents": report.documents,
        "labels": labels,
        "unit": spec.examples,
        "tokens": report.tokens,
        "trained_tokens": report.trained_tokens,
        "held_out": None if corpus.eval is None else corpus.eval.report.documents // spec.documents,
        "sources": list(report.sources),
        "format": report.format,
        "remarks": report.decisions(),
        "unread": report.unread,
        "max_length": config.data.max_length,
        "percentiles": dict(zip(map(str, PERCENTILES), percentiles, strict=True)),
        "histogram": _make_histogram(corpus.train.lengths),
        "cuts": _count_cuts(corpus),
        "processes": processes,
        "mode": config.packing.mode,
        "modes": mode_costs(corpus, processes, cost or 0.0),
        "attention_cost": cost,
        "audit": audit_json(findings, places),
        "shown": [show_example(corpus, number, places) for number in shown],
    }


def mode_costs(corpus: Corpus, processes: int, cost: float) -> dict[str, Shown]:
    """Return each mode's costs: rows and slots of an epoch, `efficiency`, figures of a step.

    `efficiency` is tokens / slots. A mode that is not possible has the reason. A packed row is as long as its documents: `fill` is its
    share of batch.tokens_per_device.
    """
    costs: dict[str, Shown] = {}
    for mode in get_args(PackingMode):
        packing = replace(corpus.config.packing, mode=mode)
        try:
            costs[mode] = _count_costs(schedule_of(corpus, packing, processes, cost), corpus, packing, processes)
        except UserError as error:
            costs[mode] = {"rows": None, "slots": None, "efficiency": None, "why": str(error).replace("\n    → ", ": ")}
    return costs


def _count_costs(schedule: Schedule, corpus: Corpus, packing: Packing, processes: int) -> Shown:
    mode, pairs, epoch = packing.mode, corpus.pairs, schedule.steps_per_epoch(0)
    tokens = pairs.lengths if pairs is not None and mode == "padding" else schedule.lengths
    sample = schedule.summary(processes, SAMPLED_STEPS, tokens)
    scale = int(tokens.sum(dtype=np.int64)) / sample.tokens
    figures: Shown = {
        "rows": len(tokens) * corpus.spec.documents if mode == "padding" else round(sample.rows * scale),
        "slots": round(sample.slots * scale),
        "efficiency": round(1 - sample.padding_fraction, 4),
        "steps": epoch,
        "micro_batches": [sample.micro_batches_min, sample.micro_batches_max],
        "imbalance": round(sample.imbalance, 4),
        "sampled": sample.steps < epoch,
    }
    if mode == "packed":
        figures["fill"] = round(sample.slots / (sample.rows * schedule.limits.tokens), 4)
    if pairs is not None and mode != "padding" and packing.share_prefix is not False:
        both = int(pairs.lengths.sum(dtype=np.int64))
        figures["saved_by_sharing"] = round(1 - int(pairs.shared_lengths.sum(dtype=np.int64)) / both, 4)
    if schedule.prefixes is not None:
        figures["saved_by_sharing"] = round(1 - sample.slots / sample.tokens, 4)
    return figures


def _choose_typical(corpus: Corpus) -> list[int]:
    """Choose examples of usual length from the start of the data, by their first documents."""
    together = corpus.spec.documents
    first = corpus.train.rows[: _CANDIDATES * together : together]
    lengths = corpus.documents.lengths[first]
    order = np.argsort(np.abs(lengths - np.median(lengths)), kind="stable")
    return sorted(list(dict.fromkeys(first[order].tolist()))[:SHOWN])


def _make_histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Count documents in bins of equal, round width, from `first` to `last` tokens. The last bin holds all longer documents."""
    most = int(np.percentile(lengths, 99.5))
    width = next(digit * 10**power for power in range(10) for digit in (1, 2, 5) if digit * 10**power * BINS > most)
    counts = np.bincount(np.minimum(lengths // width, most // width), minlength=most // width + 1).tolist()
    firsts = range(0, width * len(counts), width)
    parts = zip(firsts, counts, strict=True)
    bins = [{"first": at, "last": at + width - 1, "documents": number} for at, number in parts]
    bins[-1]["last"] = max(bins[-1]["last"], int(lengths.max()))
    return bins


def _count_cuts(corpus: Corpus) -> list[Shown]:
    """Count the cuts of data.max_length. Limits run from 512 tokens to the first that cuts nothing, or to the current limit: beyond it
    nothing is known of longer documents. For dropped documents not even the number of tokens is known."""
    lengths, current, report = corpus.train.lengths, corpus.config.data.max_length, corpus.train.report
    dropped = report.dropped.get(TOO_LONG, 0) * corpus.spec.documents
    limits = {limit for limit in LIMITS if limit < 2 * int(lengths.max())} or {LIMITS[0]}
    cuts = []
    for limit in sorted({limit for limit in limits if limit < current} | {current} if current else limits):
        longer = lengths[lengths > limit].astype(np.int64)
        documents = len(longer) + dropped + (report.truncated + report.split if limit == current else 0)
        lost = int((longer - limit).sum()) + report.cut_tokens
        cuts.append(
            {
                "max_length": limit,
                "documents": documents,
                "share": round(documents / (len(lengths) + dropped), 4),
                "tokens": None if dropped else lost,
                "tokens_share": None if dropped else round(lost / (int(lengths.sum()) + report.cut_tokens), 4),
                "current": limit == current,
            }
        )
    return cuts


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
        what = "it shows one row, so it does not go with --rows or --step"
        raise UserError(what, where="--source", code="source-stands-alone")
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
        terminal.remarks(corpus.train.report.decisions())
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
        raise UserError("there is no such folder", where=where, fix="Make it first.", code="no-such-folder")
    if os.path.lexists(file) and (file.suffix not in (".html", ".htm") or file.is_dir()):
        fix = "Give a name that ends in .html."
        what = "this file is not an HTML page, so it is not overwritten"
        raise UserError(what, where=where, fix=fix, code="not-an-html-page")
