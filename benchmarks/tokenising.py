"""Rows per second and peak memory of tokenising, and the time of a second start, on generated conversations.

    python benchmarks/tokenising.py 200000 [--tokenizer FOLDER] [--workers N] [--words 60]

Memory is the highest sum, over this process and its workers, of resident memory that is not file-backed (RssAnon), and
of resident memory as a whole (RSS, which counts shared pages once for each process), looked at every 0.2 s. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import threading
import time
from pathlib import Path

from packtrain.config.schema import Data
from packtrain.data.prepare import prepare


def write_conversations(path: Path, rows: int, words: int) -> None:
    """Conversations of one to three exchanges; an answer has about `words` words."""
    rng = random.Random(0)
    vocabulary = [
        "".join(rng.choice(consonants) + rng.choice("aeiou") for consonants in ["bdfglmnprst"] * rng.randint(1, 4))
        for _ in range(5000)
    ]
    with open(path, "w", encoding="utf-8") as file:
        for number in range(rows):
            messages = []
            for _ in range(rng.randint(1, 3)):
                question = " ".join(rng.choices(vocabulary, k=rng.randint(3, 20)))
                answer = " ".join(rng.choices(vocabulary, k=rng.randint(1, 2 * words)))
                messages.append({"role": "user", "content": f"{number}: {question}?"})
                messages.append({"role": "assistant", "content": f"{answer}."})
            file.write(json.dumps({"messages": messages}) + "\n")


def memory(pid: int) -> tuple[int, int]:
    """RssAnon and RSS in KiB of a process and its descendants (0 for one that has just ended)."""
    anonymous = resident = 0
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        anonymous, resident = (int(fields[name].split()[0]) for name in ("RssAnon", "VmRSS"))
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (OSError, KeyError):
        return anonymous, resident
    for child in children:
        more = memory(child)
        anonymous, resident = anonymous + more[0], resident + more[1]
    return anonymous, resident


def watch(peaks: list[int], stop: threading.Event) -> None:
    """Keep the highest figures in `peaks` until `stop`."""
    while not stop.wait(0.2):
        for index, figure in enumerate(memory(os.getpid())):
            peaks[index] = max(peaks[index], figure)


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int)
    parser.add_argument("--tokenizer", help="folder or hub id; the quickstart's small one if none")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--words", type=int, default=60, help="words of an answer, on average")
    arguments = parser.parse_args()
    if arguments.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    else:
        from packtrain.data.sources.quickstart import tokenizer as make_tokenizer

        tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.jsonl"
        write_conversations(path, arguments.rows, arguments.words)
        os.utime(path, (0, 0))  # as old as real data: its hash is remembered
        data = Data(train=str(path), cache_dir=f"{folder}/cache", workers=arguments.workers)
        peaks, stop = [0, 0], threading.Event()
        watcher = threading.Thread(target=watch, args=(peaks, stop))
        watcher.start()
        started = time.perf_counter()
        report = prepare(data, tokenizer, seed=0, progress=True).train.report
        seconds = time.perf_counter() - started
        stop.set()
        watcher.join()
        started = time.perf_counter()
        prepare(data, tokenizer, seed=0)
        figures = {
            "rows": report.rows,
            "tokens": report.tokens,
            "megabytes": round(path.stat().st_size / 1e6, 1),
            "seconds": round(seconds, 2),
            "rows_per_second": round(report.rows / seconds),
            "peak_anonymous_mib": peaks[0] // 1024,
            "peak_rss_mib": peaks[1] // 1024,
            "second_start_seconds": round(time.perf_counter() - started, 3),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
