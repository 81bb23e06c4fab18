"""The most memory of a pass forward and backward over one long row, with and without trainer.tokens_per_mlp_tile.

    python benchmarks/tiled_mlp.py [--tokens 32768] [--tile 2048] [--policy none]      # --tile 0: all tokens at once

A tiny mistral (4 layers, hidden 128, inside of MLPs 2048, 4 heads) with a window of 128 tokens, so that attention takes little time, on CPUs and
one thread; `--policy` is trainer.gradient_checkpointing. Prints the most
resident memory above that before, and the seconds of both passes; or how far loss and gradients are from those of all tokens (--compare).
"""

from __future__ import annotations

import argparse
import resource
import time

import psutil
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packtrain.attention.backends import attending_by
from packtrain.changes.tiles import tile_mlps
from packtrain.model.layers import recompute
from packtrain.packing.collate import row_arguments
from packtrain.packing.segments import Segments

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "vocab_size": 400,
    "sliding_window": 128,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1 << 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--tile", type=int, default=2048)
    parser.add_argument("--policy", default="none")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mistral"](**SIZES)).train()
    ids, row = torch.randint(0, 400, (1, options.tokens)), row_arguments(Segments((options.tokens,)))
    if options.policy != "none":
        recompute(model, options.policy)

    def passes() -> torch.Tensor:
        with attending_by(model, "segmented"):
            loss = model.model(input_ids=ids, use_cache=False, **row).last_hidden_state.float().pow(2).mean()
            loss.backward()
        return loss.detach()

    if options.compare:
        loss, gradients = passes(), [weight.grad for weight in model.parameters()]
        model.zero_grad()
        tile_mlps(model, options.tile)
        off = abs(passes() - loss) / abs(loss)
        pairs = zip(model.parameters(), gradients, strict=True)
        worst = max(((one.grad - two).norm() / two.norm()).item() for one, two in pairs if two is not None)
        print(f"loss off by {off:.1g}, gradients by at most {worst:.1g}")
        return
    if options.tile:
        tile_mlps(model, options.tile)
    before, started = psutil.Process().memory_info().rss, time.perf_counter()
    passes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    tiles = f"tiles of {options.tile:,}" if options.tile else "all at once"
    seconds = time.perf_counter() - started
    print(f"{options.tokens:,} tokens, {options.policy}, {tiles}: {peak / 2**20:,.0f} MiB at the peak, {seconds:.1f} s")


if __name__ == "__main__":
    main()
