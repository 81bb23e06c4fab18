"""Preference optimisation in memory: seven pairs of random tokens, a tiny model, and packtrain's trainer on them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import numpy as np
import pytest
import torch
from test_pairs import a_pair
from tiny_models import tiny_model
from trl import DPOConfig

from packtrain.attention.backends import attend_by
from packtrain.config.objective import Objective
from packtrain.config.schema import Batch, Model, Packing
from packtrain.data.dataset import PairDataset, Preference
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.model.load import base_model
from packtrain.objectives.dpo.run import DPOLoss
from packtrain.packing.collate import RowLayout
from packtrain.packing.schedule import make_schedule
from packtrain.train.loader import Steps
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.loss import Setup
from packtrain.train.objectives.pairs_and_answers import PairSteps
from packtrain.train.run_state import LoopSettings, StopRequest
from packtrain.train.verify.loss_proofs import check_answer_forward, check_first_loss

TOKENIZER = load_tokenizer(Model(tokenizer="quickstart"))
LAYOUTS: tuple[RowLayout, ...] = ("padding", "flat", "shared")
SPLITS = ([[0, 1, 2, 3, 4, 5, 6]], [[2, 0, 5], [6], [], [4, 1, 3]])
"""A step of seven examples in one micro-batch, and in several of which one is empty."""


class Pairs:
    """As a PairDataset, of pairs in memory: 7, of odd lengths."""

    report = SimpleNamespace(sources=("memory",))

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        shapes = [(10, 5, 9), (1, 4, 4), (33, 1, 2), (2, 7, 7), (5, 20, 3), (18, 6, 11), (1, 1, 1)]
        self.pairs = [a_pair(rng, *shape) for shape in shapes]
        self.lengths = np.array([len(p.chosen.input_ids) + len(p.rejected.input_ids) for p in self.pairs], np.int32)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Preference:
        return self.pairs[index]


PAIRS = Pairs()


def policy() -> torch.nn.Module:
    return tiny_model("llama")


def another() -> torch.nn.Module:
    """A reference that is not the policy."""
    model = tiny_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


def arguments(folder: Path, config: type[Any] = DPOConfig, **given: Any) -> Any:
    """TRL's, `given` the objective's."""
    usual = {"bf16": False, "activation_checkpointing": False, "max_length": None, "max_steps": 1}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    return config(output_dir=str(folder), **{**usual, **quiet, **given})


def steps_of(
    layout: RowLayout, tokens: int | None = None, *, a_step: int = len(PAIRS), rank: int = 0, world_size: int = 1
) -> PairSteps:
    """An epoch of all pairs, so many a step (all of them), in rows of so many `tokens` (all in one)."""
    packing = Packing(mode="padding_free" if tokens is None else "packed")
    batch = Batch(examples_per_step=a_step, examples_per_device=len(PAIRS), tokens_per_device=tokens)
    schedule = make_schedule(PAIRS.lengths, packing, batch)
    return PairSteps(cast(PairDataset, PAIRS), schedule, layout, 0, rank, world_size)


OTHER = "another"


def ours(
    folder: Path,
    layout: RowLayout,
    *,
    model: Any = None,
    reference: Any = OTHER,
    steps: PairSteps | None = None,
    **given: Any,
) -> StepTrainer:
    """packtrain's trainer, ready for step 1; without a `model` on `policy`, without a `reference` against `another`."""
    objective = objective_of("dpo", **given)
    return trainer_of(DPOLoss, folder, steps or steps_of(layout), objective, model=model, reference=reference)


def objective_of(
    kind: str,
    *,
    loss_type: Any = None,
    beta: float = 0.1,
    precompute_ref_log_probs: bool = False,
    **options: Any,
) -> Objective:
    """Our config of these arguments of TRL."""
    reference = "precomputed" if precompute_ref_log_probs else "auto"
    return Objective(kind=kind, loss=loss_type, options=options, beta=beta, reference=reference)


def trainer_of(kind: type[Any], folder: Path, steps: Steps, objective: Objective, *, model: Any, reference: Any) -> Any:
    """A trainer by a loss of that kind over `steps`, on models that attend by Segments unless they are padded."""
    of_loop = LoopSettings(steps, {}, StopRequest(), folder, {})
    held_to = another() if reference == OTHER else reference
    trainer = StepTrainer(kind(Setup(model or policy(), TOKENIZER, of_loop), objective, held_to), of_loop)
    if steps.layout != "padding":
        for one in filter(None, (trainer.model, trainer.loss.reference)):
            attend_by(base_model(one), "segmented")
    return trainer


def gradient(model: torch.nn.Module) -> torch.Tensor:
    parts = [p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(parts)


def in_parts(trainer: Any, parts: list[list[int]]) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and figures of a step of ours in these micro-batches."""
    trainer.model.train()
    batches = [trainer.steps.collate(part) for part in parts]
    batches = trainer.steps.complete(batches, 0)
    counts = torch.tensor([batch.counts for batch in batches]).sum(0)
    trainer.loss.open_step(batches)
    total = 0.0
    for batch in batches:
        loss = trainer.loss.compute(trainer.model, batch, counts)
        loss.backward()
        total += loss.item()
    return total, gradient(trainer.model), trainer.loss.pop_metrics()


def padded_trainer(kind: type[Any], settings: Any, columns: dict[str, Any]) -> Any:
    """TRL's own trainer, for padded batches that it is given; its data set of those `columns` is not used."""

    class Padded(kind):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    rows = datasets.Dataset.from_dict({name: [value] for name, value in columns.items()})
    models = {"model": policy(), "ref_model": another()}
    trainer = Padded(**models, args=settings, processing_class=TOKENIZER, train_dataset=rows)
    trainer.model.train()
    return trainer


def step_of_trl(trainer: Any, batch: Any) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and logged figures of one padded batch."""
    loss = trainer._compute_loss(trainer.model, batch, False)
    loss.backward()
    return loss.item(), gradient(trainer.model), {name: one[0] for name, one in trainer._metrics["train"].items()}


def assert_same_step(found: Any, expected: Any, case: str) -> None:
    """Losses, gradients and figures are equal but for rounding."""
    loss, grad, figures = expected
    assert found[0] == pytest.approx(loss, rel=1e-5), case
    assert ((found[1] - grad).norm() / grad.norm()).item() < 1e-4, case
    assert set(figures) - {"num_tokens"} == set(found[2]), case
    for name, value in found[2].items():
        assert value == pytest.approx(figures[name], rel=1e-5, abs=1e-5), (case, name)


def start_loss(trainer: Any) -> float:
    """The loss of the first pairs, once it was checked to be that of a zero margin."""
    return check_first_loss(trainer.loss, trainer.steps.first_batch(0))


def check_forward(trainer: Any, attention: str) -> None:
    """Compares the log-probabilities of the first pairs with those of a padded batch."""
    check_answer_forward(trainer.loss, trainer.steps, 0, attention)
