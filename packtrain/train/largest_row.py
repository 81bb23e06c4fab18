"""Run the largest micro-batch before step 1, to find a lack of memory early.

It changes nothing: gradients are dropped, buffers and random states restored, and the optimizer does not step, but memory for its states
is allocated meanwhile. `memory_error` makes the message for out of memory, here or later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from heapq import nlargest

import numpy as np
import torch

from packtrain.errors import UserError
from packtrain.model.precision import weights_cast_once
from packtrain.model.spread import Ranks
from packtrain.packing.balance import parts_of_rank
from packtrain.plan.memory import Memory, optimizer_bytes
from packtrain.train.engine import Engine
from packtrain.train.library_errors import LESS_MEMORY, out_of_memory, shortly
from packtrain.train.loader import Steps, WorkRecord
from packtrain.train.objectives.loss import Loss
from packtrain.train.optim.seen_updates import local
from packtrain.train.run_state import LoopSettings
from packtrain.wording import counted, size

_CANDIDATES = 16
"""Number of steps with the longest documents, and of steps with the most tokens: one of them has the fullest micro-batch."""
_NAMED = 3  # examples


def largest_row(steps: Steps, first_step: int) -> tuple[np.ndarray, bool]:
    """Return the micro-batch with the most token slots of any rank. Returned are its examples, int [n], and whether ranks split it.
    Searched are the steps from `first_step` to the end of the first pass."""
    schedule = steps.schedule
    end = min(len(steps), max(first_step + 1, schedule.steps_per_epoch(0)))
    lengths = {step: schedule.lengths[schedule.documents(step)] for step in range(min(first_step, end - 1), end)}

    def slots(row: tuple[np.ndarray, bool]) -> float:
        return schedule.slots(row[0]) / (schedule.ranks_per_row if row[1] else 1)

    longest = nlargest(_CANDIDATES, lengths, key=lambda step: lengths[step].max(initial=0))
    fullest = nlargest(_CANDIDATES, lengths, key=lambda step: lengths[step].sum())
    layouts = [schedule.layout(step, steps.world_size) for step in sorted({*longest, *fullest})]
    return max(
        (row for layout in layouts for rank in range(len(layout)) for row in parts_of_rank(layout, rank)), key=slots
    )


def try_largest(
    steps: Steps, first_step: int, engine: Engine, loss: Loss, work: WorkRecord, settings: LoopSettings
) -> None:
    """Run the largest micro-batch forward and backward, on every rank. It runs twice: the second time gradients exist.

    An engine that steps in the backward pass takes it for a step; `ask_before_update` must refuse the update.
    """
    numbers, is_split = largest_row(steps, first_step)
    batch, device = steps.collate_part(numbers, is_split), loss.device
    buffers = [(buffer, buffer.detach().clone()) for buffer in engine.model.buffers()]
    counts = torch.tensor(batch.counts, device=device)
    work.begin(first_step, 1, batch, numbers)
    engine.wrapped.train()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), loss.keeping_metrics(), engine.trying():
        held = torch.empty(_states_to_come(engine, settings), dtype=torch.uint8, device=device)
        for again in (False, True):
            cast_once = nullcontext() if settings.sharded else weights_cast_once()
            last = engine.spec.steps_in_backward or (engine.exchanges_once and again)
            with cast_once, engine.exchanging_gradients(last=last):
                engine.accelerator.backward(loss.compute(engine.wrapped, batch, counts))
        del held
    engine.wrapped.zero_grad()
    for buffer, before in buffers:
        buffer.copy_(before)
    work.end()


def _states_to_come(engine: Engine, settings: LoopSettings) -> int:
    """Return the bytes of this process's optimizer states that do not exist yet."""
    if engine.spec.steps_in_backward or engine.plain_optimizer.state:
        return 0
    trained = [weight for weight in engine.model.parameters() if weight.requires_grad]
    number, width = sum(local(weight).numel() for weight in trained), trained[0].itemsize
    return optimizer_bytes(settings.optim, engine.spec, number, width)


def memory_error(
    error: Exception,
    work: WorkRecord,
    steps: Steps,
    ranks: Ranks,
    places: Callable[[list[int]], list[str]],
    planned: Callable[[int | None], Memory | str],
    *,
    by_tokens: bool,
) -> UserError | None:
    """Return the message for `error`; None if memory sufficed or no micro-batch ran.

    `places` returns FILE:LINE of examples, `planned` the estimate for a device with that many bytes. `by_tokens`: batch.tokens_per_device
    limits micro-batches. The message suggests half of the micro-batch's size, which trains the same, or data.max_length if a single example
    fills it.
    """
    if (batch := work.batch) is None or not out_of_memory(error):
        return None
    schedule, total, used = steps.schedule, None, ""
    if (tried := work.tried) is not None:
        numbers, when = tried.tolist(), "before step 1, where the largest micro-batch of the first pass is tried"
    else:
        own, at = steps.at(work.step)
        numbers = own.schedule.micro_batches(at, steps.rank, steps.world_size)[work.micro - 1][0].tolist()
        when = f"in step {work.step + 1} (micro-batch {work.micro})"
    names = ", ".join(places(numbers[:_NAMED])) + (f" and {len(numbers) - _NAMED} more" if numbers[_NAMED:] else "")
    if ranks.device.type == "cuda":
        total = torch.cuda.get_device_properties(ranks.device).total_memory
        peak = torch.cuda.max_memory_allocated(ranks.device)
        used = f". {size(work.held)} were in use before it, {size(peak)} at the peak, of {size(total)}"
    if not isinstance(expected := planned(total), str):
        used += f". Planned were {expected.sentence().partition(': ')[0]}"
    key, now, least = "batch.examples_per_device", len(numbers), 1
    if by_tokens:
        longest = math.ceil(int(schedule.lengths.max()) / schedule.ranks_per_row)
        key, now, least = "batch.tokens_per_device", schedule.slots(np.array(numbers)) // batch.parts, longest
    half = max(now // 2, least)
    fix = f"set {key}={half}, or {LESS_MEMORY}"
    if half >= now:
        key, fix = "data.max_length", f"set it lower, which cuts documents, or {LESS_MEMORY}"
    row = f"{counted(len(numbers), 'documents')} in {batch.slots:,} token slots ({names})"
    what = f"out of memory on {ranks.device} {when}: {row}{used}. {shortly(error)}"
    return UserError(what, where=key, fix=fix, code="out-of-memory")
