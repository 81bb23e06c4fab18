"""trainer.tokens_per_mlp_tile: MLPs on tiles compute as on all tokens (runs: test_cells.py), keep no more than a tile, and leave experts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from here import run_here
from matrix import SPARSE
from running import base_config
from test_experts import loss_and_gradients
from tiny_models import tiny_model

from packtrain.changes.tiles import check_tiles, mlps_of, tile_mlps
from packtrain.errors import CheckFailed, UserError
from packtrain.model.layers import recompute
from packtrain.packing.segments import Segments

ROW = Segments((17, 1, 33, 8))
FAMILIES = ["llama", "gpt2", "gemma3_text", "phi"]
MORE = ["qwen3", "gemma2", "mistral", "cohere", "glm", "olmo2"]


@pytest.mark.sample("llama-none", "llama-full", "llama-every_2", "gemma3_text-none", "gpt2-full")
@pytest.mark.parametrize("policy", ["none", "full", "every_2"])
@pytest.mark.parametrize("family", FAMILIES + MORE)
def test_losses_and_gradients_are_those_of_all_tokens_at_once(family: str, policy: str) -> None:
    model = tiny_model(family)
    check_tiles(model)
    model.train()
    for module in model.modules():
        module.p = 0.0 if isinstance(module, torch.nn.Dropout) else getattr(module, "p", None)
    if policy != "none":
        recompute(model, policy)
    loss, gradients = loss_and_gradients(model, ROW)
    for tokens in (1, 7, ROW.tokens - 1, ROW.tokens, 1000):
        undo = tile_mlps(model, tokens)
        ours, our_gradients = loss_and_gradients(model, ROW)
        assert abs(ours - loss) <= 1e-6 * abs(loss)
        for name, gradient in our_gradients.items():
            assert (gradient - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), (name, tokens)
        assert tokens < ROW.tokens or ours.equal(loss)
        undo()
    assert loss_and_gradients(model, ROW)[0].equal(loss)


def kept(model: Any, segments: Segments) -> tuple[int, int]:
    """Bytes that a pass forward keeps in tensors as wide as the inside of an MLP, and in all."""
    storages, wide = dict[int, int](), dict[int, int]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        if tensor.dim() > 1 and tensor.shape[-1] == model.config.intermediate_size and not tensor.is_leaf:
            wide[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_and_gradients(model, segments)
    return sum(wide.values()), sum(storages.values())


def test_of_what_is_inside_nothing_is_kept() -> None:
    model = tiny_model("llama", intermediate_size=768).train()
    before, whole = kept(model, Segments((200,)))
    tile_mlps(model, 50)
    after, tiled = kept(model, Segments((200,)))
    assert before >= 3 * 3 * 200 * 768 * 4 and after == 0 and whole - tiled > 0.9 * before


def test_experts_and_routers_are_left_alone() -> None:
    mixed = tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[1])
    assert [type(mlp).__name__ for mlp in mlps_of(mixed)] == ["Qwen3MoeMLP"]
    for family in ("gpt_oss", "mixtral", "opt"):
        with pytest.raises(UserError, match="has an MLP that is a module of its own"):
            check_tiles(tiny_model(family))


def test_mlps_that_mix_tokens_are_refused() -> None:
    model: Any = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    for layer in model.model.layers:
        layer.mlp.forward = lambda hidden: own(hidden.cumsum(dim=-2))
    with pytest.raises(CheckFailed, match="tokens see each other in the MLPs of LlamaForCausalLM"):
        check_tiles(model)


@pytest.mark.exhaustive
def test_of_a_mixture_the_dense_layers_are_tiled(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 2})
    config["model"]["config"] = {**SPARSE, "mlp_only_layers": [0]}
    plain, run = (run_here(tmp_path, config, f"trainer.tokens_per_mlp_tile={n}", name=n) for n in ("null", "20"))
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    assert "1 MLP on tiles of 20 tokens" in run.summary["changes"]["tiles"]
