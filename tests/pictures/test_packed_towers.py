"""Towers keep their own attention, and get no argument of the row of tokens."""

from __future__ import annotations

import pickle

import pytest
import torch
from packed import alone, check, loss_and_gradients, seeing
from tiny_seeing import FAMILIES

from packtrain.attention.backends import attend_by, attending_by, attention_by, own_attention
from packtrain.packing.collate import KERNEL_ARGUMENTS, collate_flat, collate_padded

OF_ROWS = {"segments", *KERNEL_ARGUMENTS}
BACKENDS = {"qwen3_5": "mixers", "lfm2_vl": "mixers"}


@pytest.mark.sample("qwen2_5_vl", "qwen3_5", "llava", "gemma4", "internvl", "lfm2_vl")
@pytest.mark.parametrize("family", FAMILIES)
def test_towers_keep_their_attention_and_get_no_argument_of_the_row(family):
    model, sight, documents = seeing(family)
    text = model.get_decoder()
    towers = [
        part for part in model.modules() if hasattr(part, "config") and "vis" in type(part.config).__name__.lower()
    ]
    inside = {id(part) for part in text.modules()}
    given: set[str] = set()

    def note(module, args, kwargs):
        given.update(kwargs)

    beside = [part for name, part in model.named_modules() if id(part) not in inside and "vis" in name]
    handles = [
        part.register_forward_pre_hook(note, with_kwargs=True) for part in beside if "tion" in type(part).__name__
    ]
    assert handles
    before, own = [part.config._attn_implementation for part in towers], own_attention(model)
    with attending_by(model, BACKENDS.get(family, "segmented")):
        model(**{k: v for k, v in collate_flat(documents, sight).items() if k != "shift_labels"}, use_cache=False)
        assert [part.config._attn_implementation for part in towers] == before
        assert family in BACKENDS or own_attention(model) != own
    assert own_attention(model) == own
    assert not given & OF_ROWS


@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v", "gemma3"])
def test_eager_attention_trains_alike(family):
    """Its function takes fewer keywords, so that an argument of the row would stop a tower."""
    model, sight, documents = seeing(family)
    model.set_attn_implementation("eager")
    truth = loss_and_gradients(model, [alone(model, sight.reader, one) for one in documents])
    undo = attention_by("segmented").install_when_packed(model)
    check(loss_and_gradients(model, [collate_padded(documents, 0, sight)]), truth)
    check(loss_and_gradients(model, [collate_flat(documents, sight)]), truth)
    undo()
    assert own_attention(model) == "eager"


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "qwen3_5"])
def test_recomputed_layers_see_the_same(family):
    model, sight, documents = seeing(family)
    truth = loss_and_gradients(model, [alone(model, sight.reader, one) for one in documents])
    attend_by(model, BACKENDS.get(family, "segmented"))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check(loss_and_gradients(model, [collate_flat(documents, sight)]), truth)


def test_a_sight_can_be_sent_to_loader_processes():
    _, sight, documents = seeing("qwen2_5_vl")
    own, other = collate_flat(documents, sight), collate_flat(documents, pickle.loads(pickle.dumps(sight)))
    assert own.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in own.items() if isinstance(value, torch.Tensor))


def test_positions_are_those_of_each_document_alone():
    _, sight, documents = seeing("qwen2_5_vl")
    batch = collate_flat(documents, sight)
    row, starts = batch["position_ids"], batch["segments"].starts
    assert row[:, 0, list(starts)].eq(0).all()
    text = row[:, 0, starts[2] : starts[3]]
    assert torch.equal(text, torch.arange(11).expand(3, -1))
    assert not torch.equal(row[0], row[1])
