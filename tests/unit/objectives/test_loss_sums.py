"""Losses and figures add up over micro-batches, and never wait for the device."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from packtrain.errors import UserError
from packtrain.objectives.answers import LabelledAnswers, PairLogps, Pairs, Sum, Targets, TokenFigures, sum_answers
from packtrain.objectives.dpo.run import pair_figures
from packtrain.objectives.kto.run import unpaired_figures
from packtrain.objectives.losses import (
    F_DIVERGENCES,
    PAIR_LOSSES,
    UNPAIRED_LOSSES,
    FDivergence,
    PairOptions,
    UnpairedOptions,
    bradley_terry,
    estimate_kl,
    make_pairs,
    pair_loss,
    score,
)
from packtrain.objectives.reward.run import reward_figures
from packtrain.objectives.spec import OBJECTIVES, Figure
from packtrain.train.objectives.loss import FigureSums

SORTING = {*OBJECTIVES["dpo"].sorting_losses}
ALONE: Any = SimpleNamespace(reduce=lambda values, **_: values, gather=lambda values: values)
"""An accelerator of one process."""
SMOOTHED_WEIGHTED = PairOptions(label_smoothing=0.1, use_weighting=True, ld_alpha=0.5)


def test_the_registries_and_options_are_those_of_the_config_and_of_trl(tmp_path: Path) -> None:
    for kind, ours, name in ((DPOTrainer, PAIR_LOSSES, "dpo"), (KTOTrainer, UNPAIRED_LOSSES, "kto")):
        theirs = re.findall(r'\bloss_type == "(\w+)"', inspect.getsource(kind._compute_loss))
        assert set(theirs) <= set(ours) == set(OBJECTIVES[name].losses)
    for options, arguments in ((PairOptions(), DPOConfig), (UnpairedOptions(), KTOConfig)):
        theirs = arguments(output_dir=str(tmp_path), use_cpu=True, bf16=False)
        assert asdict(options) == {one.name: getattr(theirs, one.name) for one in fields(options)}


def made_up_pairs(count: int, options: PairOptions, device: str = "cpu") -> Pairs:
    """Pairs with answers of 1 to 9 random targets."""
    generator = torch.Generator().manual_seed(0)

    counts = torch.randint(1, 10, (2 * count,), generator=generator)

    def targets() -> Targets:
        log_probs, squares = -torch.rand(2, int(counts.sum()), generator=generator)
        return Targets(log_probs.to(device), counts.to(device), squares.to(device))

    return make_pairs(targets(), sum_answers(targets(), options.ld_alpha), options)


@pytest.mark.parametrize("name", sorted(set(PAIR_LOSSES) - SORTING))
def test_the_shares_of_micro_batches_add_up_to_the_loss_of_the_step(name: str) -> None:
    options = SMOOTHED_WEIGHTED
    whole = made_up_pairs(7, options)
    counts = torch.tensor(7), whole.chosen_tokens.sum()
    parts = [part_of(whole, slice(0, 2)), part_of(whole, slice(2, 2)), part_of(whole, slice(2, 7))]
    shares = torch.stack([pair_loss(part, {name: 0.7}, options, *counts) for part in parts])
    torch.testing.assert_close(shares.sum(), pair_loss(whole, {name: 0.7}, options, *counts))


def part_of(pairs: Pairs, rows: slice) -> Pairs:
    return Pairs(**{one.name: getattr(pairs, one.name)[rows] for one in fields(pairs)})


@pytest.mark.parametrize("divergence", F_DIVERGENCES)
def test_no_loss_and_no_figure_reads_a_tensor_on_the_host(divergence: FDivergence) -> None:
    """Tensors on the device meta have no values to read."""
    options = replace(SMOOTHED_WEIGHTED, f_divergence_type=divergence)
    pairs, values, slots = made_up_pairs(3, options, "meta"), *(torch.zeros(3, n, device="meta") for n in (1, 9))
    answers = LabelledAnswers(values[:, 0], values[:, 0], values[:, 0].bool())
    head = TokenFigures(slots.bool(), slots, slots)
    loss = pair_loss(pairs, dict.fromkeys(PAIR_LOSSES, 1.0), options, pairs.chosen_logps[0], pairs.weights[0])
    kl = estimate_kl(Sum(loss, loss))
    found = {
        "dpo": pair_figures(pairs, 0.1, head, slots.bool()),
        "kto": unpaired_figures(answers, kl, 0.1, head),
        "reward": reward_figures(answers.logps, answers.ref_logps),
    }
    for kind, figures in found.items():
        FigureSums.none(OBJECTIVES[kind].figures, torch.device("meta")).plus(figures, counted=True)
    losses = [one(answers, kl, UnpairedOptions()) for one in UNPAIRED_LOSSES.values()]
    losses.append(bradley_terry(answers.logps, answers.ref_logps, margin=answers.logps, center_rewards_coefficient=0.1))
    assert [tuple(one.shape) for one in losses] == [(3,)] * 3


def test_no_pairs_and_no_answers_of_a_label_add_nothing() -> None:
    answers = LabelledAnswers(torch.zeros(2), torch.zeros(2), torch.tensor([True, True]))
    tokens = TokenFigures(torch.ones(2).bool(), torch.zeros(2), torch.zeros(2))
    figures = unpaired_figures(answers, torch.zeros(()), 0.1, tokens)
    sums = FigureSums.none(OBJECTIVES["kto"].figures, torch.device("cpu"))
    sums = sums.plus(figures, counted=True)
    assert [*sums.values(ALONE)] == ["rewards/chosen", "kl", "logps/chosen", "logits/chosen", "entropy"]
    assert FigureSums.none(OBJECTIVES["kto"].figures, torch.device("cpu")).values(ALONE) == {}


def test_extremes_and_differences_are_figures() -> None:
    ends = [Figure("low", extreme="least"), Figure("high", extreme="greatest")]
    ends.append(Figure("span", difference=("high", "low")))
    sums = FigureSums.none(ends, torch.device("cpu"))
    for low, high in ((1.0, 2.0), (0.5, 0.5)):
        sums = sums.plus({"low": torch.tensor(low), "high": torch.tensor(high)}, counted=True)
    assert sums.values(ALONE) == {"low": 0.5, "high": 2.0, "span": 1.5}
    with pytest.raises(UserError, match=r"figures low.*\[figures-undeclared\]"):
        sums.plus({"low": torch.tensor(1.0)}, counted=True)


def test_weights_by_wpo_need_their_output_of_the_head_and_an_alpha_divergence_stays_finite_in_float32() -> None:
    targets = Targets(torch.zeros(2), torch.ones(2).long())
    with pytest.raises(ValueError, match="log_sum_sq_probs"):
        make_pairs(targets, PairLogps(torch.zeros(1), torch.zeros(1)), PairOptions(use_weighting=True))
    options = PairOptions(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=2.0)
    assert torch.isfinite(score(torch.tensor([1e4, -1e4]), options)).all()
