"""What is likely to be wrong with the data: each finding with how many, where the first ones are, and what to do.

Nothing here reads a text: the fates of rows say what was odd when they were tokenised (data/tokens/cache.py), and tokens show the
rest (scan.py). A finding that makes training pointless is `bad`, a likely fault is `warn`, what may be meant is `note`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from packtrain.data.dataset import PairDataset, TokenDataset
from packtrain.data.tokens.encode import SAME, SAME_ONCE_CUT, UNTRAINED, UNTRAINED_ONCE_CUT
from packtrain.inspect.corpus import Corpus
from packtrain.inspect.duplicates import LIKELY, MOST_CHECKED, SIMILAR, Duplicates, compare, find_candidates
from packtrain.inspect.scan import TokenScan
from packtrain.wording import visible

Severity = Literal["bad", "warn", "note"]
EXAMPLES = 3
POINTLESS = 0.5
"""Share of rows from which a fault makes the training pointless."""
_SAMPLE = 128


@dataclass(frozen=True, eq=False)
class AuditFinding:
    """The numbers of its `rows` int[n], of `total` of the `unit`, a sentence and what to do.

    `twins` are the rows that the first of them repeat; `count` is their number where not all are in `rows`.
    """

    name: str
    rows: np.ndarray
    total: int
    what: str
    fix: str
    unit: str = "rows"
    severity: Severity = "warn"
    twins: list[int] = field(default_factory=list)
    count: int | None = None

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.rows) if self.count is None else self.count

    @property
    def share(self) -> float:
        """Of all of the unit."""
        return self.number / max(1, self.total)


def find_all(corpus: Corpus, scan: TokenScan) -> list[AuditFinding]:
    """All findings, the worst first; `rows_named` says which rows need a place before `audit_lines`."""
    order: list[Severity] = ["bad", "warn", "note"]
    findings = [*_find_faults(corpus, scan), *_find_repeats(corpus, scan)]
    return sorted(
        (finding for finding in findings if len(finding.rows)),
        key=lambda finding: (order.index(finding.severity), -finding.share),
    )


def rows_named(findings: Sequence[AuditFinding]) -> set[int]:
    """The rows that are shown as examples."""
    return {int(row) for finding in findings for row in (*finding.rows[:EXAMPLES], *finding.twins[:EXAMPLES])}


def audit_lines(findings: Sequence[AuditFinding], places: Mapping[int, str]) -> list[dict[str, Any]]:
    """The findings as plain containers, with the places of their first rows."""
    lines = []
    for finding in findings:
        where = [visible(places[int(row)]) for row in finding.rows[:EXAMPLES]]
        for at, twin in enumerate(finding.twins[:EXAMPLES]):
            file, colon, line = visible(places[twin]).rpartition(":")
            same_file = colon and where[at].startswith(f"{file}:")
            where[at] += f" (as {f'line {line}' if same_file else visible(places[twin])})"
        lines.append(
            {
                "name": finding.name,
                "count": finding.number,
                "share": round(finding.share, 6),
                "unit": finding.unit,
                "where": where,
                "what": finding.what,
                "fix": finding.fix,
                "severity": finding.severity,
            }
        )
    return lines


FAULTS = (
    (
        "no_trained_token",
        "nothing of these rows would be trained, so they are dropped",
        "See data.loss_on, weights of turns, and data.max_length if the answers begin beyond it.",
    ),
    (
        "identical_answers",
        "the chosen and the rejected answer are the same, so these pairs are dropped",
        "Take them out, or see data.max_length.",
    ),
    (
        "marker_in_content",
        "the content holds text that becomes control tokens, such as the end of a turn",
        "Take the markers out of the texts: they end or begin turns in the middle of one.",
    ),
    (
        "broken_encoding",
        "the text holds replacement characters (�), or letters that UTF-8 becomes when it is read as latin-1 (Ã©)",
        "Write the file anew from its source, as UTF-8; what became � is lost.",
    ),
    (
        "dropped_system_prompt",
        "the chat template leaves the system prompt out, so the model never sees it",
        "Set data.chat_template to one that has system prompts, or put them into the first question.",
    ),
    (
        "answer_cut",
        "the answer is cut before its end by data.max_length={max_length}, so the model learns to go on",
        "Raise data.max_length (the statistics say what each would cut), or set data.overlong=drop.",
    ),
    (
        "end_never_trained",
        "no end of an answer ({end}) is trained, so the model does not learn to stop",
        "Give rows of tokens their EOS, with a label; else see eos_token of the tokenizer, and data.chat_template.",
    ),
    (
        "end_trained_twice",
        "the end of an answer ({end}) is trained twice in a row",
        "The texts end in the end token already, and it is added again: take it out of them.",
    ),
    (
        "doubled_bos",
        "documents begin with BOS twice: the template writes it, and the text or the tokens hold it already",
        "Take BOS out of the texts, or of the template.",
    ),
    (
        "unknown_tokens",
        "the tokenizer has no token for part of the text, which becomes its token for unknown text",
        "Take the tokenizer of the model, or one that knows these characters.",
    ),
)
"""Name, what it is, and what to do, of the faults of rows."""
FATAL = ("no_trained_token", "end_never_trained")
"""Faults that make training pointless where many rows have them."""


def _find_faults(corpus: Corpus, scan: TokenScan) -> Iterator[AuditFinding]:
    """Faults of rows of data.train, from what became of them and from their tokens."""
    fates, total = corpus.fates, int(corpus.rows_of_train.sum())
    cut = fates["truncated"][corpus.row_of]

    def rows_of(chosen: np.ndarray) -> np.ndarray:
        return np.flatnonzero(corpus.rows_of_train & chosen)

    def rows_with(chosen: np.ndarray) -> np.ndarray:
        """Rows with a trained document that is chosen."""
        return np.unique(corpus.row_of[corpus.in_train & chosen])

    rows = {
        "no_trained_token": rows_of(corpus.dropped_for((UNTRAINED, UNTRAINED_ONCE_CUT))),
        "identical_answers": rows_of(corpus.dropped_for((SAME, SAME_ONCE_CUT))),
        "marker_in_content": rows_of(fates["marker"]),
        "broken_encoding": rows_of(fates["garbled"]),
        "dropped_system_prompt": rows_of(fates["unsaid"]),
        "answer_cut": rows_with(cut & scan.open),
        "end_never_trained": rows_with(~cut & ~fates["split"][corpus.row_of] & ~scan.ends),
        "end_trained_twice": rows_with(scan.ends_twice),
        "doubled_bos": rows_with(scan.two_bos),
        "unknown_tokens": rows_with(scan.unknown),
    }
    for name, what, fix in FAULTS:
        fatal = name in FATAL and len(rows[name]) >= POINTLESS * total
        what = what.format(max_length=corpus.data.max_length, end=corpus.end_names)
        yield AuditFinding(name, rows[name], total, what, fix, severity="bad" if fatal else "warn")


def _find_repeats(corpus: Corpus, scan: TokenScan) -> Iterator[AuditFinding]:
    """Examples that are there more than once, and held-out ones that are trained."""
    prints = scan.fingerprints
    trained, held_out = (np.flatnonzero(chosen)[:: corpus.together] for chosen in (corpus.in_train, corpus.in_eval))

    def hash_examples(documents: np.ndarray) -> np.ndarray:
        hashes = prints.hashes[documents]
        return hashes if corpus.together == 1 else hashes * np.uint64(3) + prints.hashes[documents + 1]

    def finding(
        name: str, documents: np.ndarray, same: Duplicates, total: int, what: str, fix: str, severity: Severity
    ) -> AuditFinding:
        rows, twins = corpus.row_of[documents[same.repeats]], corpus.row_of[documents[same.originals]].tolist()
        return AuditFinding(name, rows, total, what, fix, corpus.unit, severity, twins, same.count)

    hashes = hash_examples(trained)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[inverse] != np.arange(len(hashes)))
    what, fix = "the same tokens as an earlier one: it counts twice", "Take them out, or say it on purpose with weight."
    same = Duplicates(again, first[inverse][again], len(again))
    yield finding("exact_duplicates", trained, same, len(trained), what, fix, "note")
    alone = np.delete(trained, again)
    what, fix = (
        "at least 80 % of their sequences of four tokens are those of an earlier one",
        "See what repeats, and take it out.",
    )
    similar = _find_similar(corpus, scan, alone, 0)
    yield finding("near_duplicates", alone, similar, len(trained), what, fix, "note")
    if not len(held_out):
        return
    order = np.argsort(hashes, kind="stable")
    own = hash_examples(held_out)
    twin = order[np.minimum(np.searchsorted(hashes, own, sorter=order), len(order) - 1)]
    known = np.flatnonzero(hashes[twin] == own)
    both, fix = (
        np.concatenate([trained, held_out]),
        "Keep one of the two: else the eval loss is too low by what was memorised.",
    )
    same = Duplicates(len(trained) + known, twin[known], len(known))
    what = "held-out examples that are trained, token by token"
    yield finding("eval_in_train", both, same, len(held_out), what, fix, "warn")
    both = np.concatenate([trained, np.delete(held_out, known)])
    similar = _find_similar(corpus, scan, both, len(trained))
    what = "held-out examples that are almost the same as trained ones"
    yield finding("eval_nearly_in_train", both, similar, len(held_out), what, fix, "warn")


def _find_similar(corpus: Corpus, scan: TokenScan, documents: np.ndarray, trained: int) -> Duplicates:
    """Near duplicates among `documents`, each the first of an example: of those from number `trained` on that are like one before."""
    prints = scan.fingerprints
    usable = np.flatnonzero(prints.compared[documents])
    best, alike = find_candidates(prints.signatures[documents[usable]])
    likely = np.flatnonzero((best >= 0) & (alike >= LIKELY))
    repeats, originals = usable[likely], usable[best[likely]]
    if trained:
        leaks = (repeats >= trained) & (originals < trained)
        repeats, originals = repeats[leaks], originals[leaks]
    checked = np.arange(len(repeats))
    if len(repeats) > MOST_CHECKED:
        checked = np.sort(np.random.default_rng(0).choice(checked, MOST_CHECKED, replace=False))

    def is_similar(at: int) -> bool:
        repeat, original = int(documents[repeats[at]]), int(documents[originals[at]])
        sides = range(corpus.together)  # of pairs both answers
        return all(
            compare(corpus.read(repeat + side), corpus.read(original + side), prints.common) >= SIMILAR
            for side in sides
        )

    kept = checked[[is_similar(at) for at in checked.tolist()]] if len(checked) else checked
    return Duplicates(repeats[kept], originals[kept], round(len(kept) * len(repeats) / max(1, len(checked))))


def pointless(data: TokenDataset | PairDataset, tokenizer: Any, max_length: int | None) -> list[str]:
    """Sentences for the user on what makes a training pointless, none for data that can be learned from: for the start of a run,
    from a sample of the documents, in a few milliseconds. `tokenizer` is that of transformers."""
    documents = data.documents if isinstance(data, PairDataset) else data
    report, warnings = documents.report, list[str]()
    untrained = report.dropped.get(UNTRAINED, 0) + report.dropped.get(UNTRAINED_ONCE_CUT, 0)
    if untrained >= POINTLESS * report.rows:
        what = f"{untrained:,} of {report.rows:,} rows have nothing to train and are dropped"
        warnings.append(f"{what} (data.loss_on, data.max_length)")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    control = {
        *tokenizer.all_special_ids,
        *(token for token, added in added.items() if getattr(added, "special", False)),
    }
    sample = np.unique(np.linspace(0, len(documents) - 1, min(_SAMPLE, len(documents))).astype(int)).tolist()
    whole = [documents[number] for number in sample if max_length is None or documents.lengths[number] < max_length]
    endless = sum(1 for document in whole if control.isdisjoint(document.input_ids[document.loss_mask].tolist()))
    if whole and endless >= POINTLESS * len(whole):
        end = tokenizer.eos_token or "EOS"
        what = f"{endless:,} of {len(whole):,} sampled documents train no end of an answer, such as {end}"
        warnings.append(f"{what}: the model would not learn to stop")
    return [f"data: {warning}; packtrain inspect shows which" for warning in warnings]
