"""Proof that documents in a packed row cannot see each other's pictures. Measured on the loaded model.

Three documents share a row: two with a picture each, and text between them. Each is changed in turn: the middle one gets other
tokens, the outer ones other pixels. Like in isolation.py, the outputs of the others must not move, and each document must have the
outputs that it has alone. The control has two parts: the row declared as one document must differ, and a changed picture must move
the outputs after it in its own document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from packtrain.attention.backends import attending_by
from packtrain.data.dataset import Document
from packtrain.data.pictures.encoded import Picture
from packtrain.errors import CheckFailed
from packtrain.packing.collate import ModelInputs, collate_flat, collate_padded, on_device, row_arguments
from packtrain.packing.pictures import PixelSource, Sight
from packtrain.packing.segments import Segments
from packtrain.proof.comparison import difference, evaluating, tolerance_of
from packtrain.proof.isolation import Proof, logits_of, measure, vocabulary_size

_TEXT_TOKENS = 11
"""Length of the document without a picture."""
_WITH_PICTURE = (0, 2)
"""Numbers of the documents with a picture."""
_OTHER_PIXELS = -1
"""In place of a document's other tokens: it keeps its tokens, and gets other pixels."""
_COMPARED_IDS = 4096
"""Number of ids of the vocabulary whose logits are compared."""


@dataclass(frozen=True, slots=True)
class Exhibits:
    """Two documents with a picture each, and the sight of the model under proof."""

    sight: Sight
    first: Document
    last: Document


@dataclass(frozen=True, slots=True)
class _NoiseReader:
    """Reader of a row that puts noise in place of some pictures. `numbers`: their numbers in the row."""

    reader: PixelSource
    numbers: frozenset[int]

    def read(self, pictures: Sequence[Picture]) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return [
            {key: _noise(key, value, generator) for key, value in tensors.items()}
            if number in self.numbers
            else tensors
            for number, tensors in enumerate(self.reader.read(pictures))
        ]


def _is_pixels(name: str, values: torch.Tensor) -> bool:
    return "pixel" in name and values.is_floating_point()


