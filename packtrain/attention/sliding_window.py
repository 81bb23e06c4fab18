"""Windows of layers within a document: passed on by the layer, or from its config.

Most local layers pass `sliding_window` to their attention function. Others rely on the mask that the model builds, which
flattened rows do not have: the window of their config is applied here instead. If the config is ambiguous the layer is refused,
even if all documents of the row are shorter than the window (as in the isolation proof).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch

from packtrain.errors import CheckFailed
from packtrain.packing.segments import Segments

_UNSURE = "it cannot be flattened exactly: set model.attention=per_document"


def local_segments(
    module: torch.nn.Module, segments: Segments, sliding_window: int | None
) -> tuple[Segments, int | None]:
    """Return the segments of the row as this layer sees them, and its window. It is in tokens (itself included) or None.

    Chunked attention is plain attention over smaller segments. Raises CheckFailed if the layer's window is unknown.
    """
    if sliding_window is not None:
        return segments, sliding_window
    config = getattr(module, "config", None)
    kind = _layer_kind(config, getattr(module, "layer_idx", None))
    window, chunk = (_positive(config, name) for name in ("sliding_window", "attention_chunk_size"))
    if kind == "sliding_attention" and window:
        return segments, window
    if kind == "chunked_attention" and chunk:
        return chunks(segments, chunk), None
    if kind is None and (window or chunk):
        raise CheckFailed(
            f"{type(module).__name__} may see only {window or chunk} tokens back by its config, but does not say so",
            fix=_UNSURE,
        )
    return segments, None


def _layer_kind(config: object, layer: int | None) -> str | None:
    kinds = getattr(config, "layer_types", None)
    return kinds[layer] if kinds and layer is not None and layer < len(kinds) else None


def _positive(config: object, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


@lru_cache(maxsize=64)
def chunks(segments: Segments, size: int) -> Segments:
    """Cut the row where positions pass a multiple of `size`: the chunks of chunked attention.

    A segment that begins inside a chunk continues it: the last chunk of the segment before it on its path.
    """
    lengths: list[int] = []
    prefixes: list[int | None] = []
    last: list[int] = []  # chunk of each segment
    for length, before, prefix in zip(segments.lengths, segments.prefix_lengths, segments.shared, strict=True):
        inside = None if prefix is None or before % size == 0 else last[prefix]
        cuts = [before, *range((before // size + 1) * size, before + length, size), before + length]
        lengths += [end - start for start, end in pairwise(cuts)]
        prefixes += [inside, *[None] * (len(cuts) - 2)]
        last.append(len(lengths) - 1)
    return Segments(tuple(lengths), tuple(prefixes))
