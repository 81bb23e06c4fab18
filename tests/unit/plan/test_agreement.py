"""What differs between the processes of a run, in words: who has what, the few before the many."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from packtrain.errors import Problem
from packtrain.plan.agreement import differences
from packtrain.wording import ranks_in_words


def found(number: int, facts: dict[int, dict[str, str]], fixes: dict[str, str] | None = None) -> list[Problem]:
    """Of so many ranks that all have seed 0, but for the `facts` of some."""

    def in_words(ranks: Sequence[int]) -> str:
        return ranks_in_words(ranks)

    return differences({rank: {"seed": "0", **facts.get(rank, {})} for rank in range(number)}, fixes or {}, in_words)


@pytest.mark.parametrize(
    ("number", "facts", "said"),
    [
        (2, {1: {"seed": "7"}}, "rank 1 has 7; rank 0 has 0"),
        (3, {0: {"seed": "7"}}, "rank 0 has 7; ranks 1 and 2 have 0"),
        (128, {5: {"seed": "7"}}, "rank 5 has 7; ranks 0 to 4 and 6 to 127 have 0"),
        (
            128,
            {rank: {"seed": str(rank)} for rank in range(100, 110)},
            "rank 109 has 109; rank 108 has 108; rank 107 has 107; 7 more values; ranks 0 to 99 and 110 to 127 have 0",
        ),
    ],
    ids=["tie", "rank-0", "one-of-128", "ten-of-128"],
)
def test_a_difference_names_who_has_what_the_few_first(
    number: int, facts: dict[int, dict[str, str]], said: str
) -> None:
    assert found(number, {}) == []
    assert found(number, facts, {"seed": "set it"}) == [Problem(said, "seed", "set it")]


def test_a_fact_that_only_some_state_is_a_difference() -> None:
    assert found(3, {1: {"optim.new": "1"}}) == [Problem("rank 1 has 1; ranks 0 and 2 have no such thing", "optim.new")]


def test_of_many_differences_the_first_are_shown_in_full_and_their_fix_once() -> None:
    other = {f"k{number}": "x" for number in range(30)}
    problems = found(2, {1: other}, dict.fromkeys(other, "same config"))
    assert [one.where for one in problems] == [*(f"k{number}" for number in range(8)), ""]
    assert problems[-1].what == "22 more differ: k8, k9, k10, k11, k12, k13, k14, k15, …"
    assert [one.fix for one in problems[:-1]] == [""] * 7 + ["same config"]
