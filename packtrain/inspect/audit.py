"""What is likely to be wrong with the data: each finding with how many, where the first ones are, and what to do.

Nothing here reads a text: rows tell what was odd about them when they were tokenised (data/tokens/text_faults.py), and tokens tell
the rest (token_scan.py). A finding that makes training pointless is `bad`, a likely fault is `warn`, what may be meant is `note`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from packtrain.data.dataset import PairDataset, TokenDataset
from packtrain.data.tokens.encode import SAME, SAME_ONCE_CUT, UNTRAINED, UNTRAINED_ONCE_CUT
from packtrain.inspect.corpus import Corpus
from packtrain.inspect.scan.duplicates import Duplicate, duplicates, leaks
from packtrain.inspect.scan.token_scan import TokenScan
from packtrain.inspect.scan.vocabulary import SCRIPTS
from packtrain.wording import visible

Severity = Literal["bad", "warn", "note"]
EXAMPLES = 3
POINTLESS = 0.5
"""Share of rows from which a fault makes the training pointless."""
RARE = 0.05
"""Share of documents in other scripts up to which these are odd; more of them are meant."""
OUTLIER = 4
"""Times the length that 99 percent of the documents do not exceed."""
FEW = 100
"""Documents that say nothing yet about what is usual."""
_SAMPLE = 128
_TOGETHER = {SCRIPTS.index("Japanese"): SCRIPTS.index("Chinese")}
"""Scripts that are written in one text."""


@dataclass(frozen=True, eq=False)
class Oddity:
    """A finding: the numbers of its `rows` int[n], of `total` of the `unit`, a sentence and what to do.

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


def findings(corpus: Corpus, scan: TokenScan) -> list[Oddity]:
    """All findings, the worst first; `rows_named` says which rows need a place before `audit_lines`."""
    order: list[Severity] = ["bad", "warn", "note"]
    found = [one for one in _all(corpus, scan) if len(one.rows)]
    return sorted(found, key=lambda one: (order.index(one.severity), -one.share))


def rows_named(found: Sequence[Oddity]) -> set[int]:
    """The rows that are shown as examples."""
    return {int(row) for one in found for row in (*one.rows[:EXAMPLES], *one.twins[:EXAMPLES])}


def audit_lines(found: Sequence[Oddity], places: Mapping[int, str]) -> list[dict[str, Any]]:
    """The findings as plain containers, with the places of their first rows."""
    made = []
    for one in found:
        where = [visible(places[int(row)]) for row in one.rows[:EXAMPLES]]
        for at, twin in enumerate(one.twins[:EXAMPLES]):
            where[at] += f" (as {_beside(visible(places[twin]), where[at])})"
        figures = {
            "name": one.name,
            "count": one.number,
            "share": round(one.share, 6),
            "unit": one.unit,
            "where": where,
        }
        made.append({**figures, "what": one.what, "fix": one.fix, "severity": one.severity})
    return made


def _beside(place: str, other: str) -> str:
    """A place, without its file if the `other` one is in it."""
    file, colon, line = place.rpartition(":")
    return f"line {line}" if colon and other.startswith(f"{file}:") else place


def _all(corpus: Corpus, scan: TokenScan) -> Iterator[Oddity]:
    yield from _of_rows(corpus)
    yield from _of_ends(corpus, scan)
    yield from _of_tokens(corpus, scan)
    yield from _of_lengths(corpus)
    yield from _of_twins(corpus, scan)


