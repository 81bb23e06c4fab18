"""Adapters on a base in 4 bits beside the same on float32: held-out losses, also of the merged model, the bytes of the weights, peak memory.

    python benchmarks/quantised_bases.py --model MODEL_FOLDER --data CHATS.jsonl [--steps 100]

One run after the other, each a process, with the same config and data but for `model.quantize`. The peak is the process' largest resident memory,
checks before step 1 included. "merged" is `packtrain eval` of what `packtrain merge` makes: adapters added to the weights as the files have them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

KINDS = ("no", "nf4")
_BYTES = """
import sys
from packtrain.config.schema import Model, Peft
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.model.load import load_model
settings = Model(path=sys.argv[1], quantize=sys.argv[2])
model = load_model(settings, Peft(), load_tokenizer(settings), seed=0)
print(sum(weight.nbytes for weight in model.parameters()))
"""


def config_of(model: str, data: str, steps: int, folder: Path) -> list[str]:
    """The settings that both kinds have."""
    return [
        f"model.path={model}",
        f"data.train={data}",
        "data.eval=0.02",
        "data.max_length=128",
        f"data.cache_dir={folder / 'cache'}",
        "peft=lora",
        "batch.examples_per_step=2",
        "batch.tokens_per_device=256",
        "optim.learning_rate=2e-4",
        "optim.warmup_steps=5",
        f"trainer.max_steps={steps}",
        "trainer.log_every=10",
    ]


def python(*arguments: str) -> tuple[str, float]:
    """Output and peak memory in MiB of a Python process."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, output
    return output, usage.ru_maxrss / 1024


packtrain = partial(python, "-m", "packtrain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    print(
        "| base | bytes of weights | peak memory | tokens/s | held-out loss before | after | merged |\n|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = config_of(given.model, given.data, given.steps, folder)
        for kind in KINDS:
            run = folder / kind
            _, peak = packtrain("sft", *config, f"model.quantize={kind}", f"trainer.output_dir={run}")
            packtrain("merge", str(run))
            told, _ = packtrain("eval", *config, f"model.path={run / 'final-merged'}", "--json")
            size, _ = python("-c", _BYTES, given.model, kind)
            summary = json.loads((run / "summary.json").read_text())
            losses = [summary["first_eval_loss"], summary["eval_loss"], json.loads(told)["figures"]["eval_loss"]]
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            speed = statistics.median(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
            row = [
                "float32" if kind == "no" else kind,
                f"{int(size) / 2**20:.0f} MiB",
                f"{peak:,.0f} MiB",
                f"{speed:.0f}",
            ]
            print("| " + " | ".join([*row, *(f"{loss:.4f}" for loss in losses)]) + " |", flush=True)


if __name__ == "__main__":
    main()
