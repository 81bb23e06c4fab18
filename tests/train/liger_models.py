"""Liger's kernels in Triton's interpreter on tiny models, in a process of its own, since Triton decides as it is imported: the proof of
each, as JSON, in float32, in bfloat16 and under autocast, and the names that it leaves behind."""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model

from packtrain.changes.liger import fuse_by_liger
from packtrain.changes.residual_norm import layers_with_sums, sum_in_norms
from packtrain.model.load import base_model
from packtrain.proof.comparison import has_routers, prove_change, tolerance_of
from tests.standin.site import triton_interpreter

ROW = torch.arange(14)[None] * 7 % 94 + 3


def proved(
    family: str, dtype: torch.dtype, *, autocast: bool, adapters: bool, wrong: bool, sums: bool
) -> dict[str, Any]:
    """Outcomes of the proof, whether it ran with kernels, and whether undoing left none.

    `wrong`: norms have another offset. `sums`: norms also sum.
    """
    model: Any = tiny_model(family, num_hidden_layers=2)
    model.to(torch.float32 if autocast else dtype)
    model.gradient_checkpointing_enable()
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    inner: Any = base_model(model).base_model
    layer = inner.layers[0]
    undo: list[Any] = []
    parts = (layer.input_layernorm, getattr(layer.mlp, "experts", layer.mlp))

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(input_ids=ROW, labels=ROW).loss

    def make() -> Any:
        undo.append(fuse_by_liger(model))
        norms: list[Any] = (
            [module for module in base_model(model).modules() if hasattr(module, "offset")] if wrong else []
        )
        for norm in norms:
            norm.offset = 1 - norm.offset
        if sums:
            assert len([*layers_with_sums(base_model(model))]) == 2
            undo.append(partial(_both, sum_in_norms(base_model(model)), undo[-1]))
        return undo[-1]

    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    tolerance = tolerance_of(dtype, routed=has_routers(base_model(model)))
    proof = prove_change(make, loss, weights, tolerance, lambda values: values, base_model(model), dtype)
    inside = ["forward" in vars(module) for module in parts]
    if not proof.refusal:
        undo[-1]()
    after = ["forward" in vars(module) for module in parts]
    rotation = vars(__import__(type(layer).__module__, fromlist=["_"]))["apply_rotary_pos_emb"].__module__
    return {
        "refusal": proof.refusal,
        "figures": proof.figures(),
        "inside": inside,
        "after": after,
        "rotation": rotation,
    }


def _both(one: Any, other: Any) -> None:
    one()
    other()


if __name__ == "__main__":
    triton_interpreter.install()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    bfloat16 = torch.bfloat16
    cases: list[tuple[str, torch.dtype, dict[str, bool]]] = [
        ("llama", torch.float32, {}),
        ("llama", bfloat16, {"autocast": True}),
        ("qwen3", torch.float32, {"adapters": True}),
        ("gemma2", torch.float32, {}),
        ("qwen3", bfloat16, {"adapters": True, "autocast": True}),
        ("gemma2", bfloat16, {}),
        ("qwen3_moe", bfloat16, {"autocast": True}),
        ("qwen3_moe", bfloat16, {"adapters": True, "autocast": True}),
        ("gemma2", bfloat16, {"wrong": True}),
        ("qwen3", torch.float32, {"adapters": True, "sums": True}),
        ("gemma2", bfloat16, {"sums": True}),
    ]
    for family, dtype, how in cases:
        print(
            json.dumps(proved(family, dtype, **dict.fromkeys(("autocast", "adapters", "wrong", "sums"), False) | how)),
            flush=True,
        )
