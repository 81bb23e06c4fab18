"""Experts: grouped products train as the loop does; the routers' loss is that of transformers over all real tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from answer_runs import of_objective
from here import run_here
from matrix import SPARSE
from running import LLAMA, base_config
from tiny_models import EXPERTS, documents, gradient, off, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.integrations import moe
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention.backends import attend_by, attending_by
from packtrain.changes.experts import group_experts
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed, UserError
from packtrain.model.forward import add_loss_sum
from packtrain.model.layers import can_group, loop_over_experts
from packtrain.model.routers import RouterLoss, router_loss, without_labels
from packtrain.packing.collate import IGNORE, collate_flat, collate_padded
from packtrain.packing.segments import Segments
from packtrain.train.loader import MicroBatch

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss"]
MORE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("olmoe", "qwen2_moe", "granitemoe", "phimoe")]


def loss_and_gradients(model: Any, segments: Segments, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, Any]:
    """Of some labels for all tokens of a row, in autocast's `dtype`."""
    ids = torch.arange(segments.tokens)[None] * 7 % 94 + 3
    model.zero_grad()
    row = {"position_ids": segments.position_ids(), "segments": segments, "use_cache": False}
    with attending_by(model, "segmented"), torch.autocast("cpu", dtype, enabled=dtype is not None):
        logits = model(input_ids=ids, **row).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[0], ids[0] * 5 % 97, reduction="sum")
        loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("lengths", [(17, 1, 33, 8), (1,)], ids=["a row", "one token, most experts without any"])
@pytest.mark.parametrize("family", FAMILIES + MORE)
def test_losses_and_gradients_are_those_of_the_loop(family: str, lengths: tuple[int, ...]) -> None:
    model = tiny_model(
        family, **{**EXPERTS, "num_local_experts": 8, "num_experts": 8}
    )  # in training phimoe draws noise
    assert can_group(model)
    loop_over_experts(model, "auto")
    loss, gradients = loss_and_gradients(model, Segments(lengths))
    undo = group_experts(model)
    ours, our_gradients = loss_and_gradients(model, Segments(lengths))
    assert abs(ours - loss) <= 1e-5 * abs(loss)
    whole = torch.stack([one.norm() for one in gradients.values() if one is not None]).norm()
    for name, one in our_gradients.items():
        expected = torch.zeros_like(one) if gradients[name] is None else gradients[name]
        assert (one - expected).norm() <= 1e-5 * max(expected.norm(), 1e-2 * whole), name
    undo()
    assert loss_and_gradients(model, Segments(lengths))[0].equal(loss)


class Grouped(TorchDispatchMode):
    """The formats in which grouped products multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.formats = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("aten::_grouped_mm"):
            self.formats |= {args[0].dtype, args[1].dtype}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_over_float32_weights_products_are_in_the_format_of_autocast(family: str) -> None:
    """transformers' own stay in float32, whose products GPUs make one by one."""
    model, segments = tiny_model(family, **EXPERTS).train(), Segments((17, 33))
    group_experts(model)
    exact, _ = loss_and_gradients(model, segments)
    with Grouped() as seen:
        loss, gradients = loss_and_gradients(model, segments, torch.bfloat16)
    assert seen.formats == {torch.bfloat16} and abs(loss - exact) <= 0.05 * abs(exact)
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())


def test_preferences_begin_with_a_zero_margin_as_the_reference_groups_its_experts_too(tmp_path: Path) -> None:
    config = of_objective(tmp_path, "dpo", trainer={"max_steps": 1})
    config["model"]["config"] = {**SPARSE, "output_router_logits": False}
    run = run_here(tmp_path, config)
    assert run.losses[0] == pytest.approx(0.6931472, abs=1e-6) and "loss off by" in run.summary["changes"]["experts"]


def test_products_that_are_not_exact_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = moe._grouped_linear
    monkeypatch.setattr(moe, "_grouped_linear", lambda *given, **named: own(*given, **named) * 0.9)
    config = base_config(tmp_path, trainer={"max_steps": 1})
    config["model"]["config"] = SPARSE
    loop = run_here(tmp_path, config, "model.experts=loop", name="loop")
    run = run_here(tmp_path, config, name="auto")
    assert run.losses == loop.losses and "the loss of the first rows is off" in run.summary["changes"]["experts"]
    with pytest.raises(CheckFailed, match=r"\[change-inexact\]"):
        run_here(tmp_path, config, "model.experts=grouped", name="asked")


@pytest.mark.parametrize("asked", ["grouped", "loop"])
@pytest.mark.parametrize("shape", [{}, {"model_type": "jetmoe", "kv_channels": 12}], ids=["none", "of its own code"])
def test_a_model_without_such_experts_is_refused_by_name(tmp_path: Path, shape: Any, asked: str) -> None:
    config = base_config(tmp_path, model={"config": {**LLAMA, **shape}})
    with pytest.raises(UserError, match=rf"model\.experts \({asked}\): .*\[experts-not-groupable\]"):
        run_here(tmp_path, config, f"model.experts={asked}")


LENGTHS = (1, 2, 17, 33, 33, 5, 64, 9)
WEIGHT = 0.5
SPLITS = {"one micro-batch": [8], "several, one of them empty": [3, 0, 1, 4]}
LAYOUTS = ["padding", "segmented", "per_document"]


def sparse_model(family: str, **overrides) -> PreTrainedModel:
    model = tiny_model(family, **{**EXPERTS, "num_hidden_layers": 2, **overrides})
    add_fused_lm_head(model)
    add_loss_sum(model)
    return model


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
    return output.loss.item(), output.aux_loss.item(), gradient(model)


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
    items = documents(LENGTHS)
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
            assert off(gradient(model), expected) < 1e-4, (layout, split)


def test_with_dropout_the_pass_that_counts_draws_the_numbers_of_the_pass_that_trains() -> None:
    model = sparse_model("mixtral", attention_dropout=0.3).train()
    routers = routers_of(model)
    batches = micro_batches(documents(LENGTHS), [3, 5], padded=True)
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
    with pytest.raises(UserError, match=r"LlamaForCausalLM .*\[no-router-loss\]"):
        router_loss(sparse_model("llama"), WEIGHT)
    with pytest.raises(UserError, match=r"DogeForCausalLM .*\[no-router-loss\]"):
        router_loss(sparse_model("doge", is_moe=True), WEIGHT)
    dense = sparse_model("qwen3_moe", mlp_only_layers=[0, 1])
    routers = routers_of(dense)
    with pytest.raises(UserError, match=r"\[no-routers\]"):
        routers.check(dense, collate_padded(documents(LENGTHS), 0))


def test_a_loss_that_differs_from_the_models_own_is_caught_before_training() -> None:
    model = sparse_model("mixtral")
    routers = routers_of(model)
    routers.check(model, collate_padded(documents(LENGTHS), 0))
    model.num_experts_per_tok = 1  # type: ignore[assignment]
    with pytest.raises(CheckFailed, match=r"MixtralForCausalLM .*\[router-loss-differs\]"):
        routers.check(model, collate_padded(documents(LENGTHS), 0))


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
