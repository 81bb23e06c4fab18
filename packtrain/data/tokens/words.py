"""The tokens of a text from those of its words, which are looked up: most words have been seen before.

That is exact if a text is cut only where its tokenizer begins a new word. Byte-level BPE tokenizers take control tokens out of
a text, split the rest by one of a few regular expressions, and merge bytes within words only. In the expressions named here
white space is the first character of a word or all of it, and a letter is followed by letters, or by 's and the like. So
no word goes on

- over a space that follows anything but white space, or
- from an ASCII letter to white space or . , : ; ! ?

None looks behind, and they look ahead only to see whether white space goes on, so what is on one side of such a place does not
change the words on the other. A text that any other tokenizer gets stays whole, and so do all texts once one of the first
PROVED, which are also encoded whole, had other tokens.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

LONGEST, MOST = 64, 1 << 16
"""Characters of a piece whose tokens are kept, and how many such pieces (about 15 MB in each process)."""
PROVED = 64
"""Texts that each process encodes both ways."""
_PIECES = re.compile(r" ?[A-Za-z]+(?![^ .,:;!?\n])|\s*\S+(?:[^\S ]\s*\S*)*|\s+")
_BREAKABLE = re.compile(r"\s|[A-Za-z][.,:;!?]")
_ENDING, _REST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_INTO_WORDS = (
    _ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST,  # Qwen 2 to 3
    _ENDING + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST,  # Llama 3, GLM 4
    _ENDING + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _REST,  # Qwen 3.5
    _CASED % (_ENDING + "?", _ENDING + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST,  # gpt-oss
    _CASED % ("", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST,  # Nemotron 3, Mistral's Tekken
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _REST,  # DeepSeek 3
)
_WITHIN_WORDS = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", " ?[0-9]")
"""What tokenizers apply before those."""


class Words(dict[str, bytes]):
    """Pieces of text to their tokens, each four int32: id, start and end in the piece, and, at the last one, the piece's length.

    A piece without tokens has one with the id -1. What is not there is encoded (TypeError for lone surrogates).
    """

    def __init__(self, rust: Tokenizer) -> None:
        super().__init__()
        self._rust, self._control = rust, _control_tokens(rust)
        self._unproved = PROVED
        if self._control is not None:
            tokens, number = self._encoded("a", special=True), len(self["a"])
            before = 16 * rust.encode("a").special_tokens_mask.index(0)
            self._before, self._behind = tokens[:before], tokens[before + number :]

    def of(self, text: str, *, special: bool) -> np.ndarray:
        """The tokens of `text`, int32[3, n]: id, start, end; with `special`, also what the tokenizer adds around it."""
        if self._control is None:
            return _placed(self._encoded(text, special=special))
        pieces = [piece for part in self._control.split(text) for piece in _PIECES.findall(part)]
        tokens = b"".join(map(self.__getitem__, pieces))
        if self._unproved:
            self._unproved -= 1
            if not np.array_equal(_placed(tokens), _placed(self._encoded(text, special=False))):
                self._control = None
                return self.of(text, special=special)
        return _placed(self._before + tokens + self._behind if special else tokens)

    def __missing__(self, piece: str) -> bytes:
        tokens = self._encoded(piece, special=False)
        if len(piece) <= LONGEST:
            if len(self) >= MOST:
                self.clear()
            self[piece] = tokens
        return tokens

    def _encoded(self, text: str, *, special: bool) -> bytes:
        encoding = self._rust.encode(text, add_special_tokens=special)
        tokens = zip(encoding.ids, encoding.offsets, strict=True)
        fields = [field for id, place in tokens for field in (id, *place, 0)] or [-1, 0, 0, 0]
        fields[-1] = len(text)
        return array("i", fields).tobytes()


def _placed(tokens: bytes) -> np.ndarray:
    """The tokens of pieces, with their places in the text: int32[3, n]."""
    fields = np.frombuffer(tokens, np.int32).reshape(-1, 4).T.copy()
    fields[1:3] += np.cumsum(fields[3], dtype=np.int32) - fields[3]
    return fields[:3] if fields[0].min(initial=0) == 0 else fields[:3, fields[0] >= 0]


def _control_tokens(rust: Tokenizer) -> re.Pattern[str] | None:
    """Finds what the tokenizer takes out of a text before all else; None if its texts must stay whole."""
    added = list(rust.get_added_tokens_decoder().values())
    for token in added:
        breakable = _BREAKABLE.search(token.content) and not token.content.isspace()
        if breakable or token.lstrip or token.rstrip or token.single_word:
            return None
    if rust.encode_special_tokens or not _is_known(rust):
        return None
    first = sorted((token.content for token in added if not token.normalized), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, first)) or '(?!)'})")


def _is_known(rust: Tokenizer) -> bool:
    """Whether the tokenizer is a byte-level BPE that splits by the expressions above."""
    into_words = byte_level = False
    for split in _parts(rust.pre_tokenizer, "pretokenizers"):
        regex = split.get("pattern", {}).get("Regex", "").replace("\r", r"\r").replace("\n", r"\n")
        cuts_only = (split.get("behavior"), split.get("invert")) in (("Isolated", False), ("Removed", True))
        if split["type"] == "ByteLevel" and not split["add_prefix_space"]:
            byte_level, into_words = True, into_words or split["use_regex"]
        elif regex in _INTO_WORDS and cuts_only:
            into_words = True
        elif split["type"] != "Digits" and not (regex in _WITHIN_WORDS and cuts_only and not split["invert"]):
            return False
    moved = any(
        part.get("trim_offsets") and part["add_prefix_space"] for part in _parts(rust.post_processor, "processors")
    )
    same = [part["type"] for part in _parts(rust.normalizer, "normalizers")] in ([], ["NFC"])
    plain = isinstance(rust.model, BPE) and rust.model.dropout is None and rust.model.token_to_id("a") is not None
    return into_words and byte_level and same and plain and not moved


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """The settings of a tokenizer's component, of each part where it is a sequence."""
    settings = json.loads(component.__getstate__()) if component is not None else {name: []}
    return settings.get(name, [settings])
