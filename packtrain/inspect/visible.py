"""Text that cannot act on what shows it: control characters (a terminal obeys them), and those that turn the direction of a text
or cannot be seen, become symbols. Escaping for HTML and rich is up to who shows it."""

from __future__ import annotations

import unicodedata


def visible(text: str) -> str:
    """`text` with a symbol for each character that acts, or that cannot be seen; a line end stays, behind its symbol."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_symbol, text))


def _symbol(character: str) -> str:
    if character == "\n":
        return "⏎\n"
    if character.isprintable() or character == "\u3000":
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return "⍽" if unicodedata.category(character) == "Zs" else f"⟨U+{code:04X}⟩"
