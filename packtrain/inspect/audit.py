"""Audit of the data: each finding has a count, the first places, and a fix.

Nothing here reads texts. The fates of rows record oddities of tokenising (data/tokens/cache.py), and a scan of all tokens shows the rest: one
pass over arrays, in blocks that are read, not mapped, in a few threads. Memory stays small for any size of data.
`bad` findings make training pointless, `warn` are likely faults, `note` may be intended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from packtrain.data.dataset import Dataset, PairDataset
from packtrain.data.tokens.cache import Store
from packtrain.data.tokens.encode import SAME, UNTRAINED
from packtrain.inspect.corpus import Corpus
from packtrain.inspect.picture_facts import MEANT, PICTURE_FAULTS, find_picture_faults
from packtrain.inspect.rendering import Shown
from packtrain.wording import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Severity = Literal["bad", "warn", "note"]
EXAMPLES = 3
POINTLESS = 0.5
"""A fault of this share of rows or more makes the training pointless."""
_SAMPLE = 128


@dataclass(frozen=True, eq=False)
class AuditFinding:
    """A fault of `rows` int[n], out of `total` of the `unit`. `twins`: earlier rows that these repeat."""

    name: str
    rows: np.ndarray
    total: int
    what: str
    fix: str
    unit: str = "rows"
    severity: Severity = "warn"
    twins: Sequence[int] = ()

    @property
    def share(self) -> float:
        """The fraction of `total` with this fault."""
        return len(self.rows) / max(1, self.total)


def audit(corpus: Corpus, scanned: TokenScan) -> list[AuditFinding]:
    """Return all findings, the worst first. Call `rows_named` for the rows whose places `audit_json` needs."""
    order: list[Severity] = ["bad", "warn", "note"]
    looked_for = (*_find_faults(corpus, scanned), *_find_repeats(corpus, scanned), *_judge_pictures(corpus, scanned))
    found = [finding for finding in looked_for if len(finding.rows)]
    return sorted(found, key=lambda finding: (order.index(finding.severity), -finding.share))


def rows_named(findings: Sequence[AuditFinding]) -> set[int]:
    """Return the rows that are shown as examples."""
    return {int(row) for finding in findings for row in (*finding.rows[:EXAMPLES], *finding.twins[:EXAMPLES])}


def audit_json(findings: Sequence[AuditFinding], places: Mapping[int, str]) -> list[Shown]:
    """Return the findings as plain containers, with the places of their first rows."""
    lines = []
    for finding in findings:
        where = [visible(places[int(row)]) for row in finding.rows[:EXAMPLES]]
        for at, twin in enumerate(finding.twins[:EXAMPLES]):
            where[at] += f" (as {visible(places[twin])})"
        words = {name: getattr(finding, name) for name in ("name", "what", "fix", "unit", "severity")}
        lines.append({**words, "count": len(finding.rows), "share": round(finding.share, 6), "where": where})
    return lines


FAULTS = {
    "no_trained_token": (
        "nothing of these rows would be trained, so they are dropped",
        "See data.loss_on, weights of turns, and data.max_length if the answers begin beyond it.",
    ),
    "identical_answers": (
        "the chosen and the rejected answer are the same, so these pairs are dropped",
        "Take them out, or see data.max_length.",
    ),
    "marker_in_content": (
        "the content holds text that becomes control tokens, such as the end of a turn",
        "Take the markers out of the texts: they end or begin turns in the middle of one.",
    ),
    "dropped_system_prompt": (
        "the chat template leaves the system prompt out, so the model never sees it",
        "Set data.chat_template to one that has system prompts, or put them into the first question.",
    ),
    "answer_cut": (
        "the answer is cut before its end by data.max_length={max_length}, so the model learns not to stop",
        "Raise data.max_length (inspect with data.max_length=null says what each would cut), or set data.overlong=drop.",
    ),
    "end_never_trained": (
        "no end of an answer ({ends}) is trained, so the model does not learn to stop",
        "In tokenised rows, add EOS with a label; otherwise check the tokenizer's eos_token and data.chat_template.",
    ),
    "end_trained_twice": (
        "the end of an answer ({ends}) is trained twice in a row",
        "The texts end in the end token already, and it is added again: take it out of them.",
    ),
    "doubled_bos": (
        "documents begin with BOS twice: the template writes it, and the text or the tokens hold it already",
        "Take BOS out of the texts, or of the template.",
    ),
    "unknown_tokens": (
        "the tokenizer has no token for part of the text, which becomes its token for unknown text",
        "Use the model's own tokenizer, or one that knows these characters.",
    ),
}
"""Faults of rows: problem and fix."""
REPEATS = {
    "exact_duplicates": (
        "the same tokens as an earlier example, so it counts twice",
        "Remove them, or use weight if the repetition is intended.",
    ),
    "eval_in_train": (
        "held-out examples that are also trained on, token for token",
        "Remove one copy: memorised examples make the eval loss too low.",
    ),
}
"""Repeated examples: problem and fix, for trained and then for held-out examples."""
FATAL = ("no_trained_token", "end_never_trained")
"""Faults that make training pointless if many rows have them."""


def _find_faults(corpus: Corpus, scanned: TokenScan) -> Iterator[AuditFinding]:
    """Find faults of rows of data.train, from their fates and their tokens."""
    fates = corpus.fates
    cut, split = fates["truncated"][corpus.row_of], fates["split"][corpus.row_of]
    by_row = {
        "no_trained_token": corpus.dropped_for(UNTRAINED),
        "identical_answers": corpus.dropped_for(SAME),
        "marker_in_content": fates["marker"],
        "dropped_system_prompt": fates["drops_system"],
    }
    by_document = {
        "answer_cut": cut & scanned.open,
        "end_never_trained": ~cut & ~split & ~scanned.ends,
        "end_trained_twice": scanned.ends_twice,
        "doubled_bos": scanned.two_bos,
        "unknown_tokens": scanned.unknown,
    }
    rows = {name: np.flatnonzero(corpus.rows_of_train & chosen) for name, chosen in by_row.items()}
    rows |= {name: np.unique(corpus.row_of[corpus.in_train & chosen]) for name, chosen in by_document.items()}
    total = int(corpus.rows_of_train.sum())
    ends = " or ".join(map(corpus.tokenizer.text_of, corpus.end_ids)) or "there is none"
    for name, (what, fix) in FAULTS.items():
        bad = name in FATAL and len(rows[name]) >= POINTLESS * total
        what = what.format(max_length=corpus.config.data.max_length, ends=ends)
        yield AuditFinding(name, rows[name], total, what, fix, severity="bad" if bad else "warn")


def _find_repeats(corpus: Corpus, scanned: TokenScan) -> Iterator[AuditFinding]:
    """Find repeated examples, and held-out examples that are trained."""
    together, unit = corpus.spec.documents, corpus.spec.examples
    trained, held_out = (np.flatnonzero(chosen)[::together] for chosen in (corpus.in_train, corpus.in_eval))
    examples = np.concatenate([trained, held_out])  # each by its first document
    own = examples[:, None] + np.arange(together)
    first = find_equal((scanned.hashes[own] * np.array([1, 3], np.uint64)[:together]).sum(1))
    for held, (name, (what, fix)) in enumerate(REPEATS.items()):
        side = slice(len(trained), None) if held else slice(len(trained))
        repeats = np.flatnonzero((first[side] >= 0) & (first[side] < len(trained))) + (side.start or 0)
        rows, twins = corpus.row_of[examples[repeats]], corpus.row_of[examples[first[repeats]]].tolist()
        total, severity = (len(held_out), "warn") if held else (len(trained), "note")
        yield AuditFinding(name, rows, total, what, fix, unit, severity, twins)


def _judge_pictures(corpus: Corpus, scanned: TokenScan) -> Iterator[AuditFinding]:
    """Find faults of the pictures of data.train."""
    data, total = corpus.config.data, int(corpus.rows_of_train.sum())
    token = " or ".join(map(corpus.tokenizer.text_of, corpus.picture_ids))
    for name, rows, twins in find_picture_faults(corpus, scanned.stray):
        what, fix = PICTURE_FAULTS[name]
        what = what.format(token=token, max_length=data.max_length, most=data.max_picture_tokens)
        yield AuditFinding(
            name, rows, total, what, fix, severity="note" if name in MEANT else "warn", twins=twins[:EXAMPLES]
        )


def sample_answers(
    data: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> tuple[list[str], list[int]]:
    """Return remarks on pointless training, and the control tokens that end trained answers.

    A sample of the documents takes a few milliseconds. `tokenizer` is transformers' own. A token that also stands within an answer
    (gpt-oss: <|end|> after its thoughts) ends one only if it is a document's last token.
    """
    documents = data.documents if isinstance(data, PairDataset) else data
    report, warnings = documents.report, list[str]()
    untrained = report.dropped.get(UNTRAINED, 0)
    if untrained >= POINTLESS * report.rows:
        what = f"{untrained:,} of {report.rows:,} rows have nothing to train and are dropped"
        warnings.append(f"{what} (data.loss_on, data.max_length)")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    control = {token for token, known in added.items() if getattr(known, "special", False)}
    control |= {*tokenizer.all_special_ids}
    sample = np.unique(np.linspace(0, len(documents) - 1, min(_SAMPLE, len(documents))).astype(int)).tolist()
    whole = [documents[number] for number in sample if max_length is None or documents.lengths[number] < max_length]
    last, earlier, inside, endless = set[int](), set[int](), set[int](), 0
    for document in whole:
        endless += control.isdisjoint(document.input_ids[document.loss_mask].tolist())
        borders = np.flatnonzero(np.diff(document.loss_mask)) + 1
        answers = np.split(document.input_ids, borders)[
            int(not document.loss_mask[0]) :: 2
        ]  # every other part is trained
        for number, ids in enumerate(map(np.ndarray.tolist, answers), start=1):
            places = [at for at, token in enumerate(ids) if token in control]
            if places and not str(tokenizer.decode(ids[places[-1] + 1 :])).strip():
                (last if number == len(answers) else earlier).add(ids[places.pop()])
            inside |= {ids[at] for at in places}
    if whole and endless >= POINTLESS * len(whole):
        what = f"{endless:,} of {len(whole):,} sampled documents train no end of an answer"
        warnings.append(f"{what}, such as {tokenizer.eos_token or 'EOS'}: the model would not learn to stop")
    remarks = [f"data: {warning}; packtrain inspect shows which" for warning in warnings]
    return remarks, sorted(last | (earlier - inside))


BLOCK = 1 << 19
"""Tokens read together."""
THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, eq=False)
class TokenScan:
    """Properties of each document's tokens, by its number (corpus.py).

    `hashes`: uint64 of all tokens and pictures. The others are bool. The document trains the end of an answer (`ends`) or two ends in a row
    (`ends_twice`), begins with two BOS (`two_bos`), has a token for text that the tokenizer does not know (`unknown`), ends inside a
    trained answer (`open`), or has a token of a picture outside of its pictures (`stray`).
    """

    hashes: np.ndarray
    ends: np.ndarray
    ends_twice: np.ndarray
    two_bos: np.ndarray
    unknown: np.ndarray
    open: np.ndarray
    stray: np.ndarray


def scan(corpus: Corpus) -> TokenScan:
    """Read every token of the corpus's stores."""
    total, pictures, wanted = len(corpus.documents), corpus.pictures, corpus.picture_ids
    scanned = TokenScan(np.empty(total, np.uint64), *(np.zeros(total, bool) for _ in range(6)))

    def scan_block(block: tuple[int, int, int]) -> None:
        store_number, first, end = block
        store = corpus.stores[store_number]
        ids, mask = store.read(first, end)
        lengths = store.lengths[first:end].astype(np.int64)
        inside = slice(*(int(corpus.documents.first[store_number]) + at for at in (first, end)))
        seen = pictures[slice(*np.searchsorted(pictures["document"], [inside.start, inside.stop]))]
        scanned.hashes[inside] = hash_documents(ids, lengths)
        own = seen["hash"] * (2 * seen["start"].astype(np.uint64) + np.uint64(1))
        np.add.at(scanned.hashes, seen["document"], own)
        _set_flags(scanned, inside, corpus, ids, mask, lengths)
        scanned.stray[inside] = _find_strays(ids, lengths, seen, inside.start, wanted)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(scan_block, _cut_blocks(corpus.stores)))
    return scanned


