"""What padding-free rows and shared prompts save of the slots that a model computes, counted over a data set: no training.

    python benchmarks/padding_share.py --model MODEL_FOLDER [--max-length 2048] FILE.jsonl [FILE.jsonl …]

A file of preference pairs is recognised by its columns; its rows are padded as TRL does it, the chosen answers of a batch
and the rejected ones to the longest of all. Batches are drawn at random, each figure the mean over 20 orders of the data.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from packtrain.config.schema import Data
from packtrain.data.prepare import prepare

BATCHES = (2, 4, 8, 16, 32)
ORDERS = 20


def padded_share(lengths: np.ndarray, batch: int, rng: np.random.Generator) -> float:
    """Share of padding in batches of so many examples; `lengths` int[n, documents of an example]."""
    slots = 0
    for _ in range(ORDERS):
        order = rng.permutation(len(lengths))[: len(lengths) // batch * batch]
        shuffled = lengths[order].reshape(-1, batch * lengths.shape[1])
        slots += shuffled.max(axis=1).sum() * shuffled.shape[1] / (shuffled.size / lengths.size)
    return 1 - lengths.sum() * ORDERS / slots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.jsonl")
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-length", type=int, default=2048)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    print(
        f"{'file':<22}{'examples':>9}{'tokens':>10}" + "".join(f"{f'batch {one}':>10}" for one in BATCHES) + "  shared"
    )
    for file in options.files:
        data = Data(train=file, max_length=options.max_length)
        pairs = '"chosen"' in Path(file).read_text()[:100_000]
        if pairs:
            found = prepare(data, tokenizer, "dpo", seed=0).train
            every = [found[index] for index in range(len(found))]
            lengths = np.array([[len(one.chosen.input_ids), len(one.rejected.input_ids)] for one in every])
            saved = sum(one.prompt - 1 for one in every) / lengths.sum()
        else:
            lengths, saved = prepare(data, tokenizer, "sft", seed=0).train.lengths[:, None], 0.0
        rng = np.random.default_rng(0)
        shares = "".join(f"{padded_share(lengths, batch, rng):>10.1%}" for batch in BATCHES)
        print(
            f"{Path(file).name:<22}{len(lengths):>9}{lengths.sum():>10}{shares}" + (f"{saved:>8.1%}" if pairs else "")
        )


if __name__ == "__main__":
    main()
