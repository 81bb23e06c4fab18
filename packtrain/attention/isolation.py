"""The proof that documents in a packed row cannot see each other, measured on the loaded model.

Three documents share a row. (1) The first, the middle and the last are replaced by other tokens in turn, and the outputs of
the other two must not move; in training mode, since some layers run other code there, with the same random numbers each
time. (2) Every document's outputs must equal those of the document alone under the model's own
attention. Preference pairs with a shared prompt are proved the same way: an answer must not move with the other one.
(3) A positive control: the same row declared as ONE document, its positions still counted per document (else learned
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
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from packtrain.attention.backends import attending_by
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed, PacktrainError
from packtrain.packing.collate import collate_flat, collate_padded, row_arguments
from packtrain.packing.segments import Segments

LENGTHS = (19, 41, 11)  # 71 tokens in all, a prime: a size that no weight has
DOCUMENTS = Segments(LENGTHS)
PAIRS = Segments((13, 7, 9, 17, 12, 13), (None, 0, 0, None, 3, 3))
"""Two preference pairs in a row, each a prompt and the two answers that see it; 71 tokens again."""
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


def loss_tolerance_of(dtype: torch.dtype) -> float:
    """Relative difference of a mean loss that rounding may cause: errors of many tokens cancel (measured: 1e-7, 6e-6, 9e-5)."""
    return {torch.float32: 1e-5, torch.float64: 1e-9, torch.float16: 1e-3}.get(dtype, 5e-3)


@torch.no_grad()
def prove_isolation(
    model: PreTrainedModel, backend: str, *, autocast: torch.dtype | None = None, segments: Segments = DOCUMENTS
) -> Proof:
    """Runs the proof on `model` as it is, by the backend of that name; leaves mode, attention and random state as they were.

    Costs a forward pass of the row of `segments` for each of them and three more, and one of each alone. Raises CheckFailed
    where the model cannot run such a row at all.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary_of(model), (2, segments.tokens))
    tolerance = tolerance_of(autocast or model.dtype)
    with evaluating(model, autocast):
        alone = [_alone(model, ids[0], segments, number) for number in range(len(segments.lengths))]
        with attending_by(model, backend):
            together = _together(model, ids[0], segments)
            control = _difference(_together(model, ids[0], segments, separated=False), alone)
            train_without_dropout(model)
            unchanged = _together(model, ids[0], segments)
            before, after = 0.0, 0.0
            for number, (start, length) in enumerate(zip(segments.starts, segments.lengths, strict=True)):
                changed = ids[0].copy()
                changed[start : start + length] = ids[1, start : start + length]
                outputs = _together(model, changed, segments)
                # what continues the changed segment has to move with it
                others = [i for i, prefix in enumerate(segments.shared) if number not in (i, prefix)]
                moved = {i: _difference([outputs[i]], [unchanged[i]]) for i in others}
                before = max([before, *(value for i, value in moved.items() if i < number)])
                after = max([after, *(value for i, value in moved.items() if i > number)])
    # in 16 bits a router may choose another expert for a token here and there: that is no leak
    equality = _difference(together, alone, typical=(autocast or model.dtype).itemsize < 4)
    exact = max(before, after, equality) <= tolerance
    seeing = control >= CONTROL_FACTOR * tolerance
    verdict = "exact" if exact and seeing else "leaks" if not exact else "unsupported"
    return Proof(verdict, backend, before, after, equality, control, tolerance)


@torch.no_grad()
def check_as_it_comes(model: PreTrainedModel, *, padding: bool, autocast: torch.dtype | None = None) -> None:
    """Raises CheckFailed where `model` is not causal, or, if `padding`, gives other outputs beside padding than alone.

    Training would be nonsense in the first case (a token sees what it has to predict; BERT and its kin without is_decoder),
    inexact in the second. Call it with the model's own attention in place; with the documents of the proof.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary_of(model), (2, DOCUMENTS.tokens))
    tolerance, name = tolerance_of(autocast or model.dtype), type(model).__name__
    with evaluating(model, autocast):
        first = _alone(model, ids[0], DOCUMENTS, 0)
        changed = ids[0].copy()
        changed[LENGTHS[0] - 1] = ids[1, 0] if ids[1, 0] != changed[LENGTHS[0] - 1] else ids[1, 0] - 1
        seen = _difference([_alone(model, changed, DOCUMENTS, 0)[:-1]], [first[:-1]])
        if seen > tolerance:
            raise CheckFailed(
                f"{name} is not causal: a later token moves the outputs before it by {seen:.2g} (tolerance {tolerance:.1g})",
                where="model.path",
                fix="take a causal language model; models such as BERT need model.config.is_decoder=true",
            )
        if not padding:
            return
        alone = [first, *(_alone(model, ids[0], DOCUMENTS, number) for number in range(1, len(LENGTHS)))]
        documents = [Document(one, np.zeros(len(one), dtype=bool)) for one in np.split(ids[0], DOCUMENTS.starts[1:])]
        padded = logits_of(model, collate_padded(documents, 0))
    beside = [padded[number, :length] for number, length in enumerate(LENGTHS)]
    off = _difference(beside, alone, typical=(autocast or model.dtype).itemsize < 4)
    if off > tolerance:
        raise CheckFailed(
            f"padded documents of {name} come out otherwise than alone, off by {off:.2g} (tolerance {tolerance:.1g})",
            where="packing.mode",
            fix="set it to packed: its backend per_document needs no padding",
        )


def _alone(model: PreTrainedModel, ids: np.ndarray, segments: Segments, number: int) -> torch.Tensor:
    """float32 [length, vocabulary] of a segment behind its prefix, by the model's own attention."""
    places = [segments.shared[number], number]
    tokens = np.concatenate(
        [ids[segments.starts[i] : segments.starts[i] + segments.lengths[i]] for i in places if i is not None]
    )
    batch = {
        "input_ids": torch.from_numpy(tokens)[None],
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.int64),
    }
    return logits_of(model, batch)[0, segments.prefix_lengths[number] :]


def _together(
    model: PreTrainedModel, ids: np.ndarray, segments: Segments, *, separated: bool = True
) -> list[torch.Tensor]:
    """float32 [length, vocabulary] of each segment in the row; not `separated`: with no border but the positions' restart."""
    told = row_arguments(segments if separated else Segments((segments.tokens,)))
    batch = {"input_ids": torch.from_numpy(ids)[None], **told, "position_ids": segments.position_ids()}
    torch.manual_seed(0)  # of what is drawn in training mode
    return list(logits_of(model, batch)[0].split(segments.lengths))


def train_without_dropout(model: PreTrainedModel) -> None:
    """Training mode, but for dropout modules: one in front of an expert draws as many numbers as tokens are routed there."""
    model.train()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()


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


def _difference(ours: list[torch.Tensor], theirs: list[torch.Tensor], *, typical: bool = False) -> float:
    """Largest |a - b| over all tokens (or, `typical`, the mean over tokens of a token's largest) / the largest |b|."""
    a, b = torch.cat(ours), torch.cat(theirs)
    of_tokens = (a - b).abs().amax(dim=-1)
    return ((of_tokens.mean() if typical else of_tokens.max()) / b.abs().max()).item()
