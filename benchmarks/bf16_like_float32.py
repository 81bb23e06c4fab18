"""What a model learns that computes in bfloat16, beside float32: with masters in the middle of their rounding cells, and off it.

    python benchmarks/bf16_like_float32.py MODEL DATA [--verb sft] [--rates 1e-5 1e-6] [--steps 50 …] [--seeds 0] [--folder FOLDER]

MODEL is a folder whose weights are bfloat16 numbers, DATA a file of conversations (or of preferences, for dpo, kto and reward), of which
some are held out. Each run trains by `packtrain VERB`, constant AdamW, 2 documents of at most 128 tokens a step. After each of `--steps`
(multiples of the first) its weights are evaluated in float32 (by `packtrain eval`, against MODEL as the reference), and
again rounded to bfloat16. Lines are printed as they are made; runs that are there are not made again, and leave no weights.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

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
    parser.add_argument("--steps", nargs="+", type=int, default=[50])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=[*RUNS])
    parser.add_argument("--folder", type=Path, default=Path("runs/bf16_like_float32"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    common = [
        f"data.train={options.data}",
        *(
            f"data.eval={0.02 if options.verb == 'sft' else 0.1}",
            "data.max_length=128",
            "batch.examples_per_step=2",
            "batch.tokens_per_device=256",
        ),
        "verify.preflight=false",
    ]

    def packtrain(*arguments: str) -> str:
        command = [sys.executable, "-m", "packtrain", *arguments]
        with (options.folder / "errors.log").open("a") as errors:
            return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=errors).stdout

    def train(folder: Path, *arguments: str, every: int | None = None) -> Path:
        if not (folder / "summary.json").exists():
            kept = json.dumps(every)
            times = [f"trainer.checkpoint_every={kept}", f"trainer.eval_every={kept}", "trainer.keep_checkpoints=null"]
            packtrain(options.verb, *common, *times, *arguments, f"trainer.output_dir={folder}")
        return folder

    def measured(weights: Path | str, *arguments: str) -> float:
        held_to = [f"objective.reference={options.model}"] if options.verb in ("dpo", "kto") else []
        what = [f"objective.kind={options.verb}", f"model.path={weights}", *FLOAT32, *held_to, *arguments]
        return json.loads(packtrain("eval", *common, *what, "--json"))["figures"]["eval_loss"]

    def figures_of(name: str, rate: str, seed: int, step: int) -> tuple[float, ...]:
        """As logged, of the weights in float32 and rounded, and `updates_seen` of the first step."""
        place = f"{name.replace(', ', '-').replace(' ', '-')}-{options.steps[-1]}-{seed}"
        folder = options.folder / rate / place
        done = folder / f"figures-{step}.json"
        if not done.exists():
            how = ["optim.schedule=constant", f"optim.learning_rate={rate}", f"model.path={options.model}"]
            how += [f"trainer.seed={seed}", *RUNS[name]]
            train(folder, *how, f"trainer.max_steps={options.steps[-1]}", every=options.steps[0])
            at = [f"trainer.resume={folder / 'checkpoints' / f'step-{step:06}'}", f"trainer.max_steps={step}"]
            exact = train(folder / f"at-{step}", *how, *at) / "final"
            shares = [measured(exact)]
            how = [*(one for one in how if not one.startswith("optim.bf16_rounding"))]
            if name in ROUNDED:
                at += [ROUNDED[name], "trainer.resume_despite=[optim.bf16_rounding]"]
                rounded = train(folder / f"at-{step}-16", *how, *at) / "final"
            else:
                rounded = folder / f"at-{step}-16"
                shutil.copytree(exact, rounded)
                weights = load_file(exact / "model.safetensors")
                halves = {key: weight.bfloat16() for key, weight in weights.items()}
                save_file(halves, rounded / "model.safetensors", {"format": "pt"})
            shares.append(measured(rounded))
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            (logged,) = [line["eval_loss"] for line in lines if "eval_loss" in line and line["step"] == step]
            seen = [line["updates_seen"] for line in lines if line.get("updates_seen") is not None]
            done.write_text(json.dumps([logged, *shares, seen[0] if seen else None]))
            for weights in [*folder.glob(f"at-{step}*"), *at_its_end(folder, step)]:
                shutil.rmtree(weights)
        return tuple(math.nan if one is None else one for one in json.loads(done.read_text()))

    def at_its_end(folder: Path, step: int) -> list[Path]:
        return [folder / "checkpoints", folder / "final"] if step == options.steps[-1] else []

    before = measured(options.model)
    print(
        f"before: {before:.4f}\n\n| rate | run | steps | logged | in float32 | rounded to bf16 | updates seen |"
        "\n|---|---|---|---|---|---|---|"
    )
    for rate in options.rates:
        learned: dict[int, float] = {}
        for name in options.runs:
            for step in options.steps:
                figures = [figures_of(name, rate, seed, step) for seed in options.seeds]
                *losses, seen = map(statistics.mean, zip(*figures, strict=True))
                of = learned.setdefault(step, before - losses[1])
                shares = [f"{value:.4f} ({(before - value) / of:.1%})" for value in losses]
                print(f"| {rate} | {name} | {step} | {' | '.join(shares)} | {seen:.3f} |", flush=True)


if __name__ == "__main__":
    main()
