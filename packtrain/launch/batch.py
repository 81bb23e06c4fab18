"""The arithmetic of a batch: how one optimizer step of the whole run falls on processes and micro-batches. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from packtrain.config.limits import micro_batch_limits
from packtrain.config.rules import nearest_multiples
from packtrain.config.schema import RunConfig
from packtrain.errors import UserError


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One optimizer step: examples (`unit`: documents or pairs) or tokens over all devices, and what each device does.

    `rows_per_step` (rows of `tokens_per_device` over all devices) and `micro_batches_per_device` (the accumulation) are
    None where they depend on the lengths of the step's examples.
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

    def sentence(self) -> str:
        """The arithmetic in words."""
        step = f"{self.examples_per_step} {self.unit}" if self.examples_per_step else f"{self.tokens_per_step} tokens"
        limits = [f"{self.examples_per_device} {self.unit}"] if self.examples_per_device else []
        limits += [f"{self.tokens_per_device} tokens"] if self.tokens_per_device else []
        rows = f" = {self.rows_per_step} rows" if self.rows_per_step else ""
        times = self.micro_batches_per_device
        number = f"{times} micro-batches" if times else f"as many micro-batches as the step's {self.unit} need,"
        where = "1 process" if self.processes == 1 else f"each of {self.processes} processes"
        return f"a step is {step}{rows}: on {where} {number} of at most {' and '.join(limits)}"

    def to_json(self) -> dict[str, Any]:
        """The figures, and the sentence as `summary`."""
        return {**asdict(self), "summary": self.sentence()}


def plan_batch(config: RunConfig, processes: int) -> BatchPlan:
    """The batch arithmetic of `config` on `processes` devices.

    Raises UserError where the rows of batch.tokens_per_step cannot be shared out evenly.
    """
    batch, mode = config.batch, config.packing.mode
    examples, tokens = micro_batch_limits(config)
    rows = micro_batches = None
    if batch.tokens_per_step is not None and tokens is not None:
        rows = batch.tokens_per_step // tokens
        if rows % processes:
            raise UserError(
                f"{rows} rows of {tokens} tokens do not divide over {processes} processes",
                where="batch.tokens_per_step",
                fix=f"Nearest that do: {nearest_multiples(batch.tokens_per_step, tokens * processes)}.",
            )
        micro_batches = rows // processes if mode == "packed" else None
    elif batch.examples_per_step is not None and examples is not None and tokens is None:
        micro_batches = math.ceil(math.ceil(batch.examples_per_step / examples) / processes)
    return BatchPlan(
        mode=mode,
        processes=processes,
        examples_per_step=batch.examples_per_step,
        tokens_per_step=batch.tokens_per_step,
        examples_per_device=examples,
        tokens_per_device=tokens,
        rows_per_step=rows,
        micro_batches_per_device=micro_batches,
        unit="documents" if config.objective.kind == "sft" else "pairs",
    )
