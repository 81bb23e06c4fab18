"""Documents as a reader can see them: turns of text, each with what is trained, what is a control token, and what was cut."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from packtrain.config.schema import Format
from packtrain.data.sources.chunks import BadRow, RawRow
from packtrain.data.tokens.encode import ENCODERS, Encoder
from packtrain.inspect.corpus import Corpus
from packtrain.inspect.scan.roles import PARTS, Headers, headers_of
from packtrain.inspect.scan.vocabulary import Vocabulary
from packtrain.wording import visible

MOST_TOKENS = 20_000
"""Tokens of a part that are shown."""


@dataclass(frozen=True)
class Shower:
    """Shows documents of a corpus."""

    corpus: Corpus
    vocabulary: Vocabulary

    @cached_property
    def headers(self) -> Headers:
        return headers_of(self.corpus.chat)

    @cached_property
    def encoder(self) -> Encoder:
        """Makes whole documents: nothing is cut."""
        corpus = self.corpus
        return ENCODERS[corpus.kind](corpus.tokenizer, corpus.template, replace(corpus.data, max_length=None))

    def example(self, number: int, place: str, row: RawRow, *, shared: bool = False) -> dict[str, Any]:
        """The example that begins with document `number`, of the `row` at `place`; of a pair the prompt once if it is `shared`."""
        corpus = self.corpus
        own = int(corpus.row_of[number])
        fate = corpus.fates[own]
        documents = [corpus.document(number + side) for side in range(corpus.together)]
        kept = [(one.input_ids, one.loss_mask, np.zeros(len(one.input_ids), bool)) for one in documents]
        if fate["truncated"]:
            kept = self._with_cut(kept, own, number, row)
        of_row = np.flatnonzero(corpus.row_of == own) if fate["documents"] > corpus.together else []
        parts = (
            f", part {1 + (number - int(of_row[0])) // corpus.together} of {len(of_row) // corpus.together}"
            if len(of_row)
            else ""
        )
        shown = self._shown(kept, corpus.format_of(number), f"{place}{parts}", shared=shared)
        notes = ["held out"] if corpus.in_eval[number] else []
        if corpus.labels is not None:
            notes.insert(0, "desirable" if corpus.labels[number] else "undesirable")
        return {**shown, "note": ", ".join(notes)}

    def row(self, store: int, place: str, row: RawRow, dropped: str) -> dict[str, Any]:
        """A row that gave no document, `dropped` for a reason: all of it is cut."""
        try:
            whole = self.encoder.documents_of(row, cast(Format, self.corpus.stores[store].format))
        except BadRow as bad:
            return {
                "where": visible(place),
                "note": visible(f"left out: {bad.what}"),
                "tokens": 0,
                "trained": 0,
                "cut": 0,
                "parts": [],
            }
        kept = [(ids, mask, np.ones(len(ids), bool)) for ids, mask in whole]
        return {**self._shown(kept, self.corpus.stores[store].format, place), "note": f"left out: {dropped}"}

    def _with_cut(self, kept: list[Any], own: int, number: int, row: RawRow) -> list[Any]:
        """The documents with the tokens that data.max_length cut, where the row still gives as many documents."""
        corpus = self.corpus
        try:
            whole = self.encoder.documents_of(row, cast(Format, corpus.format_of(number)))
        except BadRow:
            return kept
        first = int(np.flatnonzero(corpus.row_of == own)[0])
        if len(whole) != corpus.fates["documents"][own]:
            return kept
        found = []
        for side, (ids, _, _) in enumerate(kept):
            all_ids, mask = whole[number - first + side]
            cut = np.arange(len(all_ids)) >= len(ids)
            found.append((all_ids, mask, cut[::-1] if corpus.data.overlong == "keep_end" else cut))
        return found

    def _shown(self, documents: list[Any], format: str, place: str, *, shared: bool = False) -> dict[str, Any]:
        names = ("chosen", "rejected") if self.corpus.pairs else ("",)
        pieces = [(name, *document) for name, document in zip(names, documents, strict=False)]
        common = 0
        if shared and len(documents) == 2:
            prompt = min(int(np.argmax(mask & ~cut)) for _, mask, cut in documents)
            common = max(0, prompt - 1)  # the last token of the prompt predicts the answer: it runs with each of them
            if common:
                pieces.insert(0, ("prompt", *(one[:common] for one in documents[0])))
        parts = []
        for name, ids, mask, cut in pieces:
            first = common if name in names and common else 0
            shown = self._part(ids, mask, cut, format, first)
            parts.append({"name": name, "tokens": int((~cut[first:]).sum()), "turns": shown})
        kept = [(mask & ~cut).sum() for _, mask, cut in documents]
        return {
            "where": visible(place),
            "note": "",
            "tokens": sum(part["tokens"] for part in parts),
            "trained": int(sum(kept)),
            "cut": int(sum(cut.sum() for *_, cut in documents)),
            "parts": parts,
        }

    def _part(
        self, ids: np.ndarray, mask: np.ndarray, cut: np.ndarray, format: str, first: int
    ) -> list[dict[str, Any]]:
        """The tokens from `first` on as turns."""
        names, role, begins = self._roles(ids, mask, format)
        special = self.vocabulary.is_special[ids]
        texts = self._texts(ids)
        end = min(len(ids), first + MOST_TOKENS)
        turns: list[dict[str, Any]] = []
        before: tuple[bool, ...] = ()
        for at in range(first, end):
            if at == first or begins[at]:
                turns.append({"role": names[role[at]], "spans": []})
                before = ()
            style = bool(mask[at]), bool(special[at]), bool(cut[at])
            if style == before:
                turns[-1]["spans"][-1]["text"] += texts[at]
            else:
                turns[-1]["spans"].append(
                    {"text": texts[at], "trained": style[0], "special": style[1], "cut": style[2]}
                )
            before = style
        if end < len(ids):
            turns.append({"role": f"… and {len(ids) - end:,} tokens more", "spans": []})
        return turns

    def _roles(self, ids: np.ndarray, mask: np.ndarray, format: str) -> tuple[Sequence[str], np.ndarray, np.ndarray]:
        """Names of roles, the role of each token int[T], and where turns begin bool[T]."""
        places, roles = self.headers.find(ids)
        begins = np.zeros(len(ids), bool)
        if not len(places):
            names = PARTS.get(format, ("prompt", "answer"))
            begins[1:] = (mask[1:] != mask[:-1]) & (names[0] != names[1])
            return names, mask.astype(np.int64), begins
        begins[places] = True
        role = np.zeros(len(ids), np.int64)
        for place, number in zip(places.tolist(), roles.tolist(), strict=True):
            role[place:] = number
        return self.headers.names, role, begins

    def _texts(self, ids: np.ndarray) -> list[str]:
        """The visible text of each token; a character of several tokens is that of its last one."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return [visible(decoder.decode(self.vocabulary.texts[token])) for token in ids.tolist()]
