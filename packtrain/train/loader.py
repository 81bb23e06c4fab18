"""Optimizer steps as a data set: item k holds this process's micro-batches of step k.

A step is a pure function of (schedule, k, rank, world size): a resumed run starts the index at another k, without state to restore.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from packtrain.data.dataset import Document
from packtrain.launch.worker import end_with_parent
from packtrain.model.load import base_model
from packtrain.model.spread import elements
from packtrain.monitor.processes import write_stacks_on_signal
from packtrain.packing.balance import Layout, cost_of_attention, parts_of_rank
from packtrain.packing.collate import (
    RowLayout,
    collate_flat,
    collate_padded,
    collate_pairs,
    collate_scored,
    collate_shared,
    collate_unpaired,
    label_positions,
    part_of,
)
from packtrain.packing.schedule import Schedule
from packtrain.packing.split_rows import lay_out_split


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The `inputs` of one forward pass, and its counts. `trained` targets, real `tokens`, `slots` (with padding), `examples`; a filler has
    only slots. For pairs and for answers with labels, `trained` counts the targets of the chosen answers and `rejected` the others. In kto,
    the first micro-batch of a step also holds the `mismatched` pairs of the whole step. If `parts` ranks split the row, `inputs` holds the
    tokens of part number `part`; the counts are for the whole row.
    """

    inputs: dict[str, Any]
    trained: int
    tokens: int
    slots: int
    examples: int
    rejected: int = 0
    mismatched: tuple[MicroBatch, ...] = ()
    part: int = 0
    parts: int = 1

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Return the counts that are summed over a step: trained targets, tokens, slots, documents."""
        return self.trained, self.tokens, self.slots, self.examples

    @property
    def own_counts(self) -> tuple[int, int, int, int]:
        """Return this rank's part of the step's counts. Only the first rank of a split row counts it."""
        return self.counts if self.part == 0 else (0, 0, 0, 0)

    def split(self, rank: int, parts: int) -> MicroBatch:
        """Return the part of this row that `rank` computes."""
        part = rank % parts
        return replace(self, inputs=part_of(self.inputs, part, parts), part=part, parts=parts)

    def pin_memory(self) -> MicroBatch:
        """Return a copy in pinned memory; the DataLoader calls this."""
        inputs = {
            name: value.pin_memory() if hasattr(value, "pin_memory") else value for name, value in self.inputs.items()
        }
        return replace(self, inputs=inputs, mismatched=tuple(batch.pin_memory() for batch in self.mismatched))


@dataclass(frozen=True)
class Steps(Dataset):
    """Micro-batches by step: `steps[k]` holds them for `rank`, in a `layout`. Every rank has the same number of steps."""

    data: Any  # a TokenDataset; in PairSteps a PairDataset
    schedule: Schedule
    layout: RowLayout
    pad_token_id: int
    rank: int = 0
    world_size: int = 1
    skipped_from: Mapping[int, int] = field(default_factory=dict, kw_only=True)
    """Skipped examples: number of the example → first step that leaves it out (train/spikes.py)."""
    given_up: frozenset[int] = frozenset()
    """Steps that train on nothing."""
    feed: Any = field(default=None, kw_only=True)
    """The Feed (packing/feed.py) of a stream: these steps cover its first rows. None: train on these steps themselves."""

    def at(self, step: int) -> tuple[Steps, int]:
        """Return the Steps that contain a running step, and its number in them."""
        return (self, step) if self.feed is None else (self.feed.current, 0)

    def __len__(self) -> int:
        return self.schedule.total_steps

    def __getitem__(self, step: int) -> list[MicroBatch]:
        batches = []
        for part, is_split in self.schedule.micro_batches(step, self.rank, self.world_size):
            if self.skipped_from or self.given_up:
                part = np.array([number for number in part if self.trains_on(int(number), step)], int)
            batches.append(self.collate_part(part, is_split))
        return batches

    def trains_on(self, number: int, step: int) -> bool:
        """Return whether `step` trains on this example."""
        return step not in self.given_up and self.skipped_from.get(number, step + 1) > step

    def documents_of(self, step: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Return a step's document lengths, the lengths of shared beginnings, and the number of targets.

        They cover all ranks. Lengths in tokens: int [n], and int [m] of the beginnings that another document's computation covers (None:
        none).
        """
        if self.feed is not None:
            return self.feed.current.documents_of(0)
        documents, index = self.schedule.documents(step), self.schedule.prefixes
        targets = int(self.data.trained[documents].sum(dtype=np.int64))
        return self.data.lengths[documents], None if index is None else index.repeated(documents), targets

    def first_pass(self) -> Iterator[tuple[np.ndarray, MicroBatch]]:
        """Yield this rank's micro-batches of the first pass, with their example numbers. A shorter run yields all of them, too."""
        whole = replace(self.schedule, total_steps=self.schedule.steps_per_epoch(0))
        for step in range(whole.total_steps):
            for numbers, is_split in whole.micro_batches(step, self.rank, self.world_size):
                yield numbers, self.collate_part(numbers, is_split)

    def first_examples(self, first_step: int) -> np.ndarray:
        """Return int [n]: the examples of one micro-batch from `first_step` on. It is the first one of this process that is not split over
        ranks, else of another process. If all are split, return the shortest example.

        In a later pass use the matching step of the first pass: log-probabilities are precomputed in the rows of that pass.
        """
        step = first_step % min(len(self), self.schedule.steps_per_epoch(0))
        layout = self.schedule.layout(step, self.world_size)
        own = parts_of_rank(layout, self.rank), *(parts_of_rank(layout, rank) for rank in range(self.world_size))
        shortest = np.array([self.schedule.lengths.argmin()])
        return next((np.asarray(some) for parts in own for some, split in parts if len(some) and not split), shortest)

    def first_batch(self, first_step: int) -> MicroBatch:
        """Return the micro-batch of `first_examples`, which proofs run before step 1."""
        return self.collate(self.first_examples(first_step))

    def collate_part(self, numbers: np.ndarray, is_split: bool) -> MicroBatch:
        """Collate the documents of these numbers; of a split row, return this rank's part."""
        batch = self.collate(numbers)
        return batch.split(self.rank, self.schedule.ranks_per_row) if is_split and len(numbers) else batch

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """Return one forward pass over the documents of these numbers."""
        documents: Any = [self.data[int(number)] for number in numbers]
        tokens = sum(len(document.input_ids) for document in documents)
        if self.layout == "padding":
            inputs = collate_padded(documents, self.pad_token_id)
        elif self.layout == "shared" and (index := self.schedule.prefixes) is not None and documents:
            inputs = collate_shared(documents, index.row(np.asarray(numbers)))
        else:
            inputs = collate_flat(documents)
        inputs.setdefault("label_places", label_positions(inputs["shift_labels"]))
        slots = max(inputs["input_ids"].numel(), tokens)
        return MicroBatch(inputs, len(inputs["label_places"]), tokens, slots, examples=len(documents))


