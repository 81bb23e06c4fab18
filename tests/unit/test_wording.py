"""No text acts on the terminal that shows it."""

from __future__ import annotations

import pytest

from packtrain.wording import visible


@pytest.mark.parametrize(
    ("text", "everything", "but_whitespace"),
    [
        ("a\x1b[31mred\x00\x7f", "a␛[31mred␀␡", "a␛[31mred␀␡"),
        ("one\ttwo\nthree\r\n", "one␉two⏎\nthree␍⏎\n", "one\ttwo\nthree␍\n"),
        ("\u202eevil\ud800\u200b\x9b", "⟨U+202E⟩evil⟨U+D800⟩⟨U+200B⟩⟨U+009B⟩", "⟨U+202E⟩evil⟨U+D800⟩⟨U+200B⟩⟨U+009B⟩"),
        ("5\xa0km, ünï – 漢字\u3000🙂", "5⍽km, ünï – 漢字\u3000🙂", "5\xa0km, ünï – 漢字\u3000🙂"),
    ],
)
def test_what_acts_or_hides_is_shown_as_a_symbol(text: str, everything: str, but_whitespace: str) -> None:
    assert (visible(text), visible(text, whitespace=True)) == (everything, but_whitespace)
