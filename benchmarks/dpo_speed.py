"""DPO speed of packtrain's modes beside TRL's DPOTrainer, on the same pairs, model, optimizer and order.

    python benchmarks/dpo_speed.py --model MODEL_FOLDER --data PREFERENCES.jsonl [--rows 16] [--batch 2] [--longest 1024]
        [--tokens 8192] [--recompute] [--only "NAME;NAME"]
    python benchmarks/dpo_speed.py --model MODEL_FOLDER --curve          # sharing prompts, over their share of the tokens

Every run is a process of its own, one after the other; nothing else should run on the machine. Speed is pairs over the
time of the training loop, the reference's part included, loading left out; memory is the largest of the process. The losses
show that all do the same work. `precomputed` has the reference's log-probabilities from the cache. `--recompute` has both
sides recompute activations in the backward pass, for batches that would not fit into memory otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS = {
    "trl padding": None,
    "padding": ["packing.mode=padding"],
    "padding_free": ["packing.mode=padding_free", "packing.share_prefix=false"],
    "packed": ["packing.mode=packed", "packing.share_prefix=false"],
    "packed, shared": ["packing.mode=packed"],
    "packed, shared, precomputed": ["packing.mode=packed", "objective.reference=precomputed"],
}
LEARNING_RATE = 1e-6
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


def run_trl(model: str, data: str, batch: int, longest: int, *, recompute: bool) -> dict[str, Any]:
    """One pass through TRL's DPOTrainer in this process."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=DPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=batch,
            num_train_epochs=1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_length=longest,
            train_sampling_strategy="sequential",
            activation_checkpointing=recompute,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            seed=0,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "losses": [line["loss"] for line in trainer.state.lines if "loss" in line]}


def run_packtrain(
    changes: list[str], model: str, data: str, batch: int, longest: int, folder: Path, tokens: int = 8192
) -> dict[str, Any]:
    """One pass through `packtrain dpo`, as a user starts it."""
    output = Path(tempfile.mkdtemp(dir=folder))
    arguments = [
        f"model.path={model}",
        f"data.train={data}",
        f"data.cache_dir={folder / 'cache'}",
        f"data.max_length={longest}",
        "data.shuffle=false",
        f"batch.examples_per_step={batch}",
        f"batch.tokens_per_device={tokens}",
        f"optim.learning_rate={LEARNING_RATE}",
        "optim.schedule=constant",
        "trainer.log_every=1",
        f"trainer.output_dir={output}",
        *changes,
    ]
    subprocess.run([sys.executable, "-m", "packtrain", "dpo", *arguments], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    counts = [line["tokens"] - before for line, before in zip(lines, [0, *(x["tokens"] for x in lines)], strict=False)]
    seconds = sum(count / line["tokens_per_second"] for count, line in zip(counts, lines, strict=True))
    return {"seconds": seconds, "losses": [line["loss"] for line in lines]}


def measured(arguments: list[str]) -> tuple[dict[str, Any], float]:
    """What a child of this script prints, and its largest memory in GiB."""
    child = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return json.loads(said.splitlines()[-1]), usage.ru_maxrss / 2**20


def compare(options: argparse.Namespace, folder: Path) -> None:
    """All runs on the first rows of the user's file."""
    data = folder / "pairs.jsonl"
    with open(options.data) as source:
        data.write_text("".join(line for _, line in zip(range(options.rows), source, strict=False)))
    print(f"{options.rows} pairs, {options.batch} a step, at most {options.longest} tokens an answer with its prompt")
    print(f"{'run':<30}{'pairs/s':>9}{'seconds':>9}{'first':>10}{'last':>10}{'GiB':>7}", flush=True)
    for name in options.only.split(";"):
        shared = ["--model", options.model, "--data", str(data), "--batch", str(options.batch)]
        shared += ["--tokens", str(options.tokens), *(["--recompute"] if options.recompute else [])]
        result, memory = measured([*shared, "--longest", str(options.longest), "--child", name, str(folder)])
        losses = result["losses"]
        print(
            f"{name:<30}{options.rows / result['seconds']:>9.4f}{result['seconds']:>9.1f}"
            f"{losses[0]:>10.6f}{losses[-1]:>10.6f}{memory:>7.2f}",
            flush=True,
        )


def curve(options: argparse.Namespace, folder: Path) -> None:
    """Speed of shared against unshared prompts, on made-up pairs whose prompts are a given share of all tokens."""
    print(f"{'prompt share':>13}{'unshared s':>12}{'shared s':>10}{'ratio':>8}", flush=True)
    words = [
        "river",
        "stone",
        "apple",
        "cloud",
        "seven",
        "window",
        "garden",
        "paper",
        "yellow",
        "engine",
        "quiet",
        "north",
    ]
    for share in SHARES:
        rng, data = random.Random(0), folder / f"share-{share}.jsonl"
        length = 256  # words of a prompt with one answer
        rows = []
        for _ in range(options.rows):
            text = [
                " ".join(rng.choices(words, k=count))
                for count in (round(length * share), *[round(length * (1 - share))] * 2)
            ]
            rows.append({"prompt": text[0], "chosen": " " + text[1], "rejected": " " + text[2]})
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs = [
            run_packtrain([f"packing.share_prefix={on}"], options.model, str(data), options.batch, 1024, folder)[
                "seconds"
            ]
            for on in ("false", "true")
        ]
        print(f"{share:>13.0%}{runs[0]:>12.1f}{runs[1]:>10.1f}{runs[0] / runs[1]:>8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--only", default=";".join(RUNS))
    parser.add_argument("--tokens", type=int, default=8192, help="batch.tokens_per_device")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, folder = options.child
        changes = RUNS[name]
        if changes is None:
            result = run_trl(options.model, options.data, options.batch, options.longest, recompute=options.recompute)
        else:
            changes = [*changes, f"trainer.gradient_checkpointing={'full' if options.recompute else 'none'}"]
            result = run_packtrain(
                changes, options.model, options.data, options.batch, options.longest, Path(folder), options.tokens
            )
        print(json.dumps(result))
        return
    with tempfile.TemporaryDirectory() as temporary:
        (curve if options.curve else compare)(options, Path(temporary))


if __name__ == "__main__":
    main()
