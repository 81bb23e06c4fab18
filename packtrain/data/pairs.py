"""What preference training sees of the data: pairs of documents that begin with the same prompt.

A PairDataset is a TokenDataset read two documents at a time. The prompt is not stored beside them: it is what comes
before the first target of either document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from packtrain.data.dataset import TokenDataset
from packtrain.data.report import DataReport, PairFigures
from packtrain.data.tokens.store import Document

LEAST_PROMPT = 2
"""Tokens of a prompt that can be computed once: the last one predicts the answer and runs in front of each."""


@dataclass(frozen=True, slots=True)
class Preference:
    """One pair. Both documents begin with the same `prompt` tokens, and their targets are all that follows it.

    `prompt` is 0 where it has fewer than LEAST_PROMPT tokens.
    """

    chosen: Document
    rejected: Document
    prompt: int


class PairDataset:
    """Pairs for training; picklable like the documents that they are made of.

    lengths: int32[n], tokens of both documents of a pair, the prompt in each. shared_lengths: int32[n], its tokens when
    the prompt (but for its last token) is computed once. trained: int32[n], its targets. prompts: int32[n], see
    Preference. `fingerprint` changes whenever a token, a mask or the order changes.
    """

    def __init__(self, documents: TokenDataset) -> None:
        """`documents`: the chosen and the rejected one of each pair, one after the other."""
        self.documents, self.fingerprint = documents, documents.fingerprint
        lengths, trained = (part.reshape(-1, 2) for part in (documents.lengths, documents.trained))
        before = (lengths - trained)[:, 0]
        self.lengths: np.ndarray = lengths.sum(1, dtype=np.int32)
        self.trained: np.ndarray = trained.sum(1, dtype=np.int32)
        self.prompts: np.ndarray = np.where(before >= LEAST_PROMPT, before, 0)
        self.shared_lengths: np.ndarray = self.lengths - np.maximum(self.prompts - 1, 0)
        self.report: DataReport = replace(
            documents.report,
            pairs=PairFigures(
                pairs=len(before),
                prompt_tokens=round(float(before.mean()), 1),
                chosen_tokens=round(float(trained[:, 0].mean()), 1),
                rejected_tokens=round(float(trained[:, 1].mean()), 1),
                prompt_share=round(2 * int(before.sum(dtype=np.int64)) / int(lengths.sum(dtype=np.int64)), 4),
                shareable=int(np.count_nonzero(self.prompts)),
            ),
        )

    def __reduce__(self) -> tuple[type[PairDataset], tuple[TokenDataset]]:
        return (PairDataset, (self.documents,))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Preference:
        """Pair number `index`, 0 to len - 1."""
        chosen, rejected = self.documents[2 * index], self.documents[2 * index + 1]
        return Preference(chosen, rejected, int(self.prompts[index]))
