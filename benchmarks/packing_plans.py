"""How long planning an epoch takes and how full its rows get, beside plain best-fit-decreasing.

    python benchmarks/packing_plans.py [--documents 1000000 10000000] [--seed 0]

Lengths: lognormal(5.5, 1) clipped to [16, 4096] tokens. `plain rows`, `plain s`: TRL's packing (`trl.data_utils`,
strategy bfd) of ONE table of all documents, where TRL is installed and there are at most a million of them.
Times are the best of three, with the shuffle; `first s` is the first call, in memory the process never used before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from packtrain.packing.bins import Rows, best_fit, in_order

CAPACITIES = (4096, 32768)
MAX_FOR_PLAIN = 1_000_000


def timed(make: Callable[[], Rows], repeats: int = 3) -> tuple[Rows, float, float]:
    """The plan, seconds of the first call, seconds of the fastest."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        rows = make()
        seconds.append(time.perf_counter() - start)
    return rows, seconds[0], min(seconds)


def plain(lengths: np.ndarray, capacity: int) -> tuple[int, float] | None:
    """Rows and seconds of TRL's best-fit-decreasing; None where it cannot be asked."""
    try:
        import pyarrow as pa
        from trl.data_utils import _pack_bfd
    except ImportError:
        return None
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    tokens = pa.array(np.zeros(offsets[-1], dtype=np.int8))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), tokens)})
    start = time.perf_counter()
    return len(_pack_bfd(table, capacity, "truncate")), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{'documents':>10} {'row':>6} {'planner':>9} {'first s':>8} {'best s':>7} {'rows':>9} {'full %':>8}", end="")
    print(f" {'plain rows':>11} {'plain s':>8}")
    for documents in arguments.documents:
        rng = np.random.default_rng(arguments.seed)
        lengths = np.clip(rng.lognormal(5.5, 1, documents), 16, 4096).astype(np.int32)
        for capacity in CAPACITIES:
            planners = {
                "best_fit": partial(best_fit, lengths, capacity, np.random.default_rng(1)),
                "in_order": partial(in_order, lengths, capacity),
            }
            for name, make in planners.items():
                rows, first, best = timed(make)
                full = 100 * lengths.sum(dtype=np.int64) / (len(rows) * capacity)
                compare = plain(lengths, capacity) if name == "best_fit" and documents <= MAX_FOR_PLAIN else None
                beside = f"{compare[0]:11,} {compare[1]:8.1f}" if compare else f"{'-':>11} {'-':>8}"
                line = f"{documents:10,} {capacity:6} {name:>9} {first:8.3f} {best:7.3f} {len(rows):9,} {full:8.4f}"
                print(line, beside, flush=True)


if __name__ == "__main__":
    main()
