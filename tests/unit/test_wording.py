"""Numbers and ranks in words, and which ranks are a machine's, by how a launch numbers them."""

from __future__ import annotations

import pytest

from packtrain.wording import counted, numbered


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


@pytest.mark.parametrize(
    ("ranks", "per_node", "machines", "place"),
    [
        ({0, 1}, 2, 2, (range(2), 0)),
        ({2, 3}, 2, 2, (range(2, 4), 1)),
        ({0, 2}, 2, 2, (range(0, 4, 2), 0)),
        ({1, 3}, 2, 2, (range(1, 4, 2), 1)),
        ({1, 4, 7}, 3, 3, (range(1, 9, 3), 1)),
        ({3}, 1, 4, (range(3, 4), 3)),
        ({0, 3}, 2, 2, None),
        ({1, 2}, 2, 2, None),
        ({0}, 2, 2, None),
        ({0, 1, 2}, 4, 1, None),
    ],
)
def test_the_ranks_of_a_machine_are_in_a_row_or_in_turn(
    ranks: set[int], per_node: int, machines: int, place: tuple[range, int] | None
) -> None:
    assert numbered(ranks, per_node, machines) == place
