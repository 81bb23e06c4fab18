"""Segments and collators: what a flattened row tells the model, to the token."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.data.dataset import Document
from packtrain.packing.collate import IGNORE, collate_flat, collate_padded, layout_of
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
        following = [
            int(token) if trained else IGNORE
            for token, trained in zip(item.input_ids[1:], item.loss_mask[1:], strict=True)
        ]
        expected += [*following, IGNORE]
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


def test_transformers_flash_path_gets_what_it_asks_for() -> None:
    batch = collate_flat(documents([3, 1, 5]))
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 4, 9]
    assert batch["max_length_q"] == batch["max_length_k"] == 5
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2, 2, 2, 2]]
    assert "attention_mask" not in batch


def test_an_empty_micro_batch_is_a_row_that_trains_nothing() -> None:
    for batch in (collate_flat([]), collate_padded([], pad_token_id=0)):
        assert batch["input_ids"].numel() > 0
        assert (batch["shift_labels"] == IGNORE).all()


def test_any_number_of_answers_may_share_a_prompt() -> None:
    """Two groups of a padded batch: three answers to a prompt of four tokens, and one to a prompt of two."""
    layout = layout_of([6, 9, 5, 4], groups=[(0, 2, 1), (3,)], prompts=[4, 2])
    assert layout.segments == Segments((3, 3, 2, 6, 1, 3), (None, 0, 0, 0, None, 4))
    assert layout.rows.tolist() == [0] * 3 + [0] * 3 + [2] * 2 + [1] * 6 + [3] + [3] * 3
    assert layout.columns.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3]
    assert layout.segments.position_ids()[0].tolist() == layout.columns.tolist()
