"""What a stream costs: the share of the time in which steps waited for data, tokens a second, and the memory of the process, early and late.

    python benchmarks/streaming.py --rows 20000 100000 --steps 200 [--data FILE.jsonl] [--hidden 256] [--buffer 2000]

    python benchmarks/streaming.py --rows 20000 200000 --through [--data FILE.jsonl] [--buffer 2000]

A random llama of four layers is trained on one CPU thread, on rows of FILE (else on made-up ones of 100 words) over and over, once as a
stream of each number of rows and once (`whole`) tokenised before. The first ten steps are left out of the figures. With `--through` nothing is trained: all rows are read, for the most that a stream gives,
and the memory of the process (without the tokenising ones) after 50 steps and its most. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil

from packtrain.config.schema import Data
from packtrain.data.sources.quickstart import tokenizer
from packtrain.data.streaming import open_stream


def write_rows(file: Path, rows: int, data: Path | None) -> None:
    """So many rows of running text, or those of `data`."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(3000)]
    made = (json.dumps({"text": " ".join(rng.choices(words, k=100))}) + "\n" for _ in range(rows))
    with file.open("w") as out:
        out.writelines(made if data is None else islice(cycle(data.read_text().splitlines(keepends=True)), rows))


def measure(folder: Path, file: Path, args: argparse.Namespace, *, streaming: bool) -> dict[str, Any]:
    """The figures of a run."""
    sizes = {"hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    stream = {"streaming": True, "shuffle_buffer": args.buffer} if streaming else {}
    config = {
        "model": {"init": "random", "config": {"model_type": "llama", **sizes}, "tokenizer": "quickstart"},
        "data": {"train": str(file), "cache_dir": str(folder / "cache"), "max_length": 1024, **stream},
        "batch": {"examples_per_step": 16, "tokens_per_device": 8192},
        "trainer": {"max_steps": args.steps, "log_every": 1, "output_dir": str(folder / "run")},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "packtrain", "sft", str(folder / "run.yaml")]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][10:]
    return {
        "rows": sum(1 for _ in file.open()),
        "data": "stream" if streaming else "whole",
        "data_fraction_mean": statistics.mean(line["data_fraction"] for line in lines),
        "data_fraction_most": max(line["data_fraction"] for line in lines),
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines),
        "memory_early_mib": lines[0]["memory_bytes"] >> 20,
        "memory_late_mib": lines[-1]["memory_bytes"] >> 20,
    }


def read_through(file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a stream that is read to its end in steps of 64."""
    data = Data(
        train=str(file), streaming=True, shuffle_buffer=args.buffer, cache_dir=str(file.parent), max_length=1024
    )
    stream, tokens, held = open_stream(data, tokenizer(), "sft", 64, seed=0).stream, 0, list[int]()
    started, process = time.perf_counter(), psutil.Process()
    with stream.stack:
        for window in stream.windows():
            tokens += int(window.data.lengths.sum())
            held.append(process.memory_info().rss >> 20)
    figures = {"rows": sum(1 for _ in file.open()), "steps": len(held), "tokens": tokens}
    figures["tokens_per_second"] = round(tokens / (time.perf_counter() - started))
    return {**figures, "memory_after_50_steps_mib": max(held[:50]), "memory_most_mib": max(held)}


def main() -> None:
    """Prints a line of JSON for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--buffer", type=int, default=2000)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--through", action="store_true")
    args = parser.parse_args()
    for rows in args.rows if args.through else ():
        with tempfile.TemporaryDirectory() as folder:
            write_rows(file := Path(folder, "rows.jsonl"), rows, args.data)
            print(json.dumps(read_through(file, args)), flush=True)
    for number, rows in enumerate(() if args.through else args.rows):
        for streaming in (True, False) if number == 0 else (True,):
            with tempfile.TemporaryDirectory() as folder:
                write_rows(file := Path(folder, "rows.jsonl"), rows, args.data)
                print(json.dumps(measure(Path(folder), file, args, streaming=streaming)), flush=True)


if __name__ == "__main__":
    main()
