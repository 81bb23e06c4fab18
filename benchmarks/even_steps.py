"""How evenly the documents of a step are spread over many ranks, whole and split over neighbours. Pure planning, no model.

    python benchmarks/even_steps.py [DATA …]

16 documents a rank, drawn with a seed: of the lengths of DATA (files of conversations or texts, four characters to a token), and of a lognormal
of median 400 tokens in which one of 500 has 131,072. The attention is that of an 8B model (36 layers, 4,096 wide). Prints how much more work
than the mean the busiest rank has, and how long the layout took.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.packing.balance import MicroBatchLimits, imbalance, lay_out

ATTENTION = 36 * 4096 / 8e9
RANKS, TOGETHER, EACH = (8, 64, 256, 1024), (2, 4, 8, 16, 32, 64), 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", type=Path)
    rng = np.random.default_rng(0)
    texts = [len(line) // 4 for path in parser.parse_args().data for line in path.read_text().splitlines()]
    print("| lengths | ranks | whole | " + " | ".join(f"over {ranks}" for ranks in TOGETHER) + " |")
    print("|---" * (3 + len(TOGETHER)) + "|")
    for ranks in RANKS:
        outliers = np.clip(rng.lognormal(6, 1.2, EACH * ranks), 16, 32_768).astype(int)
        outliers[rng.random(len(outliers)) < 0.002] = 131_072
        sets = {"lognormal, 128k": (outliers, 32_768)}
        if texts:
            sets["data"] = (rng.choice(np.array(texts), EACH * ranks), max(texts))
        for name, (lengths, row) in sets.items():
            cells = [_cell(lengths, max(row, int(lengths.max())), ranks, 1)]
            cells += [_cell(lengths, row, ranks, together) for together in TOGETHER]
            print(f"| {name} | {ranks:,} | " + " | ".join(cells) + " |", flush=True)


def _cell(lengths: np.ndarray, row: int, ranks: int, together: int) -> str:
    if together > ranks or lengths.max() > row * together:
        return "too long"
    how: Any = {"mode": "packed", "world_size": ranks, "ranks_per_row": together}
    started = time.perf_counter()
    layout = lay_out(lengths, limits=MicroBatchLimits(tokens=row), attention_cost=ATTENTION, **how)
    took = 1000 * (time.perf_counter() - started)
    return f"{imbalance(layout, lengths, ATTENTION):.1%} ({took:.0f} ms)"


if __name__ == "__main__":
    main()
