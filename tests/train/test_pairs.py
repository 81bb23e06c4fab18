"""Preference pairs in a row say, token by token, what TRL's padded call says, and with the same gradients."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from tiny_dpo import trl_batch
from tiny_models import a_pair, gradient, off, tiny_model
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention.backends import attend_by
from packtrain.data.dataset import Preference
from packtrain.model.forward import add_answer_scores
from packtrain.packing.collate import RowLayout, collate_pairs

OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"]
BACKENDS: dict[RowLayout, tuple[str | None, ...]] = {
    "padding": (None,),
    "flat": ("segmented", "per_document"),
    "shared": ("segmented", "sdpa_mask", "per_document"),
}


def odd_pairs() -> list[Preference]:
    """A prompt of one token (nothing to share) and of two, a long one, answers of one token and of equal lengths."""
    rng = np.random.default_rng(0)
    shapes = [(10, 5, 9), (1, 4, 4), (33, 1, 2), (2, 7, 7), (5, 20, 3), (1, 1, 1), (4, 1, 1)]
    return [a_pair(rng, *shape) for shape in shapes]


def said(family: str, layout: RowLayout | None, backend: str | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Figures of the targets of the odd pairs, and the gradient of a weighted sum of log-probabilities.

    Without a layout by TRL's own padded call, which knows nothing of ours.
    """
    model = tiny_model(family)
    add_fused_lm_head(model, outputs=OUTPUTS)
    if layout is None:
        batch = trl_batch(odd_pairs())
        mask = batch.pop("completion_mask")
        labels = batch["input_ids"].masked_fill(mask == 0, -100)
        figures = model(**batch, labels=labels, fused_lm_head=True, use_cache=False)
        found = {name: figures[name][mask[:, 1:].bool()] for name in OUTPUTS}
    else:
        add_answer_scores(model, OUTPUTS)
        if backend:
            attend_by(model, backend)
        batch = collate_pairs(odd_pairs(), 0, layout)
        places, counts = batch.pop("target_places"), batch.pop("target_counts")
        assert counts.sum() == len(places)
        figures = model(**batch, answer_scores=True)
        found = {name: figures[name].flatten()[places] for name in OUTPUTS}
    log_probs = found["log_probs"]
    (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    return found, gradient(model)


@lru_cache
def padded(family: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return said(family, None, None)


@pytest.mark.parametrize(("layout", "backend"), [(one, by) for one, backends in BACKENDS.items() for by in backends])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_pairs_equals_the_padded_call_of_trl(family: str, layout: RowLayout, backend: str | None) -> None:
    expected, theirs = padded(family)
    found, ours = said(family, layout, backend)
    for name in OUTPUTS:
        assert found[name].dtype == expected[name].dtype and found[name].shape == expected[name].shape, name
        assert (found[name].float() - expected[name].float()).abs().max() <= 1e-5, name
    assert off(ours, theirs) < 1e-4


@pytest.mark.parametrize("layout", ["flat", "shared"])
def test_a_filler_trains_nothing_and_reaches_every_parameter(layout: RowLayout) -> None:
    model = tiny_model("llama")
    add_fused_lm_head(model, outputs=OUTPUTS)
    add_answer_scores(model, OUTPUTS)
    attend_by(model, "segmented")
    batch = collate_pairs([], 0, layout)
    assert not len(batch.pop("target_places")) and batch.pop("target_counts").tolist() == [0, 0]
    model(**batch, answer_scores=True).log_probs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
