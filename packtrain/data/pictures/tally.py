"""Figures on the pictures of a data set."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from packtrain.wording import counted


@dataclass(frozen=True, slots=True)
class PictureFigures:
    """Pictures of an epoch: their `number`, how many are `different`, the `documents` with pictures.

    `tokens` are all their tokens, `tokens_each` the least, median and most of a picture. Sizes are (width, height), ordered by area.
    """

    number: int
    different: int
    documents: int
    tokens: int
    tokens_each: tuple[int, int, int]
    smallest: tuple[int, int]
    median: tuple[int, int]
    largest: tuple[int, int]

    def in_words(self, all_tokens: int) -> str:
        """Describe the pictures of data with `all_tokens` in a line."""
        different = f" ({self.different:,} different)" if self.different != self.number else ""
        least, median, most = (f"{tokens:,}" for tokens in self.tokens_each)
        sizes = ["×".join(map(str, size)) for size in (self.smallest, self.largest, self.median)]
        return (
            f"{counted(self.number, 'pictures')}{different} in {counted(self.documents, 'documents')}, "
            f"{self.tokens:,} tokens ({self.tokens / all_tokens:.1%} of all; {least} to {most} each, median {median}), "
            f"sizes {sizes[0]} to {sizes[1]}, median {sizes[2]}"
        )

    def to_json(self, all_tokens: int) -> dict[str, object]:
        """Return the figures as plain values, with the `share` of all tokens, and in `words`."""
        share = round(self.tokens / all_tokens, 4)
        return {**asdict(self), "share": share, "words": self.in_words(all_tokens)}


def count_pictures(table: np.ndarray, times: np.ndarray) -> PictureFigures | None:
    """Count pictures, PICTURES[n]. Each document is trained on `times` int[documents]. None without any."""
    table = table[times[table["document"]] > 0]
    if not len(table):
        return None
    often, tokens = times[table["document"]], table["end"] - table["start"]
    by_area = np.argsort(table["height"].astype(np.int64) * table["width"], kind="stable")
    sizes = [(int(table["width"][at]), int(table["height"][at])) for at in by_area[[0, len(by_area) // 2, -1]]]
    return PictureFigures(
        int(often.sum()),
        len(np.unique(table["hash"])),
        int(times[np.unique(table["document"])].sum()),
        int((often * tokens).sum()),
        (int(tokens.min()), int(np.median(tokens)), int(tokens.max())),
        *sizes,
    )
