"""Steps of kto: answers with labels, and mismatched pairs for the KL estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packtrain.data.dataset import Document
from packtrain.packing.balance import Layout, lay_out, parts_of_rank
from packtrain.train.loader import ByStep, MicroBatch
from packtrain.train.objectives.answer_objectives import AnswerSteps


@dataclass(frozen=True)
class UnpairedSteps(AnswerSteps):
    """Steps of answers with labels, and their mismatched pairs.

    A mismatched pair is the prompt of a document with the completion of the document before it in the step (for the first document: of the
    last), cut to `max_length` tokens. `estimates`: the loss needs them; the first micro-batch of each step then has them. `whole`: all steps
    count as one, as in an evaluation, and `mismatched` loads the pairs apart from the steps. `reference_mismatched`: the reference's
    log-probabilities of the mismatched pairs in the order of the steps, if precomputed.
    """

    max_length: int | None = None
    estimates: bool = True
    whole: bool = False
    reference_mismatched: np.ndarray | None = None

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
        """Return `batches` of `step` with the step's mismatched pairs, in the first one."""
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
        """Return one forward pass over mismatched `pairs`, int64 [n, 2].

        `known`: their log-probabilities by the reference, float32 [n], if precomputed.
        """
        documents = []
        for prompt, completion in ((self.data[int(asked)], self.data[int(other)]) for asked, other in pairs):
            asked = len(prompt.input_ids) - int(prompt.loss_mask.sum())
            ids = np.concatenate([prompt.input_ids[:asked], completion.input_ids[completion.loss_mask]])
            ids = ids[: self.max_length]
            documents.append(Document(ids, np.arange(len(ids)) >= asked))
        return self.collate_documents(documents, np.ones(len(documents), bool), known)

    def with_reference_by(
        self, logps: Callable[[MicroBatch], np.ndarray], random: np.random.Generator, off: float
    ) -> UnpairedSteps:
        """Return these steps with the reference's log-probabilities by `logps`, plus noise of `off` nats.

        For mismatched pairs the noise is negative, so that the estimate of the divergence stays above 0.
        """
        known = super().with_reference_by(logps, random, off).reference
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
        """Deal a step's pairs to ranks and micro-batches: `[rank][micro-batch]` arrays of places in `pairs_of(step)`.

        Every rank has the same number of micro-batches.
        """
        schedule = self.steps.schedule
        return lay_out(
            self._lengths(step),
            mode=schedule.packing.mode,
            world_size=self.steps.world_size,
            limits=schedule.limits,
            attention_cost=schedule.attention_cost,
            keep_order=schedule.packing.strategy == "in_order",
            ranks_per_row=schedule.ranks_per_row,
        )
