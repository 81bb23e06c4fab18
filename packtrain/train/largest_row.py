"""The largest micro-batch runs before step 1, so that a run that lacks memory ends in the first minute.

It changes nothing: its gradients are dropped, buffers and random states are restored, and the optimizer does not step. The memory of
the optimizer's states is allocated meanwhile. The message for out of memory, here or later, names the documents, compares use and
estimate, and says what to set (`memory_error`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from heapq import nlargest

import numpy as np
import torch

from packtrain.config.schema import Batch
from packtrain.errors import UserError
from packtrain.model.precision import weights_cast_once
from packtrain.model.spread import Ranks
from packtrain.plan.memory import Memory, optimizer_bytes
from packtrain.train.engine import Engine
from packtrain.train.library_errors import out_of_memory, shortly
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.objectives.loss import Loss
from packtrain.train.optim.lost_updates import local
from packtrain.train.patches import counting_no_step
from packtrain.train.settings import LoopSettings
from packtrain.wording import counted, size

_CANDIDATES = 16
"""Steps with the longest documents, and as many with the most tokens: the fullest micro-batch is one of theirs."""
_NAMED = 3  # examples
BEFORE = 0
"""The number of the step before step 1."""


@dataclass(frozen=True, slots=True)
class RowAtWork:
    """A micro-batch at work: number `micro` of `step`, its examples' numbers, and the batch; `held` bytes before it.

    `longest`: slots of the longest example of the data, which is never split.
    """

    step: int
    micro: int
    numbers: Sequence[int]
    batch: MicroBatch
    held: int
    longest: int


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What of the config limits a micro-batch: `mode` is packing.mode, `recomputes` trainer.gradient_checkpointing, `documents`
    those of an example."""

    batch: Batch
    mode: str
    recomputes: bool
    documents: int


def largest_row(steps: Steps, first_step: int) -> np.ndarray:
    """int [examples] of the micro-batch with the most token slots of any rank, from `first_step` to the end of the first pass."""
    schedule, padded = steps.schedule, steps.layout == "padding"
    end = min(len(steps), max(first_step + 1, schedule.steps_per_epoch(0)))
    lengths = {step: schedule.lengths[schedule.documents(step)] for step in range(min(first_step, end - 1), end)}

    def slots(numbers: np.ndarray) -> int:
        own = schedule.lengths[numbers]
        return len(own) * int(own.max(initial=0)) if padded else int(own.sum())

    longest = nlargest(_CANDIDATES, lengths, key=lambda step: lengths[step].max(initial=0))
    fullest = nlargest(_CANDIDATES, lengths, key=lambda step: lengths[step].sum())
    candidates = sorted({*longest, *fullest})
    return max((part for n in candidates for rank in schedule.layout(n, steps.world_size) for part in rank), key=slots)


class WorkRecord:
    """The micro-batch at work, for the message about memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._held = device, 0
        self._work: tuple[int, int, MicroBatch, np.ndarray | None] | None = None

    def begin(self, step: int, micro: int, batch: MicroBatch, tried: np.ndarray | None = None) -> None:
        """Notes the micro-batch that runs next; `tried` are the numbers of its examples, before step 1."""
        if micro == 1 and self._device.type == "cuda":
            self._held = torch.cuda.memory_allocated(self._device)
        self._work = step, micro, batch, tried

    def end(self) -> None:
        """Notes that none is at work."""
        self._work = None

    @property
    def is_trial(self) -> bool:
        """Whether a micro-batch is tried before step 1, and no step runs."""
        return self._work is not None and self._work[3] is not None

    def row(self, steps: Steps) -> RowAtWork | None:
        """The micro-batch at work, if there is one; `steps` are the run's."""
        if self._work is None:
            return None
        step, micro, batch, numbers = self._work
        number = BEFORE
        if numbers is None:
            numbers, number = steps.schedule.micro_batches(step, steps.rank, steps.world_size)[micro - 1], step + 1
        return RowAtWork(number, micro, numbers.tolist(), batch, self._held, int(steps.schedule.lengths.max()))


