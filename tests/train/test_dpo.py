"""Every loss of TRL's DPOTrainer and KTOTrainer, over any layout and any micro-batches, is TRL's own of one padded batch."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tiny_dpo
import torch
from tiny_dpo import LAYOUTS, PAIRS, SPLITS, assert_same_step, in_parts, of_trl, ours, steps_of, trl_trainer
from tiny_models import tiny_model
from trl import DPOTrainer

from packtrain.config.objective import Objective
from packtrain.config.rules import check_combinations
from packtrain.config.schema import Batch, Packing, RunConfig
from packtrain.data.dataset import PairDataset
from packtrain.errors import UserError
from packtrain.model.spread import Ranks
from packtrain.objectives.dpo.run import DPO
from packtrain.objectives.dpo.spec import SPEC
from packtrain.objectives.spec import OBJECTIVES
from packtrain.packing.collate import RowLayout
from packtrain.packing.schedule import make_schedule
from packtrain.train.objectives.pairs_and_answers import PairSteps

ALONE = {"exo_pair": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.1}, "aot": {"label_smoothing": 0.1}}
TOGETHER: list[dict[str, Any]] = [  # tests/unit/objectives/test_losses.py has all of them
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},  # MPO
    {"loss_type": ["hinge"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},
    {"loss_type": ["apo_zero", "nca_pair"], "use_weighting": True, "ld_alpha": 0.5},
]


def assert_all_equal_trl(folder: Path, kind: str = "dpo", **objective: Any) -> tiny_dpo.Step:
    expected = of_trl(folder, kind, **objective)
    assert set(expected[2]) - {"num_tokens"} == {one.name for one in OBJECTIVES[kind].figures}
    splits = SPLITS[:1] if {*objective["loss_type"]} & {*SPEC.sorting_losses} else SPLITS
    for layout in LAYOUTS if kind == "dpo" else tiny_dpo.OF_KTO:
        trainer = ours(folder, layout, kind=kind, **objective)
        for parts in splits:
            assert_same_step(in_parts(trainer, parts), expected, f"{layout} in {len(parts)} micro-batches")
    return expected


def known_to_trl() -> set[str]:
    return set(re.findall(r'\bloss_type == "(\w+)"', inspect.getsource(DPOTrainer._compute_loss)))


@pytest.mark.sample(without=("apo_down", "exo_pair", "robust", "sigmoid_norm", "sppo_hard"))
@pytest.mark.parametrize("loss_type", sorted(known_to_trl()))
def test_every_loss_gradient_and_figure_equals_trl_padding(loss_type: str, tmp_path: Path) -> None:
    assert_all_equal_trl(tmp_path, loss_type=[loss_type], **ALONE.get(loss_type, {}))


@pytest.mark.parametrize("objective", TOGETHER, ids=lambda o: "-".join(f"{v}" for v in o.values()))
def test_losses_together_and_their_settings_equal_trl_padding(objective: dict[str, Any], tmp_path: Path) -> None:
    assert_all_equal_trl(tmp_path, **objective)


def test_shared_prompts_are_as_near_to_float64_as_unshared_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 the step is the same, in float32 no sum loses more. (Norms of gpt2 are float64 then; those of llama never.)"""

    def step(layout: RowLayout, dtype: torch.dtype) -> tuple[float, torch.Tensor]:
        monkeypatch.setattr(tiny_dpo, "policy", lambda: tiny_model("gpt2").to(dtype))
        monkeypatch.setattr(tiny_dpo, "another", lambda: moved(tiny_model("gpt2")).to(dtype))
        loss, gradient, _ = in_parts(ours(tmp_path, layout), SPLITS[0])
        return loss, gradient.double()

    def moved(model: Any) -> Any:
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 1.02
        return model

    loss, exact = step("flat", torch.float64)

    def gap(layout: RowLayout, dtype: torch.dtype) -> float:
        own_loss, own = step(layout, dtype)
        assert own_loss == pytest.approx(loss, rel=1e-6)  # the loss itself is float32
        return ((own - exact).norm() / exact.norm()).item()

    assert gap("shared", torch.float64) < 1e-13 and gap("padding", torch.float64) < 1e-6
    off = {layout: gap(layout, torch.float32) for layout in LAYOUTS}
    assert off["shared"] < 2 * max(off["flat"], off["padding"]) < 1e-5


