"""Segments and collators: what a flattened row tells the model, to the token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.data.dataset import Document
from packtrain.packing.collate import IGNORE, RowLayout, collate_answers, collate_flat, collate_padded
from packtrain.packing.segments import Segments

untimed = settings(deadline=None, max_examples=50)  # timings are for benchmarks
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def documents(lengths: list[int], seed: int = 0) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(1, 50, n, dtype=np.int32), rng.random(n) < 0.5) for n in lengths]


@untimed
@given(LENGTHS)
def test_labels_are_the_next_trained_token_and_never_cross_a_border(lengths: list[int]) -> None:
    items = documents(lengths)
    labels = collate_flat(items)["shift_labels"][0].tolist()
    expected = []
    for item in items:
        expected += [*np.where(item.loss_mask[1:], item.input_ids[1:], IGNORE).tolist(), IGNORE]
    assert labels == expected


@untimed
@given(LENGTHS)
def test_padded_and_flat_batches_hold_the_same_tokens_and_labels(lengths: list[int]) -> None:
    items = documents(lengths)
    flat, padded = collate_flat(items), collate_padded(items, pad_token_id=0)
    real = padded["attention_mask"].bool()
    assert padded["input_ids"][real].tolist() == flat["input_ids"][0].tolist()
    assert padded["shift_labels"][real].tolist() == flat["shift_labels"][0].tolist()
    assert (padded["shift_labels"][~real] == IGNORE).all()
    assert (padded["input_ids"][~real] == 0).all()


def test_transformers_flash_path_gets_what_it_asks_for_and_an_empty_micro_batch_trains_nothing() -> None:
    batch = collate_flat(documents([3, 1, 5]))
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 4, 9]
    assert batch["max_length_q"] == batch["max_length_k"] == 5
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2, 2, 2, 2]]
    assert "attention_mask" not in batch
    for batch in (collate_flat([]), collate_padded([], pad_token_id=0)):
        assert batch["input_ids"].numel() > 0
        assert (batch["shift_labels"] == IGNORE).all()


@pytest.mark.parametrize("rows", ["padding", "flat", "shared"])
def test_the_places_of_targets_predict_them_answer_by_answer(rows: RowLayout) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 50, n, dtype=np.int32) for n in (4, 1, 2)]

    def answered(prompt: np.ndarray, tokens: int) -> Document:
        ids = np.concatenate([prompt, rng.integers(1, 50, tokens, dtype=np.int32)])
        return Document(ids, np.arange(len(ids)) >= len(prompt))

    items = [answered(prompt, n) for n in (3, 1) for prompt in prompts]
    batch = collate_answers(items, 0, rows, [len(prompt) for prompt in prompts])
    ids, labels = batch["input_ids"].flatten(), batch["shift_labels"].flatten()
    assert batch["target_counts"].tolist() == [3, 3, 3, 1, 1, 1]
    assert sorted(batch["target_places"].tolist()) == batch["label_places"].tolist()
    for item, places in zip(items, batch["target_places"].split(batch["target_counts"].tolist()), strict=True):
        targets = np.flatnonzero(item.loss_mask)
        assert labels[places].tolist() == item.input_ids[targets].tolist()
        assert ids[places].tolist() == item.input_ids[targets - 1].tolist()
    if rows == "shared":  # a prompt of one token has nothing to share
        assert batch["segments"] == Segments((3, 4, 2, 4, 2, 1, 4, 2), (None, 0, 0, None, None, None, 5, 5))
    else:
        assert rows == "padding" or batch["segments"].lengths == (7, 5, 4, 2, 5, 3)
