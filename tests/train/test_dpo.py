"""Every loss of TRL's DPOTrainer, over any layout and any micro-batches, is TRL's own of one padded batch."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from test_pairs import a_pair
from tiny_models import tiny_model
from trl import DPOConfig, DPOTrainer

from packtrain.attention.backends import attend_by, own_attention
from packtrain.config.rules import check
from packtrain.config.schema import LossType, Model, Objective, RunConfig
from packtrain.data.pairs import PairDataset, Preference
from packtrain.errors import CheckFailed, UserError
from packtrain.packing.balance import Limits
from packtrain.packing.batches import make_schedule
from packtrain.packing.pairs import Layout, collate_pairs
from packtrain.packing.segments import Segments
from packtrain.train import dpo_start
from packtrain.train.dpo import FIGURES, PackedDPOTrainer, unsplittable
from packtrain.train.dpo_stages import _check_sorting_losses
from packtrain.train.dpo_start import check_pair_forward, check_start
from packtrain.train.loader import PairSteps
from packtrain.train.model import load_tokenizer
from packtrain.train.stop import StopRequest
from packtrain.train.whole_steps import Course, placeholder

TOKENIZER = load_tokenizer(Model(tokenizer="quickstart"))
LAYOUTS: tuple[Layout, ...] = ("padding", "flat", "shared")
SPLITS = ([[0, 1, 2, 3, 4, 5, 6]], [[2, 0, 5], [6], [], [4, 1, 3]])
ALONE = {"exo_pair": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.1}, "aot": {"label_smoothing": 0.1}}
TOGETHER: list[dict[str, Any]] = [
    {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.7, 0.3]},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},  # MPO
    {"loss_type": ["robust", "exo_pair"], "label_smoothing": 0.3},
    {"loss_type": ["sigmoid"], "f_divergence_type": "forward_kl"},
    {"loss_type": ["sigmoid", "sft"], "f_divergence_type": "js_divergence"},
    {"loss_type": ["hinge"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},
    {"loss_type": ["sigmoid"], "ld_alpha": 0.3},
    {"loss_type": ["ipo", "sft"], "ld_alpha": 0.0},
    {"loss_type": ["sigmoid"], "use_weighting": True},
    {"loss_type": ["apo_zero", "nca_pair"], "use_weighting": True, "ld_alpha": 0.5},
    {"loss_type": ["discopop"], "discopop_tau": 0.5},
    {"loss_type": ["sigmoid"], "beta": 0.7},
]


class _Pairs:
    """As a PairDataset, of pairs in memory: 7, of odd lengths."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        shapes = [(10, 5, 9), (1, 4, 4), (33, 1, 2), (2, 7, 7), (5, 20, 3), (18, 6, 11), (1, 1, 1)]
        self.pairs = [a_pair(rng, *shape) for shape in shapes]
        self.lengths = np.array([len(p.chosen.input_ids) + len(p.rejected.input_ids) for p in self.pairs], np.int32)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Preference:
        return self.pairs[index]


PAIRS = _Pairs()


class _TRL(DPOTrainer):
    """TRL's trainer, given padded batches."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


def policy() -> torch.nn.Module:
    return tiny_model("llama")


def another() -> torch.nn.Module:
    """A reference that is not the policy."""
    model = tiny_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


def arguments(folder: Path, **objective: Any) -> DPOConfig:
    return DPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        activation_checkpointing=False,
        max_length=None,
        remove_unused_columns=False,
        disable_tqdm=True,
        max_steps=1,
        **objective,
    )


def steps_of(layout: Layout, tokens: int | None = None) -> PairSteps:
    """All pairs as one step, in rows of so many `tokens`."""
    schedule = make_schedule(
        PAIRS.lengths,
        limits=Limits(examples=None if tokens else len(PAIRS), tokens=tokens),
        mode="padding_free" if tokens is None else "packed",
        strategy="best_fit",
        examples_per_step=len(PAIRS),
        tokens_per_step=None,
        max_steps=1,
        epochs=1.0,
        seed=0,
        shuffle=False,
        attention_cost=0.0,
    )
    return PairSteps(cast(PairDataset, PAIRS), schedule, layout, 0)


def ours(folder: Path, layout: Layout, *, reference: Any = None, **objective: Any) -> PackedDPOTrainer:
    """packtrain's trainer, ready for step 1."""
    trainer = PackedDPOTrainer(
        cast(Any, policy()),
        arguments(folder, **objective),
        TOKENIZER,
        course=Course(steps_of(layout), None, StopRequest(), folder, {}),
        reference=reference or cast(Any, another()),
    )
    if layout != "padding":
        attend_by(trainer.model, "segmented")
        attend_by(trainer.ref_model, "segmented")
    return trainer


