"""Documents as a reader can see them: turns of text, each with what is trained, what is a control token, and what was cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from packtrain.config.schema import Format
from packtrain.data.sources.chunks import BadRow, RawRow
from packtrain.data.tokens.encode import Encoder
from packtrain.inspect.corpus import Corpus
from packtrain.inspect.roles import PARTS, Headers, learn_headers
from packtrain.wording import visible

MOST_TOKENS = 20_000
"""Tokens of a part that are shown."""
Piece = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ids int32[n] of a document, which are trained targets bool[n], and which were cut bool[n]."""


@dataclass(frozen=True)
class DocumentView:
    """Shows documents of a corpus, the prompts of pairs once where they are `shared`."""

    corpus: Corpus
    shared: bool

    @cached_property
    def headers(self) -> Headers:
        return learn_headers(self.corpus.chat)

    @cached_property
    def encoder(self) -> Encoder:
        """Makes whole documents: nothing is cut."""
        corpus = self.corpus
        return Encoder(corpus.tokenizer, corpus.template, replace(corpus.data, max_length=None), corpus.kind)

    def show(self, number: int, place: str, row: RawRow) -> dict[str, Any]:
        """The example that begins with document `number`, of the `row` at `place`."""
        corpus, together = self.corpus, self.corpus.together
        own = int(corpus.row_of[number])
        fate, format = corpus.fates[own], corpus.format_of(number)
        documents = [corpus.document(number + side) for side in range(together)]
        pieces = [(own.input_ids, own.loss_mask, np.zeros(len(own.input_ids), bool)) for own in documents]
        first = int(np.searchsorted(corpus.row_of, own))
        if fate["truncated"]:
            pieces = self._restore_cut(pieces, number - first, row, int(fate["documents"]), format)
        part = f", part {1 + (number - first) // together} of {fate['documents'] // together}"
        notes = [] if corpus.labels is None else ["desirable" if corpus.labels[number] else "undesirable"]
        notes += ["held out"] if corpus.in_eval[number] else []
        place += part if fate["documents"] > together else ""
        return {**self._show(pieces, format, place), "note": ", ".join(notes)}

    def show_dropped(self, store: int, place: str, row: RawRow, reason: str) -> dict[str, Any]:
        """A row that gave no document, dropped for a `reason`: all of it is cut."""
        format = self.corpus.stores[store].format
        try:
            whole, _ = self.encoder.encode_row(row, cast(Format, format))
        except BadRow as bad:
            note = visible(f"dropped: {bad.what}")
            return {"where": visible(place), "note": note, "tokens": 0, "trained": 0, "cut": 0, "parts": []}
        pieces = [(ids, mask, np.ones(len(ids), bool)) for ids, mask in whole]
        return {**self._show(pieces, format, place), "note": f"dropped: {reason}"}

    def _restore_cut(self, pieces: list[Piece], first: int, row: RawRow, documents: int, format: str) -> list[Piece]:
        """The documents with the tokens that data.max_length cut, where the row still gives as many documents."""
        try:
            whole, _ = self.encoder.encode_row(row, cast(Format, format))
        except BadRow:
            return pieces
        if len(whole) != documents:
            return pieces
        restored = []
        for (ids, _, _), (all_ids, mask) in zip(pieces, whole[first:], strict=False):
            cut = np.arange(len(all_ids)) >= len(ids)
            restored.append((all_ids, mask, cut))
        return restored

    def _show(self, documents: list[Piece], format: str, place: str) -> dict[str, Any]:
        names = ("chosen", "rejected") if self.corpus.pairs else ("",)
        parts, common = [], 0
        if (
            self.shared and len(documents) == 2
        ):  # the last token of the prompt predicts the answer: it runs with each of them
            common = max(0, min(int(np.argmax(mask & ~cut)) for _, mask, cut in documents) - 1)
        if common:
            ids, mask, cut = (values[:common] for values in documents[0])
            parts.append({"name": "prompt", "tokens": common, "turns": self._show_turns(ids, mask, cut, format, 0)})
        for name, (ids, mask, cut) in zip(names, documents, strict=False):
            turns = self._show_turns(ids, mask, cut, format, common)
            parts.append({"name": name, "tokens": int((~cut[common:]).sum()), "turns": turns})
        return {
            "where": visible(place),
            "note": "",
            "tokens": sum(part["tokens"] for part in parts),
            "trained": int(sum((mask & ~cut).sum() for _, mask, cut in documents)),
            "cut": int(sum(cut.sum() for *_, cut in documents)),
            "parts": parts,
        }

    def _show_turns(
        self, ids: np.ndarray, mask: np.ndarray, cut: np.ndarray, format: str, first: int
    ) -> list[dict[str, Any]]:
        """The tokens from `first` on as turns, each of spans of tokens in one style."""
        names, begins = self._find_turns(ids, mask, format)
        special = np.isin(ids, list(self.corpus.tokenizer.special_ids))
        texts = self._decode(ids)
        end = min(len(ids), first + MOST_TOKENS)
        turns: list[dict[str, Any]] = []
        role = begins[max(place for place in begins if place <= first)]
        for at in range(first, end):
            if at == first or at in begins:
                role = begins.get(at, role)
                turns.append({"role": names[role], "spans": []})
            style = {"trained": bool(mask[at]), "special": bool(special[at]), "cut": bool(cut[at])}
            spans = turns[-1]["spans"]
            if spans and style.items() <= spans[-1].items():
                spans[-1]["text"] += texts[at]
            else:
                spans.append({"text": texts[at], **style})
        if end < len(ids):
            turns.append({"role": f"… and {len(ids) - end:,} tokens more", "spans": []})
        return turns

    def _find_turns(self, ids: np.ndarray, mask: np.ndarray, format: str) -> tuple[tuple[str, ...], dict[int, int]]:
        """Names of roles, and the role of each turn by the place where it begins."""
        places, roles = self.headers.find(ids)
        if len(places):
            return self.headers.names, {0: 0, **dict(zip(places.tolist(), roles.tolist(), strict=True))}
        names = PARTS.get(format, ("prompt", "answer"))
        borders = np.flatnonzero(mask[1:] != mask[:-1]) + 1 if names[0] != names[1] else []
        return names, {int(at): int(mask[at]) for at in (0, *borders)}

    def _decode(self, ids: np.ndarray) -> list[str]:
        """The visible text of each token; a character of several tokens is that of its last one."""
        rust, stream = Tokenizer.from_str(self.corpus.tokenizer.backend), DecodeStream(skip_special_tokens=False)
        return [visible(stream.step(rust, token) or "") for token in ids.tolist()]
