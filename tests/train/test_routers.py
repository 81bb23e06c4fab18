"""The routers' loss is that of transformers over all real tokens of a step, however these are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from here import run_here
from running import LLAMA, base_config
from tiny_models import tiny_model
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention.backends import attend_by
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed, UserError
from packtrain.model.forward import add_loss_sum
from packtrain.model.routers import RouterLoss, router_loss, without_labels
from packtrain.packing.collate import IGNORE, collate_flat, collate_padded
from packtrain.train.loader import MicroBatch

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LENGTHS = (1, 2, 17, 33, 33, 5, 64, 9)
WEIGHT = 0.5
SPLITS = {"one micro-batch": [8], "several, one of them empty": [3, 0, 1, 4]}
LAYOUTS = ["padding", "segmented", "per_document"]


def sparse_model(family: str, **overrides) -> PreTrainedModel:
    model = tiny_model(family, **{**EXPERTS, "num_hidden_layers": 2, **overrides})
    add_fused_lm_head(model)
    add_loss_sum(model)
    return model


def documents() -> list[Document]:
    rng = np.random.default_rng(0)
    return [Document(rng.integers(3, 97, n, dtype=np.int32), rng.random(n) < 0.7) for n in LENGTHS]


def micro_batches(items: Sequence[Document], sizes: Sequence[int], *, padded: bool) -> list[MicroBatch]:
    rest, batches = list(items), []
    for size in sizes:
        own, rest = rest[:size], rest[size:]
        inputs = collate_padded(own, 0) if padded else collate_flat(own)
        trained = int((inputs["shift_labels"] != IGNORE).sum())
        batches.append(MicroBatch(inputs, trained, sum(len(d.input_ids) for d in own), 0, len(own)))
    return batches


def routers_of(model: PreTrainedModel, weight: float = WEIGHT) -> RouterLoss:
    routers = router_loss(model, weight)
    assert routers is not None
    return routers


def gradients(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def by_transformers(model: PreTrainedModel, items: list[Document]) -> tuple[float, float, torch.Tensor]:
    """Loss, auxiliary loss and gradients of all documents in one padded batch, by the model's own forward pass."""
    model.router_aux_loss_coef = model.aux_loss_coef = WEIGHT  # type: ignore[assignment]
    batch = collate_padded(items, 0)
    labels = torch.full_like(batch["shift_labels"], IGNORE)
    labels[:, 1:] = batch["shift_labels"][:, :-1]
    output = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels, output_router_logits=True
    )
    output.loss.backward()
    return output.loss.item(), output.aux_loss.item(), gradients(model)


def step(model: PreTrainedModel, routers: RouterLoss, batches: list[MicroBatch]) -> float:
    """One step as the trainer makes it; leaves the gradients in the model."""
    trained = sum(batch.trained for batch in batches)
    routers.open_step(batches, partial(run_without_labels, model), Accelerator(cpu=True))
    total = 0.0
    for batch in batches:
        with routers.watching(real=batch.examples > 0) as loads:
            loss = model(**batch.inputs, loss_sum=True) / trained
        loss = loss + routers.part(loads)
        loss.backward()
        total += loss.item()
    return total


def run_without_labels(model: PreTrainedModel, batch: MicroBatch) -> None:
    model(**without_labels(batch.inputs), loss_sum=True)


def test_every_layout_gives_the_loss_and_gradients_of_transformers_on_one_padded_batch() -> None:
    """As all families do, see tests/architectures/test_architectures.py."""
    items = documents()
    expected_loss, expected_aux, expected = by_transformers(sparse_model("mixtral"), items)
    for layout in LAYOUTS:
        for split in SPLITS.values():
            model = sparse_model("mixtral")
            if layout != "padding":
                attend_by(model, layout)
            routers = routers_of(model)
            loss = step(model, routers, micro_batches(items, split, padded=layout == "padding"))
            assert loss == pytest.approx(expected_loss, rel=1e-5), (layout, split)
            assert routers.value() == pytest.approx(expected_aux, rel=1e-5), (layout, split)
            assert relative(gradients(model), expected) < 1e-4, (layout, split)


def test_with_dropout_the_pass_that_counts_draws_the_numbers_of_the_pass_that_trains() -> None:
    model = sparse_model("mixtral", attention_dropout=0.3).train()
    routers = routers_of(model)
    batches = micro_batches(documents(), [3, 5], padded=True)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    routers.open_step(batches, partial(run_without_labels, model), Accelerator(cpu=True))
    assert torch.equal(torch.get_rng_state(), before)
    parts = []
    for batch in batches:
        with routers.watching() as loads:
            model(**batch.inputs, loss_sum=True)
        parts.append(routers.part(loads))
    assert not torch.equal(torch.get_rng_state(), before)  # there is dropout
    assert sum(parts).item() == pytest.approx(WEIGHT * routers.value(), rel=1e-6)  # type: ignore[union-attr]


def test_it_is_off_unless_asked_for_by_the_key_or_by_the_models_own_config() -> None:
    assert router_loss(sparse_model("mixtral"), None) is None
    asks = sparse_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.02)
    own = router_loss(asks, None)
    assert own is not None and own.weight == 0.02
    assert router_loss(asks, 0.0) is None
    assert router_loss(sparse_model("llama"), None) is None
    assert router_loss(sparse_model("llama"), 0.0) is None


def test_a_model_whose_routers_cannot_be_had_is_refused() -> None:
    with pytest.raises(UserError, match="LlamaForCausalLM has no load-balancing loss"):
        router_loss(sparse_model("llama"), WEIGHT)
    with pytest.raises(UserError, match="DogeForCausalLM has another load-balancing loss"):
        router_loss(sparse_model("doge", is_moe=True), WEIGHT)
    dense = sparse_model("qwen3_moe", mlp_only_layers=[0, 1])
    routers = routers_of(dense)
    with pytest.raises(UserError, match="no layer of this model has a router"):
        routers.check(dense, collate_padded(documents(), 0))


def test_a_loss_that_differs_from_the_models_own_is_caught_before_training() -> None:
    model = sparse_model("mixtral")
    routers = routers_of(model)
    routers.check(model, collate_padded(documents(), 0))
    model.num_experts_per_tok = 1  # type: ignore[assignment]
    with pytest.raises(CheckFailed, match="the router loss of MixtralForCausalLM"):
        routers.check(model, collate_padded(documents(), 0))


def test_the_logged_loss_is_the_token_mean_and_the_weighted_router_loss(tmp_path: Path) -> None:
    """On several processes and with other objectives' layouts: test_cells.py."""
    config = base_config(tmp_path, trainer={"max_steps": 1})
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": WEIGHT}
    config["model"]["config"] = {**LLAMA, "model_type": "mixtral", **experts}
    (first,) = run_here(tmp_path, config).steps
    (without,) = run_here(tmp_path, config, "model.config.output_router_logits=false", name="without").steps
    assert first["loss"] == pytest.approx(without["loss"] + WEIGHT * first["router_aux_loss"], rel=1e-5)
    assert first["router_aux_loss"] > 1.9  # 2 experts a token: 2 is balance
    assert "router_aux_loss" not in without
