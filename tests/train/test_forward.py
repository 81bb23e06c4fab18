"""The loss of a forward pass over rows (on every family: tests/architectures), its heads, its noise, and a loud failure."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tiny_models import documents, gradient, off, tiny_model
from torch import nn
from transformers import PreTrainedModel
from trl.kernels import chunked_logprob as kernels
from trl.trainer.utils import add_fused_lm_head

import packtrain.attention.segmented  # noqa: F401  # registers its attention
from packtrain.attention import segmented
from packtrain.config.schema import Batch, Packing
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed, UserError
from packtrain.model import forward
from packtrain.model.forward import ChosenTokens, add_loss_sum, choose_head, compare_gradients, sum_losses
from packtrain.model.load import check_trainable
from packtrain.objectives.sft.spec import TOKEN_WEIGHTS
from packtrain.objectives.spec import equal_weights
from packtrain.packing.collate import FILLER, IGNORE, collate_flat, collate_padded, shifted_labels
from packtrain.packing.schedule import make_schedule
from packtrain.train.loader import Steps

LENGTHS = (1, 2, 17, 33, 33, 33, 5, 64)


def with_loss_sum(model: PreTrainedModel, **arguments) -> PreTrainedModel:
    add_fused_lm_head(model)
    add_loss_sum(model, **arguments)
    return model


def loss_and_gradients(model: PreTrainedModel, batches: list[dict]) -> tuple[float, torch.Tensor]:
    """Σ loss over `batches`, and all gradients as one vector."""
    model.zero_grad()
    loss = sum(model(**batch, loss_sum=True) for batch in batches)
    loss.backward()
    return loss.item(), gradient(model)


def test_gradient_checkpointing_changes_nothing_even_when_rows_are_mixed_before_the_backward() -> None:
    first, second = collate_flat(documents(LENGTHS, 1)), collate_flat(documents((40, 3, 9), 2))
    results = []
    for checkpointing in (False, True):
        model = with_loss_sum(tiny_model("llama"))
        model.set_attn_implementation(segmented.NAME)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        results.append(loss_and_gradients(model, [dict(first), dict(second)]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert off(results[1][1], results[0][1]) < 1e-6


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
    items: Any = documents(LENGTHS)
    schedule = make_schedule(np.array(LENGTHS), Packing(), Batch(examples_per_step=2))
    filler = Steps(items, schedule, layout, 0).collate_part(np.array([], int), False)
    model(**filler.inputs, loss_sum=True).backward()
    assert filler.counts == (0, 0, 2, 0)
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_dft_weighs_each_token_by_its_own_probability() -> None:
    items = documents(LENGTHS)
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
    batch = collate_flat(documents(LENGTHS))
    del batch["segments"]
    with pytest.raises(CheckFailed, match=r"\[segments-not-passed-on\]"):
        model(**batch, loss_sum=True)


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_a_head_that_the_fused_one_does_not_fit_is_found_and_runs_as_the_model_has_it(loss: str) -> None:
    model, items = tiny_model("llama"), documents(LENGTHS)
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
    with pytest.raises(UserError, match=r"\[float16-trained\]"):
        check_trainable(half)
    check_trainable(half.requires_grad_(False))
    quantised: Any = tiny_model("llama")
    quantised.is_quantized = True
    method = SimpleNamespace(quant_method="some method")
    quantised.hf_quantizer = SimpleNamespace(quantization_config=method, is_trainable=True)
    with pytest.raises(UserError, match=r"some method .*\[quantised\]"):
        check_trainable(quantised)
    adapted: Any = get_peft_model(quantised, LoraConfig(target_modules=["q_proj"]))
    check_trainable(adapted)
    quantised.hf_quantizer.is_trainable = False
    with pytest.raises(UserError, match=r"some method .*\[quantised\]"):
        check_trainable(adapted)


ROWS, WIDTH, WORDS = 70, 24, 211


def inputs(bias: bool = True, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(WIDTH, WORDS, bias=bias)
    for weight in head.parameters():
        weight.data.normal_(generator=generator)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)
    return hidden, torch.randint(WORDS, (ROWS,), generator=generator), head


def by_full_logits(hidden: torch.Tensor, targets: torch.Tensor, head: nn.Linear, loss: str) -> torch.Tensor:
    losses = F.cross_entropy(head(hidden).double(), targets, reduction="none")
    return (losses * (-losses).exp().detach() if loss == "dft" else losses).sum()


def of_step(total: torch.Tensor, hidden: torch.Tensor, head: nn.Linear) -> list[torch.Tensor]:
    """The loss of a step that divides it by a number of tokens, and its gradients."""
    hidden.grad = None
    head.zero_grad()
    (total * 0.37).backward()
    return [total.detach(), *(tensor.grad for tensor in (hidden, *head.parameters()) if tensor.grad is not None)]


def as_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's functions in torch, of the same arguments, in place of its kernels."""

    class Launched:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.function

    monkeypatch.setattr(kernels, "_use_triton", lambda device: True)
    monkeypatch.setattr(kernels, "_forward_kernel", Launched(kernels._forward_tile))
    monkeypatch.setattr(kernels, "_backward_kernel", Launched(kernels._backward_tile))


