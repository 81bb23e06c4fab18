"""Every causal language model of transformers trains exactly in every mode, or is refused with the reason; all of them."""

from __future__ import annotations

import pytest
from page import PAGE, is_comparable, page
from sweep import Outcome, sweep
from tiny import model_types

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {outcome.model_type: outcome for outcome in sweep(model_types())}


@pytest.mark.parametrize("model_type", model_types())
def test_every_architecture_is_exact_in_every_mode_or_refused(outcomes: dict[str, Outcome], model_type: str) -> None:
    outcome = outcomes[model_type]
    assert all(difference.exact for difference in outcome.modes.values()), outcome
    modes = {"refused": 0, "padding only": 1}.get(outcome.path, 3)
    assert len(outcome.modes) == modes
    assert outcome.why or outcome.path == "segmented"


def test_the_page_says_what_was_measured(outcomes: dict[str, Outcome]) -> None:
    if not is_comparable():
        pytest.skip("docs/architectures.md is about another transformers, or other packages")
    assert PAGE.read_text() == page(list(outcomes.values()))
