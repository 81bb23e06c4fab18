"""One of a thing is told in the singular."""

from __future__ import annotations

import pytest

from packtrain.wording import counted


@pytest.mark.parametrize(
    ("number", "things", "words"),
    [
        (1, "documents", "1 document"),
        (1, "processes", "1 process"),
        (1, "machines", "1 machine"),
        (0, "rows", "0 rows"),
        (2.5, "pairs", "2.5 pairs"),
        (1000, "pairs", "1,000 pairs"),
    ],
)
def test_a_number_of_things_in_words(number: float, things: str, words: str) -> None:
    assert counted(number, things) == words