def test_a_loss_that_is_not_a_mean_over_pairs_is_told_from_those_that_are(tmp_path: Path) -> None:
    """Each loss of pairs, sorted ones aside, is that of each pair alone, averaged: what the parts of a step are joined by."""
    trainer = ours(tmp_path, "padding", loss_type=["sigmoid"], label_smoothing=0.1)
    steps, loss = cast(PairSteps, trainer.steps), cast(Any, trainer.loss)
    apart, numbers = set(), range(len(PAIRS))
    for name in known_to_trl():
        loss.weights = {name: 1.0}
        one_by_one = np.mean([loss.standalone_loss(steps.collate([number])) for number in numbers])
        if loss.standalone_loss(steps.collate(numbers)) != pytest.approx(one_by_one, rel=1e-4):
            apart.add(name)
    assert apart == {"aot", "aot_unpaired", "sft"}
    assert tuple(one for one in sorted(apart) if one in SPEC.sorting_losses) == SPEC.sorting_losses


# -- what is refused


def configured(of_trl: dict[str, Any]) -> Objective:
    """The objective of arguments of TRL's."""
    options = {name: value for name, value in of_trl.items() if name != "loss_type"}
    return Objective(kind="dpo", loss=of_trl.get("loss_type"), options=options)


@pytest.mark.parametrize(
    ("objective", "code"),
    [
        ({"loss_type": ["sigmoid", "sft"], "use_weighting": True}, "weighting-undefined"),
        ({"loss_type": ["aot"], "use_weighting": True}, "weighting-undefined"),
        ({"loss_type": ["exo_pair"]}, "exo-needs-smoothing"),
        ({"loss_type": ["apo_zero"], "f_divergence_type": "forward_kl"}, "divergence-undefined"),
    ],
)
def test_what_trl_cannot_compute_is_refused_by_the_config(objective: dict[str, Any], code: str, tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        of_trl(tmp_path, **objective)
    config = RunConfig(objective=configured(objective))
    (finding,) = (one for one in check_combinations(config, set()) if one.keys[0].startswith("objective."))
    assert finding.code == code


def test_label_smoothing_that_trl_passes_over_is_refused_by_the_config(tmp_path: Path) -> None:
    """TRL takes it for every loss and uses it in few: this finds those few."""
    uses = set()
    trainers = [trl_trainer(tmp_path, loss_type=["sigmoid"], label_smoothing=smoothing) for smoothing in (0.0, 0.2)]
    batch = tiny_dpo.trl_batch(PAIRS[:3])
    for name in known_to_trl() - {"exo_pair"}:
        losses = []
        for trainer in trainers:
            trainer.loss_types = [name]
            losses.append(trainer._compute_loss(trainer.model, batch, False).item())
        if losses[0] != losses[1]:
            uses.add(name)
        config = RunConfig(objective=configured({"loss_type": name, "label_smoothing": 0.2}))
        refused = any(problem.code == "smoothing-unused" for problem in check_combinations(config, set()))
        assert refused == (losses[0] == losses[1]), name
    assert uses == {"robust", "aot", "aot_unpaired"}


def test_a_loss_that_sorts_finds_the_only_step_in_two_micro_batches_in_a_schedule_and_in_a_stream(
    tmp_path: Path,
) -> None:
    lengths = np.full(400, 20, np.int32)
    lengths[[5, 6]] = 150  # step 1, which a summary of the schedule passes over
    schedule = make_schedule(lengths, Packing(), Batch(examples_per_step=4, tokens_per_device=230))
    assert schedule.summary(1).micro_batches_max == 1
    objective = DPO(RunConfig(objective=Objective(kind="dpo", loss="aot")))
    with pytest.raises(UserError, match="2 micro-batches"):
        objective.steps(cast(PairDataset, None), schedule, 0, Ranks(0, 1, torch.device("cpu")))
    with pytest.raises(UserError, match=f"{len(SPLITS[1])} micro-batches"):
        in_parts(ours(tmp_path, "flat", loss_type=["aot"]), SPLITS[1])


@pytest.mark.parametrize("loss_type", ["aot", ["sigmoid", "aot_unpaired"]])
def test_losses_that_sort_the_pairs_of_a_step_are_refused_where_it_is_split(loss_type: Any) -> None:
    def steps(objective: Objective, tokens: int | None = None, processes: int = 1) -> PairSteps:
        dpo = DPO(RunConfig(objective=objective))
        of = steps_of("flat", tokens=tokens)
        return dpo.steps(of.data, of.schedule, 0, Ranks(0, processes, torch.device("cpu")))

    sorting = Objective(kind="dpo", loss=loss_type)
    steps(sorting)
    with pytest.raises(UserError, match="micro-batches"):
        steps(sorting, tokens=80)
    with pytest.raises(UserError, match="2 processes"):
        steps(sorting, processes=2)
    steps(Objective(kind="dpo"), tokens=80)


@pytest.mark.parametrize(
    "objective",
    [
        {"loss_type": "kto"},
        {"loss_type": "apo_zero_unpaired"},
        {"loss_type": "kto", "beta": 0.7, "desirable_weight": 1.5, "undesirable_weight": 0.3},
        {"loss_type": "apo_zero_unpaired", "desirable_weight": 0.0, "undesirable_weight": 2.0},
    ],
    ids=lambda one: "-".join(map(str, one.values())),
)
def test_every_loss_of_kto_equals_trl_padding(objective: dict[str, Any], tmp_path: Path) -> None:
    expected = assert_all_equal_trl(tmp_path, "kto", **objective)
    assert (expected[2]["kl"] > 0.1) == (objective["loss_type"] == "kto")


@pytest.mark.parametrize("label", [True, False])
def test_steps_of_one_kind_of_answers_are_those_of_trl(label: bool, tmp_path: Path) -> None:
    labels = [label] * len(tiny_dpo.LABELS)
    expected = of_trl(tmp_path, "kto", labels=labels)
    steps = replace(steps_of("flat", kind="kto"), data=tiny_dpo.answers(labels))
    assert_same_step(in_parts(ours(tmp_path, "flat", kind="kto", steps=steps), SPLITS[1]), expected, "one kind")
    assert "rewards/margins" not in expected[2]


def test_mismatched_pairs_are_cut_as_by_trl_and_keep_to_the_limits_of_a_micro_batch(tmp_path: Path) -> None:
    longest = max(len(row["prompt_ids"]) + len(row["KL_completion_ids"]) for row in tiny_dpo.rows())
    assert longest == 38 and max(tiny_dpo.ANSWERS.lengths) == 34
    expected = of_trl(tmp_path, "kto", most=36)
    for layout in tiny_dpo.OF_KTO:
        steps = steps_of(layout, 40, kind="kto", max_length=36)
        batches = steps.mismatched()[0]
        assert len(batches) > 2 and max(batch.slots for batch in batches) <= 40
        rows_of = [batch.inputs.get("segments") for batch in batches]
        padded = [batch.inputs["input_ids"].shape[1] for batch in batches]
        lengths = [max(row.lengths) if row else slots for row, slots in zip(rows_of, padded, strict=True)]
        assert max(lengths) == 36
        assert sum(batch.examples for batch in batches) == len(tiny_dpo.ANSWERS)
        assert_same_step(in_parts(ours(tmp_path, layout, kind="kto", steps=steps), SPLITS[1]), expected, layout)


def test_an_evaluation_is_one_step_over_the_whole_set(tmp_path: Path) -> None:
    loss, _, figures = of_trl(tmp_path, "kto")
    trainer = ours(tmp_path, "flat", kind="kto")
    trainer.evaluation = {"": replace(steps_of("flat", 40, kind="kto", a_step=3), whole=True)}
    trainer.evaluate()
    found = {name.removeprefix("eval_"): value for name, value in trainer.state.lines[-1].items()}
    assert found.pop("step") == 0 and found.pop("epoch") == 0
    assert found.pop("loss") == pytest.approx(loss, rel=1e-5) and found.pop("answers") == 7
    assert found == pytest.approx({name: figures[name] for name in found}, rel=1e-5, abs=1e-5)
