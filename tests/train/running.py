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


def config_on(model: Path | str, folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """A tiny run that begins with the model in a folder."""
    return {**base_config(folder, **groups), "model": {"path": str(model)}}


def written(folder: Path, config: Mapping[str, Any], name: str = "run") -> str:
    """The path of `config` as folder/name.yaml."""
    (path := folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return str(path)


def packtrain(
    *arguments: str,
    expect: int | None = 0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    begin: Callable[..., None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`packtrain ARGUMENTS` in a process of its own (forked.py), with the variables of `env`; asserts its exit code."""
    return _checked(forked.command(*arguments, cwd=cwd, env=env, begin=begin), expect)


def joined(processes: int, *arguments: str, expect: int = 0, begin: Any = None) -> list[Any]:
    """The same in processes as torchrun starts them; what became of them by rank."""
    return [_checked(one, expect) for one in forked.joined(processes, *arguments, begin=begin)]


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
    def norms(self) -> list[float]:
        return [line["grad_norm"] for line in self.steps]

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

    @property
    def spikes(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "spikes.jsonl").read_text().splitlines()]

    @property
    def ledger(self) -> list[dict]:
        file = self.folder / "ledger.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def ledger_by_names(self) -> list[dict]:
        """The ledger with file names in place of paths."""
        return [{**line, "row": line["row"] and Path(line["row"]).name} for line in self.ledger]

    @property
    def kept(self) -> list[str]:
        """The names of its checkpoints."""
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    def weights(self, place: str = "final") -> dict:
        return load_file(self.folder / place / "model.safetensors")

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:06d}"

    def states(self, step: int) -> dict:
        """What the checkpoint of that step has of the optimizer."""
        return torch.load(self.checkpoint(step) / "optimizer.pt", weights_only=True)

    def resume(self, step: int) -> str:
        """The override by which another run goes on from that step."""
        return f"trainer.resume={self.checkpoint(step)}"


def trained(folder: Path, path: str, *options: str, processes: int = 1) -> Run:
    """A run of the config `path` in processes as torchrun starts them, in `folder`."""
    joined(processes, "sft", path, f"trainer.output_dir={folder}", *options)
    return Run(folder)


def after(do: Callable[..., object], own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, called once `do` was called with the same arguments."""

    def call(*given: Any, **named: Any) -> Any:
        do(*given, **named)
        return own(*given, **named)

    return call


def assert_same_bits(run: Run, expected: Run, file: str = "final/model.safetensors", *, after: int = 0) -> None:
    """Losses after step `after`, and the weights in `file`, are equal bit for bit."""
    assert run.losses == expected.losses[after:]
    own, ledger = run.ledger_by_names, expected.ledger_by_names
    assert own == ledger[-len(own) :] and (after or len(own) == len(ledger))
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
    arguments = command, written(folder, config, name), *overrides
    if processes == 1:
        packtrain(*arguments, expect=expect, begin=begin)
    else:
        joined(processes, *arguments, expect=expect, begin=begin)
    return Run(folder / name)
