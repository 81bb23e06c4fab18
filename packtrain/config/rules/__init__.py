"""What cannot work though each key alone is fine, refused before anything is loaded; one file for each kind of reason."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import asdict

from packtrain.config.keys import Fault
from packtrain.config.rules import combinations, missing, secrets, slurm
from packtrain.config.schema import RunConfig


def check(config: RunConfig, given: Set[str]) -> list[Fault]:
    """Everything that is impossible in `config`, for the keys `given` with a value that is not their default."""
    return [
        *combinations.check(config, given),
        *slurm.check(config.topology, config.trainer.resume, given),
        *secrets.check(asdict(config)),
        *missing.check(config.model, config.data, config.objective, config.trainer, config.optim, config.tracking),
    ]
