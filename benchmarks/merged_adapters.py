"""What merging adapters into bfloat16 weights keeps: rounded to the nearest number, and by chance, as `packtrain merge` does.

    python benchmarks/merged_adapters.py MODEL DATA [--rates 1e-4 1e-5] [--steps 50] [--folder FOLDER]

MODEL is a folder whose weights are bfloat16 numbers, DATA a file of conversations, of which a fiftieth is held out. LoRA of rank 16 is trained
on it. Losses are computed in float32; `kept` is the projection of what was added to the weights on what the adapters add.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

NAME = "model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data")
    parser.add_argument("--rates", nargs="+", default=["1e-4", "1e-5"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=Path("runs/merged_adapters"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    data = [f"data.train={options.data}", "data.eval=0.02", "data.max_length=128"]
    common = [*data, "batch.examples_per_step=2", "batch.tokens_per_device=256", "verify.preflight=false"]

    def packtrain(*arguments: str) -> str:
        command = [sys.executable, "-m", "packtrain", *arguments]
        with (options.folder / "errors.log").open("a") as errors:
            return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=errors).stdout

    def loss(model: Path) -> float:
        exact = ["model.dtype=float32", "trainer.mixed_precision=no"]
        return json.loads(packtrain("eval", *common, f"model.path={model}", *exact, "--json"))["figures"]["eval_loss"]

    before, base = loss(options.model), load_file(options.model / NAME)
    print(
        f"before: {before:.4f}\n\n| rate | adapters | merged, nearest | kept | merged by chance | kept |\n|---|---|---|---|---|---|"
    )
    for rate in options.rates:
        run, nearest = options.folder / rate, options.folder / f"{rate}-nearest"
        if not (run / "summary.json").exists():
            how = ["peft=lora", "model.dtype=bfloat16", "optim.schedule=constant", f"optim.learning_rate={rate}"]
            times = [f"trainer.max_steps={options.steps}", "trainer.checkpoint_every=null", "trainer.eval_every=null"]
            packtrain("sft", *common, *how, *times, f"model.path={options.model}", f"trainer.output_dir={run}")
        merged = {}
        for dtype in ("float32", "bfloat16"):
            merged[dtype] = options.folder / f"{rate}-{dtype}"
            shutil.rmtree(merged[dtype], ignore_errors=True)
            packtrain("merge", str(run), "--output", str(merged[dtype]), "--dtype", dtype)
        exact = load_file(merged["float32"] / NAME)
        shutil.copytree(merged["bfloat16"], nearest, dirs_exist_ok=True)
        save_file({key: weight.bfloat16() for key, weight in exact.items()}, nearest / NAME, {"format": "pt"})

        def kept(folder: Path, exact: dict = exact) -> float:
            found, added, length = load_file(folder / NAME), 0.0, 0.0
            for key, weight in exact.items():
                delta = weight - base[key].float()
                added += ((found[key].float() - base[key].float()) * delta).sum().item()
                length += delta.square().sum().item()
            return added / length

        cells = [f"{loss(run / 'final'):.4f}"]
        for folder in (nearest, merged["bfloat16"]):
            found = loss(folder)
            cells += [f"{found:.4f} ({(before - found) / (before - float(cells[0])):.0%})", f"{kept(folder):.1%}"]
        print(f"| {rate} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
