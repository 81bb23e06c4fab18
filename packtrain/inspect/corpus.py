"""Tokenised data of a config, and its steps. Each document has one number, even if it is trained on several times."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, get_args

import numpy as np
from transformers import AutoConfig

from packtrain.config.schema import DEFAULT_ROW_TOKENS, Packing, RunConfig, Split, sources
from packtrain.data.dataset import PairDataset, TokenDataset
from packtrain.data.pictures.album import tabulate_pictures
from packtrain.data.prepare import PreparedData, prepare
from packtrain.data.sources.chunks import Chunk
from packtrain.data.sources.locate import Source, locate
from packtrain.data.tokens.cache import Store
from packtrain.data.tokens.chat_template import choose_template
from packtrain.data.tokens.encode import UNUSABLE
from packtrain.data.tokens.loss_mask import ChatEncoder
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.data.tokens.tokenizer import PlainTokenizer, plain_tokenizer
from packtrain.errors import UserError
from packtrain.objectives.spec import Spec
from packtrain.packing.balance import choose_ranks_per_row, cost_of_attention
from packtrain.packing.prefixes import PrefixIndex, index_prefixes
from packtrain.packing.schedule import Schedule, make_schedule
from packtrain.plan.known_model import adapter_shapes, known_sizes, weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents of `train` and `eval`. Documents of `pairs` follow each other (chosen, rejected).

    A document has one number, counted through the `stores`; a row of a source has one, counted through all rows of the stores.
    `end_ids` are the tokens that end an answer. `unknown_id` is the token for text that the tokenizer does not know.
    """

    config: RunConfig
    tokenizer: PlainTokenizer
    end_ids: Sequence[int]
    unknown_id: int | None
    train: TokenDataset
    eval: TokenDataset | None
    pairs: PairDataset | None

    @property
    def spec(self) -> Spec:
        """Declaration of the objective."""
        return self.config.objective.spec

    @cached_property
    def prefixes(self) -> PrefixIndex | None:
        """Index of common beginnings in train; None if they do not matter."""
        return index_prefixes(self.train) if self.config.compares_prefixes else None

    @cached_property
    def within(self) -> PrefixIndex | None:
        """Index of common beginnings within each example of train; None if each has one document."""
        return None if self.train.examples is None else index_prefixes(self.train, self.train.examples)

    @cached_property
    def borders(self) -> np.ndarray:
        """Borders of the examples in the documents of the stores, int64 [examples + 1]."""
        borders = self.documents.examples
        return np.arange(0, len(self.documents) + 1, self.spec.documents) if borders is None else borders

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        """Stores of train, then the stores that only eval has."""
        if self.eval is None or self._shares_stores:
            return self.train.stores
        return (*self.train.stores, *self.eval.stores)

    @property
    def _shares_stores(self) -> bool:
        """Whether eval is a part of the rows of data.train."""
        return isinstance(self.config.data.eval, (int, float))

    def source(self, store: int) -> Source:
        """Return the source of a store's rows."""
        config, split_names = self.config, get_args(Split)
        splits = [(source, role) for role in split_names for source in sources(getattr(config.data, role), role)]
        return locate(*splits[store], config.trainer.seed, config.objective.kind, config.data.split_text)

    @cached_property
    def documents(self) -> TokenDataset:
        """All documents of the stores."""
        return TokenDataset(self.stores, np.arange(sum(map(len, self.stores))), self.train.report)

    @cached_property
    def first_rows(self) -> np.ndarray:
        """Number of each store's first row, int64[stores + 1]."""
        return np.concatenate([[0], np.cumsum([len(store.fates) for store in self.stores])]).astype(np.int64)

    @cached_property
    def fates(self) -> np.ndarray:
        """Fates of all rows, FATES[rows]."""
        return self.stores[0].fates if len(self.stores) == 1 else np.concatenate([store.fates for store in self.stores])

    @cached_property
    def row_of(self) -> np.ndarray:
        """Row of each document, int64[documents]."""
        return np.repeat(np.arange(len(self.fates)), self.fates["documents"])

    @cached_property
    def pictures(self) -> np.ndarray:
        """Pictures of all documents, PICTURES[pictures], in the order of the documents."""
        return tabulate_pictures((store.pictures, len(store)) for store in self.stores)

    @cached_property
    def picture_ids(self) -> list[int]:
        """Return the picture tokens that the model's config names; none if the config is unknown."""
        sizes = known_sizes(self.config.model)
        found = (sizes.get(name) for name in ("image_token_id", "image_token_index"))
        return [token for token in found if isinstance(token, int)]

    @cached_property
    def labels(self) -> np.ndarray | None:
        """Whether each document is a desirable answer, bool[documents]. None for objectives without labels."""
        labelled = self.spec.examples == "answers"
        return np.concatenate([store.labels() for store in self.stores]) if labelled else None

    @cached_property
    def in_train(self) -> np.ndarray:
        """Whether each document is trained on, bool[documents]."""
        return np.bincount(self.train.rows, minlength=len(self.documents)) > 0

    @cached_property
    def in_eval(self) -> np.ndarray:
        """Whether each document is held out, bool[documents]."""
        inside = np.zeros(len(self.documents), bool)
        if self.eval is not None:
            inside[self.eval.rows + (0 if self._shares_stores else self.documents.first[len(self.train.stores)])] = True
        return inside

    @cached_property
    def rows_of_train(self) -> np.ndarray:
        """Rows of data.train that are not held out, bool[rows]. Dropped rows are included."""
        inside = np.arange(len(self.fates)) < self.first_rows[len(self.train.stores)]
        inside[self.row_of[self.in_eval]] = False
        return inside

    def bad_rows(self) -> dict[int, str]:
        """Return the rows skipped by data.bad_rows=skip, each with the reason."""
        reasons = {reason for store in self.stores for reason in store.reasons[1:]} - {*UNUSABLE}
        return dict(sorted((int(row), why) for why in reasons for row in np.flatnonzero(self.dropped_for(why))))

    def dropped_for(self, reason: str) -> np.ndarray:
        """Return the rows dropped for this reason: bool[rows]."""
        numbers = [store.reasons.index(reason) if reason in store.reasons else -1 for store in self.stores]
        return np.concatenate([store.fates["dropped"] == own for store, own in zip(self.stores, numbers, strict=True)])


