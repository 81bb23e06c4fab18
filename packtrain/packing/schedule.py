"""Choose the documents and layout of each optimizer step.

A step is a pure function of (lengths, settings, seed, step). Any process can compute any step, and resuming needs only a step number.
**The documents of a step depend neither on the packing mode nor on the number of ranks.** With `examples_per_step` an
epoch is a permutation of the examples, cut into equal steps; documents of an example stay together. With `tokens_per_step` its examples are
packed into rows of `limits.tokens`, where a common beginning within an example counts once, and a step is a fixed number of rows; packed mode
trains exactly these rows, the other modes lay the same documents out differently. The last step of an epoch is smaller: nothing is dropped and no step mixes two epochs.

With data.stages a mixture (data/dataset.py) chooses each example's source, and the source's next example is taken. Each source has its own
order and is read pass after pass, independently of the shares: no example repeats before every example of its source was used once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import TypeVar, cast

import numpy as np

from packtrain.config.schema import Batch, Packing, Shuffle
from packtrain.data.dataset import Mixture, PairDataset, TokenDataset
from packtrain.errors import UserError
from packtrain.packing.balance import (
    Layout,
    MicroBatchLimits,
    deal,
    imbalance,
    lay_out,
    part_costs,
    parts_of_rank,
    work_of_ranks,
)
from packtrain.packing.bins import Rows, best_fit, in_order
from packtrain.packing.prefixes import MIN_SHARED, PrefixIndex, cut_examples, index_prefixes, lay_out_shared, work_of

KEPT_EPOCHS = 2  # passes whose order stays in memory: the current one, and the next, as batches are prepared ahead
_Kept = TypeVar("_Kept")


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Device utilisation, summed over a sample of `steps`. `imbalance`: mean of (cost of the busiest rank / mean cost - 1).
    `micro_batches_*` count a rank's micro-batches in a step. `rows`: a row that ranks split counts as several."""

    steps: int
    documents: int
    tokens: int
    slots: int
    rows: int
    imbalance: float
    micro_batches_min: int
    micro_batches_max: int

    @property
    def padding_fraction(self) -> float:
        """Return the share of the slots without a token."""
        return max(1 - self.tokens / self.slots, 0.0)

    @property
    def shared_fraction(self) -> float:
        """Return the share of the tokens that are computed with another document."""
        return max(1 - self.slots / self.tokens, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Optimizer steps, from 0, of a training run or an evaluation; made by `make_schedule`.

    An entry of `Rows` is a packed row, or, with `examples_per_step`, all documents of a step."""

    lengths: np.ndarray
    limits: MicroBatchLimits
    packing: Packing
    examples_per_step: int | None
    rows_per_step: int
    seed: int
    shuffle: Shuffle
    attention_cost: float
    total_steps: int
    ranks_per_row: int = 1
    """Number of neighbouring ranks that may split a row (balance.py)."""
    prefixes: PrefixIndex | None = None
    """Index of common beginnings (prefixes.py); a micro-batch computes each one once. None: rows share nothing."""
    shares_within: bool = False
    """Whether rows share the beginnings within an example, if not more."""
    examples: np.ndarray | None = None
    """int64[m + 1]: the borders of the examples. None: each document is one."""
    within: PrefixIndex | None = None
    """Index of common beginnings within each example, if rows share them, or if steps are made of rows."""
    families: np.ndarray | None = None
    """int64[m]: the family of each example. A step draws whole families. None: it draws examples one by one."""
    has_epochs: bool = True
    """False: a stream's schedule, which repeats the first rows for code that asks what steps are like."""
    _rows_by_epoch: dict[int, Rows] = field(default_factory=dict[int, Rows], repr=False)
    _row_counts: dict[int, int] = field(default_factory=dict[int, int], repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_rows_by_epoch": {}}  # another process plans faster than it receives

    @property
    def settings(self) -> tuple[object, ...]:
        """Return everything that decides the rows, except the documents' lengths and the number of ranks."""
        sizes = (self.limits, self.examples_per_step, self.rows_per_step, self.attention_cost, self.ranks_per_row)
        return self.packing, *sizes, self.seed, self.shuffle

    def steps_per_epoch(self, epoch: int) -> int:
        """Return the number of optimizer steps in one pass over the data."""
        epoch = 0 if self._epochs_are_equal else epoch
        if epoch not in self._row_counts:
            self._row_counts[epoch] = len(self._rows_of_epoch(epoch))
        return math.ceil(self._row_counts[epoch] / self.rows_per_step)

    def documents(self, step: int) -> np.ndarray:
        """Return the documents of a step over all ranks: int64[documents], indices into the lengths."""
        rows, first, end = self._rows_of(step)
        return rows.documents[rows.offsets[first] : rows.offsets[end]]

    def layout(self, step: int, world_size: int) -> Layout:
        """Return the documents of a step as `[rank][micro_batch]` arrays int64[documents]. All ranks have equally many micro-batches. A row that
        several ranks split is listed at the first of them."""
        in_order = self.packing.strategy == "in_order"
        by_rows = self.packing.mode == "packed" and self.examples_per_step is None
        # planned rows count a common beginning once; documents that repeat it need not fit
        fits = self.examples is None or self.prefixes is not None
        if by_rows and fits:
            rows, first, end = self._rows_of(step)
            planned = [rows[row] for row in range(first, end)]
            cost = part_costs(planned, self.lengths, self.packing.mode, self.attention_cost)
            if self.prefixes is not None:
                cost = np.array([work_of(self.prefixes, row, attention_cost=self.attention_cost) for row in planned])
            return deal(planned, cost, world_size, in_order)
        documents = self.documents(step)
        if self.prefixes is not None:
            sizes = (world_size, self.limits, self.attention_cost, self.ranks_per_row)
            layout = lay_out_shared(self.prefixes, documents, *sizes, keep_order=in_order)
        else:
            layout = self.lay_out(self.lengths[documents], world_size)
        for parts in layout:
            parts[:] = [documents[part] for part in parts]
        return layout

    def lay_out(self, lengths: np.ndarray, world_size: int) -> Layout:
        """Lay out documents of these `lengths` as one step, without shared beginnings. See balance.py."""
        sizes = (world_size, self.limits, self.attention_cost, self.ranks_per_row)
        return lay_out(lengths, self.packing.mode, *sizes, keep_order=self.packing.strategy == "in_order")

    def slots(self, part: np.ndarray) -> int:
        """Return the token slots of a micro-batch of these documents."""
        if self.packing.mode == "padding":
            return len(part) * int(self.lengths[part].max(initial=0))
        if self.prefixes is not None and len(part):
            return self.prefixes.forest(part)[0].tokens
        return int(self.lengths[part].sum(dtype=np.int64))

    def imbalance(self, layout: Layout) -> float:
        """Return how much longer than the mean the busiest rank works, as a fraction. Shared tokens count once."""
        if self.prefixes is None:
            return imbalance(layout, self.lengths, self.attention_cost, self.packing.mode)
        work = work_of_ranks(layout, partial(work_of, self.prefixes, attention_cost=self.attention_cost))
        return float(work.max() / work.mean() - 1)

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[tuple[np.ndarray, bool]]:
        """Return the micro-batches of one rank: int64[documents], empty if it has nothing to do.
        The flag is True if the rank splits this row with its neighbours."""
        return parts_of_rank(self.layout(step, world_size), rank)

    def epoch_of(self, step: int) -> float:
        """Return the number of passes over the data after `step` steps; 0.0 for a stream."""
        if not self.has_epochs:
            return 0.0
        epoch, within = self._locate(step)
        return epoch + within / self.steps_per_epoch(epoch)

    def examples_before(self, step: int) -> int:
        """Return how many examples the first `step` steps train on. A repeated example counts each time."""
        epoch, within = self._locate(step)
        seen = epoch * self.examples_per_epoch
        if within:
            rows = self._rows_of_epoch(epoch)
            documents = rows.documents[: int(rows.offsets[min(within * self.rows_per_step, len(rows))])]
            seen += len(documents) if self.examples is None else int(np.isin(documents, self.examples[:-1]).sum())
        return seen

    @property
    def examples_per_epoch(self) -> int:
        """Return the number of examples of the data."""
        return len(self.lengths) if self.examples is None else len(self.examples) - 1

    def example_slots(self) -> dict[str, int]:
        """Count `examples`, `documents` and an epoch's token slots; {} if each example is one document.

        The slots: `shared` in these rows, `repeated` if no beginning is shared, and `once` with the longest document of each example alone, about
        as many as if the chat template rendered each row once.
        """
        if self.examples is None:
            return {}
        tokens = int(self.lengths.sum(dtype=np.int64))
        common = np.zeros(0) if self.prefixes is None else self.prefixes.common
        shared = tokens - int(common[common >= MIN_SHARED].sum(dtype=np.int64))
        once = int(np.maximum.reduceat(self.lengths, self.examples[:-1]).sum(dtype=np.int64))
        sizes = {"examples": self.examples_per_epoch, "documents": len(self.lengths)}
        return {**sizes, "shared": shared, "repeated": tokens, "once": once}

    def over(self, data: TokenDataset | PairDataset, lengths: np.ndarray) -> Schedule:
        """Return one step over all examples of `data` with these `lengths` int[n], in order."""
        shares = self.shares_within and data.examples is not None
        prefixes = index_prefixes(cast(TokenDataset, data), data.examples) if shares else None
        own = replace(self, lengths=lengths, examples=data.examples, prefixes=prefixes, shuffle=False, total_steps=1)
        return replace(own, examples_per_step=own.examples_per_epoch, _rows_by_epoch={}, _row_counts={})

    def summary(self, world_size: int, sample_steps: int = 32, tokens: np.ndarray | None = None) -> Utilisation:
        """Sum over at most `sample_steps` steps, spread evenly over the first epoch. Plans the whole epoch.

        `tokens` int[n] are the tokens of each document, if its length includes padding.
        """
        steps = min(self.total_steps, self.steps_per_epoch(0))
        sample = np.unique(np.rint(np.linspace(0, steps - 1, min(sample_steps, steps))).astype(int)).tolist()
        layouts = [self.layout(step, world_size) for step in sample]
        parts = [part for layout in layouts for rank in layout for part in rank if len(part)]
        slots = [*map(self.slots, parts)]
        return Utilisation(
            steps=len(sample),
            documents=sum(map(len, parts)),
            tokens=int((self.lengths if tokens is None else tokens)[np.concatenate(parts)].sum(dtype=np.int64)),
            slots=sum(slots),
            rows=sum(math.ceil(own / self.limits.tokens) if self.packing.mode == "packed" else 1 for own in slots),
            imbalance=float(np.mean([self.imbalance(layout) for layout in layouts])),
            micro_batches_min=min(len(layout[0]) for layout in layouts),
            micro_batches_max=max(len(layout[0]) for layout in layouts),
        )

    @property
    def _epochs_are_equal(self) -> bool:
        """Return whether all epochs have equally many steps. Only next fit over a shuffled order differs."""
        return self.examples_per_step is not None or self.packing.strategy == "best_fit" or not self.shuffle

    def _rows_of(self, step: int) -> tuple[Rows, int, int]:
        """Return the rows of the step's epoch, and the step's first and end row."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of {self.total_steps}")
        epoch, within = self._locate(step)
        rows = self._rows_of_epoch(epoch)
        return rows, within * self.rows_per_step, min((within + 1) * self.rows_per_step, len(rows))

    def _locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within the epoch)."""
        if self._epochs_are_equal:
            return divmod(step, self.steps_per_epoch(0))
        epoch = 0
        while step >= (steps := self.steps_per_epoch(epoch)):
            step -= steps
            epoch += 1
        return epoch, step

    def _rows_of_epoch(self, epoch: int) -> Rows:
        epoch = epoch if self.shuffle else 0
        return _remember(self._rows_by_epoch, epoch, self._make_rows)

    def _make_rows(self, epoch: int) -> Rows:
        units, sizes = self._units
        rows = self._make_rows_of_units(epoch, sizes)
        return rows if units is None else units.expand(rows)

    @cached_property
    def _units(self) -> tuple[Rows | None, np.ndarray]:
        """Return the documents of each unit to draw, and its size in tokens.

        A unit is an example, or a part of one that is larger than a row. None: each document is one.
        """
        if self.examples is None:
            return None, self.lengths
        if self.examples_per_step is None:
            return cut_examples(cast(PrefixIndex, self.within), self.examples, self.limits.tokens)
        return Rows(np.arange(len(self.lengths)), self.examples), self.examples[1:]

    def _make_rows_of_units(self, epoch: int, sizes: np.ndarray) -> Rows:
        count, rng = len(sizes), np.random.default_rng((self.seed, epoch))
        if self.examples_per_step is None and self.packing.strategy == "best_fit":
            return best_fit(sizes, int(self.limits.tokens), rng)
        order = rng.permutation(count) if self.shuffle else np.arange(count)
        if self.families is not None:
            order = np.argsort(rng.permutation(count)[self.families], kind="stable")
        if self.examples_per_step is not None:
            return Rows(order, np.append(np.arange(0, count, self.examples_per_step), count))
        rows = in_order(sizes[order], int(self.limits.tokens))
        return Rows(order[rows.documents], rows.offsets)


def _remember(known: dict[int, _Kept], number: int, make: Callable[[int], _Kept]) -> _Kept:
    """Return `known[number]`. Make it if it is not known, and forget the oldest beyond KEPT_EPOCHS."""
    if number not in known:
        while len(known) >= KEPT_EPOCHS:
            del known[next(iter(known))]
        known[number] = make(number)
    return known[number]


def make_schedule(
    lengths: np.ndarray,
    packing: Packing,
    batch: Batch,
    *,
    max_steps: int | None = None,
    epochs: float = 1.0,
    seed: int = 0,
    shuffle: Shuffle = False,
    attention_cost: float = 0.0,
    ranks_per_row: int = 1,
    prefixes: PrefixIndex | None = None,
    examples: np.ndarray | None = None,
    within: PrefixIndex | None = None,
    shares_within: bool = False,
) -> Schedule:
    """Make the steps of a run, by default one pass over the documents. `lengths` int[n] in tokens.

    `max_steps` takes precedence over `epochs`; 1.5 epochs are all steps of epoch 0 and half the steps of epoch 1, rounded up. Without
    `shuffle` every epoch is the same. Pass `prefixes` to share them in rows or to draw by them. `examples` int64[m + 1] are the borders of the
    examples; rows hold them, and share their beginnings if `shares_within`, by the index `within`. Raises UserError if a document
    exceeds `ranks_per_row` rows.
    """
    lengths = np.asarray(lengths)
    limits = MicroBatchLimits(*(math.inf if limit is None else limit for limit in batch.limits(packing.mode)))
    capacity = limits.tokens * ranks_per_row
    if (longest := int(lengths.max())) > capacity:
        over = "" if ranks_per_row == 1 else f" over {ranks_per_row} processes"
        more = over and ", or start more processes"
        what = f"the longest document has {longest} tokens, a micro-batch{over} takes {capacity}"
        fix = f"set batch.tokens_per_device to at least {math.ceil(longest / ranks_per_row)}, or data.max_length to {capacity}{more}"
        raise UserError(what, where="batch.tokens_per_device", fix=fix, code="document-exceeds-micro-batch")
    shares_within = shares_within and packing.mode == "packed"
    families = prefixes if shuffle == "by_prefix" else None
    if families is not None and examples is not None:
        families = families.of(examples[:-1])  # an example is where its first document is
    shared = prefixes if packing.share_prefix else within if shares_within else None
    schedule = Schedule(
        lengths=lengths,
        limits=limits,
        packing=packing,
        examples_per_step=batch.examples_per_step,
        rows_per_step=1 if batch.tokens_per_step is None else batch.tokens_per_step // int(limits.tokens),
        seed=seed,
        shuffle=shuffle,
        attention_cost=attention_cost,
        total_steps=max_steps or 0,
        ranks_per_row=ranks_per_row,
        prefixes=shared if packing.mode == "packed" else None,
        shares_within=shares_within,
        examples=examples,
        within=within,
        families=None if families is None else families.families(cast(int, batch.examples_per_step)),
    )
    if max_steps is not None:
        return schedule
    whole = math.floor(epochs)
    total = sum(schedule.steps_per_epoch(epoch) for epoch in range(whole))
    if epochs > whole:
        part = (epochs - whole) * schedule.steps_per_epoch(whole)
        total += math.ceil(part - 1e-9)  # a tenth of 30 is 3; 3.0000000000000027 would give 4
    return replace(schedule, total_steps=max(total, 1))


_SEED_USE = 4  # sets these random numbers apart: data/ draws by the same seed with 2, 3, 5 and 6 at this place


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedSchedule(Schedule):
    """Schedule without epochs: the `mixture` draws the examples of each step.

    It requires examples_per_step. `source_of` int16 [m] is the source number of each example.
    """

    mixture: Mixture
    source_of: np.ndarray
    _orders: dict[int, dict[int, np.ndarray]] = field(default_factory=dict[int, dict[int, np.ndarray]], repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_orders": {}}

    def steps_per_epoch(self, epoch: int) -> int:
        """Return the number of all steps: a mixture has no epochs."""
        return self.total_steps

    def epoch_of(self, step: int) -> float:
        """Return the number of trained examples divided by the size of the data set."""
        return self.examples_before(step) / self.examples_per_epoch

    def examples_before(self, step: int) -> int:
        """Return the number of examples trained before `step`."""
        return step * (self.examples_per_step or 0)

    def _rows_of(self, step: int) -> tuple[Rows, int, int]:
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of {self.total_steps}")
        first, end = self.examples_before(step), self.examples_before(step + 1)
        sources, seen = self.mixture.sources(first, end), self.mixture.counts(first)
        taken = np.empty(len(sources), np.int64)
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            taken[here] = self._take(source, seen[source] + np.arange(len(here)))
        step_row = Rows(taken, np.array([0, len(taken)]))
        units, _ = self._units
        return step_row if units is None else units.expand(step_row), 0, 1

    def _take(self, source: int, places: np.ndarray) -> np.ndarray:
        """Return the examples at these places of a source's order. The next pass follows the last place of a pass."""
        own = np.flatnonzero(self.source_of == source)
        passes, within = np.divmod(places, len(own))
        taken = np.empty(len(places), np.int64)
        for pass_ in np.unique(passes).tolist():
            taken[passes == pass_] = own[self._order(source, pass_, len(own))[within[passes == pass_]]]
        return taken

    def _order(self, source: int, pass_: int, length: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(length)
        rng = np.random.default_rng((self.seed, _SEED_USE, source, pass_))
        return _remember(self._orders.setdefault(source, {}), pass_, lambda _: rng.permutation(length))


def stage(schedule: Schedule, mixture: Mixture, source_of: np.ndarray, names: tuple[str, ...]) -> StagedSchedule:
    """Return `schedule` with its examples drawn by `mixture`. `source_of` int16[n] is the source of each document, or pair.

    Raises UserError if a stage uses a source without examples.
    """
    source_of = source_of if schedule.examples is None else source_of[schedule.examples[:-1]]
    held = np.bincount(source_of, minlength=len(names))
    for name, number, shares in zip(names, held, zip(*mixture.shares, strict=True), strict=True):
        if not number and any(shares):
            fix = "Take it out of the stages, or see data.eval and the dropped rows."
            what = f"there is nothing to train on in {name}"
            raise UserError(what, where="data.stages", fix=fix, code="stage-without-data")
    given = {item.name: getattr(schedule, item.name) for item in fields(schedule)}
    return StagedSchedule(**given, mixture=mixture, source_of=source_of)