def _cut_blocks(stores: tuple[Store, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield (store, first document, end) of blocks of about BLOCK tokens."""
    for number, store in enumerate(stores):
        ends = np.cumsum(store.lengths, dtype=np.int64)
        first = 0
        while first < len(store):
            before = ends[first - 1] if first else 0
            end = max(first + 1, int(np.searchsorted(ends, before + BLOCK, side="right")))
            yield number, first, end
            first = end


def _set_flags(
    scanned: TokenScan, inside: slice, corpus: Corpus, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray
) -> None:
    """Set the flags of the documents `inside`, a block of `ids` int32[T] and `mask` bool[T]."""
    starts = np.cumsum(lengths) - lengths
    last = starts + lengths - 1
    is_end = np.isin(ids, corpus.end_ids)
    trained = np.flatnonzero(is_end & mask)
    document = np.searchsorted(starts, trained, side="right") - 1
    scanned.ends[inside][document] = True
    # with at most one token between them, such as a line end: the header of another turn has more
    scanned.ends_twice[inside][document[1:][(np.diff(document) == 0) & (np.diff(trained) <= 2)]] = True
    if (bos := corpus.tokenizer.bos_id) is not None:
        second = ids[np.minimum(starts + 1, len(ids) - 1)]
        scanned.two_bos[inside] = (lengths > 1) & (ids[starts] == bos) & (second == bos)
    if corpus.unknown_id is not None:
        scanned.unknown[inside] = np.logical_or.reduceat(ids == corpus.unknown_id, starts)
    scanned.open[inside] = mask[last] & ~is_end[last]


def _find_strays(
    ids: np.ndarray, lengths: np.ndarray, pictures: np.ndarray, first: int, wanted: list[int]
) -> np.ndarray:
    """Return which documents, from number `first` on, have `wanted` tokens outside of their pictures: bool[documents]."""
    starts = np.cumsum(lengths) - lengths
    borders, at = np.zeros(len(ids) + 1, np.int8), starts[pictures["document"] - first]
    np.add.at(borders, at + pictures["start"], 1)
    np.add.at(borders, at + pictures["end"], -1)
    return np.logical_or.reduceat(np.isin(ids, wanted) & (np.cumsum(borders[:-1]) == 0), starts)


def hash_documents(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Hash documents lying end to end: uint64[documents]. A hash covers tokens and places: Σ hash of the token · (2 · place + 1)."""
    starts = np.cumsum(lengths) - lengths
    values = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    plain = np.add.reduceat(values, starts)
    placed = np.add.reduceat(values * np.arange(len(values), dtype=np.uint64), starts)
    return np.uint64(2) * (placed - starts.astype(np.uint64) * plain) + plain + lengths.astype(np.uint64)


def find_equal(hashes: np.ndarray) -> np.ndarray:
    """Return the place of the first equal value: int64[n]. The first itself has -1."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return np.where(first[inverse] == np.arange(len(hashes)), -1, first[inverse])
