"""A run in this process: of a config, as the command would have it, for claims that are not about processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from running import Run, written

from packtrain.config.compose import load_config, to_yaml
from packtrain.config.schema import RunConfig
from packtrain.model.spread import Ranks
from packtrain.run_folder import RunFolder
from packtrain.train.run import train_in, verify_in

ALONE = Ranks(0, 1, torch.device("cpu"))


def train_here(config: RunConfig, folder: Path, ranks: Ranks = ALONE, *, expect: int = 0) -> Run:
    """Trains by `config` into `folder`, to an exit code; raises what the command would print."""
    config = replace(config, trainer=replace(config.trainer, output_dir=str(folder)))
    prepared = RunFolder.of(config.trainer)
    prepared.open_attempt("auto")
    prepared.attempt.config.write_text(to_yaml(config))
    assert train_in(config, replace(ranks, strategy=config.strategy.name)) == expect
    return Run(folder)


def loaded(folder: Path, config: dict[str, Any], *overrides: str, name: str = "run") -> RunConfig:
    """Writes `config` into folder/name.yaml, and loads it."""
    return load_config(written(folder, config, name), [*overrides])


def run_here(folder: Path, config: dict[str, Any], *overrides: str, name: str = "run", expect: int = 0) -> Run:
    """Writes `config`, trains by it into folder/name in this process to an exit code, and returns what is there."""
    return train_here(loaded(folder, config, *overrides, name=name), folder / name, expect=expect)


def verified(config: RunConfig, *, expect: int = 0) -> dict[str, Any]:
    """The report of a proof in this process, which ends with that exit code."""
    assert verify_in(config, ALONE) == expect
    return json.loads(RunFolder.of(config.trainer).verification.read_text())
