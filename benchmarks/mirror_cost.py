"""What a copy in a bucket costs a run: the quickstart with a checkpoint every 10 steps, with trainer.mirror and without, in turn.

    python benchmarks/mirror_cost.py [--steps 200] [--times 3]

The bucket is moto's S3 server on this machine, which shares its cores with the training: a real one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORT = 5321
ENVIRONMENT = {
    **os.environ,
    "AWS_ACCESS_KEY_ID": "someone",
    "AWS_SECRET_ACCESS_KEY": "a secret",
    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def seconds_of(folder: Path, steps: int, *given: str) -> tuple[float, float]:
    """(seconds of the steps, seconds of the command)."""
    command = [sys.executable, "-m", "packtrain", "sft", str(ROOT / "recipes/quickstart-sft.yaml"), *given]
    settings = [f"trainer.max_steps={steps}", "trainer.checkpoint_every=10", "data.eval=null", "trainer.samples=[]"]
    settings += ["trainer.eval_every=null", f"trainer.output_dir={folder}", "trainer.log_every=1"]
    begun = time.monotonic()
    subprocess.run([*command, *settings], env=ENVIRONMENT, check=True, capture_output=True)
    whole = time.monotonic() - begun
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = [line["tokens"] for line in lines if "loss" in line]
    rates = [line["tokens_per_second"] for line in lines if "loss" in line]
    own = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
    return sum(number / rate for number, rate in zip(own, rates, strict=True)), whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    import boto3

    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(PORT)], stderr=subprocess.DEVNULL)
    try:
        time.sleep(5)
        os.environ.update(ENVIRONMENT)
        boto3.client("s3").create_bucket(Bucket="runs")
        found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
        with tempfile.TemporaryDirectory() as made:
            for number in range(given.times):
                for name, runs in found.items():
                    mirror = [f"trainer.mirror=s3://runs/{number}"] if name == "with" else []
                    runs.append(seconds_of(Path(made, f"{name}-{number}"), given.steps, *mirror))
    finally:
        server.kill()
    for name, runs in found.items():
        steps, whole = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name:8} {steps:6.1f} s of steps, {whole:6.1f} s from start to end (median of {given.times})")


if __name__ == "__main__":
    main()
