"""The public `pack` and `PackedCollator`: no document is lost, cut or trained across a border."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from packtrain import PackedCollator, Segments, pack

DOCUMENTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 10, 11, 12]}]


@given(st.lists(st.integers(1, 50), max_size=40), st.sampled_from(["best_fit", "in_order"]), st.integers(0, 3))
def test_every_document_is_in_one_row_and_no_row_is_too_long(lengths: list[int], strategy: Any, seed: int) -> None:
    rows = pack(lengths, 50, strategy=strategy, seed=seed)
    assert sorted(number for row in rows for number in row) == [*range(len(lengths))]
    assert all(0 < sum(lengths[number] for number in row) <= 50 for row in rows)
    assert rows == pack(iter(lengths), 50, strategy=strategy, seed=seed)
    assert strategy == "best_fit" or [number for row in rows for number in row] == [*range(len(lengths))]


def test_what_cannot_be_packed_is_named() -> None:
    for lengths, how, said in (
        ([3, 60], {}, "document 1 has 60 tokens, a row takes 50"),
        ([3, 0], {}, "document 1 has no token"),
        ([3], {"strategy": "tightest"}, "'tightest'"),
    ):
        with pytest.raises(ValueError, match=said):
            pack(lengths, 50, **how)


def test_it_says_what_the_collators_of_transformers_and_trl_say() -> None:
    ours = PackedCollator(return_flash_attn_kwargs=True, return_seq_idx=True)(DOCUMENTS)
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(DOCUMENTS)
    of_trl = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(DOCUMENTS)
    for expected in (theirs, of_trl):
        assert expected.keys() == ours.keys() - {"segments"}
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)), name
    assert ours["segments"] == Segments((3, 1, 4))
    assert PackedCollator(return_segments=False)(DOCUMENTS).keys() == {"input_ids", "labels", "position_ids"}


def labels_of(*features: Any) -> list[int]:
    return PackedCollator()(features)["labels"][0].tolist()


def test_only_what_is_to_be_trained_is_and_never_the_first_token_of_a_document() -> None:
    ids = [5, 6, 7]
    assert labels_of({"input_ids": ids, "labels": [5, -100, 7]}) == [-100, -100, 7]
    assert labels_of({"input_ids": ids, "completion_mask": [1, 1, 0]}) == [-100, 6, -100]
    assert labels_of({"input_ids": ids, "completion_mask": [0, 1, 1], "assistant_masks": [0, 0, 1]}) == [-100, -100, 7]
    assert labels_of({"input_ids": ids}, {"input_ids": ids}) == [-100, 6, 7, -100, 6, 7]


def test_tensors_arrays_rows_of_trl_padding_and_lists_of_documents_are_features() -> None:
    expected = PackedCollator()(DOCUMENTS)
    flat = [token for one in DOCUMENTS for token in one["input_ids"]]
    padded = {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}
    for features in (
        [{"input_ids": torch.tensor(one["input_ids"])} for one in DOCUMENTS],
        [{"input_ids": np.array(one["input_ids"], np.int32)} for one in DOCUMENTS],
        [{"input_ids": flat, "seq_lengths": [3, 1, 4]}],
        [DOCUMENTS[:2], DOCUMENTS[2]],
        [padded, *DOCUMENTS[1:]],
    ):
        row = PackedCollator()(features)
        assert all(torch.equal(row[name], expected[name]) for name in ("input_ids", "labels", "position_ids"))
        assert row["segments"] == expected["segments"]


def test_features_that_are_no_documents_are_named() -> None:
    for said, feature in {
        "with input_ids": {"text": "no tokens"},
        "2 input_ids and 1 labels": {"input_ids": [5, 6], "labels": [5]},
        "2 tokens has seq_lengths": {"input_ids": [5, 6], "seq_lengths": [1, 2]},
        "without a token|seq_lengths": {"input_ids": []},
        "one document": {"input_ids": [[5, 6], [7, 8]]},
        "without a token": {"input_ids": [5, 6], "attention_mask": [0, 0]},
        "without features": (),
        "a list of them": None,
    }.items():
        features = {"input_ids": [1, 2]} if feature is None else [feature] if feature else []
        with pytest.raises(ValueError, match=said):
            PackedCollator()(features)
