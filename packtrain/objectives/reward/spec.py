"""Declaration of reward models."""

from __future__ import annotations

from packtrain.config import Option, is_number
from packtrain.objectives.spec import Figure, Spec

SPEC = Spec(
    name="reward",
    order=3,
    help="Train a reward model on pairs of a preferred and a rejected answer.",
    about="a reward model",
    run=f"{__package__}.run",
    examples="pairs",
    figures=(
        Figure("min_reward", "Scores", "least", extreme="least"),
        Figure("mean_reward", "Scores", "mean"),
        Figure("max_reward", "Scores", "greatest", extreme="greatest"),
        Figure("accuracy", "Pairs ranked right", unit="percent", headline=True, note="chance: 50%"),
        Figure("margin", "Score margin", headline=True),
    ),
    options={
        "center_rewards_coefficient": Option(None, "number ≥ 0", lambda value: is_number(value) and value >= 0),
    },
    scores=True,
    margins=True,
)
