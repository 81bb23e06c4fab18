"""Proof that documents in a packed row cannot see each other's pictures. Measured on the loaded model.

Three documents share a row: two with a picture each, and text between them. Each is changed in turn: of the outer ones only the
pixels of the picture. As in isolation.py, outputs of the others must not move, and each document has its outputs when alone. The control has two
parts: the row declared as one document must differ, and a changed picture must move the outputs after it in its own document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from packtrain.attention.backends import attending_by
from packtrain.data.dataset import Document
from packtrain.data.pictures.picture import Picture
from packtrain.errors import CheckFailed
from packtrain.packing.collate import ModelInputs, collate_flat, collate_padded, on_device, row_arguments
from packtrain.packing.pictures import PixelSource, Sight
from packtrain.packing.segments import Segments
from packtrain.proof.comparison import difference, evaluating, tolerance_of
from packtrain.proof.isolation import Proof, logits_of, measure, vocabulary_size

_TEXT = 11
"""Tokens of the document without a picture."""
_MOST = 4096
"""Ids of the vocabulary whose logits are compared."""


@dataclass(frozen=True, slots=True)
class Exhibits:
    """Two documents with a picture each, and the sight of the model that is to see them."""

    sight: Sight
    first: Document
    last: Document


@dataclass(frozen=True, slots=True)
class _Changed:
    """Reader that replaces the pixels of some pictures, by their number in the row, with noise."""

    reader: PixelSource
    numbers: frozenset[int]

    def read(self, pictures: Sequence[Picture]) -> list[dict[str, torch.Tensor]]:
        draw = torch.Generator().manual_seed(0)
        return [
            {key: _noise(key, value, draw) for key, value in tensors.items()} if number in self.numbers else tensors
            for number, tensors in enumerate(self.reader.read(pictures))
        ]


def _noise(name: str, values: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    is_pixels = "pixel" in name and values.is_floating_point()
    return torch.rand(values.shape, generator=draw).to(values.dtype) if is_pixels else values


@torch.no_grad()
def prove_pictures(
    model: PreTrainedModel, backend: str, exhibits: Exhibits, *, autocast: torch.dtype | None = None
) -> Proof:
    """Run the proof on `model` with this backend. Leaves mode, attention and random state unchanged.

    Costs ten calls. Raises CheckFailed if the model cannot run this row at all.
    """
    documents, ids = _row(model, exhibits)
    lengths = tuple(len(document.input_ids) for document in documents)
    outputs: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def run(parts: list[np.ndarray]) -> list[torch.Tensor]:
        changed = tuple(number for number, part in enumerate(parts) if part[0] < 0)
        batch = collate_flat(_with_tokens(documents, parts), _changing(exhibits.sight, changed))
        found = list(_logits(model, batch)[0].split(lengths))
        outputs.setdefault(changed, found)
        return found

    with evaluating(model, autocast) as computed_in:
        alone = [_alone(model, exhibits.sight, document) for document in documents]
        with attending_by(model, backend):
            control = list(_logits(model, _as_one(collate_flat(documents, exhibits.sight)))[0].split(lengths))
            proof = measure(model, run, ids, Segments(lengths), alone, control, computed_in())
    ends = [documents[number].pictures[0].end - 1 for number in (0, 2)]
    seen = [
        difference(outputs[number,][number][end:], outputs[()][number][end:])
        for number, end in zip((0, 2), ends, strict=True)
    ]
    return replace(proof, backend=backend, control=min(proof.control, *seen))


@torch.no_grad()
def check_pictures(
    model: PreTrainedModel, exhibits: Exhibits, *, padding: bool, autocast: torch.dtype | None = None
) -> None:
    """Raise CheckFailed if a later token of a document with a picture changes earlier outputs, or, with `padding`, if padding does.

    Some models see the whole prompt both ways once it has a picture. Call it with the model's own attention in place.
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
    """Return how much of the gradients of a document's outputs reaches the pixels of others, and, as a control, its own.

    They are the largest gradient of others' pixels relative to the largest of its own, and the largest of its own. The towers' gradients are sums over
    pixels: a document that does not reach others' pixels gives them no gradients for these.
    """
    documents, _ = _row(model, exhibits)
    lengths = tuple(len(document.input_ids) for document in documents)
    with evaluating(model), attending_by(model, backend), torch.enable_grad():
        batch = on_device(collate_flat(documents, exhibits.sight), model.device)
        pixels = {
            name: batch[name].requires_grad_() for name in batch if "pixel" in name and batch[name].is_floating_point()
        }
        outputs = _logits(model, {**batch, **pixels})[0].split(lengths)
        others, own = 0.0, float("inf")
        for number, document in enumerate((0, 2)):
            end = documents[document].pictures[0].end - 1
            gradients = torch.autograd.grad(
                outputs[document][end:].square().sum(), [*pixels.values()], retain_graph=True
            )
            parts = [
                [
                    part.abs().max().item()
                    for part in gradient.split([one.rows[name] for one in batch["segments"].pictures])
                ]
                for name, gradient in zip(pixels, gradients, strict=True)
            ]
            mine, theirs = (max(part[which] for part in parts) for which in (number, 1 - number))
            others, own = max(others, theirs / max(mine, 1e-30)), min(own, mine)
    return others, own


def _row(model: PreTrainedModel, exhibits: Exhibits) -> tuple[list[Document], np.ndarray]:
    """Return the documents of the row, and the tokens of all of them with their replacements: int64 [2, T]. -1: other pixels."""
    text = exhibits.sight.as_text(np.random.default_rng(0).integers(0, vocabulary_size(model), (2, _TEXT)))
    middle = Document(text[0], np.zeros(_TEXT, dtype=bool))
    documents = [exhibits.first, middle, exhibits.last]
    own = [document.input_ids.astype(np.int64) for document in documents]
    other = [np.full_like(own[0], -1), text[1], np.full_like(own[2], -1)]
    return documents, np.stack([np.concatenate(own), np.concatenate(other)])


def _with_tokens(documents: Sequence[Document], parts: Sequence[np.ndarray]) -> list[Document]:
    return [
        document if part[0] < 0 else replace(document, input_ids=part)
        for document, part in zip(documents, parts, strict=True)
    ]


def _changing(sight: Sight, documents: Sequence[int]) -> Sight:
    """Return the sight with other pixels in these documents: the outer ones hold picture 0 and 1."""
    return replace(sight, reader=_Changed(sight.reader, frozenset(number // 2 for number in documents)))


def _as_one(batch: ModelInputs) -> ModelInputs:
    """Declare the row as one document. Its positions still restart."""
    whole = replace(batch["segments"], lengths=(batch["segments"].tokens,))
    return {**batch, **row_arguments(whole), "position_ids": batch["position_ids"]}


def _alone(model: PreTrainedModel, sight: Sight, document: Document) -> torch.Tensor:
    """Return float32 [length, ids] of a document alone. The model makes its positions itself."""
    batch = collate_padded([document], sight.text, sight)
    found = _logits(model, {name: value for name, value in batch.items() if name != "position_ids"})
    return found[0, : len(document.input_ids)]  # a blank picture beside it may be longer


def _logits(model: PreTrainedModel, batch: ModelInputs) -> torch.Tensor:
    return logits_of(model, batch, _MOST)
