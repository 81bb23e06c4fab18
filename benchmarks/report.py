"""How long `packtrain report` takes over a run of a million logged steps, and how large its page is.

python benchmarks/report.py [LINES]
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from packtrain.report.page import page
from packtrain.report.run_record import read_metrics, read_run
from packtrain.run_folder import RunFolder


def write_lines(file: Path, lines: int) -> None:
    """A metrics.jsonl as a run writes it, with evaluations, a line of garbage and a torn end."""
    chance = random.Random(0)
    with file.open("w") as out:
        for step in range(1, lines + 1):
            line = {"step": step, "epoch": step / 1e5, "loss": 7 / (1 + step / 1000) + chance.random()}
            line |= {"grad_norm": chance.random(), "lr": 3e-4 * (1 - step / lines), "tokens": 1143 * step}
            line |= {
                "tokens_per_second": 15000 + chance.random(),
                "padding_fraction": 0.0,
                "examples": 200,
                "mfu": None,
            }
            out.write(json.dumps(line | {"memory_bytes": 1 << 30, "seconds": step / 10}) + "\n")
            if step % 1000 == 0:
                out.write(json.dumps({"step": step, "epoch": step / 1e5, "eval_loss": 8 / (1 + step / 1000)}) + "\n")
        out.write('garbage\n{"step": 1000001, "lo')


def main(lines: int) -> None:
    """Prints the seconds of each part."""
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place))
        folder.logs.mkdir()
        folder.summary.write_text('{"status": "done"}')
        write_lines(folder.metrics, lines)
        megabytes = folder.metrics.stat().st_size / 1e6
        started = time.perf_counter()
        metrics = read_metrics(folder.metrics)
        read = time.perf_counter() - started
        run = read_run(folder)
        began = time.perf_counter()
        text = page([run])
        whole = read + time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{len(metrics.steps):,} lines ({megabytes:.0f} MB, {metrics.skipped} skipped): read in {read:.1f} s,")
    print(f"page in {whole:.1f} s, {len(text.encode()) / 1e6:.2f} MB; {peak:.1f} GiB of memory")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
