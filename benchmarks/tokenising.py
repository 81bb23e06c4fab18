"""Rows per second and peak memory of tokenising, and the time of a second start.

    python benchmarks/tokenising.py 200000 [--tokenizer FOLDER] [--template NAME] [--workers N] [--words 60]
    python benchmarks/tokenising.py 20000 --trl --template chatml [--data FILE.jsonl] …

Conversations are generated, or those of FILE.jsonl over and over. `--trl` has TRL tokenise them too, with as many processes: the
part of SFTTrainer that does it (`assistant_only_loss`, so the template needs generation marks), of which `trl_map_seconds` is
the tokenising alone and `trl_seconds` includes the labels. Tokens and masks are compared.

Memory is the highest sum, over this process and its workers, of resident memory that is not file-backed (RssAnon), and
of resident memory as a whole (RSS, which counts shared pages once for each process), looked at every 0.2 s. CPU seconds are user and system time of all these processes. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import threading
import time
from itertools import cycle, islice
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from packtrain.config.schema import Data
from packtrain.data import prepare as preparing
from packtrain.data.dataset import TokenDataset
from packtrain.data.tokens.chat_template import choose_template


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


def cpu_seconds() -> float:
    """User and system time of this process, of those it has waited for, and of the server that forks its workers."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[11:15] if server else []
    return sum(os.times()[:4]) + sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")


def with_trl(path: Path, tokenizer: Any, template: str, workers: int, ours: TokenDataset) -> dict[str, object]:
    """What TRL takes for the same rows, and whether its tokens and masks are ours."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    datasets.disable_caching()
    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(path.parent / "arrow"))
    seconds: dict[str, float] = {}
    plain_map = datasets.Dataset.map

    def timed_map(self: Any, *given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        result = plain_map(self, *given, **named)
        seconds[named["desc"].split()[0]] = time.perf_counter() - started
        return result

    datasets.Dataset.map = timed_map  # type: ignore[method-assign]
    config = SFTConfig(
        output_dir=str(path.parent),
        assistant_only_loss=True,
        max_length=None,
        dataset_num_proc=workers if workers > 1 else None,
        use_cpu=True,
        bf16=False,
    )
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss=False)
    started, cpu = time.perf_counter(), cpu_seconds()
    made = SFTTrainer._prepare_dataset(trainer, rows, tokenizer, config, False, None, "train")  # type: ignore[arg-type]
    figures: dict[str, object] = {
        "trl_seconds": round(time.perf_counter() - started, 2),
        "trl_cpu_seconds": round(cpu_seconds() - cpu, 2),
        "trl_map_seconds": round(seconds["Tokenizing"], 2),
    }
    same_tokens = same_masks = len(made) == len(ours)
    for row, document in zip(made, (ours[index] for index in range(len(ours))), strict=False):
        same_tokens &= row["input_ids"] == document.input_ids.tolist()
        same_masks &= ((np.array(row["labels"]) != -100) == document.loss_mask).all()
    return {**figures, "same_tokens": bool(same_tokens), "same_masks": bool(same_masks)}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int)
    parser.add_argument("--tokenizer", help="folder or hub id; the quickstart's small one if none")
    parser.add_argument("--template", help="as data.chat_template; the tokenizer's own if none")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--data", type=Path, help="a file of conversations (JSON Lines) in place of generated ones")
    parser.add_argument("--trl", action="store_true", help="compare with TRL")
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
        if arguments.data:
            with open(arguments.data, "rb") as lines, open(path, "wb") as file:
                file.writelines(islice(cycle(lines), arguments.rows))
        else:
            write_conversations(path, arguments.rows, arguments.words)
        os.utime(path, (0, 0))  # as old as real data: its hash is remembered
        data = Data(
            train=str(path),
            cache_dir=f"{folder}/cache",
            chat_template=arguments.template,
        )
        preparing.count_tokenising_processes = lambda: arguments.workers
        peaks, stop = [0, 0], threading.Event()
        watcher = threading.Thread(target=watch, args=(peaks, stop))
        watcher.start()
        started, cpu = time.perf_counter(), cpu_seconds()
        made = preparing.prepare(data, tokenizer, "sft", seed=0, progress=True).train
        seconds, cpu, report = time.perf_counter() - started, cpu_seconds() - cpu, made.report
        stop.set()
        watcher.join()
        started = time.perf_counter()
        preparing.prepare(data, tokenizer, "sft", seed=0)
        figures = {
            "rows": report.rows,
            "tokens": report.tokens,
            "megabytes": round(path.stat().st_size / 1e6, 1),
            "seconds": round(seconds, 2),
            "rows_per_second": round(report.rows / seconds),
            "cpu_seconds": round(cpu, 2),
            "peak_anonymous_mib": peaks[0] // 1024,
            "peak_rss_mib": peaks[1] // 1024,
            "second_start_seconds": round(time.perf_counter() - started, 3),
        }
        if arguments.trl and (template := choose_template(arguments.template, tokenizer)):
            figures |= with_trl(path, tokenizer, template.text, arguments.workers, made)
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
