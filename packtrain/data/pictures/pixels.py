"""Read the pixels of pictures, in the processes that load a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packtrain.data.pictures.encoded import decode
from packtrain.data.pictures.picture import Picture
from packtrain.data.pictures.processor import PictureProcessor
from packtrain.data.sources.chunks import BadRow
from packtrain.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PictureReader:
    """Reader of pictures. It pickles, and loads its processor at the first picture."""

    processor: PictureProcessor

    def read(self, pictures: Sequence[Picture]) -> list[dict[str, torch.Tensor]]:
        """Decode pictures; return the image processor's tensors for each alone. Raises UserError naming the file."""
        return [self._read(picture) for picture in pictures]

    def _read(self, picture: Picture) -> dict[str, torch.Tensor]:
        image = decode(picture)
        try:
            return self.processor.pixels(image)
        except BadRow as bad:
            raise UserError(bad.what, where=picture.name, fix=bad.fix, code="picture-refused") from bad
