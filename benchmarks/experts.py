"""The experts of a layer in a loop and by grouped products: the seconds of a step's two passes, side by side.

    python benchmarks/experts.py [--tokens 2048] [--experts 32] [--bf16]

A qwen3_moe of 2 layers with random weights (hidden 256, experts of 128, 4 of them for each token), on one thread, as packtrain runs it:
model.experts=loop and grouped. Also the grouped products as transformers has them, which under autocast (--bf16) stay in float32.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packtrain.changes.experts import group_experts

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 400, "head_dim": 32}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "num_experts_per_tok": 4, "norm_topk_prob": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16 over float32 weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_moe"](**SIZES, num_experts=options.experts)).train()
    ids = torch.randint(0, 400, (1, options.tokens))

    def passes() -> float:
        model.zero_grad()
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        hidden.float().pow(2).mean().backward()
        return time.perf_counter() - started

    ways = {
        "loop": lambda: model.set_experts_implementation("eager"),
        "grouped": lambda: group_experts(model),
        "grouped, by transformers": lambda: model.set_experts_implementation("grouped_mm"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(6):  # in turns, since other processes may be on the machine; the first one warms up
        for name, choose in ways.items():
            choose()
            seconds[name].append(passes())
    for name, measured in seconds.items():
        print(f"{name:25} {min(measured[1:]):.3f} s")


if __name__ == "__main__":
    main()
