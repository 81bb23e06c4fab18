"""Training in bfloat16 beside float32 on a CPU: tokens/s of `packtrain sft`, and how far losses and gradients are apart.

    taskset -c 0 python benchmarks/bf16_cpu.py --model MODEL_FOLDER --data CHATS.jsonl [--rows 32] [--rounds 3]

One thread. The two formats run in turn, packed, one process each, and the best step of each counts: other work on the machine
only makes a step slower. The gradient is that of the first row of up to 2,048 tokens of the data, relative to its norm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sft_speed import tokenise

FORMATS = {"float32": "no", "bfloat16": "bf16"}
TOKENS = 2048


def train(model: str, tokens: Path, mixed_precision: str, folder: Path) -> list[dict]:
    """The logged lines of one pass through the documents, in steps of 16."""
    arguments = [
        f"model.path={model}",
        "model.dtype=float32",
        f"data.train={tokens}",
        f"data.cache_dir={folder / 'cache'}",
        "data.shuffle=false",
        "packing.mode=packed",
        "batch.examples_per_step=16",
        f"batch.tokens_per_device={TOKENS}",
        "optim.learning_rate=1e-12",  # both formats see the same weights in every step
        "optim.schedule=constant",
        f"trainer.mixed_precision={mixed_precision}",
        "trainer.resume=never",
        "trainer.log_every=1",
        f"trainer.output_dir={folder / mixed_precision}",
        "verify.preflight=false",
    ]
    command = [sys.executable, "-m", "packtrain", "sft", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in (folder / mixed_precision / "metrics.jsonl").read_text().splitlines()]


def gradient_difference(model_folder: str, tokens: Path) -> float:
    """‖gradient in bfloat16 - gradient in float32‖ / ‖gradient in float32‖ of one row."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from packtrain.config.objective import Objective
    from packtrain.data.dataset import Document
    from packtrain.model.forward import patch_forward
    from packtrain.packing.collate import collate_flat

    torch.set_num_threads(1)
    row: list[Document] = []
    for line in tokens.read_text().splitlines():
        ids = np.array(json.loads(line)["input_ids"], dtype=np.int32)
        if sum(len(one.input_ids) for one in row) + len(ids) > TOKENS:
            break
        row.append(Document(ids, np.ones(len(ids), dtype=bool)))
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
    add_fused_lm_head(model)
    patch_forward(model, documents=Objective(), backend="segmented")
    gradients = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(**collate_flat(row), loss_sum=True)
        (loss / TOKENS).backward()
        gradients.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
    exact, rounded = gradients
    return ((rounded - exact).norm() / exact.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    best, losses = dict.fromkeys(FORMATS, 0.0), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = folder / "tokens.jsonl"
        total = tokenise(options.model, options.data, options.rows, tokens)
        print(f"{options.rows} documents, {total:,} tokens", flush=True)
        for _ in range(options.rounds):
            for name, mixed_precision in FORMATS.items():
                lines = train(options.model, tokens, mixed_precision, folder)
                best[name] = max(best[name], *(line["tokens_per_second"] for line in lines))
                losses[name] = [line["loss"] for line in lines]
                print(f"{name:<10}{best[name]:>8.1f} tokens/s, losses {losses[name]}", flush=True)
        apart = max(abs(a / b - 1) for a, b in zip(losses["bfloat16"], losses["float32"], strict=True))
        print(f"bfloat16 / float32: {best['bfloat16'] / best['float32']:.2f} times as fast, losses apart {apart:.1e}")
        print(f"gradient apart {gradient_difference(options.model, tokens):.1e}")


if __name__ == "__main__":
    main()
