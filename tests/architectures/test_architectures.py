"""Every causal language model of transformers trains exactly in every mode, or is refused with the reason."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from padded_call import PACKED, REFUSED, SHARED, attachment_of, off, outputs_and_gradients, padded_call
from page import PAGE, is_comparable, line, page
from quirks import QUIRKS
from sweep import WINDOW, difference, documents, one_by_one, outcome_of
from test_experts import LENGTHS, by_transformers, micro_batches, routers_of, step
from tiny import model_types, tiny_model, whole_types
from tiny_models import documents as documents_for_routers
from tiny_models import gradient
from tiny_models import off as relative
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl.trainer.utils import add_fused_lm_head

from packtrain import attach
from packtrain.attention import segmented
from packtrain.attention.backends import attending_by
from packtrain.library.attach import at_places
from packtrain.model.forward import add_loss_sum
from packtrain.packing.collate import collate_flat
from packtrain.packing.segments import Segments
from packtrain.plan.model_types import PACKAGES, UNTRAINABLE

# of every kind one, for `-m "not slow"`
KINDS = {
    "llama": "grouped queries",
    "gemma2": "soft-cap, local layers",
    "gpt_oss": "sinks, experts, local layers",
    "llama4_text": "chunks",
    "gpt2": "learned positions",
    "opt": "positions counted from the attention mask",
    "bloom": "ALiBi",
    "gptj": "attention that is code of its own",
    "deepseek_v3": "latent attention, experts by groups",
    "deepseek_v32": "an indexer that chooses the keys",
    "doge": "a mask of the layer's own",
    "qwen3_next": "linear attention",
    "mamba": "state space",
    "rwkv": "a recurrent state",
    "lfm2": "convolutions",
    "bert": "an encoder as a decoder, a head that is not linear",
    "roberta": "a head that over few tokens fits the fused one by chance",
    "cpmant": "not causal",
    "musicgen": "no model of tokens",
    "qwen2_vl": "three positions of a token",
    "gemma4": "a tower beside local layers",
    "qwen3_5": "a tower beside linear attention",
    "molmo2": "kinds of tokens, in training",
    "llama4": "outputs that its text part lacks",
    "chameleon": "tokens that are never the next one",
    "granite_speech": "a tower with attention code of its own",
    "paligemma": "sees its prompt both ways",
    "florence2": "an encoder and a decoder",
}
REFUSED_ROUTERS = ("doge",)  # a loss over other logits than its routers', see tests/train/test_experts.py


def types() -> list:
    """All; of each kind one, and every third of the rest, without -m exhaustive."""
    rest = [one for one in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if one not in KINDS]
    more = [*rest[1::3], *rest[2::3], *({*whole_types()} - {*rest, *KINDS})]
    slow = [pytest.param(one, marks=pytest.mark.slow) for one in rest[::3]]
    return [
        *KINDS,
        *slow,
        *(pytest.param(one, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for one in sorted(more)),
    ]


@pytest.mark.parametrize("model_type", types())
def test_every_architecture_is_exact_in_every_mode_or_refused(model_type: str) -> None:
    outcome = outcome_of(model_type)
    assert all(difference.exact for difference in outcome.modes.values()), outcome
    modes = {"refused": 0, "padding only": 1}.get(outcome.path, 3)
    assert len(outcome.modes) == modes
    assert outcome.why or outcome.path == "segmented"
    assert bool(outcome.by_document) == (outcome.path == "mixers")
    if is_comparable():
        assert line(outcome, attachment_of(model_type)) in PAGE.read_text().splitlines()


@pytest.mark.parametrize("model_type", types())
def test_attach_gives_the_outputs_and_gradients_of_the_padded_call(model_type: str) -> None:
    attachment = attachment_of(model_type)
    assert bool(attachment.calls) == (attachment.path != REFUSED)
    assert all(difference.exact for difference in attachment.calls.values()), attachment
    assert attachment.why or attachment.path in (SHARED, PACKED)


def test_the_measurement_of_attach_sees_tokens_at_wrong_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of the row in another document's place, and an answer that does not see its prompt."""
    model = tiny_model("llama")
    assert isinstance(model, PreTrainedModel)
    batch = padded_call(left=True)
    truth, handle = outputs_and_gradients(model, batch), attach(model)
    assert off(outputs_and_gradients(model, batch), truth).exact and handle.stats.shared_tokens

    def astray(values: torch.Tensor, slots: torch.Tensor, shape: Any) -> torch.Tensor:
        return at_places(values, slots.roll(1), shape)

    with monkeypatch.context() as patch:
        patch.setattr("packtrain.library.attach.at_places", astray)
        assert not off(outputs_and_gradients(model, batch), truth).exact
    on_paths = segmented.on_paths

    def forgetful(tensor: torch.Tensor, row: Segments) -> list[torch.Tensor]:
        pieces = zip(on_paths(tensor, row), row.prefix_lengths, strict=True)
        return [torch.cat([0 * piece[:, :, :before], piece[:, :, before:]], dim=2) for piece, before in pieces]

    with monkeypatch.context() as patch:
        patch.setattr(segmented, "on_paths", forgetful)
        assert not off(outputs_and_gradients(model, batch), truth).exact