def _of_rows(corpus: Corpus) -> Iterator[Oddity]:
    """What rows tell."""
    of_train, fates, rows = corpus.rows_of_train, corpus.fates, int(corpus.rows_of_train.sum())

    def flagged(name: str) -> np.ndarray:
        return np.flatnonzero(of_train & fates[name])

    def dropped(*reasons: str) -> np.ndarray:
        return np.flatnonzero(of_train & corpus.dropped_for(reasons))

    untrained = dropped(UNTRAINED, UNTRAINED_ONCE_CUT)
    yield Oddity(
        "no_trained_token",
        untrained,
        rows,
        "nothing of these rows would be trained, so they are left out",
        "See data.loss_on, weights of turns, and data.max_length if the answers begin beyond it.",
        severity="bad" if len(untrained) >= POINTLESS * rows else "warn",
    )
    if corpus.pairs:
        same = "the chosen and the rejected answer are the same, so these pairs are left out"
        yield Oddity(
            "identical_answers", dropped(SAME, SAME_ONCE_CUT), rows, same, "Take them out, or see data.max_length."
        )
        prefix = "one answer is the beginning of the other: the pair teaches length alone"
        fix = "See whether one of them was cut short when it was made; take such pairs out."
        yield Oddity("prefix_answers", flagged("prefix"), rows, prefix, fix)
    yield Oddity(
        "marker_in_content",
        flagged("marker"),
        rows,
        "what is said holds text that becomes control tokens, such as the end of a turn",
        "Take the markers out of the texts: they end or begin turns in the middle of one.",
    )
    echo = "an answer is the very text that it answers"
    yield Oddity("answer_is_prompt", flagged("echo"), rows, echo, "See whether a column is used twice (data.columns).")
    garbled = "the text holds replacement characters (�), or letters that UTF-8 becomes when it is read as latin-1 (Ã©)"
    fix = "Write the file anew from its source, as UTF-8; what became � is lost."
    yield Oddity("broken_encoding", flagged("garbled"), rows, garbled, fix)
    unsaid = "the chat template leaves the system prompt out, so the model never sees it"
    fix = "Set data.chat_template to one that has system prompts, or put them into the first question."
    yield Oddity("dropped_system_prompt", flagged("unsaid"), rows, unsaid, fix)


def _of_ends(corpus: Corpus, scan: TokenScan) -> Iterator[Oddity]:
    """Whether answers end, and once."""
    rows, fates = corpus.row_of, corpus.fates
    cut = fates["truncated"][rows]
    total = int(corpus.rows_of_train.sum())
    if corpus.data.overlong != "keep_end":
        yield Oddity(
            "answer_cut",
            np.unique(rows[corpus.in_train & cut & scan.open]),
            total,
            f"the answer is cut before its end by data.max_length={corpus.data.max_length}, so the model learns to go on",
            "Raise data.max_length (the statistics say what each would cut), or set data.overlong=drop.",
        )
    endless = np.unique(rows[corpus.in_train & ~cut & ~fates["split"][rows] & ~scan.ends])
    token = corpus.end_names
    yield Oddity(
        "end_never_trained",
        endless,
        total,
        f"no end of an answer ({token}) is trained, so the model does not learn to stop",
        "Give rows of tokens their EOS, with a label; else see eos_token of the tokenizer, and data.chat_template.",
        severity="bad" if len(endless) >= POINTLESS * total else "warn",
    )
    yield Oddity(
        "end_trained_twice",
        np.unique(rows[corpus.in_train & scan.ends_twice]),
        total,
        f"the end of an answer ({token}) is trained twice in a row",
        "The texts end in the end token already, and it is added again: take it out of them.",
    )


def _of_tokens(corpus: Corpus, scan: TokenScan) -> Iterator[Oddity]:
    """Faults that show in token ids."""
    rows, total = corpus.row_of, int(corpus.rows_of_train.sum())
    bos = "documents begin with BOS twice: the template writes it, and the text or the tokens hold it already"
    fix = "Take BOS out of the texts, or of the template."
    yield Oddity("doubled_bos", np.unique(rows[corpus.in_train & scan.two_bos]), total, bos, fix)
    unknown = "the tokenizer has no token for part of the text, which becomes its token for unknown text"
    fix = "Take the tokenizer of the model, or one that knows these characters."
    yield Oddity("unknown_tokens", np.unique(rows[corpus.in_train & scan.unknown]), total, unknown, fix)
    script = scan.script.copy()
    for one, other in _TOGETHER.items():
        script[script == one] = other
    times = np.bincount(script[corpus.in_train], minlength=len(SCRIPTS))
    times[0] = 0
    usual = int(times.argmax())
    others = corpus.in_train & (script != 0) & (script != usual)
    if times.sum() >= FEW and others.sum() <= RARE * times.sum():
        found = ", ".join(SCRIPTS[one] for one in np.argsort(-times, kind="stable") if times[one] and one != usual)
        what = f"most of the text is in another script ({found}) than that of the others ({SCRIPTS[usual]})"
        fix = "Look whether they are meant; broken encodings look like this, too."
        yield Oddity("other_script", np.unique(rows[others]), total, what, fix, severity="note")


