"""Summary of a config's data as one JSON document, for `inspect --json` and reports."""

from __future__ import annotations

from typing import Any

import numpy as np

from packtrain.data.tokens.encode import TOO_LONG
from packtrain.inspect.audit import audit, audit_json, rows_named
from packtrain.inspect.corpus import Corpus, find_places
from packtrain.inspect.examples import show_example
from packtrain.inspect.mode_costs import estimate_attention_cost, mode_costs
from packtrain.inspect.scan import scan
from packtrain.wording import visible

SHOWN = 3
_CANDIDATES = 200
"""Number of examples from the start of the data to choose the shown ones from."""
PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)
BINS = 24
LIMITS = tuple(512 * 2**power for power in range(12))


def summarise(corpus: Corpus, processes: int) -> dict[str, Any]:
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


def _choose_typical(corpus: Corpus) -> list[int]:
    """Choose examples of usual length from the start of the data, by their first documents."""
    together = corpus.spec.documents
    first = corpus.train.rows[: _CANDIDATES * together : together]
    order = np.argsort(np.abs(corpus.lengths[first] - np.median(corpus.lengths[first])), kind="stable")
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


def _count_cuts(corpus: Corpus) -> list[dict[str, Any]]:
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
