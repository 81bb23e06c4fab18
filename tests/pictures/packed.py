"""Losses and gradients of batches with pictures, beside each document alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest
import torch
from tiny_seeing import IMAGE, RandomReader, document, seeing_model
from transformers import PreTrainedModel

from packtrain.data.tokens.cache import Document
from packtrain.packing.collate import ModelInputs, shifted_labels
from packtrain.packing.pictures import TYPES, Sight

LAYOUTS = [(5, (1, 2), 9), (3, (2, 1), 4, (2, 2), 6), (11,), (2, (1, 1), 5)]


def seeing(family: str) -> tuple[PreTrainedModel, Sight, list[Document]]:
    """A model, its sight, and documents with one, two, no and one pictures."""
    model = seeing_model(family)
    reader = RandomReader(family, model.config)
    documents = [document(model, reader, layout, seed) for seed, layout in enumerate(LAYOUTS, 1)]
    return model, Sight.of(model, reader), documents


def alone(model: PreTrainedModel, reader: RandomReader, one: Document) -> ModelInputs:
    """The batch of one document, as the model's own processor makes it."""
    ids = torch.from_numpy(one.input_ids).long()[None]
    batch: ModelInputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "shift_labels": shifted_labels(one)[None],
    }
    takes = inspect.signature(type(model).forward).parameters
    for pixels in map(reader.padded, [one.pictures] if one.pictures else []):
        batch |= {name: values for name, values in pixels.items() if name in takes}
        batch |= {name: (ids == IMAGE).long() for name in TYPES if name in takes}
    return batch


def loss_and_gradients(model: PreTrainedModel, batches: Sequence[ModelInputs]) -> tuple[float, torch.Tensor]:
    """The sum of the losses, and the gradients of all weights as one vector."""
    total = 0.0
    for batch in batches:
        given = {name: value for name, value in batch.items() if name not in ("shift_labels", "label_places")}
        logits = model(**given, use_cache=False).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch["shift_labels"].flatten(), reduction="sum")
        loss.backward()
        total += loss.item()
    gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in model.parameters()]
    model.zero_grad()
    return total, torch.cat([gradient.flatten() for gradient in gradients])


def check(found: tuple[float, torch.Tensor], truth: tuple[float, torch.Tensor]) -> None:
    assert found[0] == pytest.approx(truth[0], rel=1e-6)
    assert (found[1] - truth[1]).norm() <= 1e-5 * truth[1].norm()
