"""What a model learns that computes in bfloat16, beside float32: with masters in the middle of their rounding cells, and off it.

    python benchmarks/bf16_like_float32.py MODEL DATA [--verb sft] [--rates 1e-5 1e-6] [--steps 50 …] [--seeds 0] [--figures eval_loss …]

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
PLAIN, EXACT = "optim.bf16_rounding=undithered", "optim.bf16_rounding=never"
RUNS = {
    "float32": FLOAT32,
    "bf16": [*MIXED, PLAIN],
    "bf16, dithered": MIXED,
    "bf16 weights, masters": [*WEIGHTS, PLAIN],
    "bf16 weights, masters, dithered": [*WEIGHTS, EXACT],
    "bf16 weights, stochastic rounding": [*WEIGHTS, "optim.bf16_rounding=stochastic"],
}
"""What each trains with. final/ is in float32 where there are masters, and without dither."""
ROUNDED = {"bf16, dithered": "optim.bf16_rounding=final", "bf16 weights, masters, dithered": "optim.bf16_rounding=auto"}
"""Runs whose rounded weights are those that they computed with: that final/ is written in bfloat16 by a run of its own."""


SHOWN = ("loss", "rewards/margins", "rewards/accuracies")
"""What preferences log of each step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--verb", default="sft", choices=["sft", "dpo", "kto", "reward"])
    parser.add_argument("--rates", nargs="+", default=["1e-5", "1e-6"])
    parser.add_argument("--steps", nargs="+", type=int, default=[50])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=[*RUNS])
    parser.add_argument("--figures", nargs="+", default=["eval_loss"], help="held-out figures of the tables")
    parser.add_argument("--folder", type=Path, default=Path("runs/bf16_like_float32"))
    options = parser.parse_args()
    runs = Runs(options)
    before = runs.measure(options.model)
    for figure in options.figures:
        print(f"\n{figure}, {before[figure]:.4f} before\n")
        print(
            "| rate | run | steps | logged | in float32 | rounded to bf16 | updates seen |\n|---|---|---|---|---|---|---|"
        )
        for rate in options.rates:
            learned: dict[int, float] = {}
            for name in options.runs:
                for step in options.steps:
                    made = [runs.figures_of(name, rate, seed, step) for seed in options.seeds]
                    seen = statistics.mean(one["seen"] if one["seen"] is not None else math.nan for one in made)
                    values = [
                        statistics.mean(one[how][figure] for one in made) for how in ("logged", "float32", "rounded")
                    ]
                    of = learned.setdefault(step, before[figure] - values[1])
                    shares = [f"{value:.4f} ({(before[figure] - value) / of:.1%})" for value in values]
                    print(f"| {rate} | {name} | {step} | {' | '.join(shares)} | {seen:.3f} |", flush=True)
    if options.verb == "dpo":
        print("\nMeans of ten logged steps each (first seed)\n\n| rate | run | figure | |\n|---|---|---|---|")
        for rate in options.rates:
            for name in options.runs:
                lines = runs.logged(name, rate, options.seeds[0])
                for figure in SHOWN:
                    values = [line[figure] for line in lines if figure in line]
                    means = [f"{statistics.mean(values[at : at + 10]):.3f}" for at in range(0, len(values), 10)]
                    print(f"| {rate} | {name} | {figure} | {' '.join(means)} |")


class Runs:
    """Runs of packtrain on one machine, each made once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.verb, self.model, self.folder, self.steps = options.verb, options.model, options.folder, options.steps
        self.folder.mkdir(parents=True, exist_ok=True)
        held_out = 0.02 if self.verb == "sft" else 0.1
        data = [f"data.train={options.data}", f"data.eval={held_out}", "data.max_length=128"]
        self.common = [*data, "batch.examples_per_step=2", "batch.tokens_per_device=256", "verify.preflight=false"]

    def figures_of(self, name: str, rate: str, seed: int, step: int) -> dict:
        """The held-out figures after `step` steps as `logged`, of the weights in `float32` and `rounded`, and the `seen` updates of the first step."""
        folder = self._place(name, rate, seed)
        done = folder / f"figures-{step}.json"
        if not done.exists():
            how = ["optim.schedule=constant", f"optim.learning_rate={rate}", f"model.path={self.model}"]
            how += [f"trainer.seed={seed}", "trainer.log_every=1", *RUNS[name]]
            self._train(folder, *how, f"trainer.max_steps={self.steps[-1]}", every=self.steps[0])
            at = [f"trainer.resume={folder / 'checkpoints' / f'step-{step:06}'}", f"trainer.max_steps={step}"]
            exact = self._train(folder / f"at-{step}", *how, *at) / "final"
            figures = {"float32": self.measure(exact)}
            if name in ROUNDED:
                at += [ROUNDED[name], "trainer.resume_despite=[optim.bf16_rounding]"]
                how = [one for one in how if not one.startswith("optim.bf16_rounding")]
                rounded = self._train(folder / f"at-{step}-16", *how, *at) / "final"
            else:
                rounded = folder / f"at-{step}-16"
                shutil.copytree(exact, rounded)
                halves = {key: weight.bfloat16() for key, weight in load_file(exact / "model.safetensors").items()}
                save_file(halves, rounded / "model.safetensors", {"format": "pt"})
            figures["rounded"] = self.measure(rounded)
            lines = self.logged(name, rate, seed)
            (figures["logged"],) = [line for line in lines if "eval_loss" in line and line["step"] == step]
            seen = [line["updates_seen"] for line in lines if line.get("updates_seen") is not None]
            done.write_text(json.dumps({**figures, "seen": seen[0] if seen else None}))
            at_its_end = [folder / "checkpoints", folder / "final"] if step == self.steps[-1] else []
            for weights in [*folder.glob(f"at-{step}*"), *at_its_end]:
                shutil.rmtree(weights)
        return json.loads(done.read_text())

    def measure(self, weights: Path | str) -> dict[str, float]:
        """The held-out figures of a model, computed in float32."""
        held_to = [f"objective.reference={self.model}"] if self.verb in ("dpo", "kto") else []
        what = [f"objective.kind={self.verb}", f"model.path={weights}", *FLOAT32, *held_to, "--json"]
        return json.loads(self._packtrain("eval", *self.common, *what))["figures"]

    def logged(self, name: str, rate: str, seed: int) -> list[dict]:
        """The lines that a run has logged."""
        metrics = self._place(name, rate, seed) / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    def _place(self, name: str, rate: str, seed: int) -> Path:
        return self.folder / self.verb / rate / f"{name.replace(', ', '-').replace(' ', '-')}-{self.steps[-1]}-{seed}"

    def _train(self, folder: Path, *arguments: str, every: int | None = None) -> Path:
        if not (folder / "summary.json").exists():
            kept = json.dumps(every)
            times = [f"trainer.checkpoint_every={kept}", f"trainer.eval_every={kept}", "trainer.keep_checkpoints=null"]
            self._packtrain(self.verb, *self.common, *times, *arguments, f"trainer.output_dir={folder}")
        return folder

    def _packtrain(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "packtrain", *arguments]
        with (self.folder / "errors.log").open("a") as errors:
            return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=errors).stdout


if __name__ == "__main__":
    main()
