"""What the data of a config is, as one JSON document: `inspect --json`, and what reports show of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from packtrain.config.schema import RunConfig
from packtrain.data.dataset import size_of
from packtrain.data.prepare import PREPARE, PreparedData
from packtrain.data.row_counts import DataReport
from packtrain.data.sources.chunks import RawRow
from packtrain.data.tokens.encode import TOO_LONG
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.inspect.audit import audit_lines, findings, rows_named
from packtrain.inspect.corpus import Corpus, corpus_of
from packtrain.inspect.mode_costs import attention_cost, mode_costs
from packtrain.inspect.places import rows_of
from packtrain.inspect.scan.token_scan import scan
from packtrain.inspect.scan.vocabulary import Vocabulary
from packtrain.inspect.statistics import by_role, cuts, full_lengths, histogram, percentiles
from packtrain.inspect.tokens_shown import Shower
from packtrain.plan.data_size import remember
from packtrain.wording import counted

SHOWN = 3
_AMONG = 200
"""Documents from the start of the data among which those that are shown are chosen."""


@dataclass(frozen=True)
class Inspection:
    """The data of a config, opened; `processes` are those that would train."""

    config: RunConfig
    corpus: Corpus
    processes: int

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens."""
        return Vocabulary(self.corpus.tokenizer)

    @cached_property
    def shower(self) -> Shower:
        """Shows documents."""
        return Shower(self.corpus, self.vocabulary)

    @cached_property
    def attention_cost(self) -> float | None:
        """See mode_costs.py."""
        config, vocabulary = self.config, self.corpus.tokenizer.vocabulary
        return attention_cost(config.model, config.peft, vocabulary, scores=config.objective.traits.scores)

    @property
    def shares_prompts(self) -> bool:
        """Whether the prompt of a pair is laid out once, if the attention proves that exact."""
        packing = self.config.packing
        return self.corpus.pairs is not None and packing.mode != "padding" and packing.share_prefix is not False

    def summary(self) -> dict[str, Any]:
        """Everything about the data set, as plain containers."""
        corpus, config = self.corpus, self.config
        scanned = scan(corpus, self.vocabulary)
        found = findings(corpus, scanned)
        shown = self._typical()
        read = rows_of(corpus, rows_named(found) | {int(corpus.row_of[one]) for one in shown})
        report = corpus.train.report
        lengths = full_lengths(corpus)
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
            "labels": labels_of(corpus),
            "unit": corpus.unit,
            "tokens": report.tokens,
            "trained_tokens": report.trained_tokens,
            "held_out": None if corpus.eval is None else corpus.eval.report.documents // corpus.together,
            "sources": list(report.sources),
            "format": report.format,
            "remarks": _remarks(report),
            "max_length": config.data.max_length,
            "percentiles": percentiles(corpus.train.lengths),
            "histogram": histogram(corpus.train.lengths),
            "roles": by_role(scanned),
            "cuts": cuts(lengths, config.data.max_length, report.dropped.get(TOO_LONG, 0) * corpus.together),
            "processes": self.processes,
            "mode": config.packing.mode,
            "modes": mode_costs(corpus, config.packing, config.batch, config.trainer, self.processes, cost or 0.0),
            "attention_cost": cost,
            "audit": audit_lines(found, {row: place for row, (place, _) in read.items()}),
            "shown": self.examples(shown, read),
        }

    def examples(self, documents: list[int], read: Mapping[int, tuple[str, RawRow]]) -> list[dict[str, Any]]:
        """The examples that begin with these documents, as turns of coloured text; `read` are their rows."""
        rows = [read[int(self.corpus.row_of[one])] for one in documents]
        return [
            self.shower.example(one, place, row, shared=self.shares_prompts)
            for one, (place, row) in zip(documents, rows, strict=True)
        ]

    def _typical(self) -> list[int]:
        """Documents of usual length from the start of the data, and the first that was cut, if any."""
        corpus = self.corpus
        first = corpus.train.rows[: _AMONG * corpus.together : corpus.together]
        order = np.argsort(np.abs(corpus.lengths[first] - np.median(corpus.lengths[first])), kind="stable")
        chosen = list(dict.fromkeys(first[order].tolist()))[:SHOWN]
        cut = first[corpus.fates["truncated"][corpus.row_of[first]]]
        if len(cut) and len(chosen) == SHOWN and int(cut[0]) not in chosen:
            chosen[-1] = int(cut[0])
        return sorted(chosen)


def labels_of(corpus: Corpus) -> dict[str, int] | None:
    """How many answers of an epoch are desirable, and how many are not; None of other data."""
    if corpus.labels is None:
        return None
    desirable = int(corpus.labels[corpus.train.rows].sum())
    return {"desirable": desirable, "undesirable": len(corpus.train) - desirable}


def _remarks(report: DataReport) -> list[str]:
    """What was decided about the rows."""
    told = {
        "rendered by TRL's training version of the chat template": report.retold,
        "a document for each question, as the chat template rewrites what came before": report.unrolled,
        "tokenised in parts, as a token would lie over the border of an answer": report.apart,
    }
    return [*report.remarks, *(f"{counted(rows, 'rows')} {what}" for what, rows in told.items() if rows)]


def inspection(
    config: RunConfig,
    processes: int = 1,
    *,
    tokenizer: Any = None,
    prepared: PreparedData[Any] | None = None,
    progress: bool = False,
) -> Inspection:
    """Opens the data of `config`: tokenised now, or found in the cache, unless a run has `prepared` it with its `tokenizer`."""
    kind, seed = config.objective.kind, config.trainer.seed
    tokenizer = tokenizer or load_tokenizer(config.model)
    if prepared is None:
        prepared = PREPARE[kind](config.data, tokenizer, seed=seed, progress=progress)
        remember(size_of(prepared.train), config.model, config.data, kind, seed)  # for `packtrain plan`
    return Inspection(config, corpus_of(config.data, kind, tokenizer, prepared, seed=seed), processes)


def data_summary(config: RunConfig, processes: int = 1, **given: Any) -> dict[str, Any]:
    """What `inspect --json` prints; `given` as for `inspection`."""
    return inspection(config, processes, **given).summary()
