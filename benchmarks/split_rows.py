"""What splitting a document over processes costs and saves: one long document over N processes, beside one process, and beside N whole
documents of an N-th of its length.

    python benchmarks/split_rows.py [--tokens 131072] [--processes 4] [--window 0] [--steps 3] [--only split|alone|whole]

A tiny model (2 layers, 4 heads of 16, hidden 64) is trained by `packtrain sft` on a CPU, one thread per process. Prints seconds of a step; what a process
keeps: split_rows_memory.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2**21,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--window", type=int, default=0, help="sliding window of all layers; 0: full attention")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["split", "alone", "whole"])
    options = parser.parse_args()
    model = dict(MODEL)
    if options.window:
        model |= {"model_type": "mistral", "sliding_window": options.window}
    print("| run | seconds of a step |\n|---|---|")
    for name in options.only:
        documents, processes = (options.processes, options.processes) if name == "whole" else (1, options.processes)
        processes = 1 if name == "alone" else processes
        length = options.tokens // documents
        seconds = _train(model, documents, length, processes, options, split=name == "split")
        print(
            f"| {name}: {documents} × {length:,} tokens, {processes} processes | {seconds:.2f} |",
            flush=True,
        )


def _train(
    model: dict, documents: int, length: int, processes: int, options: argparse.Namespace, *, split: bool
) -> float:
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data.jsonl")
        rows = [{"input_ids": random.choices(range(5, 400), k=length)} for _ in range(documents)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "model": {"init": "random", "config": model, "tokenizer": "quickstart", "attention": "segmented"},
            "data": {"train": str(data), "max_length": length, "overlong": "truncate", "cache_dir": f"{folder}/cache"},
            "optim": {"schedule": "constant"},
            "batch": {
                "examples_per_step": documents,
                "tokens_per_device": -(-length // processes) if split else length,
            },
            "trainer": {"max_steps": options.steps, "output_dir": f"{folder}/run", "log_every": 1},
            "verify": {"preflight": False},
            "strategy": {"sequence_parallel": processes if split else 1},
        }
        path = Path(folder, "run.yaml")
        path.write_text(json.dumps(config))
        command = ["-m", "packtrain", "sft", str(path)]
        if processes > 1:
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        return min(later["seconds"] - line["seconds"] for line, later in pairwise(steps))


if __name__ == "__main__":
    main()
