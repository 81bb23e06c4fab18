"""The matrix of runs on GPUs: objective × attention × precision × strategy × devices."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import product
from typing import Any, NamedTuple

OBJECTIVES = ("sft", "dpo", "kto", "reward")
ATTENTION = ("flash", "segmented", "padding")
PRECISION = ("float32 weights", "bfloat16 weights")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
DEVICES = (1, 2)


class Reference(NamedTuple):
    """What the CPU's run that a cell is compared with depends on."""

    objective: str
    precision: str
    packing: str


@dataclass(frozen=True)
class Cell:
    objective: str
    attention: str
    precision: str
    strategy: str
    devices: int

    def __str__(self) -> str:
        return "-".join(str(value).replace(" weights", "") for value in astuple(self))

    @property
    def packing(self) -> str:
        return "padding" if self.attention == "padding" else "packed"

    @property
    def reference(self) -> Reference:
        return Reference(self.objective, self.precision, self.packing)

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        """The keys of the config that make the cell; flash is what `auto` is to choose, so it is not asked for."""
        groups = groups_of(self.reference)
        backend = "segmented" if self.attention == "segmented" else "auto"
        return {**groups, "strategy": {"name": self.strategy}, "model": {**groups["model"], "attention": backend}}


def groups_of(reference: Reference) -> dict[str, dict[str, Any]]:
    """Weights in float32 are computed with in bfloat16 everywhere, so that a CPU rounds as a GPU does."""
    dtype = reference.precision.removesuffix(" weights")
    packing = {"mode": reference.packing}
    return {"model": {"dtype": dtype}, "trainer": {"mixed_precision": "bf16"}, "packing": packing}


CELLS = [Cell(*values) for values in product(OBJECTIVES, ATTENTION, PRECISION, STRATEGIES, DEVICES)]
