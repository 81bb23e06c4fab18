"""Running packtrain as a user does: a process, a YAML, and what it leaves in the run folder."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.train import forked
from tests.train.forked import ENVIRONMENT as ENVIRONMENT

LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WORDS = ["river", "stone", "apple", "cloud", "seven", "window", "garden", "paper", "yellow", "engine", "quiet", "north"]


def conversations(count: int, seed: int = 0) -> list[dict]:
    """Conversations of one to three turns, of very different lengths."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        messages = []
        for _ in range(rng.randint(1, 3)):
            words = rng.choices(WORDS, k=rng.choice([1, 2, 5, 12, 30]))
            messages += [
                {"role": "user", "content": "Say backwards: " + " ".join(words)},
                {"role": "assistant", "content": " ".join(reversed(words))},
            ]
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def base_config(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """A tiny run on 22 documents, 7 a step: the last step of an epoch has a single document."""
    data = folder / "data.jsonl"
    if not data.exists():
        write_jsonl(data, conversations(22))
    config = {
        "model": {"init": "random", "config": LLAMA, "tokenizer": "quickstart"},
        "data": {"train": str(data), "cache_dir": str(folder / "cache"), "max_length": 200},
        "batch": {"examples_per_step": 7, "tokens_per_device": 256},
        "optim": {"learning_rate": 1e-3, "schedule": "constant"},
        "trainer": {"max_steps": 10, "log_every": 1, "output_dir": str(folder / "run")},
    }
    for group, keys in groups.items():
        config[group] = {**config.get(group, {}), **keys}
    return config


def packtrain(
    *arguments: str,
    expect: int | None = 0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    begin: Callable[..., None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`packtrain ARGUMENTS` in a process of its own (forked.py), with the variables of `env`; asserts its exit code."""
    return _checked(forked.command(*arguments, cwd=cwd, env=env, begin=begin), expect)


def _checked(result: subprocess.CompletedProcess[str], expect: int | None) -> subprocess.CompletedProcess[str]:
    assert expect is None or result.returncode == expect, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


class Run:
    """What a finished run left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def steps(self) -> list[dict]:
        return [line for line in self.lines if "loss" in line]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.steps]

    @property
    def evals(self) -> list[dict]:
        return [line for line in self.lines if "eval_loss" in line]

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def log(self) -> str:
        """That of rank 0."""
        return (self.folder / "logs" / "rank-00000.log").read_text()

    def weights(self, place: str = "final") -> dict:
        return load_file(self.folder / place / "model.safetensors")


def assert_same_bits(run: Run, expected: Run, file: str = "final/model.safetensors") -> None:
    """Losses, and the weights in `file`, are equal bit for bit."""
    assert run.losses == expected.losses
    weights = load_file(expected.folder / file)
    for name, weight in load_file(run.folder / file).items():
        assert torch.equal(weight, weights[name]), name


def train(
    folder: Path,
    config: dict[str, Any],
    *overrides: str,
    name: str = "run",
    expect: int = 0,
    command: str = "sft",
    processes: int = 1,
    begin: Callable[..., None] | None = None,
) -> Run:
    """Writes `config`, trains by it into folder/name, and returns what is there.

    Processes do `begin` (forked.py); several are started as torchrun starts them.
    """
    config = {**config, "trainer": {**config["trainer"], "output_dir": str(folder / name)}}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    if processes == 1:
        packtrain(command, str(path), *overrides, expect=expect, begin=begin)
    else:
        for result in forked.joined(processes, command, str(path), *overrides, begin=begin):
            _checked(result, expect)
    return Run(folder / name)
