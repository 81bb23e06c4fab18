"""A picture in a beginning that documents share runs once; equal tokens with another picture are not shared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from packed import alone, check, loss_and_gradients
from tiny_seeing import RandomReader, document, seeing_model

from packtrain.attention.backends import attending_by
from packtrain.data.dataset import Preference
from packtrain.data.tokens.cache import Document
from packtrain.packing.collate import collate_pairs, collate_shared
from packtrain.packing.pictures import Sight
from packtrain.packing.prefixes import index_prefixes

SHARING = ("qwen2_5_vl", "gemma3", "llava_next", "mistral3")


class Documents(list[Document]):
    """Documents by number."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(one.input_ids) for one in self])


def answered(prompt: Document, length: int, seed: int, *, other: int = 0) -> Document:
    """`prompt` with an answer; with `other`, its pictures are others of the same size."""
    answer = np.random.default_rng(seed).integers(3, 100, length, dtype=np.int32)
    pictures = tuple(
        replace(picture, offset=picture.offset + other, hash=picture.hash + other) for picture in prompt.pictures
    )
    mask = np.append(np.zeros(len(prompt.input_ids), bool), np.ones(length, bool))
    return Document(np.append(prompt.input_ids, answer), mask, pictures)


@pytest.mark.parametrize("backend", ["segmented", "mixers", "per_document"])
@pytest.mark.parametrize("family", SHARING)
def test_a_shared_picture_runs_once(family, backend):
    model = seeing_model(family)
    reader = RandomReader(family, model.config)
    sight = Sight.of(model, reader)
    prompt = document(model, reader, (9, (1, 2), 12), 1)
    apart = document(model, reader, (7, (1, 1), 4), 3)
    others = [answered(prompt, 4, 4, other=1), answered(prompt, 6, 5, other=1)]
    documents = Documents([answered(prompt, 5, 1), apart, answered(prompt, 7, 2), *others])
    row = index_prefixes(documents).row(np.arange(len(documents)))
    batch = collate_shared([documents[number] for number in row.documents], row, sight)
    # each pair has its prompt once, and all four have the text before the picture once, without its last token
    assert batch["segments"].tokens == sum(documents.lengths) - 2 * (len(prompt.input_ids) - 1) - 8
    assert len(batch["segments"].pictures) == 3
    truth = loss_and_gradients(model, [alone(model, reader, one) for one in documents])
    with attending_by(model, backend):
        check(loss_and_gradients(model, [batch]), truth)


@pytest.mark.parametrize("end", [3, 0], ids=["text ends the prompt", "a picture ends the prompt"])
@pytest.mark.parametrize("other", [0, 1], ids=["same picture", "another picture"])
@pytest.mark.parametrize("family", SHARING)
def test_pairs_share_the_picture_of_their_prompt(family, other, end):
    model = seeing_model(family)
    reader = RandomReader(family, model.config)
    sight = Sight.of(model, reader)
    prompt = document(model, reader, (9, (1, 2), end), 1)
    pairs = [Preference(answered(prompt, 5, 1), answered(prompt, 7, 2, other=other), len(prompt.input_ids))]
    pairs += [Preference(document(model, reader, (12,), 5), document(model, reader, (9,), 6), 0)]
    batch = collate_pairs(pairs, 0, "shared", sight)
    assert len(batch["segments"].pictures) == (1 if end and not other else 2)
    documents = [one for pair in pairs for one in (pair.chosen, pair.rejected)]
    truth = loss_and_gradients(model, [alone(model, reader, one) for one in documents])
    with attending_by(model, "segmented"):
        check(loss_and_gradients(model, [batch]), truth)
    check(loss_and_gradients(model, [collate_pairs(pairs, 0, "padding", sight)]), truth)
