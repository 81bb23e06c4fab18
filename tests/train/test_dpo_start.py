"""What is checked of preference training before step 1: where the model is not its reference, the run says which side differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny_dpo import LAYOUTS, PAIRS, another, check_forward, ours, policy, start_loss
from tiny_models import tiny_model

from packtrain.attention.backends import own_attention
from packtrain.config.schema import Peft
from packtrain.errors import CheckFailed
from packtrain.model.adapters import add_adapters
from packtrain.objectives import losses
from packtrain.packing.collate import RowLayout, row_arguments
from packtrain.packing.segments import Segments
from packtrain.train.loader import MicroBatch
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.pairs_and_answers import PairSteps
from packtrain.train.verify import loss_proofs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_is_its_own_reference_starts_at_ln_2(layout: RowLayout, tmp_path: Path) -> None:
    trainer = ours(tmp_path, layout, reference=policy(), loss_type=["sigmoid"])
    assert start_loss(trainer) == pytest.approx(math.log(2), abs=1e-6)
    check_forward(trainer, "sdpa")


@pytest.mark.parametrize(
    "objective",
    [
        {"loss_type": ["ipo", "sft"]},
        {"loss_type": ["sppo_hard"], "ld_alpha": 0.5},
        {"loss_type": ["sigmoid"], "use_weighting": True},
        {"loss_type": ["sigmoid"], "loss_weights": [2.0]},
    ],
)
def test_other_losses_start_at_their_own_value_of_a_zero_margin(objective: dict[str, Any], tmp_path: Path) -> None:
    trainer = ours(tmp_path, "shared", reference=policy(), **objective)
    found = start_loss(trainer)
    if objective["loss_type"] == ["sppo_hard"]:
        assert found == pytest.approx(2 * (0.5 / 0.1) ** 2, rel=1e-6)
    with pytest.raises(CheckFailed):
        start_loss(ours(tmp_path, "shared", reference=another(), **objective))


def test_the_sigmoid_loss_is_held_to_ln_2_and_not_to_what_the_code_under_test_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ours(tmp_path, "flat", reference=policy(), loss_type=["sigmoid"])
    monkeypatch.setitem(losses.PAIR_LOSSES, "sigmoid", lambda *given: 2 * losses.sigmoid(*given))
    with pytest.raises(CheckFailed, match=r"the first loss is 1\.386294, but 0\.6931472"):
        start_loss(trainer)


def test_16_bits_hide_no_difference_of_two_sides_that_compute_the_same(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        same = ours(tmp_path, layout, model=policy().bfloat16(), reference=policy().bfloat16(), loss_type=["sigmoid"])
        assert start_loss(same) == pytest.approx(math.log(2), abs=1e-6)
    adapted = add_adapters(cast(Any, policy().bfloat16()), Peft(kind="lora", r=4), seed=0)
    assert start_loss(ours(tmp_path, "shared", model=adapted, reference=None)) == pytest.approx(math.log(2), abs=1e-6)
    dropping = tiny_model("llama", attention_dropout=0.05).bfloat16()
    with pytest.raises(CheckFailed, match="attention_dropout=0"):
        start_loss(ours(tmp_path, "flat", model=dropping, reference=policy().bfloat16(), loss_type=["sigmoid"]))


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_log_probabilities_that_are_out_of_date_are_seen(side: str, tmp_path: Path) -> None:
    trainer = kept(tmp_path)
    trainer.steps.reference[2, ["chosen", "rejected"].index(side)] += 0.01
    with pytest.raises(CheckFailed, match=rf"the {side} answer of pair \d .* by the reference") as caught:
        start_loss(trainer)
    assert "stale" in caught.value.problems[0].fix


def test_log_probabilities_that_were_rounded_to_16_bits_are_no_rounding_of_the_model(tmp_path: Path) -> None:
    trainer = kept(tmp_path, model=policy().bfloat16())
    assert start_loss(trainer) == pytest.approx(math.log(2), abs=1e-6)
    known = torch.from_numpy(trainer.steps.reference)
    trainer.steps = replace(trainer.steps, reference=known.bfloat16().float().numpy())
    with pytest.raises(CheckFailed, match="stale"):
        start_loss(trainer)


def kept(folder: Path, model: Any = None) -> Any:
    """A trainer with log-probabilities that were computed before."""
    given = {"loss_type": ["sigmoid"], "precompute_ref_log_probs": True}
    trainer = ours(folder, "padding", model=model, reference=None, **given)
    with torch.no_grad():
        batch = cast(PairSteps, trainer.steps).collate(range(len(PAIRS)))
        known = np.stack([part.numpy() for part in trainer.loss.policy_logps(batch)], axis=1)
    trainer.steps = replace(cast(PairSteps, trainer.steps), reference=known)
    return trainer


def start(folder: Path, model: Any, reference: Any, spoil: Callable[[Any], Any] = id) -> StepTrainer:
    """A trainer whose two sides are not the same, or no longer once it is spoilt."""
    trainer = ours(folder, "flat", model=model, reference=reference, loss_type=["sigmoid"])
    spoil(trainer)
    return trainer


def drop_by_a_hook(trainer: Any) -> None:
    layer = trainer.loss.reference.model.layers[0]
    layer.mlp.register_forward_hook(lambda _, __, out: torch.nn.functional.dropout(out, 0.1))


def adapted(*, beside: bool = False) -> Any:
    """With adapters that have been trained, and maybe others named ref `beside` them."""
    model: Any = add_adapters(cast(Any, policy()), Peft(kind="lora", r=4), seed=0)
    if beside:
        model.add_adapter("ref", LoraConfig(r=4, target_modules="all-linear"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


FAULTS: dict[str, Callable[[Path], StepTrainer]] = {
    "dropout in the reference": lambda folder: start(folder, policy(), policy(), drop_by_a_hook),
    "another precision": lambda folder: start(folder, policy(), policy().to(torch.bfloat16)),
    "adapters that are not new": lambda folder: start(folder, adapted(), None),
    "other earlier adapters": lambda folder: start(folder, adapted(beside=True), None),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_model_that_differs_from_its_reference_is_refused(fault: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"0\.6931472(.|\n)*\[first-loss-wrong\]") as caught:
        start_loss(fault(tmp_path))
    assert caught.value.exit_code == 3 and caught.value.problems[0].fix


@pytest.mark.parametrize("precomputed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_check_makes_few_logits_whatever_the_layout_and_the_reference(
    layout: RowLayout, precomputed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, made = 8 * 5 * cast(Any, policy()).config.vocab_size, []
    monkeypatch.setattr(loss_proofs, "CHECKED_LOGITS", most)
    given: dict[str, Any] = {"reference": None if precomputed else policy(), "loss_type": ["sigmoid"]}
    trainer = ours(tmp_path, layout, precompute_ref_log_probs=precomputed, **given)
    for model in filter(None, (trainer.model, trainer.loss.reference)):
        model.lm_head.register_forward_hook(lambda *call: made.append(call[-1].numel()))
    check_forward(trainer, "sdpa")
    assert made and max(made) <= most
    trainer.model.lm_head.register_forward_hook(lambda *call: 1.1 * call[-1])  # which the fused head does not know
    with pytest.raises(CheckFailed, match=r"\[answers-differ\]"):
        check_forward(trainer, "sdpa")


@dataclass(frozen=True)
class WrongRows(PairSteps):
    """Pairs whose rows are wrong, and whose padded batches are right."""

    fault: str = ""

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        batch = super().collate(numbers)
        if self.layout == "padding":
            return batch
        own = batch.inputs
        whole = Segments((own["segments"].tokens,), ())  # all one document
        faults = {"borders": row_arguments(whole), "places": {"target_places": own["target_places"].roll(1)}}
        return replace(batch, inputs={**own, **faults.get(self.fault, {})})


@pytest.mark.parametrize("layout", ["flat", "shared"])
def test_a_row_whose_tokens_see_too_much_or_come_back_wrong_is_caught(layout: RowLayout, tmp_path: Path) -> None:
    trainer = ours(tmp_path, layout, loss_type=["sigmoid"])
    attention, steps = own_attention(policy()), trainer.steps
    for fault in ("", "borders", "places"):
        trainer.steps = WrongRows(steps.data, steps.schedule, layout, 0, fault=fault)
        caught = pytest.raises(CheckFailed, match=r"LlamaForCausalLM.*\[answers-differ\]")
        with caught if fault else nullcontext():
            check_forward(trainer, attention)
