"""What is inspected: the tokenised data of a config, each document numbered once however often it is trained on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from packtrain.config.objective import TRAITS, ObjectiveKind
from packtrain.config.schema import Data, DataSource, Split, sources
from packtrain.data.dataset import PairDataset, TokenDataset
from packtrain.data.prepare import PreparedData
from packtrain.data.sources.chunks import RawRow
from packtrain.data.sources.locate import Source, locate
from packtrain.data.tokens.cache import Document, Store
from packtrain.data.tokens.chat_template import Template, choose_template
from packtrain.data.tokens.loss_mask import ChatEncoder
from packtrain.data.tokens.tokenizer import PlainTokenizer, plain_tokenizer


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of `train` and `eval`, those of pairs one after the other (chosen, rejected).

    A document has one number, counted through the `stores`; a row of a source likewise through all rows of the stores.
    """

    data: Data
    kind: ObjectiveKind
    seed: int
    tokenizer: PlainTokenizer
    template: Template | None
    unknown: int | None
    train: TokenDataset
    eval: TokenDataset | None
    pairs: PairDataset | None

    @property
    def unit(self) -> str:
        """What the objective trains on."""
        return TRAITS[self.kind].unit

    @property
    def together(self) -> int:
        """Documents of one example."""
        return TRAITS[self.kind].documents

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        """The stores of train, then those of eval that are others."""
        return (
            self.train.stores if self._shares_stores or self.eval is None else (*self.train.stores, *self.eval.stores)
        )

    @property
    def _shares_stores(self) -> bool:
        """Whether eval is a part of the rows of data.train."""
        return isinstance(self.data.eval, (int, float))

    def source(self, store: int) -> Source:
        """Where the rows of a store come from."""
        roles: tuple[Split, ...] = ("train", "eval")
        pairs: list[tuple[DataSource, Split]] = [
            (source, role) for role in roles for source in sources(getattr(self.data, role), role)
        ]
        given, role = pairs[store]
        return locate(given, role, self.seed, self.kind, self.data.split_text)

    @cached_property
    def first_documents(self) -> np.ndarray:
        """int64[stores + 1]: the number of each store's first document."""
        return np.concatenate([[0], np.cumsum([len(store) for store in self.stores])]).astype(np.int64)

    @cached_property
    def first_rows(self) -> np.ndarray:
        """int64[stores + 1]: the number of each store's first row."""
        return np.concatenate([[0], np.cumsum([len(store.fates) for store in self.stores])]).astype(np.int64)

    @cached_property
    def fates(self) -> np.ndarray:
        """FATES[rows] of all rows."""
        return self.stores[0].fates if len(self.stores) == 1 else np.concatenate([store.fates for store in self.stores])

    @cached_property
    def row_of(self) -> np.ndarray:
        """int64[documents]: the row that each document comes from."""
        return np.repeat(np.arange(len(self.fates)), self.fates["documents"])

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32[documents]: tokens."""
        return np.concatenate([store.lengths for store in self.stores])

    @cached_property
    def labels(self) -> np.ndarray | None:
        """bool[documents]: whether each is a desirable answer; None where that is not said."""
        return np.concatenate([store.labels() for store in self.stores]) if self.kind == "kto" else None

    @cached_property
    def times(self) -> np.ndarray:
        """int64[documents]: how often an epoch trains on each."""
        return np.bincount(self.train.rows, minlength=len(self.lengths))

    @cached_property
    def in_train(self) -> np.ndarray:
        """bool[documents]: those that are trained on."""
        return self.times > 0

    @cached_property
    def in_eval(self) -> np.ndarray:
        """bool[documents]: those that are held out."""
        inside = np.zeros(len(self.lengths), bool)
        if self.eval is not None:
            inside[self.eval.rows + (0 if self._shares_stores else self.first_documents[len(self.train.stores)])] = True
        return inside

    @cached_property
    def rows_of_train(self) -> np.ndarray:
        """bool[rows]: those of data.train that are not held out; also those that were dropped."""
        inside = np.arange(len(self.fates)) < self.first_rows[len(self.train.stores)]
        inside[self.row_of[self.in_eval]] = False
        return inside

    def document(self, number: int) -> Document:
        """The tokens of a document."""
        store = self.store_of(number)
        return self.stores[store][int(number - self.first_documents[store])]

    def read(self, number: int) -> np.ndarray:
        """The ids of a document, read and not mapped."""
        store = self.store_of(number)
        at = int(number - self.first_documents[store])
        return self.stores[store].read(at, at + 1)[0]

    def dropped_for(self, reasons: Sequence[str]) -> np.ndarray:
        """bool[rows]: those that were dropped for one of these reasons."""
        numbers = [[at for at, reason in enumerate(store.reasons) if reason in reasons] for store in self.stores]
        return np.concatenate(
            [np.isin(store.fates["dropped"], own) for store, own in zip(self.stores, numbers, strict=True)]
        )

    def store_of(self, document: int) -> int:
        """The store of a document."""
        return int(np.searchsorted(self.first_documents, document, side="right")) - 1

    def format_of(self, document: int) -> str:
        """The format of a document's source."""
        return self.stores[self.store_of(document)].format

    @cached_property
    def chat(self) -> ChatEncoder | None:
        """Renders conversations; None without a chat template."""
        return None if self.template is None else ChatEncoder(self.tokenizer, self.template)

    @cached_property
    def end_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""
        if self.chat is not None:
            return sorted(self.chat.end_ids)
        return [] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]

    @property
    def end_names(self) -> str:
        """The tokens that end an answer, as text."""
        return " or ".join(map(self.tokenizer.text_of, self.end_ids)) or "there is none"


def corpus_of(data: Data, kind: ObjectiveKind, tokenizer: Any, prepared: PreparedData, *, seed: int) -> Corpus:
    """The corpus of data that is `prepared` for the objective `kind`, with the transformers tokenizer that made its tokens."""
    pairs = prepared.train if isinstance(prepared.train, PairDataset) else None
    sides: Any = (prepared.train, prepared.eval)
    train, held_out = (getattr(side, "documents", side) for side in sides)
    unknown, plain = tokenizer.unk_token_id, plain_tokenizer(tokenizer)
    control = {plain.eos_id, plain.bos_id, tokenizer.pad_token_id}  # GPT-2's <|endoftext|> is all of them
    template = choose_template(data.chat_template, tokenizer)
    return Corpus(data, kind, seed, plain, template, None if unknown in control else unknown, train, held_out, pairs)


def read_rows(corpus: Corpus, rows: Collection[int]) -> dict[int, tuple[str, RawRow]]:
    """The place (file:line) and content of these rows of a corpus, read again from their sources."""
    contents: dict[int, tuple[str, RawRow]] = {}
    for store, start in enumerate(corpus.first_rows[:-1].tolist()):
        wanted = {row for row in rows if start <= row < corpus.first_rows[store + 1]}
        first = start
        for chunk in corpus.source(store).chunks() if wanted else ():
            if wanted & set(range(first, first + len(chunk))):
                contents |= {first + at: row for at, row in enumerate(chunk.rows()) if first + at in wanted}
            first += len(chunk)
            if first > max(wanted):
                break
    return contents