def try_largest(
    steps: Steps, first_step: int, engine: Engine, loss: Loss, work: WorkRecord, settings: LoopSettings
) -> None:
    """Runs the largest micro-batch forward and backward, on every rank; twice, as gradients are there from the second on.

    DeepSpeed's engine takes it for a step, whose update is to be refused (`ask_before_update`).
    """
    numbers = largest_row(steps, first_step)
    batch, device = steps.collate(numbers), loss.device
    buffers = [(buffer, buffer.detach().clone()) for buffer in engine.model.buffers()]
    counts = torch.tensor(batch.counts, device=device)
    work.begin(first_step, 1, batch, numbers)
    engine.wrapped.train()
    no_step = counting_no_step(engine.wrapped) if engine.deepspeed else nullcontext()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), loss.keeping_figures(), no_step:
        held = torch.empty(_states_to_come(engine, settings), dtype=torch.uint8, device=device)
        for _ in range(2):
            cast_once = nullcontext() if settings.sharded else weights_cast_once()
            with cast_once, engine.exchanging_gradients(last=engine.deepspeed):
                engine.accelerator.backward(loss.compute(engine.wrapped, batch, counts))
        del held
    engine.wrapped.zero_grad()
    for buffer, before in buffers:
        buffer.copy_(before)
    work.end()


def _states_to_come(engine: Engine, settings: LoopSettings) -> int:
    """Bytes of the optimizer's states, of this process's share, while they are not there."""
    if engine.deepspeed or engine.plain_optimizer.state:
        return 0
    trained = [weight for weight in engine.model.parameters() if weight.requires_grad]
    number, width = sum(local(weight).numel() for weight in trained), trained[0].itemsize
    return optimizer_bytes(settings.optim, settings.strategy, number, width)


def memory_error(
    error: Exception,
    place: RowAtWork | None,
    limits: RowLimits,
    ranks: Ranks,
    places: Callable[[list[int]], list[str]],
    planned: Callable[[int | None], Memory | str],
) -> UserError | None:
    """The message to the user for an `error` at `place`; None if memory is not what was lacking, or no micro-batch was at work.

    `places` gives FILE:LINE of examples, `planned` the estimate for a device with so many bytes.
    """
    if place is None or not out_of_memory(error):
        return None
    numbers, on_gpu = list(place.numbers), ranks.device.type == "cuda"
    names = ", ".join(places(numbers[:_NAMED])) + (f" and {len(numbers) - _NAMED} more" if numbers[_NAMED:] else "")
    when = f"in step {place.step} (micro-batch {place.micro})"
    if place.step == BEFORE:
        when = "before step 1, where the largest micro-batch of the first pass is tried"
    row = f"{counted(len(numbers), 'documents')} in {place.batch.slots:,} token slots ({names})"
    total = torch.cuda.get_device_properties(ranks.device).total_memory if on_gpu else None
    used = ""
    if total is not None:
        peak = torch.cuda.max_memory_allocated(ranks.device)
        used = f". {size(place.held)} were in use before it, {size(peak)} at the peak, of {size(total)}"
    if not isinstance(expected := planned(total), str):
        used += f". Planned were {expected.sentence().partition(': ')[0]}"
    key, fix = _what_to_set(limits, place, ranks.strategy)
    return UserError(f"out of memory on {ranks.device} {when}: {row}{used}. {shortly(error)}", where=key, fix=fix)


def _what_to_set(limits: RowLimits, place: RowAtWork, strategy: str) -> tuple[str, str]:
    """The key that limits micro-batches, and what to set: half of what it is, or what trains the same in less memory.

    Where an example fills the micro-batch alone, only data.max_length is left, which changes the training.
    """
    by_tokens = limits.mode == "packed" or limits.batch.tokens_per_device is not None
    key, now, least = "batch.examples_per_device", len(place.numbers), 1
    if by_tokens:
        key, now, least = "batch.tokens_per_device", place.batch.slots, place.longest
    fewer = max(now // 2, least)
    ways = [f"{key}={fewer}"] if fewer < now else []
    if not limits.recomputes:
        ways.append("trainer.gradient_checkpointing=true")
    if strategy in ("ddp", "zero1", "zero2"):
        ways.append("strategy=fsdp2 or zero3 on several devices")
    fix = f"set {', or '.join(ways)}: each trains the same" if ways else "take peft=lora, or devices with more memory"
    if fewer >= now:
        key = "data.max_length"
        fix += f"; or {key}={max(place.longest // (2 * limits.documents), 1)}, which cuts documents"
    return key, f"{fix}. packtrain plan shows what takes how much. Then start the same command again"
