"""What the runs of dpo, kto and reward are tested with alike: data, a config, and what must be equal of two of them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from here import train_here
from running import ENVIRONMENT, LLAMA, WORDS, Run, base_config, write_jsonl
from safetensors.torch import load_file

from packtrain.config.compose import load_config
from packtrain.config.schema import Model, Peft
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.model.load import load_model
from packtrain.train.checkpoint import state as checkpoint_state
from tests.train import forked


def message(rng: random.Random, role: str, most: list[int]) -> list[dict[str, str]]:
    """A message of one of so many words."""
    return [{"role": role, "content": " ".join(rng.choices(WORDS, k=rng.choice(most)))}]


def preferences(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs with prompts and answers of very different lengths; some answers of a pair are equally long."""
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        prompt, chosen = message(rng, "user", [1, 3, 20]), message(rng, "assistant", [1, 4])
        rejected = message(rng, "assistant", [1, 9])
        if chosen != rejected:
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def saved_model(description: Model, place: Path, **given: Any) -> Path:
    """A new model with its tokenizer in the folder `place`."""
    tokenizer = load_tokenizer(description)
    load_model(description, Peft(), tokenizer, seed=0, **given).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def said_at_start(run: Run) -> str:
    return (run.folder / "logs" / "rank-00000.log").read_text()


@dataclass(frozen=True)
class AnswerRuns:
    """Runs of `kind` that log `figures`, on the examples in their order, `a_step` of them in each of the `steps`."""

    kind: str
    figures: Iterable[str]
    a_step: int
    steps: int
    objective: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> Path:
        """Fills `folder` with the data, and a causal language model to start from."""
        write_jsonl(folder / "train.jsonl", train)
        write_jsonl(folder / "eval.jsonl", held_out)
        saved_model(Model(init="random", config=LLAMA, tokenizer="quickstart"), folder / "start")
        return folder

    def config_of(self, folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
        """A run on the data of `folder`, from the model in folder/start."""
        model = {"init": "pretrained", "path": str(folder / "start"), "config": {}, "tokenizer": None}
        files = {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")}
        objective = {"kind": self.kind, **self.objective, **groups.pop("objective", {})}
        given = {"model": model, "data": {**files, "shuffle": False, "max_length": 92}, "objective": objective}
        batch = {"examples_per_step": self.a_step, "tokens_per_device": 1024}
        trainer = {"max_steps": self.steps, **groups.pop("trainer", {})}
        return base_config(folder, **given, batch=batch, trainer=trainer, **groups)

    def run(self, folder: Path, name: str, *overrides: str, **groups: dict[str, Any]) -> Run:
        """A run in this process."""
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(self.config_of(folder, **groups)))
        return train_here(load_config(str(path), [*overrides]), folder / name)

    def of_trl(self, folder: Path, held_out: int) -> dict[str, Any]:
        """The arguments of TRL's trainer for the same run."""
        return {
            "output_dir": str(folder / "trl"),
            "per_device_train_batch_size": self.a_step,
            "per_device_eval_batch_size": held_out,
            "max_steps": self.steps,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "activation_checkpointing": False,
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "max_length": None,
            "seed": 0,
        }

    def assert_same_training(self, found: Run, expected: Run, weights: str = "model.safetensors") -> None:
        """Losses, figures and weights are equal but for rounding."""
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert [line["examples"] for line in found.steps] == [line["examples"] for line in expected.steps]
        for ours, theirs in zip(found.lines, expected.lines, strict=True):
            if self.kind == "reward":
                assert ours.get("tokens") == theirs.get("tokens")
            for name in [f"{side}{name}" for name in ("loss", *self.figures) for side in ("", "eval_")]:
                assert (name in ours) == (name in theirs), (ours["step"], name)
                if name in ours:
                    # kto's estimate is a difference of log-probabilities of a hundred nats or more, in float32
                    within = 5e-5 if name.endswith("kl") else 1e-5
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=within), (ours["step"], name)
        ours, theirs = (load_file(run.folder / "final" / weights) for run in (found, expected))
        for name, tensor in ours.items():
            assert (tensor - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name

    def assert_resumes_bitwise(self, folder: Path, whole: Run, every: int) -> None:
        """Killed after its first checkpoint, of step `every`, and resumed, a run ends with the weights of the `whole` one."""
        config = self.config_of(folder, trainer={"checkpoint_every": every, "output_dir": str(folder / "killed")})
        path, outputs = folder / "killed.yaml", [folder / "killed.out", folder / "killed.err"]
        path.write_text(yaml.safe_dump(config))
        process = forked.start((self.kind, str(path)), ENVIRONMENT, folder, outputs, _killed_after_a_checkpoint)
        process.join()
        assert process.exitcode == -signal.SIGKILL, outputs[1].read_text()
        resumed = self.run(folder, "killed", trainer={"checkpoint_every": every})
        assert f"resuming from step-{every:06}" in said_at_start(resumed)
        assert resumed.losses == whole.losses
        weights = whole.weights()
        for name, tensor in resumed.weights().items():
            assert torch.equal(tensor, weights[name]), name


def _killed_after_a_checkpoint(*given: Any) -> None:
    complete = checkpoint_state.complete

    def last(staging: Path, target: Path) -> None:
        complete(staging, target)
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_state.complete = last
    forked.run(*given)
