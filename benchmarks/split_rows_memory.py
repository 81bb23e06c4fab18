"""What a process keeps of a document that is split over N processes, beside one process.

    torchrun --nproc-per-node N benchmarks/split_rows_memory.py [--tokens 131072] [--window 1024] [--recompute]      # and plainly, for one process

A tiny model (2 layers, 4 heads of 16, hidden 64) on CPUs, forward and backward. Prints, of rank 0: what autograd keeps, each storage once; the
most resident memory above that before the forward pass; and the seconds of both passes.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import psutil
import torch
import torch.distributed as dist
from split_rows import MODEL
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packtrain.attention.backends import attending_by
from packtrain.attention.over_ranks import open_group
from packtrain.model.layers import recompute
from packtrain.packing.collate import row_arguments
from packtrain.packing.segments import Segments, own_tokens, split_row

SIZES = {**{name: value for name, value in MODEL.items() if name != "model_type"}, "vocab_size": 400}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--window", type=int, default=0, help="sliding window of all layers; 0: full attention")
    parser.add_argument("--recompute", action="store_true", help="layers keep their inputs alone")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
        open_group(world)
    window = {"sliding_window": options.window} if options.window else {}
    torch.manual_seed(0)
    config = CONFIG_MAPPING["mistral" if window else "llama"](**SIZES, **window)
    model = AutoModelForCausalLM.from_config(config).train()
    if options.recompute:
        recompute(model, "full")
    row = split_row(Segments((options.tokens,)), rank, world)
    ids = torch.randint(0, 400, (1, options.tokens))[:, own_tokens(row)]
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    before, started = psutil.Process().memory_info().rss, time.perf_counter()
    with attending_by(model, "segmented"):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model.model(input_ids=ids, use_cache=False, **row_arguments(row)).last_hidden_state
        hidden.float().pow(2).mean().backward()
    if rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        kept, mib = sum(storages.values()), 2**20
        print(
            f"{options.tokens:,} tokens over {world}: {kept / mib:,.0f} MiB kept, {peak / mib:,.0f} MiB at the peak, "
            f"{time.perf_counter() - started:.1f} s"
        )


if __name__ == "__main__":
    main()
