"""Documents with pictures of mixed sizes: padded batches beside packed rows.

    python benchmarks/pictures.py [--documents 32] [--repeat 3] [--towers frozen|trained] [--device cuda]

A Qwen2.5-VL of random weights (about 60 million, in float32 on one thread, or in bfloat16 on a GPU). Each document has one or two pictures of
56×56 to 448×448 pixels (4 to 256 tokens each) and 20 to 200 tokens of text. The same documents, forward and backward: padded in batches of 8 in
the order of the data, as packed rows of about as many slots, and each document alone. They take turns; the first round warms up.

Slots, and real tokens a second: the median, the least and the most. On a CPU the seconds are CPU time of the process. The loss shows that all do
the same work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from packtrain.attention.backends import attending_by
from packtrain.data.dataset import Document
from packtrain.data.pictures.encoded import Picture
from packtrain.model.forward import add_loss_sum
from packtrain.packing.bins import best_fit
from packtrain.packing.collate import ModelInputs, collate_flat, collate_padded, on_device
from packtrain.packing.pictures import Sight

VOCABULARY, BATCH, UNIT = 32_000, 8, 28
IMAGE = VOCABULARY - 1
TEXT: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "num_attention_heads": 8}
TEXT |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "tie_word_embeddings": True, "pad_token_id": 0}
TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}}
VISION = {"depth": 4, "hidden_size": 256, "num_heads": 4, "intermediate_size": 768, "out_hidden_size": 512}


def build() -> Any:
    """A model with random weights."""
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE)
    return Qwen2_5_VLForConditionalGeneration(config).float().train()


@dataclass(frozen=True)
class RandomPixels:
    """Draws the patches of a picture by its offset."""

    def read(self, pictures: Sequence[Picture]) -> list[dict[str, torch.Tensor]]:
        """Return the tensors of each picture alone, as Qwen's image processor does."""
        return [self._draw(picture) for picture in pictures]

    def _draw(self, picture: Picture) -> dict[str, torch.Tensor]:
        rows, columns = picture.height // (UNIT // 2), picture.width // (UNIT // 2)
        draw = torch.Generator().manual_seed(picture.offset)
        return {
            "pixel_values": torch.randn(rows * columns, 3 * 2 * 14 * 14, generator=draw),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }


def documents(count: int) -> list[Document]:
    """Documents with one or two pictures among text."""
    random, made = np.random.default_rng(0), list[Document]()
    for number in range(count):
        ids, pictures = random.integers(3, IMAGE, random.integers(20, 200)).astype(np.int32), list[Picture]()
        for at in range(int(random.integers(1, 3))):
            height, width = random.integers(2, 17, 2)
            start = len(ids) if at else 4
            ids = np.insert(ids, start, [IMAGE] * (height * width)).astype(np.int32)
            place = Picture("", 2 * number + at, 0, UNIT * height, UNIT * width, start, start + int(height * width))
            pictures.append(place)
        ids = np.append(ids, random.integers(3, IMAGE, 5)).astype(np.int32)
        made.append(Document(ids, ids != IMAGE, tuple(pictures)))
    return made


def batches_of(kind: str, given: Sequence[Document], sight: Sight) -> list[ModelInputs]:
    """The micro-batches of the documents."""
    groups = [list(given[at : at + BATCH]) for at in range(0, len(given), BATCH)]
    if kind == "padding":
        return [collate_padded(group, 0, sight) for group in groups]
    if kind == "packed":
        lengths = np.array([len(one.input_ids) for one in given])
        rows = best_fit(
            lengths, max(int(lengths.max()), int(lengths.sum()) // len(groups) + 1), np.random.default_rng(0)
        )
        return [collate_flat([given[number] for number in rows[row]], sight) for row in range(len(rows))]
    return [collate_flat([one], sight) for one in given]


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--towers", choices=("frozen", "trained"), default="frozen")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    on_gpu = asked.device == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    model = build().to(asked.device)
    model = model.bfloat16() if on_gpu else model
    for weight in model.model.visual.parameters():
        weight.requires_grad_(asked.towers == "trained")
    sight, given = Sight.of(model, RandomPixels()), documents(asked.documents)
    tokens = sum(len(one.input_ids) for one in given)
    add_loss_sum(model)
    clock: Callable[[], float] = time.perf_counter if on_gpu else time.process_time
    made = {kind: batches_of(kind, given, sight) for kind in ("padding", "packed", "alone")}
    speeds: dict[str, list[float]] = {kind: [] for kind in made}
    losses = dict.fromkeys(made, 0.0)
    for turn in range(asked.repeat + 1):
        for kind, batches in made.items():
            backend = attending_by(model, "flash" if on_gpu else "segmented")
            with nullcontext() if kind == "padding" else backend:
                began, losses[kind] = clock(), 0.0
                for batch in batches:
                    loss = model(**on_device(batch, model.device), loss_sum=True)
                    loss.backward()
                    losses[kind] += loss.item()
                model.zero_grad()
            if turn:
                speeds[kind].append(tokens / (clock() - began))
    print(
        f"{len(given)} documents, {tokens:,} tokens, {sum(len(one.pictures) for one in given)} pictures, towers {asked.towers}"
    )
    for kind, batches in made.items():
        slots, own = sum(batch["input_ids"].numel() for batch in batches), sorted(speeds[kind])
        speed = f"{statistics.median(own):,.0f} tokens/s ({own[0]:,.0f} to {own[-1]:,.0f})"
        print(
            f"{kind:8} {slots:7,} slots ({1 - tokens / slots:5.1%} padding)  {speed}  loss {losses[kind] / tokens:.6f}"
        )


if __name__ == "__main__":
    main()
