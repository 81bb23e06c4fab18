"""What every stage of a run looks at."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from packtrain.config.schema import RunConfig
from packtrain.run_folder import RunFolder
from packtrain.train.console import Log
from packtrain.train.loop import StopRequest
from packtrain.train.sync.store import Peers


@dataclass(frozen=True, slots=True)
class Process:
    """Where this process stands in the run; `peers` are those that it runs with, None where it is alone."""

    rank: int
    world_size: int
    device: torch.device
    peers: Peers | None = None

    @property
    def main(self) -> bool:
        """Whether this is the process that talks and writes."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What every stage of a run looks at."""

    config: RunConfig
    process: Process
    folder: RunFolder
    log: Log
    stop: StopRequest
