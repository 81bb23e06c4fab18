"""The proof that documents in a packed row cannot see each other, measured on the loaded model.

Three documents share a row. (1) The first, the middle and the last are replaced by other tokens in turn, and the outputs of
the other two must not move. (2) Every document's outputs must equal those of the document alone under the model's own
attention. (3) A positive control: the same row declared as ONE document, its positions still counted per document (else learned
positions alone would show), must differ from the documents alone by many times the tolerance, so that the proof cannot
pass by being blind.

Weights in float32 are proved in float32 also where training computes in bfloat16, unless the kernel takes nothing else:
isolation does not depend on the precision, and bfloat16's rounding would hide a small leak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from packtrain.attention.backends import attending_by
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed, PacktrainError
from packtrain.packing.collate import collate_flat, collate_padded

LENGTHS = (19, 41, 11)  # 71 tokens in all, a prime: a size that no weight has
CONTROL_FACTOR = 5


@dataclass(frozen=True, slots=True)
class Proof:
    """What was measured; differences are the largest of |a - b| over all outputs, relative to the largest |output|.

    `moved_before` / `moved_after`: outputs of documents before / after the perturbed one; `alone`: against the document by
    itself; `control`: `alone` with isolation switched off on purpose.
    """

    verdict: str
    backend: str
    moved_before: float
    moved_after: float
    alone: float
    control: float
    tolerance: float

    def to_json(self) -> dict:
        """As plain values, for summary.json."""
        return asdict(self)


def tolerance_of(dtype: torch.dtype) -> float:
    """Relative difference that rounding alone may cause through a whole model.

    Each operation is off by up to half a unit in the last place (2^-24 in fp32, 2^-11 in fp16, 2^-8 in bf16), and what a
    deep stack adds up, relative to its largest output, is some units: 2e-4 leaves room for reductions in another order
    in fp32, 1e-2 and 5e-2 in fp16 and bf16. A leak moves outputs by the order of 1.
    """
    return {torch.float32: 2e-4, torch.float64: 1e-8, torch.float16: 1e-2}.get(dtype, 5e-2)


@torch.no_grad()
def prove_isolation(model: PreTrainedModel, backend: str, *, autocast: torch.dtype | None = None) -> Proof:
    """Runs the proof on `model` as it is, by the backend of that name; leaves mode, attention and random state as they were.

    Costs 5 forward passes of a row of 71 tokens and 3 of a single document. Raises CheckFailed where the model cannot run
    such a row at all.
    """
    rng = np.random.default_rng(0)
    documents = [_document(rng, length, vocabulary_of(model)) for length in LENGTHS]
    tolerance = tolerance_of(autocast or model.dtype)
    with evaluating(model, autocast):
        alone = [logits_of(model, collate_padded([document], 0))[0] for document in documents]
        with attending_by(model, backend):
            together = _split(logits_of(model, collate_flat(documents)))
            control = _difference(_split(logits_of(model, unseparated(documents))), alone)
            before, after = 0.0, 0.0
            for index, length in enumerate(LENGTHS):
                changed = [*documents[:index], _document(rng, length, vocabulary_of(model)), *documents[index + 1 :]]
                outputs = _split(logits_of(model, collate_flat(changed)))
                before = max(before, _difference(outputs[:index], together[:index]))
                after = max(after, _difference(outputs[index + 1 :], together[index + 1 :]))
    # in 16 bits a router may choose another expert for a token here and there: that is no leak
    equality = _difference(together, alone, typical=(autocast or model.dtype).itemsize < 4)
    exact = max(before, after, equality) <= tolerance
    seeing = control >= CONTROL_FACTOR * tolerance
    verdict = "exact" if exact and seeing else "leaks" if not exact else "unsupported"
    return Proof(verdict, backend, before, after, equality, control, tolerance)


@contextmanager
def evaluating(model: PreTrainedModel, autocast: torch.dtype | None = None) -> Iterator[None]:
    """The model in eval mode inside the block, computing in `autocast`, with the random state restored afterwards."""
    training = model.training
    model.eval()
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices),
            torch.autocast(model.device.type, autocast, enabled=autocast is not None),
        ):
            yield
    finally:
        model.train(training)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Number of token ids that `model` embeds."""
    embeddings: Any = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0])


def _document(rng: np.random.Generator, length: int, vocabulary: int) -> Document:
    return Document(rng.integers(0, vocabulary, length, dtype=np.int32), np.zeros(length, dtype=bool))


def unseparated(documents: Sequence[Document]) -> dict[str, Any]:
    """The row of `documents` with no border left in it but the restart of the positions."""
    row = collate_flat(documents)
    ids = row["input_ids"][0].numpy().astype(np.int32)
    whole = Document(ids, np.zeros(len(ids), dtype=bool))
    return {**collate_flat([whole]), "position_ids": row["position_ids"], "shift_labels": row["shift_labels"]}


def logits_of(model: PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    """float32 [rows, T, vocabulary] of a collated batch. Raises CheckFailed where the model cannot run it."""
    batch = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name != "shift_labels"
    }
    flat = "segments" in batch
    what = f"{type(model).__name__} cannot run {'a flattened row' if flat else 'at all'}"
    fix = "set model.attention=auto" if flat else "see what model.config sets"
    with refusals_of_a_model(what, fix=fix):
        return model(**batch, use_cache=False).logits.float()


@contextmanager
def refusals_of_a_model(what: str, *, fix: str) -> Iterator[None]:
    """Turns whatever a model's own code raises inside the block into CheckFailed: `what`, and the first line of it.

    An architecture refuses what it cannot do (packed rows without some kernel, arguments it does not take) with errors
    of every type, so no list of types is complete. Running out of memory is no refusal.
    """
    try:
        yield
    except (PacktrainError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckFailed(f"{what}: {first}", fix=fix) from error


def _split(logits: torch.Tensor) -> list[torch.Tensor]:
    return list(logits[0].split(LENGTHS))


def _difference(ours: list[torch.Tensor], theirs: list[torch.Tensor], *, typical: bool = False) -> float:
    """Largest |a - b| over all tokens (or, `typical`, the mean over tokens of a token's largest) / the largest |b|."""
    if not ours:
        return 0.0
    a, b = torch.cat(ours), torch.cat(theirs)
    of_tokens = (a - b).abs().amax(dim=-1)
    return ((of_tokens.mean() if typical else of_tokens.max()) / b.abs().max()).item()
