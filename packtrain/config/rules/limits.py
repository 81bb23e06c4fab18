"""What one device takes at once: the one place that knows the defaults, and the losses that need a whole step there."""

from __future__ import annotations

from collections.abc import Sequence

from packtrain.config.schema import LossType, RunConfig

DEFAULT_EXAMPLES = 8
DEFAULT_ROW_TOKENS = 8192
SORTING_LOSSES: tuple[LossType, ...] = ("aot", "aot_unpaired")


def micro_batch_limits(config: RunConfig) -> tuple[int | None, int | None]:
    """Most documents and most token slots of a micro-batch; None for no limit.

    Packed rows are limited by tokens alone. The other modes always have a limit on documents, and one on tokens where
    batch.tokens_per_device is set.
    """
    batch = config.batch
    if config.packing.mode == "packed":
        return None, batch.tokens_per_device or DEFAULT_ROW_TOKENS
    return batch.examples_per_device or DEFAULT_EXAMPLES, batch.tokens_per_device


def unsplittable(losses: Sequence[LossType]) -> list[LossType]:
    """Those of `losses` that sort all pairs of a step: it has to be one micro-batch of one process."""
    return [name for name in losses if name in SORTING_LOSSES]
