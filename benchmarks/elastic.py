"""Runs that go on in another world: from each strategy and number of processes to each other, against the run that nothing stopped.

    python benchmarks/elastic.py                         # the table of RESULTS.md; a quarter of an hour on two idle cores
    python benchmarks/elastic.py --verb dpo --lora       # preferences, with adapters
    python benchmarks/elastic.py --only ddp×2 zero3×2    # some of the worlds

A run of a tiny model (float32, AdamW with weight decay, a warmup and a cosine schedule) stops after step 3, in the middle of the
first of its passes of four steps, and goes on to step 7, in every world with another packing mode and micro-batch too. A cell is the
largest relative difference of the losses of all seven steps, and of the final weights, from one process that does them all.
Processes are forked from one that has imported torch and packtrain (tests/train/forked.py), as torchrun would start them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests" / "train")]

from answer_runs import preferences  # noqa: E402
from running import LLAMA, Run, base_config, train, write_jsonl  # noqa: E402

STOP, STEPS = 3, 7
WORLDS = {
    "ddp×1": ("packing=packed", "batch.tokens_per_device=256"),
    "ddp×2": ("packing=padding_free", "batch.tokens_per_device=400"),
    "ddp×3": ("packing=padding", "batch.examples_per_device=2"),
    "zero1×2": ("packing=padding_free", "batch.examples_per_device=1"),
    "zero1×3": ("packing=packed", "batch.tokens_per_device=300"),
    "zero2×2": ("packing=packed", "batch.tokens_per_device=400"),
    "zero3×2": ("packing=padding", "batch.examples_per_device=1"),
    "zero3×3": ("packing=packed", "batch.tokens_per_device=256"),
    "fsdp2×2": ("packing=packed", "batch.tokens_per_device=300"),
}
"""Strategy × processes, and what else is another there."""


def config_of(folder: Path, *, verb: str, lora: bool) -> dict[str, Any]:
    config = base_config(folder, trainer={"max_steps": STEPS, "checkpoint_every": STOP, "keep_checkpoints": None})
    config["model"]["config"] = {**LLAMA, "hidden_size": 128, "intermediate_size": 256}
    config["optim"] |= {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    if verb == "dpo":
        config["data"]["train"] = str(write_jsonl(folder / "pairs.jsonl", preferences(22, 0)))
    if lora:
        config["peft"] = {"kind": "lora"}
    return config


def differences(run: Run, expected: Run, file: str) -> tuple[float, float]:
    """The largest relative difference of a loss, and of a weight."""
    assert "resuming from step-000003" in (run.folder / "logs" / "rank-00000.log").read_text()
    if [line["examples"] for line in run.steps] != [line["examples"] for line in expected.steps]:
        return float("inf"), float("inf")
    losses = [abs(one - other) / abs(other) for one, other in zip(run.losses, expected.losses, strict=True)]
    ours, theirs = (load_file(one.folder / file) for one in (run, expected))
    return max(losses), max(float((ours[name] - one).norm() / one.norm()) for name, one in theirs.items())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--verb", default="sft", choices=["sft", "dpo"])
    options.add_argument("--lora", action="store_true")
    options.add_argument("--only", nargs="*", default=list(WORLDS), metavar="WORLD")
    chosen = options.parse_args()
    file = "final-adapters/adapter_model.safetensors" if chosen.lora else "final/model.safetensors"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = config_of(folder, verb=chosen.verb, lora=chosen.lora)

        def run_of(name: str, world: str) -> Run:
            strategy, _, processes = world.partition("×")
            overrides = [f"strategy={strategy}", *WORLDS[world]]
            return train(folder, config, *overrides, name=name, processes=int(processes), command=chosen.verb)

        expected, worst = run_of("unbroken", "ddp×1"), [0.0, 0.0]
        print(f"| from \\ to | {' | '.join(chosen.only)} |\n|---{'|---' * len(chosen.only)}|")
        for one in chosen.only:
            run_of("from", one)
            for name in (
                "summary.json",
                "final",
                "final-adapters",
                "checkpoints/step-000006",
                "checkpoints/step-000007",
            ):
                gone = folder / "from" / name
                shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
            cells = []
            for other in chosen.only:
                shutil.copytree(folder / "from", folder / "to")
                loss, weight = differences(run_of("to", other), expected, file)
                worst = [max(worst[0], loss), max(worst[1], weight)]
                cells.append(f"{loss:.0e}, {weight:.0e}{'' if loss < 1e-5 and weight < 1e-4 else ' ✗'}")
                shutil.rmtree(folder / "to")
            shutil.rmtree(folder / "from")
            print(f"| {one} | {' | '.join(cells)} |", flush=True)
        print(f"\nworst: losses {worst[0]:.1e}, weights {worst[1]:.1e}")
    sys.exit(worst[0] >= 1e-5 or worst[1] >= 1e-4)


if __name__ == "__main__":
    main()
