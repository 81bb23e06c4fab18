"""The loss of a forward pass over rows (on every family: tests/architectures), its head, its noise, and a loud failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention import segmented
from packtrain.config.schema import Batch, Packing
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed, UserError
from packtrain.model.forward import add_loss_sum, choose_head
from packtrain.model.load import check_trainable
from packtrain.objectives.sft.spec import TOKEN_WEIGHTS
from packtrain.packing.collate import FILLER, IGNORE, collate_flat, collate_padded, shifted_labels
from packtrain.packing.schedule import make_schedule
from packtrain.train.loader import Steps

LENGTHS = (1, 2, 17, 33, 33, 33, 5, 64)


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(3, 97, n, dtype=np.int32), rng.random(n) < 0.7) for n in lengths]


def with_loss_sum(model: PreTrainedModel, **arguments) -> PreTrainedModel:
    add_fused_lm_head(model)
    add_loss_sum(model, **arguments)
    return model


def loss_and_gradients(model: PreTrainedModel, batches: list[dict]) -> tuple[float, torch.Tensor]:
    """Σ loss over `batches`, and all gradients as one vector."""
    model.zero_grad()
    loss = sum(model(**batch, loss_sum=True) for batch in batches)
    loss.backward()
    parts = [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()]
    return loss.item(), torch.cat(parts)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_gradient_checkpointing_changes_nothing_even_when_rows_are_mixed_before_the_backward() -> None:
    first, second = collate_flat(documents(seed=1)), collate_flat(documents((40, 3, 9), seed=2))
    results = []
    for checkpointing in (False, True):
        model = with_loss_sum(tiny_model("llama"))
        model.set_attn_implementation(segmented.NAME)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        results.append(loss_and_gradients(model, [dict(first), dict(second)]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert relative(results[1][1], results[0][1]) < 1e-6


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
@pytest.mark.parametrize("collate", [collate_flat, lambda items: collate_padded(items, 0)])
def test_an_empty_micro_batch_is_a_zero_that_reaches_every_parameter(family: str, collate: Callable) -> None:
    model = with_loss_sum(tiny_model(family))
    batch = collate([])
    if "segments" in batch:
        model.set_attn_implementation(segmented.NAME)
    loss = model(**batch, loss_sum=True)
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    assert len(FILLER.input_ids) > 0


@pytest.mark.parametrize("layout", ["flat", "padding"])
def test_a_rank_without_documents_has_zero_gradients_where_the_padding_tokens_embedding_is_zero(layout) -> None:
    model = with_loss_sum(tiny_model("llama"))
    model.get_input_embeddings().weight.data[0] = 0
    # as Gemma 3n takes the size of hidden states: the gradient of a root is infinite at 0
    model.base_model.layers[-1].register_forward_hook(
        lambda _, __, out: out * out.square().mean(-1, keepdim=True).sqrt()
    )
    items: Any = documents()
    schedule = make_schedule(np.array(LENGTHS), Packing(), Batch(examples_per_step=2))
    filler = Steps(items, schedule, layout, 0).collate_part(np.array([], int), False)
    model(**filler.inputs, loss_sum=True).backward()
    assert filler.counts == (0, 0, 2, 0)
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_dft_weighs_each_token_by_its_own_probability() -> None:
    items = documents()
    model = with_loss_sum(tiny_model("llama"), weigh=TOKEN_WEIGHTS["dft"])
    model.set_attn_implementation(segmented.NAME)
    loss = model(**collate_flat(items), loss_sum=True).item()
    expected = 0.0
    for item in items:
        logits = tiny_model("llama")(input_ids=torch.from_numpy(item.input_ids.astype(np.int64))[None]).logits[0]
        labels = shifted_labels(item)
        log_probs = logits.log_softmax(-1)[labels != IGNORE].gather(-1, labels[labels != IGNORE, None])
        expected -= (log_probs * log_probs.exp()).sum().item()
    assert loss == pytest.approx(expected, rel=1e-4)


def test_neftune_noise_is_scaled_by_the_length_of_each_document_in_every_layout() -> None:
    alpha, lengths = 5.0, (4, 64)
    items = documents(lengths)
    for flat in (True, False):
        model = with_loss_sum(tiny_model("llama"), neftune_alpha=alpha)
        if flat:
            model.set_attn_implementation(segmented.NAME)
        seen: list[torch.Tensor] = []
        model.model.layers[0].register_forward_pre_hook(
            lambda module, inputs, seen=seen: seen.append(inputs[0].detach())
        )
        batch = collate_flat(items) if flat else collate_padded(items, 0)
        model.train()
        model(**dict(batch), loss_sum=True)
        model.eval()
        model(**dict(batch), loss_sum=True)
        noise = seen[0] - seen[1]
        rows = noise[0].split(lengths) if flat else [noise[i, :n] for i, n in enumerate(lengths)]
        for row, length in zip(rows, lengths, strict=True):
            bound = alpha / (length * 64) ** 0.5
            assert 0.9 * bound < row.abs().max().item() <= bound * (1 + 1e-4)


def test_a_layer_that_is_not_told_its_segments_fails_at_once() -> None:
    model = with_loss_sum(tiny_model("llama"))
    model.set_attn_implementation(segmented.NAME)
    batch = collate_flat(documents())
    del batch["segments"]
    with pytest.raises(CheckFailed, match="without knowing its documents"):
        model(**batch, loss_sum=True)


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_a_head_that_the_fused_one_does_not_fit_is_found_and_runs_as_the_model_has_it(loss: str) -> None:
    model, items = tiny_model("llama"), documents()
    add_fused_lm_head(model)
    head = add_loss_sum(model, weigh=TOKEN_WEIGHTS[loss])
    batch = collate_padded(items, 0)
    with torch.no_grad():
        expected = model(**batch, loss_sum=True).item()
        assert choose_head(model, head, dict(batch), tolerance=1e-5) < 1e-5 and head.kind == "summed"
        model.get_output_embeddings = lambda: torch.nn.Linear(64, 97, bias=False)  # another head than the model uses
        assert choose_head(model, head, dict(batch), tolerance=1e-3) > 1e-3 and head.kind == "full logits"
        assert model(**batch, loss_sum=True).item() == pytest.approx(expected, rel=1e-6)


def test_float16_and_quantised_weights_are_not_trained_but_adapters_on_them_are() -> None:
    half = tiny_model("llama").to(torch.float16)
    with pytest.raises(UserError, match="float16"):
        check_trainable(half)
    check_trainable(half.requires_grad_(False))
    quantised: Any = tiny_model("llama")
    quantised.is_quantized = True
    method = SimpleNamespace(quant_method="some method")
    quantised.hf_quantizer = SimpleNamespace(quantization_config=method, is_trainable=True)
    with pytest.raises(UserError, match="quantised by some method"):
        check_trainable(quantised)
    adapted: Any = get_peft_model(quantised, LoraConfig(target_modules=["q_proj"]))
    check_trainable(adapted)
    quantised.hf_quantizer.is_trainable = False
    with pytest.raises(UserError, match="quantised by some method"):
        check_trainable(adapted)
