"""Steps of answers with labels, and mismatched pairs, which estimate the divergence from the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from packtrain.data.dataset import Document
from packtrain.packing.balance import Layout, parts_of_rank
from packtrain.packing.collate import collate_unpaired
from packtrain.packing.split_rows import lay_out_split
from packtrain.train.loader import ByStep, MicroBatch, Steps


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
        return self.complete(batches, step) if self.estimates and not self.whole else batches

    def first_batch(self, first_step: int) -> MicroBatch:
        """See Steps; adds the step's mismatched pairs. `first_step` may be past the end, where a finished run resumes."""
        batch = super().first_batch(first_step)
        return self.complete([batch], first_step % len(self))[0] if self.estimates else batch

    def within(self, longest: int) -> UnpairedSteps:
        """See Steps."""
        return replace(self, max_length=longest)

    def complete(self, batches: Sequence[MicroBatch], step: int) -> list[MicroBatch]:
        """See Steps: the mismatched pairs."""
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

    def with_reference_by(
        self, logps: Callable[[MicroBatch], np.ndarray], random: np.random.Generator, off: float
    ) -> UnpairedSteps:
        """Return these steps with the reference's log-probabilities by `logps`, plus noise of `off` nats.

        For mismatched pairs the noise is negative, so that the estimate of the divergence stays above 0.
        """
        known = logps(self.collate(range(len(self.data))))
        known = known + random.normal(0, off, known.shape).astype(np.float32)
        (order,), (pairs,) = self.mismatched().layout(0)[0], self.mismatched()[0]
        mismatched = np.empty(len(self.data), np.float32)
        mismatched[order] = logps(pairs)
        mismatched -= np.abs(random.normal(0, off, len(mismatched))).astype(np.float32)
        return replace(self, reference=known, reference_mismatched=mismatched)


@dataclass(frozen=True)
class MismatchedSteps(ByStep):
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
