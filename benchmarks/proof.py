"""What the proof before step 1 costs.

    OMP_NUM_THREADS=2 python benchmarks/proof.py MODEL_FOLDER [TURNS]

Prints for each part the least time of all turns by the clock, and the least user CPU time over the number of threads, which
is nearer to the truth on a machine that has other work.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from packtrain.proof.choice import choose_attention
from packtrain.proof.isolation import check_causal_and_padding


def least(work: Callable[[], Any], turns: int) -> tuple[float, float]:
    """Seconds by the clock, and of user CPU time a thread; after one turn to warm up."""
    work()
    taken = []
    for _ in range(turns):
        clock, user = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
        work()
        used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - user
        taken.append((time.perf_counter() - clock, used / torch.get_num_threads()))
    return min(clock for clock, _ in taken), min(user for _, user in taken)


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else 6
    parts: dict[str, Callable[[], Any]] = {
        "isolation": lambda: choose_attention("auto", model, model.device),
        "isolation, pairs too": lambda: choose_attention("auto", model, model.device, pairs=True),
        "causality": lambda: check_causal_and_padding(model, padding=False),
    }
    print(f"{choose_attention('auto', model, model.device).backend.name}, {torch.get_num_threads()} threads")
    for name, work in parts.items():
        print("{}: {:.3f} s, user {:.3f} s a thread".format(name, *least(work, turns)))


if __name__ == "__main__":
    main()
