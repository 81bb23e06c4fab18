"""Built-in preference pairs: the quickstart's questions, each with its right answer and one that is wrong in one place.

The wrong answer is the right one with a single item replaced by another of its kind (a capital by a capital, a number
by a number near it), or, in a spelt word, a letter. So neither length nor form nor the words themselves tell which is
right, only the question and the rest of the answer do. An item at random and not the last one, so that a mistake may
be anywhere.
"""

from __future__ import annotations

import random
import re
from typing import Any

from packtrain.data.sources.quickstart import ANIMALS, COUNTRIES, DAYS, WORDS, Split, conversation

COUNTS = {"train": 4_000, "eval": 200}
KINDS = (
    sorted({young for young, _, _ in ANIMALS.values()}),
    sorted({sound for _, sound, _ in ANIMALS.values()}),
    sorted({capital for capital, _ in COUNTRIES.values()}),
    sorted({continent for _, continent in COUNTRIES.values()}),
    DAYS,
    WORDS,
)
ITEM = re.compile(rf"\b(?:\d+|{'|'.join(word for kind in KINDS for word in kind)})\b")
SPELT = re.compile(r"[a-z](?:-[a-z])+")


def preferences(split: Split, seed: int = 0, count: int | None = None) -> list[dict[str, Any]]:
    """`count` rows (4,000 for train, 200 for eval) of the form {"prompt", "chosen", "rejected"}, each a list of messages.

    The same arguments give the same rows on every machine, and the first rows do not depend on `count`. No question of
    eval is asked in train, neither here nor in the quickstart's conversations.
    """
    rng = random.Random(f"pairs-{split}-{seed}")
    return [_preference(split, rng) for _ in range(COUNTS[split] if count is None else count)]


def _preference(split: Split, rng: random.Random) -> dict[str, Any]:
    *prompt, answer = conversation(split, rng)
    return {
        "prompt": prompt,
        "chosen": [answer],
        "rejected": [{"role": "assistant", "content": _wrong(answer["content"], rng)}],
    }


def _wrong(answer: str, rng: random.Random) -> str:
    """`answer` with one item replaced."""
    if SPELT.fullmatch(answer):
        at = 2 * rng.randrange(len(answer) // 2 + 1)
        letter = rng.choice([one for one in "abcdefghijklmnopqrstuvwxyz" if one != answer[at]])
        return answer[:at] + letter + answer[at + 1 :]
    item = rng.choice(list(ITEM.finditer(answer)))
    return answer[: item.start()] + _other(item[0], rng) + answer[item.end() :]


def _other(item: str, rng: random.Random) -> str:
    """Another item of the same kind."""
    if item.isdigit():
        return str(rng.choice([near for step in (-2, -1, 1, 2) if (near := int(item) + step) > 0]))
    kind = next(kind for kind in KINDS if item in kind)
    return rng.choice([other for other in kind if other != item])
