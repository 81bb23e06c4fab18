"""What trainer.mixed_precision comes to, by the weights and the device, and how a plan says it."""

from __future__ import annotations

import pytest

from packtrain.config.compose import load_config
from packtrain.plan.known_model import choose_precision, precision_in_words

MADE = ["model.init=random", "model.tokenizer=quickstart", "model.config.model_type=llama", "data.train=owner/data"]
MADE += ["batch.examples_per_step=4"]


@pytest.mark.parametrize(
    ("asked", "weights", "given", "expected", "why"),
    [
        ("auto", "float32", {"gpu": True}, "bf16", "has bfloat16"),
        ("auto", "float32", {"gpu": True, "has_bf16": False}, "no", "has no bfloat16"),
        ("auto", "bfloat16", {"gpu": True}, "no", "already"),
        ("auto", "bfloat16", {"gpu": True, "adapters": True}, "bf16", "has bfloat16"),
        ("auto", "float16", {"gpu": True, "adapters": True}, "no", "float16"),
        ("auto", "float32", {"speed": 9.0}, "no", "on a CPU"),  # nothing is measured that was not asked for
        ("fast", "float32", {"speed": 4.1}, "bf16", "4.1 times"),
        ("fast", "float32", {"speed": 1.4}, "no", "1.4 times"),
        ("fast", "float32", {"gpu": True, "speed": 0.0}, "bf16", "has bfloat16"),
        ("bf16", "bfloat16", {}, "bf16", "asked for"),
    ],
)
def test_mixed_precision_is_decided_by_weights_and_device(asked, weights, given, expected, why):
    speed = given.pop("speed", 0.0)
    known = {"adapters": False, "gpu": False, "has_bf16": True, **given}
    value, because = choose_precision(asked, weights=weights, speed=lambda: speed, **known)
    assert value == expected and why in because


def test_a_plan_says_what_it_depends_on() -> None:
    fast = ["trainer.mixed_precision=fast"]
    for overrides, gpu, said in (
        ([], True, "float32 weights, computed in bfloat16 (on GPUs that have it; on a CPU no)"),
        ([], False, "float32 weights, no mixed precision (on a CPU; "),
        (fast, False, "no mixed precision (unless the start finds bfloat16 1.5 times as fast"),
        (["model.dtype=auto"], True, "if they are float32, computed in bfloat16 (on GPUs that have it; on a CPU no)"),
    ):
        assert said in precision_in_words(load_config(None, [*MADE, *overrides]), gpu=gpu)
