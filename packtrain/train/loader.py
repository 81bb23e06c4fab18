"""Optimizer steps as a data set: item k is everything that this process trains on in step k.

A step is a pure function of (schedule, k, rank, world size), so resuming is starting the index at another k, loader
processes need no state, and nothing is skipped through.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedModel

from packtrain.launch.worker import end_with_parent
from packtrain.model.load import base_model
from packtrain.model.spread import elements
from packtrain.monitor.stacks import listen
from packtrain.packing.balance import cost_of_attention
from packtrain.packing.collate import (
    PairRows,
    collate_flat,
    collate_padded,
    collate_pairs,
    collate_scored,
    places_of,
)
from packtrain.packing.schedule import Schedule


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`inputs` of one forward pass; counts of trained targets, real tokens, slots (with padding), documents. Fillers: slots only.

    Of pairs `trained` are the targets of the chosen answers, `rejected` those of the others.
    """

    inputs: dict[str, Any]
    trained: int
    tokens: int
    slots: int
    examples: int
    rejected: int = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Trained targets, tokens, slots, documents: summed over a step."""
        return self.trained, self.tokens, self.slots, self.examples

    def pin_memory(self) -> MicroBatch:
        """In memory that a device reads by itself; called by the DataLoader."""
        inputs = {name: one.pin_memory() if hasattr(one, "pin_memory") else one for name, one in self.inputs.items()}
        return replace(self, inputs=inputs)


@dataclass(frozen=True)
class Steps(Dataset):
    """`steps[k]` = the micro-batches of step k for this `rank`, in a `layout`; the same number of steps on every rank."""

    data: Any  # a TokenDataset, of PairSteps a PairDataset
    schedule: Schedule
    layout: PairRows
    pad_token_id: int
    rank: int = 0
    world_size: int = 1

    def __len__(self) -> int:
        return self.schedule.total_steps

    def __getitem__(self, step: int) -> list[MicroBatch]:
        return [self.collate(numbers) for numbers in self.schedule.micro_batches(step, self.rank, self.world_size)]

    def documents_of(self, step: int) -> tuple[np.ndarray, np.ndarray | None]:
        """int [n] tokens of every document of a step over all ranks, and int [n / 2] of what two in a row share (None: nothing)."""
        return self.data.lengths[self.schedule.documents(step)], None

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """One forward pass over the documents of these numbers."""
        documents: Any = [self.data[int(number)] for number in numbers]
        padded = self.layout == "padding"
        inputs = collate_padded(documents, self.pad_token_id) if padded else collate_flat(documents)
        places = places_of(inputs["shift_labels"])
        return MicroBatch(
            inputs={**inputs, "label_places": places},
            trained=len(places),
            tokens=sum(len(document.input_ids) for document in documents),
            slots=inputs["input_ids"].numel(),
            examples=len(documents),
        )


@dataclass(frozen=True)
class PairSteps(Steps):
    """As Steps, of preference pairs: `examples` of a micro-batch are pairs.

    `reference` float32 [pairs, 2] has the reference's log-probabilities of the chosen and the rejected answer of each pair.
    """

    reference: np.ndarray | None = None

    def documents_of(self, step: int) -> tuple[np.ndarray, np.ndarray | None]:
        """As of Steps: the chosen and the rejected document of each pair, which may share their prompt."""
        pairs = self.schedule.documents(step)
        shared = (self.data.lengths - self.data.shared_lengths)[pairs] if self.layout == "shared" else None
        return self.data.documents.lengths.reshape(-1, 2)[pairs].ravel(), shared

    def first_pairs(self, first_step: int) -> np.ndarray:
        """int [n]: the pairs of the first micro-batch of this process, or of another one if it has none, from `first_step` on.

        A run that was resumed in a later pass takes the step of the first pass: precomputed log-probabilities are of its rows.
        """
        step = first_step % min(len(self), self.schedule.steps_per_epoch(0))
        layout = self.schedule.layout(step, self.world_size)
        return next(np.asarray(pairs) for part in (layout[self.rank], *layout) for pairs in part if len(pairs))

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """One forward pass over the pairs of these numbers."""
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
    """As PairSteps, for a reward model: `trained` of a micro-batch are the documents that are scored."""

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """One forward pass over the pairs of these numbers."""
        pairs: Any = [self.data[int(number)] for number in numbers]
        inputs = collate_scored(pairs, [float(self.data.margins[n]) for n in numbers], self.pad_token_id, self.layout)
        tokens = sum(len(pair.chosen.input_ids) + len(pair.rejected.input_ids) for pair in pairs)
        slots = inputs["input_ids"].numel() if self.layout == "padding" else tokens
        return MicroBatch(inputs, trained=2 * len(pairs), tokens=tokens, slots=slots, examples=len(pairs))


class _FromStep(Sampler[int]):
    """Counts from a step to the last one, but has the length of the whole run: transformers takes the run's length from it."""

    def __init__(self, first: int, total: int) -> None:
        self.first, self.total = first, total

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.total))

    def __len__(self) -> int:
        return self.total


def _ignore_signals_except_from_parent(worker: int) -> None:
    """Makes a loader process ignore SIGINT and SIGTERM unless its parent sent them.

    A launcher signals whole process groups; a loader that died of it would prevent the last step and its checkpoint.
    """
    end_with_parent(os.getppid())
    listen()
    numbers = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    Thread(target=_exit_on_signal_of_parent, args=(os.getppid(), numbers), daemon=True).start()


def _exit_on_signal_of_parent(parent: int, numbers: set[signal.Signals]) -> None:
    while signal.sigwaitinfo(numbers).si_pid != parent:
        pass
    os._exit(0)


def step_loader(steps: Steps, *, first: int = 0, workers: int | None = 0) -> DataLoader:
    """Loads `steps` from number `first` on, in `workers` processes ahead of the model; None for one on a GPU, none on a CPU."""
    workers = int(torch.cuda.is_available()) if workers is None else workers
    return DataLoader(
        steps,
        batch_size=None,
        sampler=_FromStep(first, len(steps)),
        num_workers=workers,
        worker_init_fn=_ignore_signals_except_from_parent if workers else None,
        pin_memory=torch.cuda.is_available(),
        # its own generator: a base seed drawn from the global one would make a resumed run differ from an unbroken one
        generator=torch.Generator().manual_seed(0),
    )


def attention_cost(model: PreTrainedModel) -> float:
    """Cost of a document of l tokens is l + attention_cost · l², in units of one token's linear layers."""
    base = base_model(model)
    return cost_of_attention(base.config.get_text_config(), sum(map(elements, base.parameters())))
