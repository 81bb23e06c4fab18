"""Print errors of Liger's fused experts on tiny models, as JSON.

Triton chooses its interpreter when it is imported, so this runs in a new process. The errors are beside the loop in float32, and of both beside
float64 in bfloat16; the proof runs in bfloat16.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from peft import get_peft_model
from test_experts import loss_and_gradients
from test_fused_experts import MIXTURES, ON_EXPERTS
from tiny_models import gradient, off, tiny_model

from packtrain.changes.experts import fuse_experts
from packtrain.model.layers import loop_over_experts, recompute
from packtrain.model.load import base_model
from packtrain.packing.segments import Segments
from packtrain.proof.comparison import prove_change, tolerance_of
from tests.standin.site import triton_interpreter

ROW = Segments((9, 1, 4))


def made(family: str) -> Any:
    model = tiny_model(family, **{**MIXTURES[family], "num_hidden_layers": 2}).train()
    loop_over_experts(model, "fused")
    return model


def alone(experts: Any, dtype: torch.dtype = torch.float32, tokens: int = 19) -> dict[str, torch.Tensor]:
    """Run the experts on their own. Returns outputs, and gradients of inputs, of the routers' weights and of both weights."""
    random = torch.Generator().manual_seed(0)
    at, widths = experts.down_proj.device, (experts.hidden_dim, 2, experts.hidden_dim)
    hidden, weights, noise = (torch.randn(tokens, n, generator=random).bfloat16().to(at, dtype) for n in widths)
    chosen = torch.stack([torch.randperm(experts.num_experts, generator=random)[:2] for _ in range(tokens)]).to(at)
    given = [hidden.requires_grad_(), weights.requires_grad_(), experts.gate_up_proj, experts.down_proj]
    output = experts(hidden, chosen, weights)
    names = ("inputs", "weights", "gate_up_proj", "down_proj")
    return {"output": output.detach(), **dict(zip(names, torch.autograd.grad(output, given, noise), strict=True))}


def errors_of(model: Any) -> dict[str, float]:
    """The errors of the last layer's experts, and of the whole model."""
    found = next(module for module in reversed([*model.modules()]) if hasattr(module, "_is_expert_parallel"))
    own_loss, _ = loss_and_gradients(model, ROW)
    own, parts = gradient(model), {} if hasattr(model, "peft_config") else alone(found)
    fuse_experts(base_model(model))
    loss, _ = loss_and_gradients(model, ROW)
    errors = {"loss": abs((loss - own_loss) / own_loss).item(), "gradient": off(gradient(model), own)}
    return errors | {name: off(one, parts[name]) for name, one in (alone(found) if parts else {}).items()}


def adapted() -> Any:
    """LoRA on attention and on the experts, which compute again in the backward pass."""
    model = get_peft_model(made("qwen3_moe"), ON_EXPERTS)
    recompute(base_model(model), "full")
    return model


def nearer(device: str = "cpu") -> dict[str, list[float]]:
    """Return errors of the loop and the product in bfloat16, beside float64.

    The intermediate width has six tiles.
    """
    model: Any = tiny_model(
        "qwen3_moe", **{**MIXTURES["qwen3_moe"], "moe_intermediate_size": 768, "num_hidden_layers": 1}
    )
    loop_over_experts(model.to(device, torch.bfloat16), "fused")
    found: Any = next(module for module in model.modules() if hasattr(module, "_is_expert_parallel"))
    exact = alone(found.double(), torch.float64)
    loop = alone(found.bfloat16(), torch.bfloat16)
    fuse_experts(model)
    fused = alone(found, torch.bfloat16)
    return {name: [off(one[name].double(), right) for one in (loop, fused)] for name, right in exact.items()}


def proved() -> dict[str, str]:
    """The proof over float32 weights under autocast."""
    model = made("qwen3_moe").eval()
    ids = torch.arange(14)[None] * 7 % 94 + 3

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    tolerance = tolerance_of(torch.bfloat16, routed=True)
    weights = dict(model.named_parameters())
    proof = prove_change(
        lambda: fuse_experts(model), loss, weights, tolerance, lambda values: values, model, torch.bfloat16
    )
    return {"refusal": proof.refusal, "figures": proof.figures()}


if __name__ == "__main__":
    triton_interpreter.install()
    torch.set_num_threads(1)
    for family in MIXTURES:
        print(json.dumps(errors_of(made(family))), flush=True)
    print(json.dumps(errors_of(adapted())), flush=True)
    print(json.dumps(nearer()), flush=True)
    print(json.dumps(proved()), flush=True)
