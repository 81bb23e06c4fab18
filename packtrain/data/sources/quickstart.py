"""Built-in data and tokenizer: a first run needs no download and no account.

The conversations are small generated exercises with right or wrong answers, so that learning shows in the samples. Their
lengths are long-tailed as in real chat data: packing is made for such lengths.

The hash of a question's wording decides its split, so no question of `eval` is in `train`. The tokenizer is a byte-level BPE
trained on the `train` split at first use; a run folder keeps its own.

The rejected answer of a pair is the right answer to another question; so is an answer with the label false. A model trained from
scratch learns to tell these apart in a minute.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from packtrain.config.schema import Split
from packtrain.data.tokens.chat_template import CHATML

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, str]
Exercise = list[tuple[str, str]]
"""Turns (question, answer) that belong together; later questions only refer to facts in the first question."""

COUNTS = {"train": 10_000, "eval": 200}
PAIR_COUNTS = {"train": 4_000, "eval": 200}
VOCABULARY = 960

ANIMALS = {  # young, sound, number of legs
    "cat": ("kitten", "meows", 4), "dog": ("puppy", "barks", 4), "cow": ("calf", "moos", 4),
    "horse": ("foal", "neighs", 4), "sheep": ("lamb", "bleats", 4), "goat": ("kid", "bleats", 4),
    "pig": ("piglet", "grunts", 4), "hen": ("chick", "clucks", 2), "duck": ("duckling", "quacks", 2),
    "goose": ("gosling", "honks", 2), "swan": ("cygnet", "hisses", 2), "owl": ("owlet", "hoots", 2),
    "lion": ("cub", "roars", 4), "bear": ("cub", "growls", 4), "fox": ("kit", "yelps", 4),
    "frog": ("tadpole", "croaks", 4), "deer": ("fawn", "bellows", 4), "bee": ("larva", "buzzes", 6),
}  # fmt: skip
COUNTRIES = {  # capital, continent
    "France": ("Paris", "Europe"), "Italy": ("Rome", "Europe"), "Spain": ("Madrid", "Europe"),
    "Portugal": ("Lisbon", "Europe"), "Germany": ("Berlin", "Europe"), "Austria": ("Vienna", "Europe"),
    "Greece": ("Athens", "Europe"), "Norway": ("Oslo", "Europe"), "Japan": ("Tokyo", "Asia"),
    "China": ("Beijing", "Asia"), "Thailand": ("Bangkok", "Asia"), "Nepal": ("Kathmandu", "Asia"),
    "Egypt": ("Cairo", "Africa"), "Kenya": ("Nairobi", "Africa"), "Ghana": ("Accra", "Africa"),
    "Senegal": ("Dakar", "Africa"), "Peru": ("Lima", "South America"), "Chile": ("Santiago", "South America"),
    "Cuba": ("Havana", "North America"), "Canada": ("Ottawa", "North America"),
}  # fmt: skip
ANIMAL_FACTS = {  # answers about animals, and ways to ask for each
    "A young {0} is called a {1}.": (
        *("What is a young {0} called?", "What do you call the young of a {0}?"),
        *("Name the young of the {0}.", "A {0} has young. What are they called?"),
    ),
    "A {0} {2}.": ("What sound does a {0} make?", "Which sound can I hear from a {0}?", "How does a {0} sound?"),
    "A {0} has {3} legs.": (
        "How many legs does a {0} have?",
        "Count the legs of a {0}.",
        "On how many legs does a {0} walk?",
    ),
}
COUNTRY_FACTS = {
    "The capital of {0} is {1}.": (
        *("What is the capital of {0}?", "Which city is the capital of {0}?"),
        *("Name the capital of {0}.", "I travel to {0}. What is its capital?"),
    ),
    "{0} is in {2}.": ("On which continent is {0}?", "Where is {0}?", "To which continent does {0} belong?"),
}
TABLES = (
    ("animal", "animals", ANIMALS, ("young", "sound")),
    ("country", "countries", COUNTRIES, ("capital", "continent")),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS = [
    "apple", "bread", "milk", "cheese", "honey", "lemon", "onion", "rice", "salt", "tea",
    "river", "stone", "cloud", "storm", "field", "tree", "leaf", "seed",
    "lamp", "chair", "table", "spoon", "plate", "clock", "paper", "pencil", "bottle", "basket",
]  # fmt: skip
GOODS = WORDS[:10]
TUTOR = (
    "You are a patient tutor. Answer in one short sentence, or in a list when a list is asked for.",
    "Answer the questions of a pupil.",
    "You help with homework: facts, small sums, days, words and lists.",
)


def conversations(split: Split, seed: int = 0, count: int | None = None) -> list[dict[str, list[Message]]]:
    """Make `count` rows {"messages": [{"role", "content"}, ...]}; default 10,000 for train, 200 for eval.

    The same arguments give the same rows on every machine, and the first rows do not depend on `count`.
    """
    rng = random.Random(f"{split}-{seed}")
    return [{"messages": conversation(split, rng)} for _ in range(COUNTS[split] if count is None else count)]


def held_out(question: str) -> bool:
    """Return whether an exercise that starts with `question` belongs to the eval split."""
    return zlib.crc32(question.encode()) % 8 == 0


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most 960 tokens; every digit is a token. Its ChatML template marks the trained tokens."""
    rows = conversations("train", count=2_000)
    texts = [message["role"] + "\n" + message["content"] for row in rows for message in row["messages"]]
    return train_tokenizer(texts, VOCABULARY, [], CHATML)