@pytest.mark.slow
@pytest.mark.exhaustive  # the tests above have each line of it
def test_the_page_says_what_was_measured() -> None:
    if not is_comparable():
        pytest.skip("docs/architectures.md is about another transformers, or other packages")
    assert PAGE.read_text() == page([*map(outcome_of, model_types())], [*map(attachment_of, model_types())])


def test_the_measurement_sees_a_forgotten_border() -> None:
    model = tiny_model("llama", WINDOW)
    assert isinstance(model, PreTrainedModel)
    truth = one_by_one(model, documents())
    add_fused_lm_head(model)
    add_loss_sum(model)
    row = collate_flat(documents())
    *others, last, end = row["segments"].lengths
    with attending_by(model, "segmented"):
        assert difference(model, [row], truth).exact
        merged = difference(model, [{**row, "segments": Segments((*others, last + end))}], truth)
    assert merged.gradients > 1e-3


def test_no_exception_outlives_its_type() -> None:
    assert set(KINDS) | set(UNTRAINABLE) | set(PACKAGES) <= set(model_types())
    for model_type, quirk in QUIRKS.items():
        assert quirk.reason and (quirk.small or quirk.full), model_type


@pytest.mark.exhaustive  # tests/train/test_experts.py has two of them
@pytest.mark.slow
def test_the_loss_of_routers_is_that_of_transformers_in_every_mode_of_every_family() -> None:
    """Losses, router losses and gradients of a step in three micro-batches, one of them empty, padded and packed."""
    known = [one for one in model_types() if CONFIG_MAPPING[one] in MODEL_FOR_CAUSAL_LM_MAPPING]
    modules = {one: sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[one]].__module__] for one in known}
    routed = [one for one, module in modules.items() if hasattr(module, "load_balancing_loss_func")]
    families = [one for one in routed if one not in REFUSED_ROUTERS]
    assert len(families) >= 25 and {"mixtral", "qwen3_moe", "gpt_oss", "olmoe", "jamba", "qwen3_next"} <= {*families}
    items = documents_for_routers(LENGTHS)[:5]
    for family in families:
        model = tiny_model(family)
        assert isinstance(model, PreTrainedModel), family
        expected_loss, expected_aux, expected = by_transformers(model, items)
        add_fused_lm_head(model)
        add_loss_sum(model)
        routers = routers_of(model)
        for layout in ("padding", outcome_of(family).path):
            model.zero_grad()
            batches = micro_batches(items, [2, 0, 3], padded=layout == "padding")
            with nullcontext() if layout == "padding" else attending_by(model, layout):
                loss = step(model, routers, batches)
            assert loss == pytest.approx(expected_loss, rel=1e-5), (family, layout)
            assert routers.value() == pytest.approx(expected_aux, rel=1e-5), (family, layout)
            assert relative(gradient(model), expected) < 1e-4, (family, layout)
