"""What a model of many layers keeps on a device with and without trainer.activation_offload; runs in a process that has stand-in GPUs."""

from __future__ import annotations

import gc
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM

from packtrain.model.layers import recompute
from packtrain.plan.memory import STASHED

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 24, "vocab_size": 97, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = 401


def passes(offload: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Losses and gradients of two steps of two forward passes each before one backward pass, and the bytes kept after a forward pass."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).to("cuda").train()
    recompute(model, "full", offload=offload)
    results, kept = [], []
    for step in range(2):
        gc.collect()
        before, total = torch.cuda.memory_allocated(0), torch.zeros((), device="cuda")
        for part in range(2):
            ids = (torch.arange(TOKENS)[None] * (7 + part + step) % 97).cuda()
            total = total + model.model(input_ids=ids, use_cache=False).last_hidden_state.pow(2).mean()
            kept.append(torch.cuda.memory_allocated(0) - before)
        total.backward()
        with torch.no_grad():  # an evaluation between
            model.model(input_ids=ids, use_cache=False)
        results += [total.detach().cpu(), *(one.grad.cpu() for one in model.parameters() if one.grad is not None)]
    return results, kept


def keep_their_inputs_on_the_host() -> None:
    torch.cuda.set_device(0)
    PartialState()  # without it TRL's warning about a full memory is an error; a run has made one
    expected, kept = passes(False)
    moved, left = passes(True)
    assert len(moved) == len(expected) > 2 and all(one.equal(two) for one, two in zip(moved, expected, strict=True))
    inputs = SIZES["num_hidden_layers"] * TOKENS * SIZES["hidden_size"] * 4
    for whole, less in zip(kept, left, strict=True):
        assert whole - less > 0.9 * inputs * (1 - STASHED / SIZES["num_hidden_layers"]), (kept, left, inputs)
