"""What each token of a vocabulary is: its bytes, whether it is a control token, white space, and of which script.

Looked up once for the whole vocabulary, so that a data set is judged by arrays of its token ids.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer

from packtrain.data.tokens.tokenizer import PlainTokenizer

SCRIPTS = (
    "none", "Latin", "Greek", "Cyrillic", "Hebrew", "Arabic", "Indic", "Thai", "Hangul", "Japanese", "Chinese", "other"
)  # fmt: skip
LATIN = SCRIPTS.index("Latin")
_RANGES = (  # first and last character of a script's blocks
    (0x41, 0x24F, "Latin"), (0x250, 0x2AF, "Latin"), (0x370, 0x3FF, "Greek"), (0x400, 0x52F, "Cyrillic"), (0x590, 0x5FF, "Hebrew"),
    (0x600, 0x77F, "Arabic"), (0x8A0, 0x8FF, "Arabic"), (0x900, 0xDFF, "Indic"), (0xE00, 0xE7F, "Thai"), (0x1100, 0x11FF, "Hangul"),
    (0x1E00, 0x1EFF, "Latin"), (0x1F00, 0x1FFF, "Greek"), (0x3040, 0x30FF, "Japanese"), (0x3130, 0x318F, "Hangul"),
    (0x3400, 0x9FFF, "Chinese"), (0xAC00, 0xD7AF, "Hangul"), (0xF900, 0xFAFF, "Chinese"), (0xFB50, 0xFDFF, "Arabic"),
    (0xFE70, 0xFEFF, "Arabic"),
)  # fmt: skip
_BYTE = re.compile(r"<0x([0-9A-F]{2})>").fullmatch


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of `tokenizer`."""

    tokenizer: PlainTokenizer

    @cached_property
    def texts(self) -> list[bytes]:
        """The UTF-8 bytes of each token, which may begin or end inside a character."""
        rust = Tokenizer.from_str(self.tokenizer.backend)
        added = rust.get_added_tokens_decoder()
        by_bytes = "ByteLevel" in json.dumps(json.loads(self.tokenizer.backend)["decoder"])
        bytes_of = _bytes_of_characters() if by_bytes else {}
        texts = []
        names = {token: text for text, token in rust.get_vocab(with_added_tokens=True).items()}
        for token in range(max(max(names) + 1, self.tokenizer.vocabulary)):  # ids may have gaps
            text = names.get(token, "")
            if token in added:
                texts.append(text.encode())
            elif bytes_of and all(character in bytes_of for character in text):
                texts.append(bytes(bytes_of[character] for character in text))
            elif found := _BYTE(text):
                texts.append(bytes([int(found[1], 16)]))
            else:
                texts.append(text.replace("▁", " ").encode(errors="replace"))
        return texts

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def is_special(self) -> np.ndarray:
        """bool[vocabulary]: control tokens."""
        return self.table(self.tokenizer.special_ids)

    def table(self, ids: Iterable[int | None]) -> np.ndarray:
        """bool[vocabulary]: True at `ids`."""
        chosen = np.zeros(len(self), bool)
        chosen[[one for one in ids if one is not None and one < len(self)]] = True
        return chosen

    @cached_property
    def is_space(self) -> np.ndarray:
        """bool[vocabulary]: white space alone."""
        return np.array([bool(text) and text.isspace() for text in self.texts])

    @cached_property
    def scripts(self) -> np.ndarray:
        """uint8[vocabulary]: the number in SCRIPTS of most of a token's letters; control tokens have none."""
        found = np.array([_script_of(text) for text in self.texts], np.uint8)
        found[self.is_special] = 0
        return found


def _script_of(text: bytes) -> int:
    """The script of most letters; of a part of a character what its first byte tells."""
    whole = text.decode("utf-8", errors="ignore")
    numbers = [_script_of_letter(letter) for letter in whole if letter.isalpha()]
    if numbers:
        return max(set(numbers), key=numbers.count)
    if not whole.strip() and text and text[0] >= 0xC2:
        lead = text[0]
        code = (lead & 0x1F) << 6 if lead < 0xE0 else (lead & 0x0F) << 12
        if 0xC2 <= lead < 0xE0 and len(text) == 1 and lead >= 0xCE:
            return _script_number(code)
        if lead in range(0xE4, 0xEA):
            return SCRIPTS.index("Chinese")
        if lead in range(0xEB, 0xED):
            return SCRIPTS.index("Hangul")
        if len(text) >= 2 and lead in (0xE0, 0xE1, 0xE3):
            return _script_number(code | (text[1] & 0x3F) << 6)
    return 0


def _script_of_letter(letter: str) -> int:
    if letter.isascii():
        return LATIN
    if letter in "ªº" or "MATHEMATICAL" in unicodedata.name(letter, ""):
        return 0
    return _script_number(ord(letter))


def _script_number(code: int) -> int:
    return next((SCRIPTS.index(name) for first, last, name in _RANGES if first <= code <= last), SCRIPTS.index("other"))


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (as in GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
