"""Optimizer steps as a data set: item k holds this process's micro-batches of step k.

A step is a pure function of (schedule, k, rank, world size): a resumed run starts the index at another k, without state to restore.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from packtrain.launch.worker import end_with_parent
from packtrain.model.load import base_model
from packtrain.model.spread import elements
from packtrain.monitor.heartbeat import write_stacks_on_signal
from packtrain.objectives.answers import Inputs
from packtrain.packing.balance import cost_of_attention, parts_of_rank
from packtrain.packing.collate import (
    RowLayout,
    collate_flat,
    collate_padded,
    collate_shared,
    label_positions,
    on_device,
    part_of,
)
from packtrain.packing.pictures import Sight
from packtrain.packing.schedule import Schedule

_FIRST_TOKENS = 2048
"""Tokens in all of the documents that prove a change, unless each document is longer."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The `inputs` of one forward pass, and its counts. `trained` targets, real `tokens`, `slots` (with padding), `examples`; a filler has
    only slots. For pairs and for answers with labels, `trained` counts the targets of the chosen answers and `rejected` the others. The first
    micro-batch of a step may hold `mismatched` pairs of the whole step (objectives/kto/run.py). If `parts` ranks split the row, `inputs` holds the
    tokens of part number `part`; the counts are for the whole row. `numbers` are the numbers of its documents, in their order.
    """

    inputs: Inputs
    trained: int
    tokens: int
    slots: int
    examples: int
    rejected: int = 0
    mismatched: tuple[MicroBatch, ...] = ()
    part: int = 0
    parts: int = 1
    numbers: Sequence[int] | np.ndarray = ()

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Return the counts that are summed over a step: trained targets, tokens, slots, documents."""
        return self.trained, self.tokens, self.slots, self.examples

    @property
    def own_counts(self) -> tuple[int, int, int, int]:
        """Return this rank's part of the step's counts. Only the first rank of a split row counts it."""
        return self.counts if self.part == 0 else (0, 0, 0, 0)

    def inputs_on(self, device: torch.device) -> Inputs:
        """Return the inputs, copied to `device`."""
        return on_device(self.inputs, device)

    def split(self, rank: int, parts: int) -> MicroBatch:
        """Return the part of this row that `rank` computes."""
        part = rank % parts
        return replace(self, inputs=part_of(self.inputs, part, parts), part=part, parts=parts)

    def pin_memory(self) -> MicroBatch:
        """Return a copy in pinned memory; the DataLoader calls this."""
        pinned = {name: value.pin_memory() for name, value in self.inputs.items() if hasattr(value, "pin_memory")}
        mismatched = tuple(batch.pin_memory() for batch in self.mismatched)
        return replace(self, inputs=self.inputs | pinned, mismatched=mismatched)


@dataclass(slots=True)
class StepDocuments:
    """Documents (or pairs) that step `step` of a run trains on, over all ranks.

    `numbers` int [n] are their numbers in the data of the steps. `documents` int [n] are their numbers through the stores; in a stream, through
    the run, and then `rows` has their FILE:LINE. `tokens` int [n] counts trained ones. `found` collects the numbers in this rank's micro-batches
    with their figures (Loss.by_document).
    """

    step: int
    numbers: np.ndarray
    documents: np.ndarray
    tokens: np.ndarray
    rows: Sequence[str]
    found: list[tuple[Sequence[int] | np.ndarray, tuple[torch.Tensor, ...]]] = field(default_factory=list[Any])


