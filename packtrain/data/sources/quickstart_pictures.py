"""Built-in pictures of coloured shapes, with questions, for a first run with pictures.

A picture has 2 to 4 columns and 2 or 3 rows of places. A place is 28 pixels wide and high, and has at most one shape. A hash of the
shapes decides the split of a picture, so no picture of `eval` is in `train`.
"""

from __future__ import annotations

import io
import random
import zlib
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from packtrain.config.schema import Split
from packtrain.data.sources.quickstart import train_tokenizer
from packtrain.errors import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COUNTS = {"train": 4_000, "eval": 200}
PLACE = 28
"""Width of a place in pixels: a vision tower with patches of 14 pixels, merged 2 × 2, makes one token of it."""
COLOURS = {"red": (214, 48, 49), "green": (46, 160, 67), "blue": (40, 90, 220), "yellow": (240, 190, 20)}
GREY = (122, 116, 104)
"""Background: the mean colour that image processors subtract. So the pixels of an empty place are zero."""
SHAPES = ("circle", "square", "triangle")
KINDS = [(colour, shape) for colour in COLOURS for shape in SHAPES]
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- set text = namespace(value=message['content']) %}"
    "{%- if message['content'] is not string %}{%- set text.value = '' %}{%- for part in message['content'] %}"
    "{%- set text.value = text.value + (part['text'] if part['type'] == 'text' else "
    "'<|vision_start|><|image_pad|><|vision_end|>') %}"
    "{%- endfor %}{%- endif %}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- text.value + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- text.value + '<|im_end|>' }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML with pictures as parts of messages."""

Shape = tuple[str, str]
"""Colour and shape."""
Scene = list[list[Shape | None]]
"""Rows of places; None for an empty one."""
Turn = tuple[str, str]


def conversations(split: Split, seed: int = 0, count: int | None = None) -> list[Json]:
    """Make `count` rows of a picture with questions and answers, by default COUNTS.

    A row of train has two to four questions, a row of eval one. The first rows do not depend on `count`.
    """
    rng = random.Random(f"pictures-{split}-{seed}")
    return [_row(split, rng) for _ in range(COUNTS[split] if count is None else count)]


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on the questions and answers. Special tokens of pictures are Qwen's."""
    rng = random.Random("tokenizer")
    texts = [text for _ in range(500) for turn in _turns(_scene("train", rng), rng, 3) for text in turn]
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    return train_tokenizer(["user\n", "assistant\n", *texts], 400, marks, TEMPLATE)


def _row(split: Split, rng: random.Random) -> Json:
    scene = _scene(split, rng)
    picture = {"type": "image", "bytes": draw(scene, rng)}
    messages: list[Json] = []
    for question, answer in _turns(scene, rng, 1 if split == "eval" else rng.randint(2, 4)):
        asked = [*([] if messages else [picture]), {"type": "text", "text": question}]
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def held_out(scene: Scene) -> bool:
    """Return whether a picture of these shapes belongs to the eval split."""
    return zlib.crc32(repr(scene).encode()) % 8 == 0


def _scene(split: Split, rng: random.Random) -> Scene:
    """Return random places of this split, with one shape or more. Many have few: from these the names are learnt."""
    while True:
        columns, rows, share = rng.randint(2, 4), rng.randint(2, 3), rng.choice((0.1, 0.25, 0.4, 0.6))
        scene = [[rng.choice(KINDS) if rng.random() < share else None for _ in range(columns)] for _ in range(rows)]
        if _shapes(scene) and held_out(scene) == (split == "eval"):
            return scene


def draw(scene: Scene, rng: random.Random) -> bytes:
    """Return a picture of the scene as png. Sizes and positions of the shapes in their places vary."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (PLACE * len(scene[0]), PLACE * len(scene)), GREY)
    pencil = ImageDraw.Draw(picture)
    for row, places in enumerate(scene):
        for column, found in enumerate(places):
            radius, shifted = rng.randint(8, 11), (rng.randint(-2, 2), rng.randint(-2, 2))
            if found is None:
                continue
            x, y = (PLACE * at + PLACE // 2 + by for at, by in zip((column, row), shifted, strict=True))
            box, fill = (x - radius, y - radius, x + radius, y + radius), COLOURS[found[0]]
            if found[1] == "circle":
                pencil.ellipse(box, fill)
            elif found[1] == "square":
                pencil.rectangle(box, fill)
            else:
                pencil.polygon([(x - radius, y + radius), (x + radius, y + radius), (x, y - radius)], fill)
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def _shapes(scene: Scene) -> list[Shape]:
    return [found for places in scene for found in places if found]


def _turns(scene: Scene, rng: random.Random, wanted: int) -> list[Turn]:
    """Return different questions about the scene with their answers, which repeat the question's words."""
    turns: dict[str, str] = {}
    while len(turns) < wanted:
        turns.update(filter(None, [rng.choice(TASKS)(scene, rng)]))
    return [*turns.items()]


def _count(scene: Scene, rng: random.Random) -> Turn:
    colour, shape = rng.choice([*COLOURS, None]), rng.choice([*SHAPES, None])
    if rng.random() < 0.7:  # mostly what is there
        colour, shape = (kept and seen for kept, seen in zip((colour, shape), rng.choice(_shapes(scene)), strict=True))
    count = sum(colour in (None, found[0]) and shape in (None, found[1]) for found in _shapes(scene))
    named = " ".join(filter(None, [colour, f"{shape or 'shape'}s"]))
    return f"How many {named}?", f"{named.capitalize()}: {count}."


def _colour(scene: Scene, rng: random.Random) -> Turn | None:
    shape = rng.choice(SHAPES)
    colours = [found[0] for found in _shapes(scene) if found[1] == shape]
    return (f"What colour is the {shape}?", f"The {shape} is {colours[0]}.") if len(colours) == 1 else None


def _beside(scene: Scene, rng: random.Random) -> Turn | None:
    """Ask for the neighbour of a shape that is there once."""
    (right, down), side = rng.choice(
        [((-1, 0), "left of"), ((1, 0), "right of"), ((0, -1), "above"), ((0, 1), "below")]
    )
    pairs = [
        (found, scene[row + down][column + right])
        for row, places in enumerate(scene)
        for column, found in enumerate(places)
        if found and 0 <= row + down < len(scene) and 0 <= column + right < len(places)
    ]
    pairs = [(found, other) for found, other in pairs if _shapes(scene).count(found) == 1]
    if not pairs:
        return None
    told = [pair for pair in pairs if pair[1]]
    found, other = rng.choice(told if told and rng.random() < 0.7 else pairs)
    where = f"{side} the {' '.join(found)}"
    return f"What is {where}?", f"{where.capitalize()}: {' '.join(other) if other else 'nothing'}."


def _list(scene: Scene, rng: random.Random) -> Turn:
    counts = Counter(_shapes(scene))
    listed = (f"{counts[kind]} {' '.join(kind)}{'s' if counts[kind] > 1 else ''}" for kind in KINDS if counts[kind])
    return "What is in the picture?", f"{', '.join(listed)}."


TASKS: tuple[Callable[[Scene, random.Random], Turn | None], ...] = (_count, _colour, _beside, _list)
