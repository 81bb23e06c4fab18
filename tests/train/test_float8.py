"""trainer.mixed_precision=fp8: products of the layers in 8 bits, emulated on a CPU by rounding their factors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from transformers import PreTrainedModel

from packtrain.changes.float8 import TOLERANCE, check_float8, multiply_in_float8
from packtrain.errors import UserError
from packtrain.proof.comparison import prove_change

pytest.importorskip("torchao")
IDS = torch.randint(3, 97, (4, 61), generator=torch.Generator().manual_seed(0))


def emulated(model: PreTrainedModel) -> Callable[[], None]:
    return multiply_in_float8(model, emulate=True)


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=IDS, labels=IDS).loss


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi"])
def test_losses_and_gradients_are_off_by_rounding_alone_and_weights_keep_their_names(family: str) -> None:
    model = tiny_model(family)
    weights, before = dict(model.named_parameters()), loss_of(model)
    proof = prove_change(lambda: emulated(model), lambda: loss_of(model), weights, TOLERANCE, lambda values: values)
    assert not proof.refusal and 0.02 < proof.gradients < TOLERANCE.gradients and proof.loss > 0
    assert dict(model.named_parameters()).keys() == weights.keys() == dict(tiny_model(family).named_parameters()).keys()
    assert all(weight is weights[name] for name, weight in model.named_parameters())
    assert not loss_of(model).equal(before)


def test_undone_it_computes_the_same_bits_as_before_and_a_wrong_product_is_refused() -> None:
    model = tiny_model("llama")
    before = loss_of(model)
    emulated(model)()
    assert loss_of(model).equal(before)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}

    def wrong() -> Callable[[], None]:
        undo = emulated(model)
        handle = model.model.layers[1].mlp.register_forward_hook(lambda module, given, output: output.roll(1, dims=-1))
        return lambda: (undo(), handle.remove())[0]

    weights = dict(model.named_parameters())
    proof = prove_change(wrong, lambda: loss_of(model), weights, TOLERANCE, lambda values: values)
    assert "off by" in proof.refusal and loss_of(model).equal(before)


def test_a_document_computes_the_same_whatever_is_beside_it() -> None:
    """Each token has its own scale: one for a whole row would be set by its largest document."""
    model = tiny_model("llama")
    emulated(model)
    with torch.no_grad():
        alone = model(input_ids=IDS[:1]).logits
        beside = model(input_ids=IDS).logits[:1]
    torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-4)


def test_the_head_embeddings_and_modules_of_other_sizes_stay_as_they_are() -> None:
    model = tiny_model("llama", intermediate_size=100)
    emulated(model)
    kinds = {name.rpartition(".")[2]: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["q_proj"] == kinds["o_proj"] == "Float8Linear"
    assert kinds["gate_proj"] == kinds["down_proj"] == kinds["lm_head"] == "Linear"
    with pytest.raises(UserError, match=r"\[no-fp8-layers\]"):
        emulated(tiny_model("gpt2"))  # its layers are of another class


def test_a_device_without_products_in_8_bits_is_refused() -> None:
    with pytest.raises(UserError, match=r"trainer\.mixed_precision \(fp8\): .*\[no-fp8-device\]\n.*→ ."):
        check_float8(torch.device("cpu"))
