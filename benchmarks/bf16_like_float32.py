"""What a model learns that computes in bfloat16, beside float32: with masters in the middle of their rounding cells, and off it.

    python benchmarks/bf16_like_float32.py MODEL DATA [--verb sft] [--rates 1e-5 1e-6] [--steps 50] [--seeds 0] [--folder FOLDER]

MODEL is a folder whose weights are bfloat16 numbers, DATA a file of conversations (or of preferences, for dpo, kto and reward), of which
some are held out. Each run trains by `packtrain VERB`, constant AdamW, 2 documents of at most 128 tokens a step. Its final weights are evaluated
in float32 (by a run of one step without updates, against MODEL as the reference), and again rounded to bfloat16. The table is printed at
the end; runs that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

FLOAT32 = ["model.dtype=float32", "trainer.mixed_precision=no"]
MIXED = ["model.dtype=float32", "trainer.mixed_precision=bf16"]
WEIGHTS = ["model.dtype=bfloat16", "trainer.mixed_precision=bf16"]
PLAIN, EXACT = "optim.dither=false", "optim.bf16_rounding=never"
RUNS = {
    "float32": FLOAT32,
    "bf16": [*MIXED, PLAIN],
    "bf16, dithered": MIXED,
    "bf16 weights, masters": [*WEIGHTS, EXACT, PLAIN],
    "bf16 weights, masters, dithered": [*WEIGHTS, EXACT],
    "bf16 weights, stochastic rounding": [*WEIGHTS, "optim.bf16_rounding=stochastic"],
}
"""What each trains with. final/ is in float32 where there are masters, and without dither."""
ROUNDED = {"bf16, dithered": "optim.bf16_rounding=final", "bf16 weights, masters, dithered": "optim.bf16_rounding=auto"}
"""Runs whose rounded weights are those that they computed with: that final/ is written in bfloat16 by a run of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--verb", default="sft", choices=["sft", "dpo", "kto", "reward"])
    parser.add_argument("--rates", nargs="+", default=["1e-5", "1e-6"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=[*RUNS])
    parser.add_argument("--folder", type=Path, default=Path("runs/bf16_like_float32"))
    options = parser.parse_args()
    common = [
        f"data.train={options.data}",
        *(
            f"data.eval={0.02 if options.verb == 'sft' else 0.1}",
            "data.max_length=128",
            "batch.examples_per_step=2",
            "batch.tokens_per_device=256",
        ),
        *("trainer.checkpoint_every=null", "trainer.eval_every=null", "verify.preflight=false"),
    ]

    def run(name: str, *arguments: str) -> dict:
        folder = options.folder / name
        if not (folder / "summary.json").exists():
            command = [
                sys.executable,
                "-m",
                "packtrain",
                options.verb,
                *common,
                *arguments,
                f"trainer.output_dir={folder}",
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads((folder / "summary.json").read_text())

    def measured(name: str, weights: Path | str, *arguments: str) -> float:
        still = ["optim.learning_rate=0", "trainer.max_steps=1", f"model.path={weights}", *FLOAT32, *arguments]
        if options.verb in ("dpo", "kto"):
            still.append(f"objective.reference={options.model}")
        return run(name, *still)["first_eval_loss"]

    before = measured("before", options.model)
    print(
        f"before: {before:.4f}\n\n| rate | run | logged | in float32 | rounded to bf16 | updates seen |\n|---|---|---|---|---|---|"
    )
    for rate in options.rates:
        gains: dict[str, list[float]] = {}
        for name in options.runs:
            figures = []
            for seed in options.seeds:
                place = f"{rate}/{name.replace(', ', '-').replace(' ', '-')}-{options.steps}-{seed}"
                how = [f"optim.learning_rate={rate}", "optim.schedule=constant", f"trainer.max_steps={options.steps}"]
                how += [f"model.path={options.model}", f"trainer.seed={seed}", *RUNS[name]]
                summary = run(place, *how)
                exact = measured(f"{place}-exact", options.folder / place / "final")
                rounded = options.folder / place / "final"
                if name in ROUNDED:
                    others = [one for one in how if not one.startswith("optim.bf16_rounding")]
                    run(f"{place}-16", *others, ROUNDED[name])
                    rounded = options.folder / f"{place}-16" / "final"
                else:
                    measured(f"{place}-16", rounded, "optim.bf16_rounding=final")
                    rounded = options.folder / f"{place}-16" / "final"
                half = measured(f"{place}-16-exact", rounded)
                lines = [
                    json.loads(line) for line in (options.folder / place / "metrics.jsonl").read_text().splitlines()
                ]
                seen = [line["updates_seen"] for line in lines if "updates_seen" in line] or [float("nan")]
                figures.append((summary["eval_loss"], exact, half, seen[0]))
            logged, exact, half, seen = map(statistics.mean, zip(*figures, strict=True))
            gains[name] = [before - value for value in (logged, exact, half)]
            of = gains.get("float32", gains[name])[1]
            shares = [f"{value:.4f} ({(before - value) / of:.0%})" for value in (logged, exact, half)]
            print(f"| {rate} | {name} | {' | '.join(shares)} | {seen:.3f} |", flush=True)


if __name__ == "__main__":
    main()
