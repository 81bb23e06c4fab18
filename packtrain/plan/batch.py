"""The arithmetic of a batch: how one optimizer step of the whole run falls on processes and micro-batches. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from packtrain.config.rules.combinations import nearest_multiples
from packtrain.config.schema import Batch, Objective, Trainer
from packtrain.errors import UserError
from packtrain.wording import counted

_WORTH_SAYING = 0.1  # share of the processes' time that is lost


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One optimizer step: examples (`unit`: documents or pairs) or tokens over all devices, and what each device does.

    `rows_per_step` (rows of `tokens_per_device` over all devices) and `micro_batches_per_device` (the accumulation) are
    None where they depend on the lengths of the step's examples. `idle` is the share of the processes' time that is lost
    because a step's examples do not divide over them, if all were of one length. `steps` of the run, with the `examples` or
    `tokens` in them at the most, are None where the number of steps hangs on the data.
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
    idle: float = 0.0
    steps: int | None = None

    @property
    def examples(self) -> int | None:
        """Examples that the run trains on, each as often as it is seen; fewer where an epoch's last step is not full."""
        return self.steps * self.examples_per_step if self.steps and self.examples_per_step else None

    @property
    def tokens(self) -> int | None:
        """Tokens that the run trains on at the most: rows are almost full."""
        return self.steps * self.tokens_per_step if self.steps and self.tokens_per_step else None

    def sentence(self) -> str:
        """The arithmetic in words: the global step, what falls on each process, and its micro-batches."""
        examples = self.examples_per_step
        step = counted(examples, self.unit) if examples else f"{self.tokens_per_step} tokens"
        step += f" = {counted(self.rows_per_step, 'rows')}" if self.rows_per_step else ""
        limits = [counted(self.examples_per_device, self.unit)] if self.examples_per_device else []
        limits += [f"{self.tokens_per_device} tokens"] if self.tokens_per_device else []
        times = self.micro_batches_per_device
        number = f"as many micro-batches as the step's {self.unit} need," if times is None else f"{times} micro-batches"
        number = "1 micro-batch" if times == 1 else number
        where = "on 1 process" if self.processes == 1 else f"{self._share()} on each of {self.processes} processes, in"
        return f"a step is {step}: {where} {number} of at most {' and '.join(limits)}{self._length()}{self._remark()}"

    def to_json(self) -> dict[str, Any]:
        """The figures, and the sentence as `summary`."""
        return {**asdict(self), "examples": self.examples, "tokens": self.tokens, "summary": self.sentence()}

    def _share(self) -> str:
        """What falls on a process; of documents about as much work, not as many, on each."""
        if self.examples_per_step is None:
            rows = (self.rows_per_step or 0) // self.processes
            return counted(rows, "rows")
        each = self.examples_per_step / self.processes
        if each == 1:
            return f"about 1 {self.unit.removesuffix('s')}"
        return f"about {each:.3g} {self.unit}" if each > 1 else f"at most 1 of the {self.unit}"

    def _length(self) -> str:
        if self.steps is None:
            return ""
        of = counted(self.examples, self.unit) if self.examples else f"{self.tokens:,} tokens"
        return f"; the run is {counted(self.steps, 'steps')}, {of} at most"

    def _remark(self) -> str:
        if self.idle < _WORTH_SAYING or self.examples_per_step is None:
            return ""
        better = nearest_multiples(self.examples_per_step, self.processes)
        return f". Processes wait {self.idle:.0%} of their time: batch.examples_per_step={better} would divide"


def plan_batch(batch: Batch, mode: str, objective: Objective, trainer: Trainer, processes: int) -> BatchPlan:
    """The batch arithmetic of a run in packing.mode `mode` on `processes` devices.

    Raises UserError where the rows of batch.tokens_per_step cannot be shared out evenly, or a step would be split that a
    loss has to see as a whole.
    """
    examples, tokens = batch.limits(mode)
    rows = micro_batches = None
    if batch.tokens_per_step is not None and tokens is not None:
        rows = batch.tokens_per_step // tokens
        if rows % processes:
            what = f"{rows} rows of {tokens} tokens do not divide over {processes} processes"
            fix = f"Nearest that do: {nearest_multiples(batch.tokens_per_step, tokens * processes)}."
            raise UserError(what, where="batch.tokens_per_step", fix=fix)
        micro_batches = rows // processes if mode == "packed" else None
    elif batch.examples_per_step is not None and examples is not None and tokens is None:
        micro_batches = math.ceil(math.ceil(batch.examples_per_step / examples) / processes)
    _check_whole(objective, batch, processes, micro_batches)
    return BatchPlan(
        mode=mode,
        processes=processes,
        examples_per_step=batch.examples_per_step,
        tokens_per_step=batch.tokens_per_step,
        examples_per_device=examples,
        tokens_per_device=tokens,
        rows_per_step=rows,
        micro_batches_per_device=micro_batches,
        unit="documents" if objective.kind == "sft" else "pairs",
        idle=_idle(batch.examples_per_step, processes),
        steps=trainer.max_steps,
    )


def _check_whole(objective: Objective, batch: Batch, processes: int, micro_batches: int | None) -> None:
    """Raises UserError where a step is certain to be split, and a loss sorts its pairs; micro-batches by tokens are for later."""
    sorting = objective.sorting_losses
    if not sorting or (processes == 1 and (micro_batches or 1) == 1):
        return
    where, fix = f"{processes} processes", "Use one process (topology=single)"
    if processes == 1:
        where, fix = f"{micro_batches} micro-batches", f"Set batch.examples_per_device={batch.examples_per_step}"
    what = f"{' and '.join(sorting)} sorts all pairs of a step, which here are spread over {where}"
    raise UserError(what, where="objective.loss_type", fix=f"{fix}, or choose another loss.")


def _idle(examples: int | None, processes: int) -> float:
    """The share of all processes' time in which they wait for those with one example more."""
    if examples is None:
        return 0.0
    return 1 - examples / (processes * math.ceil(examples / processes))