def _noise(name: str, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return noise of the shape of `values`. Arguments that hold no pixels stay."""
    if not _is_pixels(name, values):
        return values
    return torch.rand(values.shape, generator=generator).to(values.dtype)


@torch.no_grad()
def prove_pictures(
    model: PreTrainedModel, backend: str, exhibits: Exhibits, *, autocast: torch.dtype | None = None
) -> Proof:
    """Run the proof on `model` with this backend. Leaves mode, attention and random state unchanged.

    It calls the model about ten times. Raises CheckFailed if the model cannot run this row at all.
    """
    documents, ids = _row(model, exhibits)
    lengths = tuple(len(document.input_ids) for document in documents)
    outputs: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def run(parts: list[np.ndarray]) -> list[torch.Tensor]:
        changed = tuple(number for number, part in enumerate(parts) if part[0] == _OTHER_PIXELS)
        reader = _NoiseReader(exhibits.sight.reader, frozenset(map(_WITH_PICTURE.index, changed)))
        row = [
            document if number in changed else replace(document, input_ids=parts[number])
            for number, document in enumerate(documents)
        ]
        found = _split_logits(model, collate_flat(row, replace(exhibits.sight, reader=reader)), lengths)
        outputs.setdefault(changed, found)  # the first of () is the row without any change
        return found

    with evaluating(model, autocast) as computed_in:
        alone = [_alone(model, exhibits.sight, document) for document in documents]
        with attending_by(model, backend):
            control = _split_logits(model, _as_one(collate_flat(documents, exhibits.sight)), lengths)
            proof = measure(model, run, ids, Segments(lengths), alone, control, computed_in())
    seen = [
        difference(*(_after_picture(documents[number], found[number]) for found in (outputs[number,], outputs[()])))
        for number in _WITH_PICTURE
    ]
    return replace(proof, backend=backend, control=min(proof.control, *seen))


@torch.no_grad()
def check_pictures(
    model: PreTrainedModel, exhibits: Exhibits, *, padding: bool, autocast: torch.dtype | None = None
) -> None:
    """Raise CheckFailed if a later token changes earlier outputs in a document with a picture.

    With `padding` also if padding changes outputs. Some models see the whole prompt both ways once it has a picture. Call it with the
    model's own attention in place.
    """
    documents, (ids, _) = _row(model, exhibits)
    name, tolerance = type(model).__name__, tolerance_of(autocast or model.dtype).outputs
    with evaluating(model, autocast):
        alone = [_alone(model, exhibits.sight, document) for document in documents]
        for document, before in zip(documents, alone, strict=True):
            tokens = document.input_ids.copy()
            tokens[-1] = ids[-1] if tokens[-1] != ids[-1] else ids[-2]
            if document.pictures and document.pictures[0].end == len(tokens):
                continue  # nothing follows the picture
            seen = difference(_alone(model, exhibits.sight, replace(document, input_ids=tokens))[:-1], before[:-1])
            if seen > tolerance:
                raise CheckFailed(
                    f"{name} is not causal in documents with pictures: a later token changes earlier outputs by {seen:.2g} (tolerance {tolerance:.1g})",
                    where="model.path",
                    fix="take a model that sees its text one way, or data without pictures",
                    code="not-causal",
                )
        if not padding:
            return
        rows = _logits(model, collate_padded(documents, exhibits.sight.text, exhibits.sight))
    beside = torch.cat([row[: len(own)] for row, own in zip(rows, alone, strict=True)])
    statistic = torch.mean if (autocast or model.dtype).itemsize < 4 else torch.max
    off = difference(beside, torch.cat(alone), statistic=statistic)
    if off > tolerance:
        raise CheckFailed(
            f"outputs of padded documents with pictures of {name} differ by {off:.2g} from each alone (tolerance {tolerance:.1g})",
            where="packing.mode",
            fix="set it to packed, or take another model",
            code="padding-changes-outputs",
        )


def reach_of_gradients(model: PreTrainedModel, backend: str, exhibits: Exhibits) -> tuple[float, float]:
    """Measure how far gradients of a document's outputs reach the pixels of the other document.

    Return the largest gradient at the other's pixels, relative to the largest at its own, and, as a control, the largest at its own.
    A tower's gradient is a sum over pixels. So a document whose gradients do not reach the other's pixels adds nothing for them.
    """
    documents, _ = _row(model, exhibits)
    lengths = tuple(len(document.input_ids) for document in documents)
    with evaluating(model), attending_by(model, backend), torch.enable_grad():
        batch = on_device(collate_flat(documents, exhibits.sight), model.device)
        pixels = {name: batch[name].requires_grad_() for name in batch if _is_pixels(name, batch[name])}
        outputs = _split_logits(model, {**batch, **pixels}, lengths)
        others, own, pictures = 0.0, float("inf"), batch["segments"].pictures
        for picture, number in enumerate(_WITH_PICTURE):
            total = _after_picture(documents[number], outputs[number]).square().sum()
            gradients = torch.autograd.grad(total, [*pixels.values()], retain_graph=True)
            by_picture = [
                gradient.split([picture.rows[name] for picture in pictures])
                for name, gradient in zip(pixels, gradients, strict=True)
            ]
            mine, theirs = (
                max(parts[which].abs().max().item() for parts in by_picture) for which in (picture, 1 - picture)
            )
            others, own = max(others, theirs / max(mine, 1e-30)), min(own, mine)
    return others, own


def two_texts(model: PreTrainedModel, sight: Sight, length: int) -> np.ndarray:
    """Return two texts of random tokens that stand for no pictures: int64 [2, length]."""
    return sight.as_text(np.random.default_rng(0).integers(0, vocabulary_size(model), (2, length)))


def _row(model: PreTrainedModel, exhibits: Exhibits) -> tuple[list[Document], np.ndarray]:
    """Return the row's documents, and int64 [2, T]: their tokens, and replacements or _OTHER_PIXELS."""
    text = two_texts(model, exhibits.sight, _TEXT_TOKENS)
    middle = Document(text[0], np.zeros(_TEXT_TOKENS, dtype=bool))
    documents = [exhibits.first, middle, exhibits.last]
    own = [document.input_ids.astype(np.int64) for document in documents]
    other = [np.full_like(own[0], _OTHER_PIXELS), text[1], np.full_like(own[2], _OTHER_PIXELS)]
    return documents, np.stack([np.concatenate(own), np.concatenate(other)])


def _as_one(batch: ModelInputs) -> ModelInputs:
    """Declare the row as one document. Its positions still restart."""
    whole = replace(batch["segments"], lengths=(batch["segments"].tokens,))
    return {**batch, **row_arguments(whole), "position_ids": batch["position_ids"]}


def _alone(model: PreTrainedModel, sight: Sight, document: Document) -> torch.Tensor:
    """Return the logits of a document alone, float32 [length, ids]. The model makes the positions itself."""
    batch = collate_padded([document], sight.text, sight)
    found = _logits(model, {name: value for name, value in batch.items() if name != "position_ids"})
    return found[0, : len(document.input_ids)]  # a blank picture beside it may be longer


def _logits(model: PreTrainedModel, batch: ModelInputs) -> torch.Tensor:
    return logits_of(model, batch, _COMPARED_IDS)


def _split_logits(model: PreTrainedModel, row: ModelInputs, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the logits of each document of a row."""
    return list(_logits(model, row)[0].split(lengths))


def _after_picture(document: Document, outputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs from the picture's last token on: they depend on all its pixels."""
    return outputs[document.pictures[0].end - 1 :]
