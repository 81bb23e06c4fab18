"""Declaration of ddp: every process keeps weights, gradients and optimizer states."""

from __future__ import annotations

from packtrain.strategies.spec import Launcher, Load, Overhead, StrategySpec


def _memory(load: Load) -> Overhead:
    """Count the buckets of gradients."""
    return Overhead(buffers=load.model.trained * load.trained_width if load.processes > 1 else 0)


SPECS = (
    StrategySpec(
        name="ddp",
        order=0,
        run=f"{__package__}.run",
        shards=(),
        memory=_memory,
        launcher=lambda _: Launcher(settings={"distributed_type": "MULTI_GPU"}, flags=("--multi_gpu",)),
    ),
)
