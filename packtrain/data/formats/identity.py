"""What a row says, as one number: equal for rows that say the same, whatever is made of them.

Only the columns that the format reads count (not an id, not a score), so copies of a conversation are known as such. Of a
preference pair only the prompt counts (paired.py), so that no prompt is trained and held out. Template, tokenizer and
data.max_length have no part in it: what is held out by it stays held out when they change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from packtrain.data.formats.conversations import OPTIONAL, READ_TOO, REQUIRED, Format
from packtrain.data.sources.rows import BadRow, Row


def content_of(row: Row, format: Format, columns: Mapping[str, str]) -> int:
    """A hash of 64 bits of the row's columns under our names; rows that cannot be read are told apart by their fault."""
    if isinstance(row, BadRow):
        said: object = [row.reason, row.what]
    else:
        ours = {
            name: row.get(columns.get(name, name)) for name in (*REQUIRED[format], *READ_TOO.get(format, ()), *OPTIONAL)
        }
        said = {name: value for name, value in ours.items() if value is not None}
    return number_of(said)


def number_of(said: object) -> int:
    """A hash of 64 bits of what JSON makes of `said`."""
    text = json.dumps(said, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
