"""Answers with labels in memory: seven of random tokens, a tiny model, and packtrain's trainer on them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import tiny_dpo
from tiny_dpo import OTHER
from trl import KTOConfig

from packtrain.config.schema import Batch, Packing
from packtrain.data.dataset import Document
from packtrain.objectives.kto.run import KTOLoss, UnpairedSteps
from packtrain.packing.collate import RowLayout
from packtrain.packing.schedule import make_schedule
from packtrain.train.loop import StepTrainer

LAYOUTS: tuple[RowLayout, ...] = ("padding", "flat")
SHAPES = [(10, 5), (1, 4), (33, 2), (2, 7), (5, 20), (18, 6), (1, 1)]
LABELS = [True, False, False, True, True, False, True]


class Answers:
    """As an UnpairedDataset, of answers in memory: 7, of odd lengths."""

    report = SimpleNamespace(sources=("memory",))

    def __init__(self, labels: list[bool]) -> None:
        rng = np.random.default_rng(1)
        ids = [rng.integers(3, 97, sum(shape)).astype(np.int32) for shape in SHAPES]
        self.documents = [
            Document(one, np.arange(len(one)) >= shape[0]) for one, shape in zip(ids, SHAPES, strict=True)
        ]
        self.labels = np.array(labels)
        self.lengths = np.array([sum(shape) for shape in SHAPES], np.int32)
        self.trained = np.array([shape[1] for shape in SHAPES], np.int32)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Document:
        return self.documents[index]


ANSWERS = Answers(LABELS)


def rows() -> list[dict[str, Any]]:
    """The same as TRL's collator takes them, with the completions of mismatched pairs as TRL makes them of one batch."""
    ids = [document.input_ids.tolist() for document in ANSWERS.documents]
    made = [
        {"prompt_ids": one[:asked], "completion_ids": one[asked:], "label": label}
        for one, (asked, _), label in zip(ids, SHAPES, LABELS, strict=True)
    ]
    completions = [row["completion_ids"] for row in made]
    return [
        {**row, "KL_completion_ids": other}
        for row, other in zip(made, completions[-1:] + completions[:-1], strict=True)
    ]


def arguments(folder: Path, **given: Any) -> KTOConfig:
    """TRL's, `given` the objective's."""
    return tiny_dpo.arguments(folder, KTOConfig, per_device_train_batch_size=len(ANSWERS), **given)


def steps_of(
    layout: RowLayout,
    tokens: int | None = None,
    *,
    a_step: int = len(ANSWERS),
    rank: int = 0,
    world_size: int = 1,
    answers: Answers = ANSWERS,
    max_length: int | None = None,
) -> UnpairedSteps:
    """An epoch of all answers, so many a step (all of them), in rows of so many `tokens` (all in one)."""
    packing = Packing(mode="padding" if layout == "padding" else "padding_free" if tokens is None else "packed")
    batch = Batch(examples_per_step=a_step, examples_per_device=len(answers), tokens_per_device=tokens)
    schedule = make_schedule(answers.lengths, packing, batch)
    return UnpairedSteps(cast(Any, answers), schedule, layout, 0, rank, world_size, max_length=max_length)


def ours(
    folder: Path,
    layout: RowLayout,
    *,
    model: Any = None,
    reference: Any = OTHER,
    steps: UnpairedSteps | None = None,
    **given: Any,
) -> StepTrainer:
    """packtrain's trainer, ready for step 1; without a `model` on `policy`, without a `reference` against `another`."""
    objective = tiny_dpo.objective_of("kto", **given)
    return tiny_dpo.trainer_of(KTOLoss, folder, steps or steps_of(layout), objective, model=model, reference=reference)