def open_corpus(
    config: RunConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prepared: PreparedData | None = None,
    progress: bool = False,
) -> Corpus:
    """Open the data of `config`. A run passes its `prepared` data and `tokenizer`; else it is tokenised, or read from the cache."""
    kind, seed = config.objective.kind, config.trainer.seed
    tokenizer = tokenizer or load_tokenizer(config.model)
    if prepared is None:
        if config.data.streaming:
            fix = "Set data.streaming=false, and data.train to a part of the data."
            raise UserError("a stream is not read as a whole", where="data.streaming", fix=fix, code="stream-not-whole")
        prepared = prepare(config.data, tokenizer, kind, seed=seed, progress=progress, model=config.model)
    plain, template = plain_tokenizer(tokenizer), choose_template(config.data.chat_template, tokenizer)
    ends = ChatEncoder(plain, template).end_ids if template else {plain.eos_id}
    unknown: int | None = getattr(tokenizer, "unk_token_id", None)
    control: set[int | None] = {plain.eos_id, plain.bos_id, getattr(tokenizer, "pad_token_id", None)}
    train, held_out = prepared.train, prepared.eval
    return Corpus(
        config,
        plain,
        end_ids=sorted(end for end in ends if end is not None),
        unknown_id=None if unknown in control else unknown,  # GPT-2's <|endoftext|> is all of them
        train=train.documents if isinstance(train, PairDataset) else train,
        eval=held_out.documents if isinstance(held_out, PairDataset) else held_out,
        pairs=train if isinstance(train, PairDataset) else None,
    )


def training_sources(config: RunConfig) -> Iterator[Source]:
    """Find the sources of data.train."""
    data, seed, kind = config.data, config.trainer.seed, config.objective.kind
    for given in sources(data.train, "train"):
        yield locate(given, "train", seed, kind, data.split_text, streaming=data.streaming)


