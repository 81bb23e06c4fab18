"""The proof that documents in a packed row cannot see each other, measured on the loaded model.

Three documents share a row. (1) The first, the middle and the last are replaced by other tokens in turn, and the outputs of
the other two must not move; in training mode, since some layers run other code there, with the same random numbers each
time. (2) Every document's outputs must equal those of the document alone under the model's own attention: those of training
mode, or of eval mode where a model draws noise. (Eval mode is what the first-step watch and the modes of `verify` run in.)
Preference pairs with a shared prompt are proved the same way, an answer must not move with the other one; a document stands
between them, so that one proof serves pairs and documents.
(3) A positive control: the same row declared as ONE document, its positions still counted per document (else learned
positions alone would show), must differ from the documents alone by many times the tolerance, so that the proof cannot
pass by being blind.

Weights in float32 are proved in float32 also where training computes in bfloat16, unless the kernel takes nothing else:
isolation does not depend on the precision, and bfloat16's rounding would hide a small leak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from packtrain.attention.backends import PER_DOCUMENT, attending_by
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed, PacktrainError
from packtrain.packing.collate import collate_flat, collate_padded, on_device, row_arguments
from packtrain.packing.segments import Segments

LENGTHS = (5, 27, 5)
"""Documents of the proof: 37 tokens in all, a prime, since few weights have a dimension of that size. The outer ones are
longer than the filters of convolutions, the middle one is long for those windows that nobody told of."""
DOCUMENTS = Segments(LENGTHS)
PAIRS = Segments((4, 2, 4, 8, 3, 5, 3), (None, 0, 0, None, None, 4, 4))
"""Two preference pairs in a row, each a prompt and the two answers that see it, and a document between them; 29 tokens, since
one row more is run than of documents. Prompts with an answer have two lengths, one of them the document's: so they run alone
in two calls."""
LONG = (150, 90, 40)
"""Documents of the one row of `verify` that is longer."""
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

    Costs a forward pass of the row of `segments` for each of `_changes` and two more (three where the model draws noise), and
    one of all documents of equal length alone: 7 calls with DOCUMENTS, 222 tokens in all. Raises CheckFailed where the model cannot run such a row at all.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary_of(model), (2, segments.tokens))
    pieces = [np.split(row, segments.starts[1:]) for row in ids]
    tolerance = tolerance_of(autocast or model.dtype)
    with evaluating(model, autocast):
        alone = _alone(model, ids[0], segments)
        with attending_by(model, backend):
            control = _difference(_together(model, ids[0], segments, separated=False), alone)
            train_without_dropout(model)
            unchanged = _together(model, ids[0], segments)
            before, after = 0.0, 0.0
            for changing in _changes(segments):
                row = np.concatenate([pieces[i in changing][i] for i in range(len(segments.lengths))])
                outputs = _together(model, row, segments)
                # what continues a changed segment has to move with it
                still = [i for i, prefix in enumerate(segments.shared) if not changing & {i, prefix}]
                moved = {i: _difference([outputs[i]], [unchanged[i]]) for i in still}
                before = max([before, *(value for i, value in moved.items() if i < max(changing))])
                after = max([after, *(value for i, value in moved.items() if i > min(changing))])
            # in 16 bits a router may choose another expert for a token here and there: that is no leak
            typical = (autocast or model.dtype).itemsize < 4
            equality = _difference(unchanged, alone, typical=typical)
            if not equality <= tolerance:  # what is drawn in training mode is no leak either
                model.eval()
                equality = _difference(_together(model, ids[0], segments), alone, typical=typical)
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
        twice = np.tile(ids[0, : max(LENGTHS)], (2, 1))
        twice[1, -1] = ids[1, 0] if ids[1, 0] != twice[0, -1] else ids[1, 0] - 1
        first, second = _whole(model, twice)[:, :-1]
        seen = _difference([second], [first])
        if seen > tolerance:
            raise CheckFailed(
                f"{name} is not causal: a later token moves the outputs before it by {seen:.2g} (tolerance {tolerance:.1g})",
                where="model.path",
                fix="take a causal language model; models such as BERT need model.config.is_decoder=true",
            )
        if not padding:
            return
        alone = _alone(model, ids[0], DOCUMENTS)
        documents = [Document(one, np.zeros(len(one), dtype=bool)) for one in np.split(ids[0], DOCUMENTS.starts[1:])]
        padded = logits_of(model, collate_padded(documents, 0))
    beside = [padded[number, :length] for number, length in enumerate(LENGTHS)]
    off = _difference(beside, alone, typical=(autocast or model.dtype).itemsize < 4)
    if off > tolerance:
        raise CheckFailed(
            f"padded documents of {name} come out otherwise than alone, off by {off:.2g} (tolerance {tolerance:.1g})",
            where="packing.mode",
            fix=_instead_of_padding(model, autocast),
        )


def _instead_of_padding(model: PreTrainedModel, autocast: torch.dtype | None) -> str:
    """What to do where padded batches are not exact: rows whose documents run one at a time, unless the model cannot run them."""
    try:
        exact = prove_isolation(model, PER_DOCUMENT, autocast=autocast).verdict != "leaks"
    except CheckFailed:
        exact = False
    return "set it to packed: its backend per_document needs no padding" if exact else "take another model"


@dataclass(frozen=True, slots=True)
class LongRow:
    """How far the `documents` of a row are `off` themselves alone, relative to the largest output; lengths in tokens."""

    documents: tuple[int, ...]
    off: float
    tolerance: float

    @property
    def exact(self) -> bool:
        """Whether rounding explains it."""
        return self.off <= self.tolerance


@torch.no_grad()
def try_long_row(model: PreTrainedModel, backend: str, *, autocast: torch.dtype | None = None) -> LongRow:
    """Runs a row of LONG documents (none longer than the model's positions), some layers having chunks or tables of more
    tokens than the proof's row has; all but the first, which has nothing before it, are compared with themselves alone.

    Costs a forward pass of the row and one of each document compared; where they differ in training mode, two more of the
    row say whether the model draws noise there. Raises CheckFailed where it cannot run such a row.
    """
    most = positions_of(model) or max(LONG)
    segments = Segments(tuple(min(length, most) for length in LONG))
    ids = np.random.default_rng(0).integers(0, vocabulary_of(model), segments.tokens)
    tolerance = tolerance_of(autocast or model.dtype)
    typical = (autocast or model.dtype).itemsize < 4
    with evaluating(model, autocast):
        alone = [_whole(model, piece[None])[0] for piece in np.split(ids, segments.starts[1:])[1:]]
        with attending_by(model, backend):
            train_without_dropout(model)
            outputs = _together(model, ids, segments)[1:]
            off = _difference(outputs, alone, typical=typical)
            if not off <= tolerance:
                ids[: segments.lengths[0]] = ids[: segments.lengths[0]][::-1].copy()
                moved = _difference(_together(model, ids, segments)[1:], outputs, typical=typical)
                model.eval()
                off = max(moved, _difference(_together(model, ids, segments)[1:], alone, typical=typical))
    return LongRow(segments.lengths, off, tolerance)


def _changes(segments: Segments) -> list[set[int]]:
    """Segments to be changed together, so that each is changed once while any other stays that must not move with it.

    Every document; or every prefix with all that continues it, then the first that continues each prefix, and so on. One
    document beside such families changes with each of the latter.
    """
    families: dict[int, list[int]] = {}
    for number, prefix in enumerate(segments.shared):
        if prefix is not None:
            families.setdefault(prefix, []).append(number)
    lone = [number for number, prefix in enumerate(segments.shared) if prefix is None and number not in families]
    if not families:
        return [{number} for number in lone]
    whole = [{prefix, *family} for prefix, family in families.items()]
    return [*whole, *({*column, *lone} for column in zip(*families.values(), strict=True))]


def _alone(model: PreTrainedModel, ids: np.ndarray, segments: Segments) -> list[torch.Tensor]:
    """float32 [length, vocabulary] of each segment; each document runs by itself, by the model's own attention.

    A document is a segment behind its prefix; the outputs of a prefix are those in front of the first that continues it.
    Those of equal length are the rows of one call.
    """
    pieces = np.split(ids, segments.starts[1:])
    rows: dict[int, dict[int, np.ndarray]] = defaultdict(dict)
    for number, prefix in enumerate(segments.shared):
        if number not in segments.shared:
            row = np.concatenate([*([] if prefix is None else [pieces[prefix]]), pieces[number]])
            rows[len(row)][number] = row
    alone: dict[int, torch.Tensor] = {}
    for together in rows.values():
        for number, outputs in zip(together, _whole(model, np.stack(list(together.values()))), strict=True):
            before, prefix = segments.prefix_lengths[number], segments.shared[number]
            alone[number] = outputs[before:]
            if prefix is not None:
                alone.setdefault(prefix, outputs[:before])
    return [alone[number] for number in range(len(segments.lengths))]


def _whole(model: PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    """float32 [rows, T, vocabulary] of documents of equal length, int64 [rows, T]."""
    tokens = torch.from_numpy(ids)
    return logits_of(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})


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


def positions_of(model: PreTrainedModel) -> int | None:
    """Tokens of the longest document that `model` was made for; None where it has no limit, or does not say."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # the second one is MPT's
    said = (getattr(config, name, None) for name in names)
    return next((number for number in said if type(number) is int and number > 0), None)


def unseparated(documents: Sequence[Document], most: int | None) -> dict[str, Any]:
    """The row of `documents` with no border left in it (see `joined`) but the restart of the positions."""
    row = collate_flat(documents)
    pieces = np.split(
        row["input_ids"][0].numpy().astype(np.int32), np.cumsum(joined(row["segments"].lengths, most))[:-1]
    )
    whole = [Document(ids, np.zeros(len(ids), dtype=bool)) for ids in pieces]
    return {**collate_flat(whole), "position_ids": row["position_ids"], "shift_labels": row["shift_labels"]}


def joined(lengths: Sequence[int], most: int | None) -> tuple[int, ...]:
    """The lengths of neighbouring documents made one, none of more than `most` tokens but where it is alone; None: all one."""
    whole = [lengths[0]]
    for length in lengths[1:]:
        if most is None or whole[-1] + length <= most:
            whole[-1] += length
        else:
            whole.append(length)
    return tuple(whole)


def logits_of(model: PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    """float32 [rows, T, vocabulary] of a collated batch. Raises CheckFailed where the model cannot run it."""
    batch = on_device({name: value for name, value in batch.items() if name != "shift_labels"}, model.device)
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
    """Largest |a - b| over all tokens (or, `typical`, the mean over tokens of a token's largest) / the largest |b|.

    Infinite where that is no number.
    """
    a, b = torch.cat(ours), torch.cat(theirs)
    of_tokens = (a - b).abs().amax(dim=-1)
    return ((of_tokens.mean() if typical else of_tokens.max()) / b.abs().max()).nan_to_num(torch.inf).item()