class WorkRecord:
    """Record of the running micro-batch, for the message about memory.

    It is number `micro` (from 1) of `step` (from 0); `batch` is None if none runs. `tried`: numbers of its examples if it is tried before
    step 1. `held`: bytes in use before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.held = device, 0
        self.step = self.micro = 0
        self.batch: MicroBatch | None = None
        self.tried: np.ndarray | None = None

    def begin(self, step: int, micro: int, batch: MicroBatch, tried: np.ndarray | None = None) -> None:
        """Note the micro-batch that runs next."""
        if micro == 1 and self._device.type == "cuda":
            self.held = torch.cuda.memory_allocated(self._device)
        self.step, self.micro, self.batch, self.tried = step, micro, batch, tried

    def end(self) -> None:
        """Note that no micro-batch runs."""
        self.batch = self.tried = None


class ByStep(Dataset[list[MicroBatch]]):
    """Micro-batches by the number of a step."""

    def __len__(self) -> int:
        raise NotImplementedError


@dataclass(frozen=True)
class Steps(ByStep):
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
    rows: Sequence[str] = field(default=(), kw_only=True)
    """FILE:LINE of the documents (or pairs) of a streamed step. The stream gave `before` documents before them."""
    before: int = field(default=0, kw_only=True)
    sight: Sight | None = field(default=None, kw_only=True)
    """Sight of the model; None if the data has no pictures."""

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

    def list_trained(self, step: int, of_run: int) -> StepDocuments:
        """Return the documents that `step` of these trains on. It is step `of_run` of the run, from 1."""
        numbers = np.sort(self.schedule.documents(step))
        if self.skipped_from:
            numbers = numbers[[self.trains_on(number, step) for number in numbers.tolist()]]
        rows = [self.rows[number] for number in map(int, numbers)] if self.rows else []
        documents = self.before + numbers if rows else self.data.rows[numbers]
        return StepDocuments(of_run, numbers, documents, self.data.trained[numbers], rows)

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

    def first_pass(self, done: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, MicroBatch]]:
        """Yield this rank's micro-batches of the first pass, with their example numbers. A shorter run yields all of them, too. Steps whose
        examples are all `done`, bool [n], are left out."""
        whole = replace(self.schedule, total_steps=self.schedule.steps_per_epoch(0))
        for step in range(whole.total_steps):
            if done is not None and done[whole.documents(step)].all():
                continue
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

    def within(self, longest: int) -> Steps:
        """Return these steps with no made-up document longer than `longest` tokens."""
        return self

    def complete(self, batches: Sequence[MicroBatch], step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step with everything that the step needs besides."""
        return [*batches]

    def collate_part(self, numbers: np.ndarray, is_split: bool) -> MicroBatch:
        """Collate the documents of these numbers; of a split row, return this rank's part.

        Without documents, return a filler of ordinary tokens: one whose embedding is 0 may have gradients of 0 · inf.
        """
        batch = self.collate(numbers)
        if not len(numbers):
            first = getattr(self.data[0], "chosen", self.data[0]).input_ids.astype(np.int64)
            ids = batch.inputs["input_ids"]
            if self.sight is not None:
                first = first[~np.isin(first, self.sight.tokens)]
            filler = torch.from_numpy(np.resize(first, ids.shape))
            if self.sight is not None:  # a blank picture keeps its tokens
                filler = torch.where(torch.isin(ids, torch.tensor(self.sight.tokens)), ids, filler)
            batch = replace(batch, inputs={**batch.inputs, "input_ids": filler})
        batch = replace(batch, numbers=numbers)
        return batch.split(self.rank, self.schedule.ranks_per_row) if is_split and len(numbers) else batch

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """Return one forward pass over the documents of these numbers."""
        documents: Any = [self.data[int(number)] for number in numbers]
        tokens = sum(len(document.input_ids) for document in documents)
        if self.layout == "padding":
            inputs = collate_padded(documents, self.pad_token_id, self.sight)
        elif self.layout == "shared" and (index := self.schedule.prefixes) is not None and documents:
            inputs = collate_shared(documents, index.row(np.asarray(numbers)), self.sight)
        else:
            inputs = collate_flat(documents, self.sight)
        inputs.setdefault("label_places", label_positions(inputs["shift_labels"]))
        if "label_owners" not in inputs:  # places are in the order of the documents
            trained = [int(document.loss_mask[1:].sum()) for document in documents]
            inputs["label_owners"] = np.repeat(np.arange(len(documents)), trained)
        slots = max(inputs["input_ids"].numel(), tokens)
        return MicroBatch(inputs, len(inputs["label_places"]), tokens, slots, examples=len(documents))


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


_MOST_PROCESSES = 8
"""Most processes that make the pixels of one GPU."""


def loader_processes(*, with_pictures: bool = False) -> int:
    """Return how many processes assemble batches. They work ahead of a GPU, so that it never waits; none on a CPU, whose cores are busy.

    One suffices for text. `with_pictures` the cores of the machine are shared out: a picture takes some 10 ms.
    """
    if not torch.cuda.is_available() or not with_pictures:
        return int(torch.cuda.is_available())
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(cores - 1, _MOST_PROCESSES))


def step_loader(steps: ByStep, *, first: int = 0) -> Iterable[list[MicroBatch]]:
    """Load `steps` from number `first` on; a stream continues from its current place."""
    if isinstance(steps, Steps) and steps.feed is not None:
        return steps.feed.load(steps)
    return DataLoader(
        steps,
        batch_size=None,
        sampler=range(first, len(steps)),
        num_workers=loader_processes(with_pictures=getattr(steps, "sight", None) is not None),
        worker_init_fn=_ignore_signals_except_from_parent,
        pin_memory=torch.cuda.is_available(),
        # a generator of its own: drawing a base seed from the global one would make a resumed run differ from an unbroken one
        generator=torch.Generator().manual_seed(0),
    )


def attention_cost(model: PreTrainedModel) -> float:
    """Return c: a document of l tokens costs l + c · l². Unit: one token's linear layers."""
    base = base_model(model)
    return cost_of_attention(base.config.get_text_config(), sum(map(elements, base.parameters())))


def first_documents(steps: Steps) -> MicroBatch:
    """Collate documents of the first micro-batch that fit into _FIRST_TOKENS tokens, in order.

    If none fits, take the shortest; a text is cut to its last _FIRST_TOKENS tokens that end with a trained one.
    """
    numbers, room, some = steps.first_examples(0), _FIRST_TOKENS, list[int]()
    for number, slots in zip(numbers.tolist(), steps.schedule.lengths[numbers].tolist(), strict=True):
        if slots <= room:
            some.append(number)
            room -= slots
    shortest = int(numbers[steps.schedule.lengths[numbers].argmin()])
    whole: Any = steps.data[shortest]
    if some or type(steps) is not Steps or whole.pictures:
        return steps.collate(np.array(some or [shortest]))
    end = int(np.flatnonzero(whole.loss_mask)[-1]) + 1
    part = slice(max(0, end - _FIRST_TOKENS), end)
    cut = replace(whole, input_ids=whole.input_ids[part], loss_mask=whole.loss_mask[part])
    return replace(steps, data=cast(Any, [cut]), layout="padding" if steps.layout == "padding" else "flat").collate([0])