@pytest.mark.parametrize("loss", ["nll", "dft"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("triton", [False, True])
def test_losses_and_gradients_are_those_of_full_logits(
    monkeypatch: pytest.MonkeyPatch, loss: Any, bias: bool, triton: bool
) -> None:
    monkeypatch.setattr(forward, "_CPU_CHUNK", 32)  # three chunks, the last one smaller
    if triton:
        as_triton(monkeypatch)
    hidden, targets, head = inputs(bias)
    expected = of_step(by_full_logits(hidden, targets, head, loss), hidden, head)
    made = of_step(sum_losses(hidden, head, ChosenTokens(targets, TOKEN_WEIGHTS[loss])), hidden, head)
    assert len(made) == len(expected) == 3 + bias
    for own, other in zip(made, expected, strict=True):
        torch.testing.assert_close(own, other.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_losses_and_gradients_are_the_same_by_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    hidden, targets, head = inputs(bias)
    made = []
    for chunk in (16, 64, len(hidden)):
        monkeypatch.setattr(forward, "_CPU_CHUNK", chunk)
        made.append(of_step(sum_losses(hidden, head, ChosenTokens(targets, equal_weights)), hidden, head))
    for own, *others in zip(*made, strict=True):
        assert all((own - other).norm() <= 1e-6 * own.norm() for other in others)


def test_it_makes_the_gradients_that_are_asked_for_and_no_others() -> None:
    hidden, targets, head = inputs()
    head.requires_grad_(False)  # as beside adapters
    sum_losses(hidden, head, ChosenTokens(targets, equal_weights)).backward()
    assert hidden.grad is not None and head.weight.grad is None
    with torch.no_grad():
        assert not sum_losses(hidden, head, ChosenTokens(targets, equal_weights)).requires_grad


def test_a_second_backward_pass_is_refused() -> None:
    """Its gradients were changed in place by the first."""
    hidden, targets, head = inputs()
    total = sum_losses(hidden, head, ChosenTokens(targets, equal_weights))
    total.backward(retain_graph=True)
    with pytest.raises(TypeError):
        total.backward()


def test_the_measured_difference_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, targets, head = inputs()
    assert compare_gradients(hidden, head, ChosenTokens(targets, equal_weights)) < 1e-5
    right = ChosenTokens.in_place

    def wrong(self: ChosenTokens, logits: torch.Tensor, part: slice, *, trains: bool) -> torch.Tensor:
        total = right(self, logits, part, trains=trains)
        logits *= 1.01
        return total

    monkeypatch.setattr(ChosenTokens, "in_place", wrong)
    assert compare_gradients(hidden, head, ChosenTokens(targets, equal_weights)) == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("fault", ["gradients", "refused", "renamed", "gone"])
def test_a_summed_head_that_is_wrong_gives_way_to_that_of_single_tokens(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    model = tiny_model("llama")
    add_fused_lm_head(model)
    head = add_loss_sum(model)
    batch = collate_flat([Document(torch.arange(3, 60).numpy(), torch.ones(57, dtype=torch.bool).numpy())])
    model.set_attn_implementation("packtrain_segmented")
    assert choose_head(model, head, dict(batch)) < 1e-5 and (head.kind, head.refusal) == ("summed", "")
    expected = model(**batch, loss_sum=True)

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise TypeError("_forward_kernel() takes other arguments")

    match fault:
        case "refused":
            monkeypatch.setattr(ChosenTokens, "in_place", refuse)
        case "gradients":
            right = ChosenTokens.in_place
            monkeypatch.setattr(
                ChosenTokens, "in_place", lambda self, logits, part, **how: right(self, logits * 1, part, **how)
            )
        case "renamed":  # in another version of TRL
            monkeypatch.delattr(kernels, "_addmm_fp32")
        case "gone":
            monkeypatch.setattr(forward, "_kernels", lambda: importlib.import_module("trl.kernels.elsewhere"))
    assert choose_head(model, head, dict(batch)) < 1e-5 and head.kind == "by token"
    said = {"refused": "takes other arguments", "gradients": "gradients by", "renamed": "_addmm_fp32"}
    assert said.get(fault, "No module named") in head.refusal
    torch.testing.assert_close(model(**batch, loss_sum=True), expected)


def test_in_bfloat16_the_loss_and_the_weights_gradient_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: of many chunks, which bfloat16 sums would round at every step."""
    monkeypatch.setattr(forward, "compute_dtype", lambda hidden: hidden.dtype)
    monkeypatch.setattr(forward, "_CPU_CHUNK", 2)
    hidden, targets, head = inputs(bias=False)
    exact = of_step(by_full_logits(hidden, targets, head, "nll"), hidden, head)
    rounded, head16 = hidden.detach().bfloat16().requires_grad_(), nn.Linear(WIDTH, WORDS, bias=False).bfloat16()
    head16.weight.data = head.weight.data.bfloat16()
    total, _, of_weight = of_step(sum_losses(rounded, head16, ChosenTokens(targets, equal_weights)), rounded, head16)
    assert total.dtype == torch.float32 and total.item() == pytest.approx(exact[0].item(), rel=2e-3)
    assert of_weight.dtype == torch.bfloat16
    assert (of_weight.float() - exact[2]).norm() < 1e-2 * exact[2].norm()
