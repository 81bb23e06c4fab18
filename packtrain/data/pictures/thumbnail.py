"""Small copies of pictures, to be shown in a page."""

from __future__ import annotations

import base64
import io

from packtrain.data.pictures.encoded import decode
from packtrain.data.pictures.picture import Picture

SIDE = 192
"""Pixels of the longer side at most."""


def thumbnail(picture: Picture) -> str:
    """Return a small copy of the picture as a data URL. Raises UserError if the picture is broken."""
    image, file = decode(picture), io.BytesIO()
    image.thumbnail((SIDE, SIDE))
    image.save(file, "jpeg", quality=90, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
