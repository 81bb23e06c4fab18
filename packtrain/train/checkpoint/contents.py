"""Contents of a checkpoint by weight, for any strategy and any number of processes.

A strategy's reader is in its folder. Files are mapped into memory, so that a process holds little more than the tensors that it asks for.
DeepSpeed's universal checkpoints offer the same for Adam only, as a second copy on disk.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class CheckpointContents(Protocol):
    """Reader of a checkpoint, by the names of `named_parameters()`. All tensors are whole and on the CPU."""

    @property
    def order(self) -> list[str] | None:
        """The weight names in the order of the optimizer's numbers. None: its states go by name."""
        ...

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight or a buffer, in its own format or in float32."""
        ...

    def states(self, name: str) -> dict[str, Any]:
        """Return the optimizer's states of a weight; {} if it never had a gradient.

        They are tensors of the weight's shape or plain values (for AdamW `exp_avg`, `exp_avg_sq`, `step`), and include MASTER.
        """
        ...
