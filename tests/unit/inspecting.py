"""`packtrain inspect` on small planted data, with the built-in tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from command_line import Done, packtrain

TEXT = """apple bread milk cheese honey lemon onion rice salt tea river stone cloud storm field tree leaf seed lamp chair table
spoon plate clock paper pencil bottle basket window garden engine north quiet yellow seven letter mother answer water people sound
place"""
WORDS = TEXT.split()
MODEL = (
    "model.init=random",
    "model.tokenizer=quickstart",
    "model.config={model_type: llama, hidden_size: 48, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 4}",
)


def chat(question: str, answer: str, system: str = "") -> dict[str, Any]:
    """A row of one exchange."""
    messages = [{"role": "system", "content": system}] if system else []
    return {"messages": [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def clean(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows that have nothing odd."""
    rng = random.Random(seed)
    return [
        chat(f"{sentence(rng, rng.randint(4, 12))}?", f"{sentence(rng, rng.randint(20, 60))}.") for _ in range(count)
    ]


def write(folder: Path, rows: list[dict[str, Any]], name: str = "chats.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def inspect(folder: Path, *arguments: str, model: tuple[str, ...] = MODEL, **variables: str) -> Done:
    """The verb, with data cached in `folder`."""
    settings = [*model, "batch.examples_per_step=8", "batch.tokens_per_device=2048", "topology=single"]
    return packtrain(
        "inspect", *settings, *arguments, folder=folder, PACKTRAIN_CACHE=str(folder / "cache"), **variables
    )


def report(folder: Path, *arguments: str, **given: Any) -> dict[str, Any]:
    """The JSON document."""
    done = inspect(folder, *arguments, "--json", **given)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def audit(folder: Path, *arguments: str, **given: Any) -> dict[str, dict[str, Any]]:
    """The findings of the audit by name."""
    return {finding["name"]: finding for finding in report(folder, *arguments, **given)["audit"]}
