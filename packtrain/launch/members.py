"""What is left of launch/members.py until the roll call goes: see plan/agreement.py."""

from __future__ import annotations

import hashlib

from packtrain.config.schema import RunConfig
from packtrain.plan.agreement import (  # noqa: F401
    Member,
    clock_remarks,
    digest_of,
    names_of,
    shared_values,
    shared_versions,
    twice,
)
from packtrain.plan.agreement import unlike as differences  # noqa: F401
from packtrain.plan.agreement import unlike_counts as wrong_counts  # noqa: F401
from packtrain.wording import listed  # noqa: F401


def job_of(config: RunConfig) -> str:
    """A name of the run by which its launchers know each other; machines of another run are sent away."""
    return hashlib.blake2b(config.trainer.output_dir.encode(), digest_size=8).hexdigest()


def ranks_of(node: int, per_node: int) -> str:
    """Which ranks a machine has, in words."""
    first, last = node * per_node, (node + 1) * per_node - 1
    return f"rank {first}" if first == last else f"ranks {first} to {last}"
