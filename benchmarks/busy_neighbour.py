"""What one busy neighbour costs a run on a CPU, by how its threads wait for each other.

    python benchmarks/busy_neighbour.py [--steps 60] [--repeats 3] [--setting NAME=VALUE …]

Each setting of the environment ("as it is": packtrain's own) trains the quickstart's model for some steps: alone, beside a process of the same
priority that computes all the time, and beside one under `nice -n 10`. Printed are the medians of tokens a second over the second half of
the steps, and of the repeats, which take turns. Needs a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

NEIGHBOURS = {"alone": None, "equal": 0, "niced": 10}
BUSY = "while True: sum(range(10_000))"


def tokens_a_second(setting: str, nice: int | None, steps: int) -> float:
    """The speed of one run with this variable, beside a neighbour of this niceness; None: alone."""
    own = dict([setting.split("=", 1)]) if "=" in setting else {}
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    neighbour = None if nice is None else subprocess.Popen(["nice", "-n", str(nice), sys.executable, "-c", BUSY])
    try:
        with tempfile.TemporaryDirectory() as folder:
            more = (f"trainer.max_steps={steps}", "trainer.samples=[]", "data.eval=null", "trainer.eval_every=null")
            output = (f"trainer.output_dir={folder}/run", "trainer.log_every=1")
            command = [sys.executable, "-m", "packtrain", "sft", "recipes/quickstart-sft.yaml", *more, *output]
            subprocess.run(command, check=True, capture_output=True, env={**usual, **own})
            lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    finally:
        if neighbour is not None:
            neighbour.kill()
            neighbour.wait()
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return statistics.median(speeds[len(speeds) // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--setting", nargs="+", default=["as it is", "OMP_WAIT_POLICY=passive", "GOMP_SPINCOUNT=1000"])
    given = parser.parse_args()
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(given.repeats):
        for setting in given.setting:
            for name, nice in NEIGHBOURS.items():
                speed = tokens_a_second(setting, nice, given.steps)
                found.setdefault((setting, name), []).append(speed)
    print(f"{os.cpu_count()} cores, tokens a second, median of {given.repeats}")
    for setting in given.setting:
        speeds = {name: statistics.median(found[setting, name]) for name in NEIGHBOURS}
        print(f"{setting:28}", ", ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items()))


if __name__ == "__main__":
    main()