def gradient(model: torch.nn.Module) -> torch.Tensor:
    parts = [p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(parts)


def of_trl(folder: Path, **objective: Any) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and logged figures of one padded batch of all pairs."""
    trainer = _TRL(
        model=cast(Any, policy()),
        ref_model=cast(Any, another()),
        args=arguments(folder, **objective),
        processing_class=TOKENIZER,
        train_dataset=placeholder({"prompt_ids": [[0]], "chosen_ids": [[0]], "rejected_ids": [[0]]}),
    )
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, collate_pairs(PAIRS.pairs, 0, "padding"), False)
    loss.backward()
    return loss.item(), gradient(trainer.model), {k: v[0] for k, v in trainer._metrics["train"].items()}


def in_parts(trainer: PackedDPOTrainer, parts: list[list[int]]) -> tuple[float, torch.Tensor, dict[str, float]]:
    """The same of a step of ours in these micro-batches."""
    trainer.model.train()
    batches = [cast(PairSteps, trainer.steps).collate(part) for part in parts]
    counts = torch.tensor([[b.trained, b.tokens, b.slots, b.examples] for b in batches]).sum(0)
    total = 0.0
    for batch in batches:
        loss = trainer.loss_of(trainer.model, batch, counts)
        loss.backward()
        total += loss.item()
    return total, gradient(trainer.model), trainer.figures()


def assert_all_equal_trl(folder: Path, **objective: Any) -> None:
    loss, grad, figures = of_trl(folder, **objective)
    assert set(figures) - {"num_tokens"} == set(FIGURES)
    splits = SPLITS[:1] if unsplittable(objective["loss_type"]) else SPLITS
    for layout in LAYOUTS:
        trainer = ours(folder, layout, **objective)
        for parts in splits:
            case = f"{layout} in {len(parts)} micro-batches"
            found, slope, logged = in_parts(trainer, parts)
            assert found == pytest.approx(loss, rel=1e-5), case
            assert ((slope - grad).norm() / grad.norm()).item() < 1e-4, case
            for name in FIGURES:
                assert logged[name] == pytest.approx(figures[name], rel=1e-5, abs=1e-5), (case, name)


def known_to_trl() -> set[str]:
    return set(re.findall(r'\bloss_type == "(\w+)"', inspect.getsource(DPOTrainer._compute_loss)))


def test_the_config_knows_every_loss_of_the_installed_trl() -> None:
    assert known_to_trl() == set(get_args(LossType))


@pytest.mark.parametrize("loss_type", sorted(known_to_trl()))
def test_every_loss_gradient_and_figure_equals_trl_padding(loss_type: str, tmp_path: Path) -> None:
    assert_all_equal_trl(tmp_path, loss_type=[loss_type], **ALONE.get(loss_type, {}))


@pytest.mark.parametrize("objective", TOGETHER, ids=lambda o: "-".join(f"{v}" for v in o.values()))
def test_losses_together_and_their_settings_equal_trl_padding(objective: dict[str, Any], tmp_path: Path) -> None:
    assert_all_equal_trl(tmp_path, **objective)


def test_a_loss_that_is_not_a_mean_over_pairs_is_told_from_those_that_are(tmp_path: Path) -> None:
    """Each loss of pairs, sorted ones aside, is that of each pair alone, averaged: what the parts of a step are joined by."""
    trainer = ours(tmp_path, "padding", loss_type=["sigmoid"], label_smoothing=0.1)
    steps = cast(PairSteps, trainer.steps)
    apart = set()
    for name in known_to_trl():
        trainer.loss_types = [name]
        trainer.all_loss_weights = [1.0]
        one_by_one = np.mean([trainer.loss_alone(steps.collate([n])) for n in range(len(PAIRS))])
        if trainer.loss_alone(steps.collate(range(len(PAIRS)))) != pytest.approx(one_by_one, rel=1e-4):
            apart.add(name)
    assert apart == {"aot", "aot_unpaired", "sft"}
    assert unsplittable(sorted(apart)) == ["aot", "aot_unpaired"]


# -- what is refused


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({"loss_type": ["sigmoid", "sft"], "use_weighting": True}, "TRL cannot weigh the pairs"),
        ({"loss_type": ["aot"], "use_weighting": True}, "would get the weights of others"),
        ({"loss_type": ["exo_pair"]}, "exo_pair needs label smoothing"),
        ({"loss_type": ["apo_zero"], "f_divergence_type": "forward_kl"}, "not defined for forward_kl"),
    ],
)
def test_what_trl_cannot_compute_is_refused_by_the_config(objective: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        of_trl(tmp_path, **objective)
    config = RunConfig(objective=Objective(kind="dpo", **objective))
    (finding,) = (one for one in check(config, set()) if one.keys[0].startswith("objective."))
    assert said in finding.what


def test_label_smoothing_that_trl_passes_over_is_refused_by_the_config(tmp_path: Path) -> None:
    """TRL takes it for every loss and uses it in few: this finds those few."""
    uses = set()
    for name in known_to_trl() - {"exo_pair"}:
        losses = [of_trl(tmp_path, loss_type=[name], label_smoothing=smoothing)[0] for smoothing in (0.0, 0.2)]
        if losses[0] != losses[1]:
            uses.add(name)
        config = RunConfig(objective=Objective(kind="dpo", loss_type=cast(Any, name), label_smoothing=0.2))
        refused = any("takes no label smoothing" in problem.what for problem in check(config, set()))
        assert refused == (losses[0] == losses[1]), name
    assert uses == {"robust", "aot", "aot_unpaired"}


@pytest.mark.parametrize("loss_type", ["aot", ["sigmoid", "aot_unpaired"]])
def test_losses_that_sort_the_pairs_of_a_step_are_refused_where_it_is_split(loss_type: Any) -> None:
    config = RunConfig(objective=Objective(kind="dpo", loss_type=loss_type))
    _check_sorting_losses(config, steps_of("flat"))
    with pytest.raises(UserError, match=r"sorts all pairs of a step.*micro-batches"):
        _check_sorting_losses(config, steps_of("flat", tokens=80))
    two = steps_of("flat")
    with pytest.raises(UserError, match="2 processes"):
        _check_sorting_losses(config, PairSteps(two.data, two.schedule, "flat", 0, rank=0, world_size=2))
    _check_sorting_losses(RunConfig(objective=Objective(kind="dpo")), steps_of("flat", tokens=80))


# -- what is checked before step 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_is_its_own_reference_starts_at_ln_2(layout: Layout, tmp_path: Path) -> None:
    trainer = ours(tmp_path, layout, reference=policy(), loss_type=["sigmoid"])
    assert check_start(trainer) == pytest.approx(math.log(2), abs=1e-6)
    check_pair_forward(trainer, "sdpa")


@pytest.mark.parametrize("objective", [{"loss_type": ["ipo", "sft"]}, {"loss_type": ["sppo_hard"], "ld_alpha": 0.5}])
def test_other_losses_start_at_their_own_value_of_a_zero_margin(objective: dict[str, Any], tmp_path: Path) -> None:
    trainer = ours(tmp_path, "shared", reference=policy(), **objective)
    found = check_start(trainer)
    if objective["loss_type"] == ["sppo_hard"]:
        assert found == pytest.approx(2 * (0.5 / 0.1) ** 2, rel=1e-6)
    with pytest.raises(CheckFailed):
        check_start(ours(tmp_path, "shared", reference=another(), **objective))


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_another_reference_is_refused_and_the_side_that_differs_named(side: str, tmp_path: Path) -> None:
    trainer = ours(tmp_path, "padding", reference=policy(), loss_type=["sigmoid"], precompute_ref_log_probs=True)
    batch = cast(PairSteps, trainer.steps).collate(range(len(PAIRS)))
    trainer.precompute_ref_logps = False
    with torch.no_grad():
        known = np.stack([part.numpy() for part in trainer.policy_logps(batch)], axis=1)
    known[:, ["chosen", "rejected"].index(side)] += 0.01
    trainer.precompute_ref_logps = True
    trainer.steps = PairSteps(**{**trainer.steps.__dict__, "reference": known})
    with pytest.raises(
        CheckFailed, match=rf"the first loss is 0\.69\d+, but 0\.6931.*of the {side} answers they differ by"
    ):
        check_start(trainer)


def test_dropout_in_the_reference_is_refused(tmp_path: Path) -> None:
    trainer = ours(tmp_path, "padding", reference=policy(), loss_type=["sigmoid"])
    for layer in trainer.ref_model.model.layers:
        layer.mlp.register_forward_hook(lambda _, __, out: torch.nn.functional.dropout(out, 0.1))
    with pytest.raises(CheckFailed, match="the first loss is"):
        check_start(trainer)


@pytest.mark.parametrize("layout", ["flat", "shared"])
def test_a_row_whose_tokens_see_too_much_or_come_back_wrong_is_caught(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ours(tmp_path, layout, loss_type=["sigmoid"])
    attention = own_attention(policy())
    check_pair_forward(trainer, attention)
    batch = cast(PairSteps, trainer.steps).collate(range(len(PAIRS)))
    told = batch.inputs["layout"]
    one = Segments((sum(told.segments.lengths),), ())  # all one document
    for broken in (replace(told, segments=one), replace(told, rows=told.rows.roll(1))):
        wrong = replace(batch, inputs={**batch.inputs, "layout": broken})
        monkeypatch.setattr(dpo_start, "_first", lambda _, wrong=wrong: wrong)
        with pytest.raises(CheckFailed, match="from padded batches and full logits of LlamaForCausalLM"):
            check_pair_forward(trainer, attention)
