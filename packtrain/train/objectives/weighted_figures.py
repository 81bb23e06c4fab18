"""The figures that TRL logs of a micro-batch, as exact means over the examples or tokens of all micro-batches and processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from accelerate import Accelerator

from packtrain.monitor.heartbeat import waiting

_NOT_FIGURES = ("num_tokens",)  # counted by packtrain, exactly even after a resume


class WeightedFigures:
    """Sums of figures, each weighted by the number of units that it is a mean over; `units` has the unit of each figure."""

    def __init__(self, units: Mapping[str, Any], *, derived: tuple[str, ...] = ()) -> None:
        """`derived` figures follow from others, and are passed over."""
        self.units, self._passed_over = units, (*_NOT_FIGURES, *derived)
        self._sums = torch.zeros(len(units), 2, dtype=torch.float64)

    def take(self, noted: dict[str, list[float]], over: Mapping[Any, int]) -> None:
        """Moves what TRL has `noted` of a micro-batch into the sums; `over` is how many of each unit there are in it."""
        for index, (name, unit) in enumerate(self.units.items()):
            for value in noted.pop(name, ()):
                self._sums[index] += torch.tensor([value * over[unit], over[unit]], dtype=torch.float64)
        for name in self._passed_over:
            noted.pop(name, None)
        if noted:
            raise NotImplementedError(f"figures of TRL that packtrain does not know: {sorted(noted)}")

    def values(self, accelerator: Accelerator) -> dict[str, float]:
        """Each figure of which there was anything on any process; the sums begin anew."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        with waiting("the figures of all ranks"):
            sums = cast(torch.Tensor, accelerator.reduce(sums.to(accelerator.device), reduction="sum")).tolist()
        return {name: total / weight for name, (total, weight) in zip(self.units, sums, strict=True) if weight}