def train_tokenizer(texts: list[str], vocabulary: int, marks: list[str], chat_template: str) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocabulary` tokens on `texts`. `marks`: special tokens besides ChatML's."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(" ?[0-9]"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *marks],
        chat_template=chat_template,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def conversation(split: Split, rng: random.Random) -> list[Message]:
    """Make one exercise most of the time, else a lesson of several. A third of the lessons start with a system prompt."""
    number = 1 if rng.random() < 0.8 else 2 + min(int(rng.expovariate(0.4)), 10)
    messages: list[Message] = []
    if number > 1 and rng.random() < 0.33:
        messages.append({"role": "system", "content": rng.choice(TUTOR)})
    for _ in range(number):
        for question, answer in _exercise(split, rng):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def _exercise(split: Split, rng: random.Random) -> Exercise:
    """Return a random exercise of this split."""
    while True:
        exercise = rng.choices(TASKS, WEIGHTS)[0](rng)
        if held_out(exercise[0][0]) == (split == "eval"):
            return exercise


def _few(rng: random.Random, least: int, most: int) -> int:
    """Return a number from `least` to `most`, mostly a small one. This makes the long tail of lengths."""
    return min(most, least + int(rng.paretovariate(1.3)) - 1)


def _fact(
    things: Mapping[str, tuple[object, ...]], facts: Mapping[str, tuple[str, ...]], rng: random.Random
) -> Exercise:
    name, known = rng.choice(list(things.items()))
    answer = rng.choice(list(facts))
    return [(rng.choice(facts[answer]).format(name), answer.format(name, *known))]


def _sum(rng: random.Random) -> Exercise:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    if rng.random() < 0.5:
        asked = (f"What is {a} + {b}?", f"How much is {a} plus {b}?", f"Start at {a} and add {b}.")
        steps = range(a + 1, a + b + 1)
    else:
        asked = (f"What is {a + b} - {b}?", f"How much is {a + b} minus {b}?", f"Start at {a + b} and take away {b}.")
        steps = range(a + b - 1, a - 1, -1)
    return [(rng.choice(asked), f"Counting: {', '.join(map(str, steps))}. It is {steps[-1]}.")]


def _day(rng: random.Random) -> Exercise:
    start, distance = rng.randrange(7), rng.randint(1, 6)
    way, sign = rng.choice((("after", 1), ("before", -1)))
    passed = [DAYS[(start + sign * i) % 7] for i in range(1, distance + 1)]
    days = "1 day" if distance == 1 else f"{distance} days"
    asked = (
        f"Which day is {days} {way} {DAYS[start]}?",
        f"What day comes {days} {way} {DAYS[start]}?",
        f"Name the day that is {days} {way} {DAYS[start]}.",
        f"Today is {DAYS[start]}. Which day {'is' if sign > 0 else 'was'} it {days} {'from now' if sign > 0 else 'ago'}?",
    )
    return [(rng.choice(asked), f"From {DAYS[start]}: {', '.join(passed)}. It is {passed[-1]}.")]


def _count(rng: random.Random) -> Exercise:
    start, length = rng.randint(1, 60), _few(rng, 4, 120)
    numbers = [str(n) for n in range(start, start + length)]
    asked = (f"Count from {start} to {numbers[-1]}.", f"Write the numbers from {start} to {numbers[-1]}.")
    return [(rng.choice(asked), ", ".join(numbers))]


def _spell(rng: random.Random) -> Exercise:
    word = rng.choice(WORDS)
    asked = (f"Spell the word {word}.", f"How do you spell {word}?", f"Write {word} letter by letter.")
    return [(rng.choice(asked), "-".join(word))]


def _list(rng: random.Random) -> Exercise:
    words = rng.sample(WORDS, _few(rng, 2, len(WORDS)))
    word_list = ", ".join(words)
    kind = rng.choice(("number", "first", "last"))
    if kind == "number":
        asked = (f"Number these words: {word_list}", f"Make a numbered list of {word_list}")
        return [(rng.choice(asked), "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1)))]
    word = words[0] if kind == "first" else words[-1]
    asked = (f"Which word is {kind}: {word_list}?", f"Give the {kind} word of {word_list}.")
    return [(rng.choice(asked), f"The {kind} word is {word}.")]


def _table(rng: random.Random) -> Exercise:
    kind, plural, things, columns = TABLES[rng.random() >= 0.5]
    names = rng.sample(list(things), _few(rng, 2, len(things)))
    asked = f"Make a table of the {columns[0]} and the {columns[1]} of these {plural}: {', '.join(names)}"
    lines = [f"| {kind} | {columns[0]} | {columns[1]} |", "|---|---|---|"]
    lines += [f"| {name} | {things[name][0]} | {things[name][1]} |" for name in names]
    return [(asked, "\n".join(lines))]


def _shop(rng: random.Random) -> Exercise:
    goods = rng.sample(GOODS, rng.randint(2, 4))
    prices = {name: rng.randint(2, 9) for name in goods}
    first, *rest = rng.sample(goods, rng.randint(1, len(goods)))
    offer = ", ".join(f"{name} for {price} coins" for name, price in prices.items())
    turns = [(f"A shop sells {offer}. What does the {first} cost?", f"The {first} costs {prices[first]} coins.")]
    return turns + [(f"And the {name}?", f"The {name} costs {prices[name]} coins.") for name in rest]


TASKS: tuple[Callable[[random.Random], Exercise], ...] = (
    partial(_fact, ANIMALS, ANIMAL_FACTS), partial(_fact, COUNTRIES, COUNTRY_FACTS), _sum, _day, _count, _spell, _list, _table, _shop
)  # fmt: skip
WEIGHTS = (3, 3, 4, 3, 2, 2, 4, 1, 3)


def preferences(split: Split, seed: int = 0, count: int | None = None) -> list[dict[str, object]]:
    """Make rows {"prompt", "chosen", "rejected"} of lists of messages, 4,000 for train; otherwise like `conversations`."""
    rng, rows = random.Random(f"relevance-{split}-{seed}"), list[dict[str, object]]()
    for _ in range(PAIR_COUNTS[split] if count is None else count):
        *prompt, answer = conversation(split, rng)
        rejected = {"role": "assistant", "content": _take_other_answer(split, answer["content"], rng)}
        rows.append({"prompt": prompt, "chosen": [answer], "rejected": [rejected]})
    return rows


def labelled(split: Split, seed: int = 0, count: int | None = None) -> list[dict[str, object]]:
    """Make rows {"prompt", "completion", "label"}; half of the answers belong to another question. Otherwise like `preferences`."""
    rng, rows = random.Random(f"labels-{split}-{seed}"), list[dict[str, object]]()
    for _ in range(PAIR_COUNTS[split] if count is None else count):
        *prompt, answer = conversation(split, rng)
        right = rng.random() < 0.5
        content = answer["content"] if right else _take_other_answer(split, answer["content"], rng)
        rows.append({"prompt": prompt, "completion": [{"role": "assistant", "content": content}], "label": right})
    return rows


def _take_other_answer(split: Split, answer: str, rng: random.Random) -> str:
    """Return the last answer of another conversation; it differs from `answer`."""
    while (other := conversation(split, rng)[-1]["content"]) == answer:
        pass
    return other
