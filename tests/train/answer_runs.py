"""What the runs of dpo, kto and reward are tested with alike: data, a config, and what must be equal of two of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from here import loaded, train_here
from running import LLAMA, WORDS, Run, base_config, config_on, conversations, train, write_jsonl
from trl_trainers import settings

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
    words = ([1, 3, 20], [1, 4, 9])
    made = ((message(rng, "user", words[0]), message(rng, "assistant", words[1])) for _ in range(count))
    return [{"prompt": prompt, "completion": answer, "label": rng.random() < 2 / 3} for prompt, answer in made]


def of_objective(folder: Path, kind: str, count: int = 14, **groups: dict[str, Any]) -> dict[str, Any]:
    """A tiny run of that objective on so many rows of its own."""
    rows = {"sft": conversations, "kto": labelled}.get(kind, preferences)(count, 0)
    data = {"train": str(write_jsonl(folder / f"{kind}.jsonl", rows)), "max_length": 92, **groups.pop("data", {})}
    return base_config(folder, data=data, objective={"kind": kind, **groups.pop("objective", {})}, **groups)


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
        files = {name: str(self.folder / f"{name}.jsonl") for name in ("train", "eval")}
        given: dict[str, Any] = {"data": {**files, "shuffle": False, "max_length": 92}}
        given["objective"] = {"kind": self.kind, "options": self.options}
        given["batch"] = {"examples_per_step": self.examples[0], "tokens_per_device": 1024}
        trainer = {"max_steps": len(self.examples), **groups.pop("trainer", {})}
        return config_on(self.folder / "start", self.folder, **{**given, **groups}, trainer=trainer)

    def load(self, name: str, *overrides: str, **groups: dict[str, Any]) -> RunConfig:
        config = self.config_of(**groups)
        config["trainer"]["output_dir"] = str(self.folder / name)
        return loaded(self.folder, config, *overrides, name=name)

    @property
    def figures(self) -> list[str]:
        """Names of the figures that it logs."""
        return [figure.name for figure in OBJECTIVES[self.kind].figures]

    def run(self, name: str, *overrides: str, **groups: dict[str, Any]) -> Run:
        """A run in this process."""
        return train_here(self.load(name, *overrides, **groups), self.folder / name)

    def start(self, name: str, *overrides: str, processes: int = 1, **groups: dict[str, Any]) -> Run:
        """A run in processes of its own."""
        how: Any = {"name": name, "command": self.kind, "processes": processes}
        return train(self.folder, self.config_of(**groups), *overrides, **how)

    def arguments_of_trl(self) -> dict[str, Any]:
        """The arguments of TRL's trainer for the same run."""
        given = {"max_length": 92} if self.kind == "kto" else {"train_sampling_strategy": "sequential"}
        given |= {"max_length": None, **given, **self.options, "optim": "adamw_torch_fused", "learning_rate": 1e-3}
        given |= {"per_device_train_batch_size": self.examples[0], "per_device_eval_batch_size": len(self.eval_rows)}
        return settings(self.folder / "trl", max_steps=len(self.examples), max_grad_norm=1.0, **given)