class RowPlaces:
    """FILE:LINE of the rows of data.train, from one more reading of its sources. Raises errors of sources that have gone or changed."""

    def __init__(self, config: RunConfig, stores: Sequence[Store]) -> None:
        self._chunks, self._firsts, first = list[Chunk](), list[int](), 0
        for source, store in zip(training_sources(config), stores, strict=True):
            rows = first + len(store.fates)
            for chunk in source.chunks():
                numbers = range(chunk.numbers[0], chunk.numbers[-1] + 1)
                numbers = numbers if len(numbers) == len(chunk) else np.array(chunk.numbers)
                self._chunks.append(replace(chunk, numbers=numbers, values=()))
                self._firsts.append(first)
                first += len(chunk)
            if first != rows:
                raise ValueError(f"{source.name} has other rows now")
        documents = np.concatenate([store.fates["documents"] for store in stores])
        self._row_of = np.repeat(np.arange(first, dtype=np.int32), documents)[:: config.objective.spec.documents]

    def of(self, documents: np.ndarray) -> list[str]:
        """Return FILE:LINE of documents (or pairs), by their numbers through the stores."""
        rows = self._row_of[documents]
        chunks = np.searchsorted(self._firsts, rows, side="right") - 1
        return [self._chunks[at].place(row - self._firsts[at]) for at, row in zip(chunks, rows.tolist(), strict=True)]


def find_places(corpus: Corpus, rows: Collection[int]) -> dict[int, str]:
    """Find the places of these rows (file:line), by reading their sources again."""
    places: dict[int, str] = {}
    for store, start in enumerate(corpus.first_rows[:-1].tolist()):
        wanted = {row for row in rows if start <= row < corpus.first_rows[store + 1]}
        first = start
        for chunk in corpus.source(store).chunks() if wanted else ():
            places |= {row: chunk.place(row - first) for row in wanted.intersection(range(first, first + len(chunk)))}
            first += len(chunk)
            if first > max(wanted):
                break
    return places


def estimate_attention_cost(corpus: Corpus) -> float | None:
    """Compute training's attention cost (packing/balance.py) from the shapes of the model's weights. None if unknown."""
    config, model = corpus.config, corpus.config.model
    if config.packing.attention_cost is not None:
        return config.packing.attention_cost
    if model.init == "random":
        model = replace(model, config={"vocab_size": corpus.tokenizer.vocabulary, **model.config})
    try:
        weights = weights_of(model, scores=config.objective.spec.scores)
        known = AutoConfig.for_model(**weights.sizes)
    except Exception:  # no files here, or a model with unknown layers: libraries raise errors of every kind
        return None
    shapes = dict(weights.shapes)
    if getattr(known, "tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    extra = adapter_shapes(shapes, config.peft) if config.peft.kind == "lora" else []
    return cost_of_attention(known.get_text_config(), sum(map(math.prod, [*shapes.values(), *extra])))


def schedule_of(corpus: Corpus, packing: Packing, processes: int, cost: float) -> Schedule:
    """Make the run's steps in a packing mode, as training on `processes` does.

    Prompts count as shared unless sharing is off. Raises UserError if an example is longer than a micro-batch.
    """
    config, pairs = corpus.config, corpus.pairs
    batch, trainer = config.batch, config.trainer
    if batch.tokens_per_step is not None and batch.tokens_per_device is None:
        batch = replace(batch, tokens_per_device=DEFAULT_ROW_TOKENS)
    if pairs is None:
        slots = corpus.train.lengths
    elif packing.mode == "padding":
        slots = (2 * pairs.documents.lengths.reshape(-1, 2).max(axis=1)).astype(np.int32)
    else:
        slots = pairs.lengths if packing.share_prefix is False else pairs.shared_lengths.astype(np.int32)
    asked, limit = config.strategy.sequence_parallel, batch.limits(packing.mode)[1]
    together = 1
    if packing.mode != "padding" and limit is not None:
        together = choose_ranks_per_row(asked, int(slots.max()), limit, processes)
    return make_schedule(
        slots,
        packing,
        batch,
        max_steps=trainer.max_steps,
        epochs=trainer.epochs,
        seed=trainer.seed,
        shuffle=config.data.shuffle,
        attention_cost=cost,
        ranks_per_row=together,
        prefixes=corpus.prefixes,
        examples=corpus.train.examples,
        within=corpus.within,
        shares_within=True,
    )