def _of_lengths(corpus: Corpus) -> Iterator[Oddity]:
    lengths = corpus.lengths[corpus.in_train]
    usual = float(np.percentile(lengths, 99))
    longest = np.flatnonzero(corpus.in_train & (corpus.lengths > OUTLIER * usual))
    if len(lengths) >= FEW and len(longest):
        longest = longest[np.argsort(-corpus.lengths[longest], kind="stable")]
        most = int(corpus.lengths[longest[0]])
        what = f"far longer than the others: up to {most:,} tokens, where 99 % have at most {usual:,.0f}"
        fix = f"Look at them; data.max_length={_rounded(usual)} cuts them, with data.overlong=drop they are left out."
        numbers = corpus.row_of[longest]
        yield Oddity("length_outliers", numbers, len(lengths), what, fix, "documents", "note")


def _rounded(length: float) -> int:
    """The next multiple of 128."""
    return -(-int(length) // 128) * 128


def _of_twins(corpus: Corpus, scan: TokenScan) -> Iterator[Oddity]:
    """Examples that are there more than once, and held-out ones that are trained."""
    unit, total = corpus.unit, int(corpus.in_train.sum()) // corpus.together
    same, similar = duplicates(corpus, scan)
    what = "the same tokens as an earlier one: it counts twice"
    fix = "Take them out, or say it on purpose with weight."
    yield _twins("exact_duplicates", same, corpus, total, what, fix, unit, "note")
    what = "at least 80 % of their sequences of four tokens are those of an earlier one"
    yield _twins("near_duplicates", similar, corpus, total, what, "Look at them; take out what repeats.", unit, "note")
    if corpus.eval is None:
        return
    total = int(corpus.in_eval.sum()) // corpus.together
    same, similar = leaks(corpus, scan)
    fix = "Keep one of the two: else the eval loss is too low by what was memorised."
    what = "held-out examples that are trained, token by token"
    yield _twins("eval_in_train", same, corpus, total, what, fix, unit, "warn")
    what = "held-out examples that are almost the same as trained ones"
    yield _twins("eval_nearly_in_train", similar, corpus, total, what, fix, unit, "warn")


def _twins(
    name: str, found: Duplicate, corpus: Corpus, total: int, what: str, fix: str, unit: str, severity: Severity
) -> Oddity:
    rows, twins = corpus.row_of[found.documents], corpus.row_of[found.of].tolist()
    return Oddity(name, rows, total, what, fix, unit, severity, twins, found.count)


def pointless(data: TokenDataset | PairDataset, tokenizer: Any, max_length: int | None) -> list[str]:
    """Sentences for the user on what makes a training pointless, none for data that can be learned from: for the start of a run, from a
    sample of the documents, in a few milliseconds. `tokenizer` is that of transformers."""
    documents = data.documents if isinstance(data, PairDataset) else data
    report, found = documents.report, list[str]()
    untrained = report.dropped.get(UNTRAINED, 0) + report.dropped.get(UNTRAINED_ONCE_CUT, 0)
    if untrained >= POINTLESS * report.rows:
        found.append(
            f"{untrained:,} of {report.rows:,} rows have nothing to train and are left out (data.loss_on, data.max_length)"
        )
    added = getattr(tokenizer, "added_tokens_decoder", {})
    control = {*tokenizer.all_special_ids, *(one for one, token in added.items() if getattr(token, "special", False))}
    sample = np.unique(np.linspace(0, len(documents) - 1, min(_SAMPLE, len(documents))).astype(int)).tolist()
    whole = [documents[one] for one in sample if max_length is None or documents.lengths[one] < max_length]
    endless = sum(1 for one in whole if control.isdisjoint(one.input_ids[one.loss_mask].tolist()))
    if whole and endless >= POINTLESS * len(whole):
        found.append(
            f"{endless:,} of {len(whole):,} documents that were looked at train no end of an answer, such as"
            f" {tokenizer.eos_token or 'EOS'}: the model would not learn to stop"
        )
    return [f"data: {one}; packtrain inspect shows which" for one in found]
