"""How long collective operations may take, as a run goes on: a step has another time than a checkpoint.

torch gives each process group a limit of its own when it is made, those that DeepSpeed makes torch's default. It holds for what
begins from then on in this process, so each process changes its own where it comes into another phase, and nothing is sent.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


def limit_collectives(seconds: float) -> None:
    """Gives the operations of all process groups that this process is in, from the next one on, so many seconds."""
    if dist.is_available() and dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
