"""Every causal language model of transformers trains exactly in every mode, or is refused with the reason; the fast part.

test_every_architecture.py does the same for all types.
"""

from __future__ import annotations

import pytest
from page import PAGE, is_comparable, line
from quirks import QUIRKS, UNBUILDABLE
from sweep import WINDOW, difference, documents, one_by_one, outcome_of
from tiny import model_types, tiny_model
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention.backends import attending_by
from packtrain.model.forward import add_loss_sum
from packtrain.packing.collate import collate_flat
from packtrain.packing.segments import Segments

# of every kind one
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
}


@pytest.mark.parametrize("model_type", KINDS)
def test_one_architecture_of_every_kind_is_exact_in_every_mode_or_refused(model_type: str) -> None:
    outcome = outcome_of(model_type)
    assert all(difference.exact for difference in outcome.modes.values()), outcome
    if is_comparable():
        assert line(outcome) in PAGE.read_text().splitlines()


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
    assert set(UNBUILDABLE) <= set(model_types())
    for model_type, quirk in QUIRKS.items():
        assert quirk.reason and (quirk.small or quirk.full), model_type
