"""Batch arithmetic: the division of one optimizer step among processes and micro-batches. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from packtrain.config.objective import Objective
from packtrain.config.rules import nearest_multiples
from packtrain.config.schema import Batch, Trainer
from packtrain.errors import UserError
from packtrain.wording import counted


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One optimizer step over all devices, and the work of each device.

    `unit` names the examples: documents or pairs. `rows_per_step` counts rows of `tokens_per_device` over all devices, and
    `micro_batches_per_device` is the accumulation. Both are None if they depend on the lengths of the step's examples. `steps` of the run
    is None if it depends on the data.
    """

    mode: str
    processes: int
    examples_per_step: int | None
    tokens_per_step: int | None
    examples_per_device: int | None
    tokens_per_device: int | None
    rows_per_step: int | None
    micro_batches_per_device: int | None
    unit: str = "documents"
    steps: int | None = None
    sequence_parallel: int | str = 1

    def sentence(self) -> str:
        """Describe the global step, the share of each process, and its micro-batches."""
        number, processes = self.rows_per_step or self.examples_per_step or 0, self.processes
        unit = "rows" if self.rows_per_step else self.unit
        step = counted(number, unit)
        if self.rows_per_step:
            step = f"{self.tokens_per_step} tokens = {step}"
        share = counted(number // processes if number % processes == 0 else round(number / processes, 2), unit)
        where = "on 1 process" if processes == 1 else f"about {share} on each of {processes} processes, in"
        times = self.micro_batches_per_device
        micro = "as many micro-batches as it takes," if times is None else counted(times, "micro-batches")
        limits = [counted(self.examples_per_device, self.unit)] if self.examples_per_device else []
        limits += [f"{self.tokens_per_device} tokens"] if self.tokens_per_device else []
        split = ""
        if processes > 1 and self.sequence_parallel != 1:
            over = "as few" if self.sequence_parallel == "auto" else str(self.sequence_parallel)
            split = f"; {self.unit} above that are split over {over} neighbouring processes"
            split += " as the longest one needs" if self.sequence_parallel == "auto" else ""
        return f"a step is {step}: {where} {micro} of at most {' and '.join(limits)}{split}"

    def to_json(self) -> dict[str, Any]:
        """Return the figures, the sentence as `summary`, and the run's most `examples` and `tokens`.

        Examples count repeats, and an epoch's last step may not be full. Tokens assume full rows; real rows are almost full."""
        each = {"examples": self.examples_per_step, "tokens": self.tokens_per_step}
        whole = {name: self.steps * number if self.steps and number else None for name, number in each.items()}
        return {**asdict(self), **whole, "summary": self.sentence()}


def plan_batch(
    batch: Batch, mode: str, objective: Objective, trainer: Trainer, processes: int, sequence_parallel: int | str = 1
) -> BatchPlan:
    """Return the batch arithmetic of a run in packing.mode `mode` on `processes` devices.

    Raises UserError if rows of batch.tokens_per_step do not divide evenly among processes, if processes do not divide into groups of
    strategy.sequence_parallel, or if a step would be split although the loss needs all its pairs together.
    """
    if sequence_parallel != "auto" and processes % int(sequence_parallel):
        what = f"{counted(processes, 'processes')} cannot make groups of {sequence_parallel}"
        fix = f"Set it to auto or a divisor of {processes}, or start another number of processes."
        raise UserError(what, where="strategy.sequence_parallel", fix=fix, code="uneven-groups")
    examples, tokens = batch.limits(mode)
    rows = micro_batches = None
    if batch.tokens_per_step is not None and tokens is not None:
        rows = batch.tokens_per_step // tokens
        if rows % processes:
            what = f"{rows} rows of {tokens} tokens do not divide over {processes} processes"
            fix = f"Nearest that do: {nearest_multiples(batch.tokens_per_step, tokens * processes)}."
            raise UserError(what, where="batch.tokens_per_step", fix=fix, code="rows-not-divisible")
        micro_batches = rows // processes if mode == "packed" else None
    elif batch.examples_per_step is not None and examples is not None and tokens is None:
        micro_batches = math.ceil(math.ceil(batch.examples_per_step / examples) / processes)
    if (sorting := objective.sorting_losses) and (processes > 1 or (micro_batches or 1) > 1):
        where, fix = f"{processes} processes", "Use one process (topology=single)"
        if processes == 1:  # training itself checks micro-batches by tokens
            where, fix = f"{micro_batches} micro-batches", f"Set batch.examples_per_device={batch.examples_per_step}"
        what = f"{' and '.join(sorting)} sorts all pairs of a step, which here are spread over {where}"
        raise UserError(what, where="objective.loss", fix=f"{fix}, or choose another loss.", code="sorted-pairs-split")
    return BatchPlan(
        mode=mode,
        processes=processes,
        examples_per_step=batch.examples_per_step,
        tokens_per_step=batch.tokens_per_step,
        examples_per_device=examples,
        tokens_per_device=tokens,
        rows_per_step=rows,
        micro_batches_per_device=micro_batches,
        unit=objective.spec.examples,
        steps=trainer.max_steps,
        sequence_parallel=sequence_parallel,
    )