@dataclass(frozen=True)
class PairSteps(Steps):
    """Steps of preference pairs: `examples` of a micro-batch are pairs.

    `reference`, float32 [pairs, 2], holds the reference's log-probabilities of the chosen and the rejected answer of each pair.
    """

    reference: np.ndarray | None = None

    def documents_of(self, step: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        """See Steps. Each pair has a chosen and a rejected document, which may share their prompt."""
        if self.feed is not None:
            return self.feed.current.documents_of(0)
        pairs = self.schedule.documents(step)
        shared = (self.data.lengths - self.data.shared_lengths)[pairs] if self.layout == "shared" else None
        targets = int(self.data.trained[pairs].sum(dtype=np.int64))
        return self.data.documents.lengths.reshape(-1, 2)[pairs].ravel(), shared, targets

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """Return one forward pass over the pairs of these numbers."""
        pairs: Any = [self.data[int(number)] for number in numbers]
        inputs = collate_pairs(pairs, self.pad_token_id, self.layout)
        if self.reference is not None:
            known = self.reference[numbers] if len(numbers) else np.zeros((1, 2), np.float32)
            chosen, rejected = torch.from_numpy(known).unbind(1)
            inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        tokens = int(inputs["attention_mask"].sum()) if pairs else 0
        return MicroBatch(
            inputs=inputs,
            trained=sum(int(pair.chosen.loss_mask[1:].sum()) for pair in pairs),
            tokens=tokens,
            slots=inputs["input_ids"].numel() if self.layout == "padding" else tokens,
            examples=len(pairs),
            rejected=sum(int(pair.rejected.loss_mask[1:].sum()) for pair in pairs),
        )


@dataclass(frozen=True)
class ScoredSteps(PairSteps):
    """Steps of pairs for a reward model: `trained` of a micro-batch counts the scored documents."""

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """Return one forward pass over the pairs of these numbers."""
        pairs: Any = [self.data[int(number)] for number in numbers]
        inputs = collate_scored(pairs, [float(self.data.margins[n]) for n in numbers], self.pad_token_id, self.layout)
        tokens = sum(len(pair.chosen.input_ids) + len(pair.rejected.input_ids) for pair in pairs)
        slots = inputs["input_ids"].numel() if self.layout == "padding" else tokens
        return MicroBatch(inputs, trained=2 * len(pairs), tokens=tokens, slots=slots, examples=len(pairs))


@dataclass(frozen=True)
class UnpairedSteps(Steps):
    """Steps of answers with labels (an UnpairedDataset), in padded or flat rows.

    kto estimates the KL over mismatched pairs: the prompt of each document of a step with the completion of the document before it (for the
    first document: of the last), cut to `max_length` tokens. `estimates`: the loss needs the estimate. `whole`: treat all steps as one, as an
    evaluation does, and load the mismatched pairs separately (`mismatched`). Precomputed log-probabilities of the reference: `reference`
    float32 [documents]; `reference_mismatched` for the mismatched pairs in the order of the steps.
    """

    max_length: int | None = None
    estimates: bool = True
    whole: bool = False
    reference: np.ndarray | None = None
    reference_mismatched: np.ndarray | None = None

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """Return one forward pass over the documents of these numbers."""
        numbers = np.asarray(numbers, dtype=np.int64)
        known = None if self.reference is None else self.reference[numbers]
        return self._batch([self.data[int(number)] for number in numbers], self.data.labels[numbers], known)

    def __getitem__(self, step: int) -> list[MicroBatch]:
        batches = super().__getitem__(step)
        return self.with_mismatched(batches, step) if self.estimates and not self.whole else batches

    def first_batch(self, first_step: int) -> MicroBatch:
        """See Steps; adds the step's mismatched pairs. `first_step` may be past the end, where a finished run resumes."""
        batch = super().first_batch(first_step)
        return self.with_mismatched([batch], first_step % len(self))[0] if self.estimates else batch

    def with_mismatched(self, batches: Sequence[MicroBatch], step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step with its mismatched pairs."""
        return [replace(batches[0], mismatched=tuple(self.mismatched()[step])), *batches[1:]]

    def mismatched(self) -> MismatchedSteps:
        """Return the mismatched pairs of every step."""
        return MismatchedSteps(self)

    def pairs_of(self, step: int) -> np.ndarray:
        """Return int64 [n, 2]: document numbers of a step's mismatched pairs, prompt and completion."""
        documents = self.schedule.documents(step)
        before = np.roll(documents, 1)
        if self.whole:
            before[0] = self.schedule.documents((step or len(self)) - 1)[-1]
        return np.stack([documents, before], axis=1)

    def collate_mismatched(self, pairs: np.ndarray, known: np.ndarray | None) -> MicroBatch:
        """Return one forward pass over mismatched `pairs`, int64 [n, 2]. `known`, float32 [n]: precomputed, by the reference."""
        documents = []
        for prompt, completion in ((self.data[int(asked)], self.data[int(other)]) for asked, other in pairs):
            asked = len(prompt.input_ids) - int(prompt.loss_mask.sum())
            ids = np.concatenate([prompt.input_ids[:asked], completion.input_ids[completion.loss_mask]])
            ids = ids[: self.max_length]
            documents.append(Document(ids, np.arange(len(ids)) >= asked))
        return self._batch(documents, np.ones(len(documents), bool), known)

    def _batch(self, documents: list[Document], labels: np.ndarray, known: np.ndarray | None) -> MicroBatch:
        inputs = collate_unpaired(documents, self.pad_token_id, self.layout)
        inputs["label"] = torch.from_numpy(labels if len(labels) else np.ones(1, bool))
        if known is not None:
            inputs["ref_logps"] = torch.from_numpy(known if len(known) else np.zeros(1, np.float32))
        targets = np.array([int(document.loss_mask[1:].sum()) for document in documents], np.int64)
        tokens = sum(len(document.input_ids) for document in documents)
        return MicroBatch(
            inputs=inputs,
            trained=int(targets[labels].sum()),
            tokens=tokens,
            slots=inputs["input_ids"].numel() if self.layout == "padding" else tokens,
            examples=len(documents),
            rejected=int(targets[~labels].sum()),
        )


@dataclass(frozen=True)
class MismatchedSteps(Dataset):
    """Mismatched pairs by step: `mismatched[k]` are this rank's, in micro-batches with the step's own limits."""

    steps: UnpairedSteps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, step: int) -> list[MicroBatch]:
        pairs, all_known = self.steps.pairs_of(step), self.steps.reference_mismatched
        first = self.steps.schedule.documents_before(step)
        known = None if all_known is None else all_known[first : first + len(pairs)]
        batches = []
        for part, is_split in self._own_parts(step):
            batch = self.steps.collate_mismatched(pairs[part], None if known is None else known[part])
            batches.append(batch.split(self.steps.rank, self.steps.schedule.ranks_per_row) if is_split else batch)
        return batches

    def every_step(self) -> Iterator[tuple[np.ndarray, MicroBatch]]:
        """Yield this rank's micro-batches of all steps. The array has each pair's place in the order of the steps."""
        for step in range(len(self)):
            first = self.steps.schedule.documents_before(step)
            for (part, _), batch in zip(self._own_parts(step), self[step], strict=True):
                yield first + part, batch

    def _own_parts(self, step: int) -> list[tuple[np.ndarray, bool]]:
        return parts_of_rank(self.layout(step), self.steps.rank)

    def _lengths(self, step: int) -> np.ndarray:
        data, (prompt, completion) = self.steps.data, self.steps.pairs_of(step).T
        lengths = (data.lengths - data.trained)[prompt] + data.trained[completion]
        return lengths if self.steps.max_length is None else np.minimum(lengths, self.steps.max_length)

    def layout(self, step: int) -> Layout:
        """Return `[rank][micro-batch]` arrays of places in the step's pairs, like lay_out. Every rank has the same number of micro-batches."""
        schedule = self.steps.schedule
        return lay_out_split(
            self._lengths(step),
            mode=schedule.packing.mode,
            world_size=self.steps.world_size,
            limits=schedule.limits,
            attention_cost=schedule.attention_cost,
            keep_order=schedule.packing.strategy == "in_order",
            ranks_per_row=schedule.ranks_per_row,
        )


def _ignore_signals_except_from_parent(worker: int) -> None:
    """Make a loader process ignore SIGINT and SIGTERM unless its parent sent them.

    A launcher signals whole process groups. If that killed a loader, the last step and its checkpoint would be lost.
    """
    end_with_parent(os.getppid())
    write_stacks_on_signal()
    numbers = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    Thread(target=_exit_on_signal_of_parent, args=(os.getppid(), numbers), daemon=True).start()


def _exit_on_signal_of_parent(parent: int, numbers: set[signal.Signals]) -> None:
    while signal.sigwaitinfo(numbers).si_pid != parent:
        pass
    os._exit(0)


def loader_processes() -> int:
    """Return how many processes assemble batches. One works ahead of a GPU, so that the GPU never waits; none on a CPU, whose cores are busy."""
    return int(torch.cuda.is_available())


def step_loader(steps: Steps | MismatchedSteps, *, first: int = 0) -> Iterable[list[MicroBatch]]:
    """Load `steps` from number `first` on; a stream continues from its current place."""
    if isinstance(steps, Steps) and steps.feed is not None:
        return steps.feed.load(steps)
    return DataLoader(
        steps,
        batch_size=None,
        sampler=range(first, len(steps)),
        num_workers=loader_processes(),
        worker_init_fn=_ignore_signals_except_from_parent,
        pin_memory=torch.cuda.is_available(),
        # a generator of its own: drawing a base seed from the global one would make a resumed run differ from an unbroken one
        generator=torch.Generator().manual_seed(0),
    )


def attention_cost(model: PreTrainedModel) -> float:
    """Return c: a document of l tokens costs l + c · l². Unit: one token's linear layers."""
    base = base_model(model)
    return cost_of_attention(base.config.get_text_config(), sum(map(elements, base.parameters())))
