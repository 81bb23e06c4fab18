"""What the runs of dpo, kto and reward are tested with alike: data, a config, and what must be equal of two of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from here import train_here
from running import LLAMA, WORDS, Run, base_config, train, write_jsonl
from trl_trainers import settings

from packtrain.config.compose import load_config
from packtrain.config.schema import Model, Peft, RunConfig
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.model.load import load_model
from packtrain.objectives.spec import OBJECTIVES


def message(rng: random.Random, role: str, most: list[int]) -> list[dict[str, str]]:
    """A message of one of so many words."""
    return [{"role": role, "content": " ".join(rng.choices(WORDS, k=rng.choice(most)))}]


def preferences(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs with prompts and answers of very different lengths, and margins; some answers of a pair are equally long."""
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        prompt, chosen = message(rng, "user", [1, 3, 20]), message(rng, "assistant", [1, 4])
        rejected = message(rng, "assistant", [1, 9])
        if chosen != rejected:
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": len(rows) % 3 / 4})
    return rows


def labelled(count: int, seed: int) -> list[dict[str, Any]]:
    """Answers with prompts of very different lengths; two thirds are desirable."""
    rng = random.Random(seed)
    return [
        {
            "prompt": message(rng, "user", [1, 3, 20]),
            "completion": message(rng, "assistant", [1, 4, 9]),
            "label": rng.random() < 2 / 3,
        }
        for _ in range(count)
    ]


def save_model(description: Model, place: Path, **given: Any) -> Path:
    """Writes a new model with its tokenizer into the folder `place`."""
    tokenizer = load_tokenizer(description)
    load_model(description, Peft(), tokenizer, seed=0, **given).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@dataclass(frozen=True)
class AnswerRuns:
    """Runs of `kind` in `folder`, on `train` in their order, with as many `examples` in each step."""

    kind: str
    folder: Path
    train_rows: list[dict[str, Any]]
    eval_rows: list[dict[str, Any]]
    examples: list[int]
    small: str
    """An override with which a step has several micro-batches."""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        write_jsonl(self.folder / "train.jsonl", self.train_rows)
        write_jsonl(self.folder / "eval.jsonl", self.eval_rows)
        save_model(Model(init="random", config=LLAMA, tokenizer="quickstart"), self.folder / "start")

    def config_of(self, **groups: dict[str, Any]) -> dict[str, Any]:
        """A run from the model in folder/start."""
        model = {"init": "pretrained", "path": str(self.folder / "start"), "config": {}, "tokenizer": None}
        files = {"train": str(self.folder / "train.jsonl"), "eval": str(self.folder / "eval.jsonl")}
        given = {"model": model, "data": {**files, "shuffle": False, "max_length": 92}}
        given["objective"] = {"kind": self.kind, "options": self.options}
        batch = {"examples_per_step": self.examples[0], "tokens_per_device": 1024}
        trainer = {"max_steps": len(self.examples), **groups.pop("trainer", {})}
        return base_config(self.folder, **{**given, **groups}, batch=batch, trainer=trainer)

    def load(self, name: str, *overrides: str, **groups: dict[str, Any]) -> RunConfig:
        path = self.folder / f"{name}.yaml"
        config = self.config_of(**groups)
        config["trainer"]["output_dir"] = str(self.folder / name)
        path.write_text(yaml.safe_dump(config))
        return load_config(str(path), [*overrides])

    @property
    def figures(self) -> list[str]:
        """Names of the figures that it logs."""
        return [figure.name for figure in OBJECTIVES[self.kind].figures]

    def run(self, name: str, *overrides: str, **groups: dict[str, Any]) -> Run:
        """A run in this process."""
        return train_here(self.load(name, *overrides, **groups), self.folder / name)

    def start(self, name: str, *overrides: str, processes: int = 1, **groups: dict[str, Any]) -> Run:
        """A run in processes of its own."""
        return train(
            self.folder, self.config_of(**groups), *overrides, name=name, command=self.kind, processes=processes
        )

    def arguments_of_trl(self) -> dict[str, Any]:
        """The arguments of TRL's trainer for the same run."""
        given = {"max_length": 92} if self.kind == "kto" else {"train_sampling_strategy": "sequential"}
        given |= {"max_length": None, **given, **self.options, "optim": "adamw_torch_fused", "learning_rate": 1e-3}
        given |= {"per_device_train_batch_size": self.examples[0], "per_device_eval_batch_size": len(self.eval_rows)}
        return settings(self.folder / "trl", max_steps=len(self.examples), max_grad_norm=1.0, **given)
