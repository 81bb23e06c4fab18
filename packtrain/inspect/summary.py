"""What the data of a config is, as one JSON document: `inspect --json`, and what reports show of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from packtrain.config.schema import RunConfig
from packtrain.data.dataset import DataReport, size_of
from packtrain.data.prepare import PreparedData, prepare
from packtrain.data.sources.chunks import RawRow
from packtrain.data.tokens.encode import TOO_LONG
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.inspect.audit import audit_lines, find_all, rows_named
from packtrain.inspect.corpus import Corpus, corpus_of, read_rows
from packtrain.inspect.mode_costs import attention_cost, mode_costs
from packtrain.inspect.scan import scan
from packtrain.inspect.tokens_shown import DocumentView
from packtrain.plan.data_size import remember
from packtrain.wording import counted

SHOWN = 3
_AMONG = 200
"""Documents from the start of the data among which those that are shown are chosen."""
PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)
BINS = 24
LIMITS = tuple(512 * 2**power for power in range(12))


@dataclass(frozen=True)
class Inspection:
    """The data of a config, opened; `processes` are those that would train."""

    config: RunConfig
    corpus: Corpus
    processes: int

    @cached_property
    def view(self) -> DocumentView:
        """Shows documents; prompts of pairs once where they are laid out once, if the attention proves that exact."""
        packing = self.config.packing
        shared = self.corpus.pairs is not None and packing.mode != "padding" and packing.share_prefix is not False
        return DocumentView(self.corpus, shared)

    @cached_property
    def attention_cost(self) -> float | None:
        """See mode_costs.py."""
        config, vocabulary = self.config, self.corpus.tokenizer.vocabulary
        return attention_cost(config.model, config.peft, vocabulary, scores=config.objective.traits.scores)

    def summary(self) -> dict[str, Any]:
        """Everything about the data set, as plain containers."""
        corpus, config = self.corpus, self.config
        scanned = scan(corpus)
        findings = find_all(corpus, scanned)
        shown = self._choose_typical()
        rows = read_rows(corpus, rows_named(findings) | {int(corpus.row_of[document]) for document in shown})
        report, labels = corpus.train.report, None
        if corpus.labels is not None:
            desirable = int(corpus.labels[corpus.train.rows].sum())
            labels = {"desirable": desirable, "undesirable": len(corpus.train) - desirable}
        too_long = report.dropped.get(TOO_LONG, 0) * corpus.together
        cost = self.attention_cost
        return {
            "rows": report.rows,
            "kept": report.kept,
            "dropped": sum(report.dropped.values()),
            "dropped_for": dict(report.dropped),
            "truncated": report.truncated,
            "split": report.split,
            "cut_tokens": report.cut_tokens,
            "documents": report.documents,
            "labels": labels,
            "unit": corpus.unit,
            "tokens": report.tokens,
            "trained_tokens": report.trained_tokens,
            "held_out": None if corpus.eval is None else corpus.eval.report.documents // corpus.together,
            "sources": list(report.sources),
            "format": report.format,
            "remarks": _list_remarks(report),
            "max_length": config.data.max_length,
            "percentiles": dict(
                zip(
                    map(str, PERCENTILES),
                    np.percentile(corpus.train.lengths, PERCENTILES).astype(int).tolist(),
                    strict=True,
                )
            ),
            "histogram": make_histogram(corpus.train.lengths),
            "roles": _share_by_role(scanned.roles),
            "cuts": count_cuts(restore_lengths(corpus), config.data.max_length, too_long),
            "processes": self.processes,
            "mode": config.packing.mode,
            "modes": mode_costs(corpus, config.packing, config.batch, config.trainer, self.processes, cost or 0.0),
            "attention_cost": cost,
            "audit": audit_lines(findings, {row: place for row, (place, _) in rows.items()}),
            "shown": self.examples(shown, rows),
        }

    def examples(self, documents: list[int], rows: Mapping[int, tuple[str, RawRow]]) -> list[dict[str, Any]]:
        """The examples that begin with these documents, as turns of coloured text, of their `rows`."""
        return [self.view.show(document, *rows[int(self.corpus.row_of[document])]) for document in documents]

    def _choose_typical(self) -> list[int]:
        """Documents of usual length from the start of the data, and the first that was cut, if any."""
        corpus = self.corpus
        first = corpus.train.rows[: _AMONG * corpus.together : corpus.together]
        order = np.argsort(np.abs(corpus.lengths[first] - np.median(corpus.lengths[first])), kind="stable")
        chosen = list(dict.fromkeys(first[order].tolist()))[:SHOWN]
        cut = first[corpus.fates["truncated"][corpus.row_of[first]]]
        if len(cut) and len(chosen) == SHOWN and int(cut[0]) not in chosen:
            chosen[-1] = int(cut[0])
        return sorted(chosen)


def _list_remarks(report: DataReport) -> list[str]:
    """What was decided about the rows."""
    decisions = {
        "rendered by TRL's training version of the chat template": report.retold,
        "tokenised in parts, as a token would lie over the border of an answer": report.apart,
    }
    return [*report.remarks, *(f"{counted(rows, 'rows')} {what}" for what, rows in decisions.items() if rows)]


def make_histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Documents by length: bins of equal, round width from `first` to `last` tokens; the last one holds all that are longer."""
    most = int(np.percentile(lengths, 99.5))
    width = max(1, -(-(most + 1) // BINS))
    power = 10 ** (len(str(width)) - 1)
    width = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= width)
    counts = np.bincount(np.minimum(lengths // width, most // width), minlength=most // width + 1).tolist()
    bins = [
        {"first": at * width, "last": (at + 1) * width - 1, "documents": number} for at, number in enumerate(counts)
    ]
    bins[-1]["last"] = max(bins[-1]["last"], int(lengths.max()))
    return bins


def _share_by_role(roles: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Tokens, trained tokens and turns of each role, and their shares of all."""
    total, trained = (max(1, sum(int(figures[at]) for figures in roles.values())) for at in (0, 1))
    return [
        {
            "role": name,
            "turns": int(figures[2]),
            "tokens": int(figures[0]),
            "share": round(int(figures[0]) / total, 4),
            "trained": int(figures[1]),
            "trained_share": round(int(figures[1]) / trained, 4),
        }
        for name, figures in roles.items()
    ]


def restore_lengths(corpus: Corpus) -> np.ndarray:
    """int64: tokens of the documents of data.train before data.max_length cut them; those of a row that was split together."""
    fates, chosen = corpus.fates, corpus.in_train
    rows, lengths = corpus.row_of[chosen], corpus.lengths[chosen].astype(np.int64)
    split = fates["split"][rows]
    # a row's loss is that of its documents that are as long as can be
    is_cut = fates["truncated"][rows] & (lengths == corpus.data.max_length)
    times = np.bincount(rows[is_cut], minlength=len(fates))
    restored = lengths + np.where(is_cut, fates["cut_tokens"][rows] // np.maximum(times[rows], 1), 0)
    parts = np.bincount(rows[split], weights=lengths[split], minlength=len(fates))
    whole = parts[parts > 0].astype(np.int64) + fates["cut_tokens"][parts > 0]
    return np.concatenate([restored[~split], whole])


def count_cuts(lengths: np.ndarray, current: int | None, dropped: int = 0) -> list[dict[str, Any]]:
    """What data.max_length would cut, for lengths of 512 tokens and more up to the first that cuts nothing.

    Of documents that were `dropped` for being longer than `current` no more is known: there are no larger limits then, and no tokens.
    """
    wanted = [limit for limit in LIMITS if limit < 2 * int(lengths.max())] or [LIMITS[0]]
    if dropped and current:
        wanted = [limit for limit in wanted if limit < current]
    cuts = []
    for limit in sorted({*wanted, *([current] if current else [])}):
        longer = lengths[lengths > limit]
        lost, documents = int((longer - limit).sum()), len(longer) + dropped
        cuts.append(
            {
                "max_length": limit,
                "documents": documents,
                "share": round(documents / (len(lengths) + dropped), 4),
                "tokens": None if dropped else lost,
                "tokens_share": None if dropped else round(lost / int(lengths.sum()), 4),
                "current": limit == current,
            }
        )
    return cuts


def inspection(
    config: RunConfig,
    processes: int = 1,
    *,
    tokenizer: Any = None,
    prepared: PreparedData | None = None,
    progress: bool = False,
) -> Inspection:
    """Opens the data of `config`: tokenised now, or found in the cache, unless a run has `prepared` it with its `tokenizer`."""
    kind, seed = config.objective.kind, config.trainer.seed
    tokenizer = tokenizer or load_tokenizer(config.model)
    if prepared is None:
        prepared = prepare(config.data, tokenizer, kind, seed=seed, progress=progress)
        remember(size_of(prepared.train), config.model, config.data, kind, seed)  # for `packtrain plan`
    return Inspection(config, corpus_of(config.data, kind, tokenizer, prepared, seed=seed), processes)


def data_summary(config: RunConfig, processes: int = 1, **given: Any) -> dict[str, Any]:
    """What `inspect --json` prints; `given` as for `inspection`."""
    return inspection(config, processes, **given).summary()
