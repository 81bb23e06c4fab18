"""The files of a run on a tiny model, for cases that break one of them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.corpus.case import OWN, Case, Make

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
CONFIG: dict[str, dict[str, Any]] = {
    "model": {"path": "model"},
    "data": {"train": "data.jsonl", "cache_dir": "home/cache", "max_length": 64},
    "batch": {"examples_per_step": 4, "tokens_per_device": 128},
    "optim": {"learning_rate": 1e-3},
    "trainer": {"max_steps": 2, "output_dir": "run"},
    "verify": {"preflight": False},
}
ROWS = [
    {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n} {n}"}]}
    for n in range(9)
]
LORA = {"kind": "lora", "r": 4, "alpha": 8, "dropout": 0.0}
Files = Mapping[str, "str | bytes | Make"]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def trains(
    name: str,
    files: Files | None = None,
    *arguments: str,
    verb: str = "sft",
    adapters: bool = False,
    groups: Mapping[str, dict[str, Any]] | None = None,
    **more: Any,
) -> Case:
    """A run on a whole tiny model and data, in which `files` are put last, with config `groups` of its own."""
    config = {**CONFIG, **({"model": {"path": "adapters"}, "peft": LORA} if adapters else {})}
    for group, keys in (groups or {}).items():
        config[group] = {**config.get(group, {}), **keys}
    whole: dict[str, Any] = {"c.yaml": yaml.safe_dump(config), "data.jsonl": lines(ROWS), "model": put("model")}
    if adapters:
        whole["adapters"] = put("adapters")
    writes = (*OWN, *more.pop("writes", ()))
    return Case(
        name=f"{verb}: {name}",
        arguments=(verb, "c.yaml", *arguments),
        files={**whole, **(files or {})},
        writes=writes,
        **more,
    )


def put(name: str) -> Make:
    """The tiny model, or adapters of it."""
    return lambda at: shutil.copytree(Path(_saved().name, name), at)


def changed(**values: Any) -> Make:
    """The JSON file that is there, with other values."""
    return lambda at: at.write_text(json.dumps({**json.loads(at.read_text()), **values}))


def cut(bytes_left: int) -> Make:
    """The first bytes of the file that is there."""
    return lambda at: os.truncate(at, bytes_left)


def gone(at: Path) -> None:
    at.unlink(missing_ok=True)


def link(target: str) -> Make:
    return lambda at: os.symlink(target, at)


@cache
def _saved() -> tempfile.TemporaryDirectory[str]:
    """A folder with the tiny model and adapters of it: made when the first case runs, as it takes torch."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from packtrain.data.sources.quickstart import tokenizer

    folder, words = tempfile.TemporaryDirectory(), tokenizer()
    special = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    config = LlamaConfig(**LLAMA, vocab_size=len(words), pad_token_id=words.pad_token_id, **special)
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(f"{folder.name}/model")
    get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).save_pretrained(f"{folder.name}/adapters")
    changed(base_model_name_or_path="model")(Path(folder.name, "adapters/adapter_config.json"))
    for name in ("model", "adapters"):
        words.save_pretrained(f"{folder.name}/{name}")
    return folder
