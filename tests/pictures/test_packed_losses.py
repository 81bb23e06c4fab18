"""Documents with pictures have the losses and gradients of each alone, in every mode and by every backend."""

from __future__ import annotations

import pytest
from packed import alone, check, loss_and_gradients, seeing
from tiny_seeing import FAMILIES

from packtrain.attention.backends import attending_by
from packtrain.packing.collate import collate_flat, collate_padded

HYBRIDS = {"qwen3_5": "mixers", "lfm2_vl": "mixers"}


@pytest.mark.sample(without=("qwen2_vl", "smolvlm", "aya_vision"))
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_with_pictures_train_as_each_alone(family):
    model, sight, documents = seeing(family)
    truth = loss_and_gradients(model, [alone(model, sight.reader, one) for one in documents])
    towers = [weight.numel() for name, weight in model.named_parameters() if "vis" in name]
    assert sum(towers) and truth[1].norm() > 0
    check(loss_and_gradients(model, [collate_padded(documents, 0, sight)]), truth)
    for backend in (
        ("mixers", "per_document") if family in HYBRIDS else ("segmented", "sdpa_mask", "mixers", "per_document")
    ):
        with attending_by(model, backend):
            check(loss_and_gradients(model, [collate_flat(documents, sight)]), truth)
    with attending_by(model, HYBRIDS.get(family, "segmented")):  # padding_free: every micro-batch is a row
        halves = [collate_flat(documents[:2], sight), collate_flat(documents[2:], sight)]
        check(loss_and_gradients(model, halves), truth)


@pytest.mark.sample("qwen2_5_vl", "qwen3_5", "llava", "gemma3", "gemma4", "idefics3")
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_pictures_get_no_argument_for_them(family):
    model, sight, documents = seeing(family)
    text = [documents[2], documents[2]]
    assert collate_flat(text, sight).keys() == collate_flat(text).keys()
    assert collate_padded(text, 0, sight).keys() == collate_padded(text, 0).keys()
    truth = loss_and_gradients(model, [alone(model, sight.reader, one) for one in text])
    check(loss_and_gradients(model, [collate_padded(text, 0, sight)]), truth)
    with attending_by(model, HYBRIDS.get(family, "segmented")):
        check(loss_and_gradients(model, [collate_flat(text, sight)]), truth)
