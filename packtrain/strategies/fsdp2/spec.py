"""Declaration of fsdp2: torch shards weights, gradients and optimizer states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from packtrain.config import Fault
from packtrain.strategies.spec import Launcher, Load, Overhead, StrategySpec, check_dtype, check_optimizer

if TYPE_CHECKING:
    from packtrain.config.schema import RunConfig

_SETTINGS = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": False,  # True would load weights only in the first process
    "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,  # the model itself does trainer.gradient_checkpointing
}
_FLAGS = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_cpu_ram_efficient_loading", "false")


def _rules(config: RunConfig) -> Iterator[Fault]:
    yield from check_optimizer(config)
    yield from check_dtype(config)
    if config.model.quantize in ("fp8", "int8"):
        what = f"fsdp2 cannot send the weights of {config.model.quantize}"
        yield Fault(("model.quantize", "strategy.name"), what, "Use nf4, or strategy=ddp.", code="quantised-not-sent")
    if config.model.quantize != "no" and config.peft.merge:
        what = "fsdp2 cannot merge adapters into quantised weights yet"
        keys = ("peft.merge", "model.quantize", "strategy.name")
        yield Fault(keys, what, "Set peft.merge=false.", code="quantised-not-merged")


def _memory(load: Load) -> Overhead:
    """Count gathered weights and their gradients.

    A layer, the buffer that it was gathered in, and the next layer exist at once. Other weights stay gathered, but not the embedding (run.py).
    """
    model = load.model
    gathered = 3 * model.block * load.block_width + (model.rest - model.embedding) * load.compute
    made, reduced = (model.block + model.rest, model.block) if load.whole else (0, 0)  # gradients, reduced in float32
    return Overhead(
        buffers=math.ceil(gathered) + made * min(load.compute, load.trained_width) + reduced * 4,
        accumulated=4 * model.trained if load.processes > 1 else None,
        leaving=_leaving(load) if load.machines > 1 else None,
    )


def _leaving(load: Load) -> int:
    """Return the bytes that one gradient exchange sends out of each machine. Its rings span all processes, or only machines."""
    model = load.model
    if load.copy_on_each:
        return 2 * 4 * model.trained * (load.machines - 1) // load.machines  # gradients are summed, then handed back
    # weights in both passes, gradients
    return 2 * load.compute * model.all - load.compute * model.embedding + 4 * model.trained


SPECS = (
    StrategySpec(
        name="fsdp2",
        order=2,
        run=f"{__package__}.run",
        shards=("weights", "gradients", "optimizer"),
        memory=_memory,
        launcher=lambda _: Launcher(
            settings={"distributed_type": "FSDP", "fsdp_config": dict(_SETTINGS)}, flags=_FLAGS
        ),
        rules=_rules,
        casts_weights=True,
        shards_within_machines=True,
    ),
)
