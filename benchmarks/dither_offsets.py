"""Time and memory of moving masters off the middle of their rounding cells, with the checks that they are exact and stay what they were.

python benchmarks/dither_offsets.py [--numbers 28] [--device cpu] [--threads 1]
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

from packtrain.train.optim.dither import Dither, exact_in_bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=28, help="their logarithm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    gpu = options.device != "cpu"
    model = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList([torch.nn.Linear(2**14, 2**14, bias=False, device="meta")])}
    )
    rows = 2**options.numbers // 2**14
    weight = torch.empty(rows, 2**14, device=options.device)
    for part in weight.split(64):
        part.normal_(std=0.05).copy_(part.bfloat16())
    model["layers"][0].weight = torch.nn.Parameter(weight)  # type: ignore[index]

    def peak() -> int:
        return torch.cuda.max_memory_allocated() if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before, start, cores = peak(), time.perf_counter(), time.process_time()
    Dither({}, exact_in_bfloat16(dict(model.named_parameters())), seed=0).move_weights()
    if gpu:
        torch.cuda.synchronize()
    billions = weight.numel() / 1e9
    print(f"{options.device}, {torch.get_num_threads()} threads, {weight.numel():,} numbers: ", end="")
    print(f"{(time.perf_counter() - start) / billions:.2f} s per 1e9 ", end="")
    print(f"({(time.process_time() - cores) / billions:.2f} s of the cores), ", end="")
    print(f"{(peak() - before) / 2**20:.0f} MiB beside the {weight.nbytes / 2**20:.0f} of the weights")


if __name__ == "__main__":
    main()
