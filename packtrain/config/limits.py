"""What one device takes at once, where the config leaves it open: the one place that knows these defaults."""

from __future__ import annotations

from packtrain.config.schema import RunConfig

DEFAULT_EXAMPLES = 8
DEFAULT_ROW_TOKENS = 8192


def micro_batch_limits(config: RunConfig) -> tuple[int | None, int | None]:
    """Most documents and most token slots of a micro-batch; None for no limit.

    Packed rows are limited by tokens alone. The other modes always have a limit on documents, and one on tokens where
    batch.tokens_per_device is set.
    """
    batch = config.batch
    if config.packing.mode == "packed":
        return None, batch.tokens_per_device or DEFAULT_ROW_TOKENS
    return batch.examples_per_device or DEFAULT_EXAMPLES, batch.tokens_per_device
