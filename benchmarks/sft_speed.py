"""Training speed of packtrain's three modes beside TRL's, on the same documents, model, optimizer and order.

    python benchmarks/sft_speed.py --model MODEL_FOLDER --data CHATS.jsonl [--rows 96] [--batch 8] [--only NAME,NAME]

Every run is a process of its own, one after the other; nothing else should run on the machine. Speed is real tokens
(padding not counted) over the time of the training loop, loading left out. The first and last losses show that all but
TRL's packing (which trains on other batches) do the same work. `outside` is packtrain's share of a step that is neither
forward, backward nor optimizer; `start` is the time from the command to the first step with a warm cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = ("trl padding", "trl padding_free", "trl packing", "padding", "padding_free", "packed")
SETTINGS = {"learning_rate": 1e-5, "max_length": 1024}


def tokenise(model: str, data: str, rows: int, target: Path) -> int:
    """Writes the first `rows` conversations of `data` as token ids, all trained, and returns the number of tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    total = 0
    with open(data) as source, target.open("w") as file:
        for _, line in zip(range(rows), source, strict=False):
            text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][: SETTINGS["max_length"]]
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
            total += len(ids)
    return total


def run_trl(mode: str, model: str, tokens: str, batch: int) -> dict:
    """One pass through TRL's SFTTrainer in this process."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    packing = mode == "packing"
    rows = [json.loads(line) for line in Path(tokens).read_text().splitlines()]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=SFTConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=2 if packing else batch,  # two rows of 1,024 hold about 8 documents
            num_train_epochs=1,
            learning_rate=SETTINGS["learning_rate"],
            lr_scheduler_type="constant",
            padding_free=mode == "padding_free",
            packing=packing,
            max_length=SETTINGS["max_length"] if packing else None,
            dataset_kwargs={"skip_prepare_dataset": not packing},
            train_sampling_strategy="sequential",
            activation_checkpointing=False,
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
    losses = [line["loss"] for line in trainer.state.lines if "loss" in line]
    return {"seconds": seconds, "losses": losses}


def run_packtrain(mode: str, model: str, tokens: str, batch: int, folder: Path) -> dict:
    """One pass through `packtrain sft`, as a user starts it."""
    output = folder / mode
    arguments = [
        f"model.path={model}",
        f"data.train={tokens}",
        f"data.cache_dir={folder / 'cache'}",
        f"data.max_length={SETTINGS['max_length']}",
        "data.shuffle=false",
        f"packing.mode={mode}",
        f"batch.examples_per_step={batch}",
        *([] if mode == "packed" else [f"batch.examples_per_device={batch}"]),
        f"optim.learning_rate={SETTINGS['learning_rate']}",
        "optim.schedule=constant",
        "trainer.log_every=1",
        f"trainer.output_dir={output}",
    ]
    started = time.time()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "packtrain", "sft", *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    start = None
    for line in process.stdout or ():
        if line.startswith("ready"):
            start = time.time() - started
    if process.wait():
        raise SystemExit(f"packtrain ended with {process.returncode}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    counts = [line["tokens"] - before for line, before in zip(lines, [0, *(x["tokens"] for x in lines)], strict=False)]
    seconds = sum(count / line["tokens_per_second"] for count, line in zip(counts, lines, strict=True))
    return {"seconds": seconds, "losses": [line["loss"] for line in lines], "start": start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", default=",".join(RUNS))
    parser.add_argument("--child", nargs=2, metavar=("MODE", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_trl(options.child[0], options.model, options.child[1], options.batch)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = folder / "tokens.jsonl"
        total = tokenise(options.model, options.data, options.rows, tokens)
        print(f"{options.rows} documents, {total:,} tokens, {options.batch} a step", flush=True)
        print(
            f"{'run':<18}{'tokens/s':>10}{'seconds':>10}{'steps':>7}{'first':>10}{'last':>10}{'start s':>9}", flush=True
        )
        for name in options.only.split(","):
            if name.startswith("trl "):
                child = [sys.executable, __file__, "--model", options.model, "--data", options.data]
                child += ["--batch", str(options.batch), "--child", name.removeprefix("trl "), str(tokens)]
                result = json.loads(
                    subprocess.run(child, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
                )
            else:
                result = run_packtrain(name, options.model, str(tokens), options.batch, folder)
            losses, start = result["losses"], result.get("start")
            print(
                f"{name:<18}{total / result['seconds']:>10.1f}{result['seconds']:>10.1f}{len(losses):>7}"
                f"{losses[0]:>10.5f}{losses[-1]:>10.5f}{f'{start:.1f}' if start else '':>9}",
                flush=True,
            )


if __name__ == "__main__":
    main()
