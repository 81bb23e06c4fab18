"""Measured cost of attention: a document of l tokens takes `token_seconds · (l + attention_cost · l²)`.

The planner counts operations (packing/balance.py), but a device runs attention at another speed than matrix products.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from packtrain.data.dataset import Document
from packtrain.model.load import base_model
from packtrain.packing.collate import collate_flat, label_positions
from packtrain.proof.isolation import max_positions, vocabulary_size
from packtrain.train.loader import MicroBatch
from packtrain.train.loop import StepTrainer

_CUTS = (1, 4, 16)  # documents of equal length in a row
_ROUNDS = 3  # the first one warms up
_FEWEST = 256  # tokens; shorter rows show nothing


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Measured cost of attention, and the planned one."""

    token_seconds: float
    attention_cost: float
    planned: float


def measure_attention_cost(trainer: StepTrainer) -> AttentionCost | None:
    """Measure forward and backward passes of flat rows of 1, 4 and 16 documents. All ranks call it together.

    The rows are as long as the fullest micro-batch of the run. The gradients are dropped. None if rows are too short, if times do not fit
    the formula (a busy machine), and under DeepSpeed: its engine counts passes.
    """
    schedule, model, engine = trainer.steps.schedule, base_model(trainer.loss.model), trainer.engine
    layouts = [schedule.layout(step, trainer.steps.world_size) for step in range(trainer.state.step)]
    tokens = max(
        schedule.slots(part) for layout in layouts for parts in layout for part in parts
    )  # memory has sufficed for these
    tokens = min(tokens, schedule.limits.tokens, max_positions(model) or tokens)  # a row that ranks split is longer
    tokens = int(tokens) // _CUTS[-1] * _CUTS[-1]
    if tokens < _FEWEST or engine.spec.steps_in_backward or trainer.steps.layout == "padding":
        return None
    ids = np.random.default_rng(0).integers(0, vocabulary_size(model), tokens, dtype=np.int32)
    taken = np.full(len(_CUTS), np.inf)
    for warm in range(_ROUNDS):
        for number, cut in enumerate(_CUTS):
            documents = [Document(part, np.ones(len(part), bool)) for part in np.split(ids, cut)]
            inputs = collate_flat(documents)
            places = label_positions(inputs["shift_labels"])
            batch = MicroBatch({**inputs, "label_places": places}, len(places), tokens, tokens, cut)
            counts = torch.tensor(batch.counts, device=trainer.loss.device)
            _wait(trainer.loss.device)
            started = time.perf_counter()
            with trainer.loss.keeping_metrics(), engine.exchanging_gradients(last=False):
                engine.accelerator.backward(trainer.loss.compute(engine.wrapped, batch, counts))
            _wait(trainer.loss.device)
            if warm:
                taken[number] = min(taken[number], time.perf_counter() - started)
    engine.wrapped.zero_grad()
    squares = [tokens**2 / cut for cut in _CUTS]
    slope, rest = np.polyfit(squares, taken, 1)
    if rest <= 0:
        return None
    return AttentionCost(float(rest / tokens), max(float(slope * tokens / rest), 0.0), schedule.attention_cost)


def _wait(device: torch.device) -> None:
    """Wait until a GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
