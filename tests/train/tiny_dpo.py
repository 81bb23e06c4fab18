"""Preferences and answers with labels in memory: seven of random tokens, a tiny model, and packtrain's trainer on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import tiny_models
import torch
from tiny_models import a_pair, off, tiny_model
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from packtrain.attention.backends import attend_by
from packtrain.config.objective import Objective
from packtrain.config.schema import Batch, Model, Packing
from packtrain.data.dataset import Document, Preference
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.model.load import base_model
from packtrain.objectives.dpo.run import DPOLoss
from packtrain.objectives.kto.run import KTOLoss, UnpairedSteps
from packtrain.packing.collate import RowLayout
from packtrain.packing.schedule import make_schedule
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.loss import Setup
from packtrain.train.objectives.pairs_and_answers import PairSteps
from packtrain.train.run_state import LoopSettings, StopRequest
from packtrain.train.verify.loss_proofs import check_answer_forward, check_first_loss

TOKENIZER = load_tokenizer(Model(tokenizer="quickstart"))
LAYOUTS: tuple[RowLayout, ...] = ("padding", "flat", "shared")
OF_KTO: tuple[RowLayout, ...] = ("padding", "flat")
SPLITS = ([[0, 1, 2, 3, 4, 5, 6]], [[2, 0, 5], [6], [], [4, 1, 3]])
"""A step of seven examples in one micro-batch, and in several of which one is empty."""
SHAPES = [(10, 5, 9), (1, 4, 4), (33, 1, 2), (2, 7, 7), (5, 20, 3), (18, 6, 11), (1, 1, 1)]
"""Tokens of a prompt, of a chosen (or the only) answer, and of a rejected one."""
LABELS = [True, False, False, True, True, False, True]
Step = tuple[float, torch.Tensor, dict[str, float]]
"""Loss, gradient and figures."""


class Examples(list):
    """As a data set, of examples in memory."""

    report = SimpleNamespace(sources=("memory",))

    def __init__(self, items: Sequence[Any], lengths: Sequence[int], labels: Sequence[bool] = LABELS) -> None:
        super().__init__(items)
        self.lengths, self.labels = np.array(lengths, np.int32), np.array(labels)
        self.trained = np.array([shape[1] for shape in SHAPES], np.int32)


def pairs() -> Examples:
    rng = np.random.default_rng(1)
    made = [a_pair(rng, *shape) for shape in SHAPES]
    return Examples(made, [len(one.chosen.input_ids) + len(one.rejected.input_ids) for one in made])


def answers(labels: Sequence[bool] = LABELS) -> Examples:
    rng, lengths = np.random.default_rng(1), [prompt + answer for prompt, answer, _ in SHAPES]
    ids = [rng.integers(3, 97, length).astype(np.int32) for length in lengths]
    made = [Document(one, np.arange(len(one)) >= shape[0]) for one, shape in zip(ids, SHAPES, strict=True)]
    return Examples(made, lengths, labels)


PAIRS, ANSWERS = pairs(), answers()


def policy() -> torch.nn.Module:
    return tiny_model("llama")


def another() -> torch.nn.Module:
    """A reference that is not the policy."""
    model = tiny_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


def steps_of(layout: RowLayout, tokens: int | None = None, *, kind: str = "dpo", a_step: int = 7, **given: Any) -> Any:
    """An epoch of all examples, so many a step (all of them), in rows of so many `tokens` (all in one)."""
    mode: Any = "padding" if (kind, layout) == ("kto", "padding") else "padding_free" if tokens is None else "packed"
    examples, steps = (PAIRS, PairSteps) if kind == "dpo" else (ANSWERS, UnpairedSteps)
    batch = Batch(examples_per_step=a_step, examples_per_device=len(examples), tokens_per_device=tokens)
    return steps(examples, make_schedule(examples.lengths, Packing(mode=mode), batch), layout, 0, **given)  # type: ignore[arg-type]


OTHER = "another"


def ours(
    folder: Path,
    layout: RowLayout,
    *,
    kind: str = "dpo",
    model: Any = None,
    reference: Any = OTHER,
    steps: Any = None,
    **given: Any,
) -> StepTrainer:
    """packtrain's trainer, ready for step 1, by arguments of TRL; without a `model` on `policy`, without a `reference` against
    `another`. Its models attend by Segments unless they are padded."""
    precomputed = "precomputed" if given.pop("precompute_ref_log_probs", False) else "auto"
    loss, beta = given.pop("loss_type", None), given.pop("beta", 0.1)
    objective = Objective(kind=kind, loss=loss, options=given, beta=beta, reference=precomputed)
    of_loop = LoopSettings(steps or steps_of(layout, kind=kind), {}, StopRequest(), folder, {})
    held_to = another() if reference == OTHER else reference
    setup = Setup(model or policy(), TOKENIZER, of_loop)
    trainer: Any = StepTrainer((DPOLoss if kind == "dpo" else KTOLoss)(setup, objective, held_to), of_loop)
    if layout != "padding":
        for one in filter(None, (trainer.model, trainer.loss.reference)):
            attend_by(base_model(one), "segmented")
    return trainer


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """Of all weights, which have none then."""
    found = tiny_models.gradient(model)
    model.zero_grad()
    return found


def in_parts(trainer: Any, parts: list[list[int]]) -> Step:
    """A step of ours in these micro-batches."""
    trainer.model.train()
    batches = trainer.steps.complete([trainer.steps.collate(part) for part in parts], 0)
    counts = torch.tensor([batch.counts for batch in batches]).sum(0)
    trainer.loss.open_step(batches)
    total = 0.0
    for batch in batches:
        loss = trainer.loss.compute(trainer.model, batch, counts)
        loss.backward()
        total += loss.item()
    return total, gradient(trainer.model), trainer.loss.pop_metrics()


def trl_batch(pairs: Sequence[Preference]) -> dict[str, torch.Tensor]:
    """The padded batch of TRL's own collator."""
    rows = []
    for pair in pairs:
        prompt = int((~pair.chosen.loss_mask).sum())
        both = {"chosen_ids": pair.chosen, "rejected_ids": pair.rejected}
        ids = {name: document.input_ids[prompt:].tolist() for name, document in both.items()}
        rows.append({"prompt_ids": pair.chosen.input_ids[:prompt].tolist(), **ids})
    return DataCollatorForPreference(pad_token_id=0)(rows)


def rows(labels: Sequence[bool] = LABELS) -> list[dict[str, Any]]:
    """The answers as TRL's collator takes them, with the completions of mismatched pairs as TRL makes them of one batch."""
    parts = [(one.input_ids.tolist(), shape[0]) for one, shape in zip(ANSWERS, SHAPES, strict=True)]
    answers = [ids[asked:] for ids, asked in parts]
    return [
        {"prompt_ids": ids[:asked], "completion_ids": ids[asked:], "label": label, "KL_completion_ids": other}
        for (ids, asked), label, other in zip(parts, labels, answers[-1:] + answers[:-1], strict=True)
    ]


def trl_trainer(folder: Path, kind: str = "dpo", **given: Any) -> Any:
    """TRL's own trainer, for padded batches that it is given; its data set is not used."""
    config: Any = DPOConfig if kind == "dpo" else KTOConfig
    usual = {"bf16": False, "activation_checkpointing": False, "max_length": None, "max_steps": 1}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False}
    settings = config(output_dir=str(folder), **{**usual, **quiet, "per_device_train_batch_size": 7, **given})

    class Padded(DPOTrainer if kind == "dpo" else KTOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    columns = ("chosen_ids", "rejected_ids") if kind == "dpo" else ("completion_ids", "label")
    unused = datasets.Dataset.from_dict({name: [True if name == "label" else [0]] for name in ("prompt_ids", *columns)})
    models: Any = {"model": policy(), "ref_model": another()}
    trainer = Padded(**models, args=settings, processing_class=TOKENIZER, train_dataset=unused)
    trainer.model.train()
    return trainer


def of_trl(folder: Path, kind: str = "dpo", *, labels: Any = LABELS, most: int | None = None, **given: Any) -> Step:
    """A step of TRL's on one padded batch of all examples."""
    trainer, batch = trl_trainer(folder, kind, **given), trl_batch(PAIRS)
    if kind == "kto":
        batch = DataCollatorForUnpairedPreference(pad_token_id=0, max_length=most)(rows(labels))
    loss = trainer._compute_loss(trainer.model, batch, False)
    loss.backward()
    return loss.item(), gradient(trainer.model), {name: one[0] for name, one in trainer._metrics["train"].items()}


def assert_same_step(found: Step, expected: Step, case: str) -> None:
    """Losses, gradients and figures are equal but for rounding."""
    loss, grad, figures = expected
    assert found[0] == pytest.approx(loss, rel=1e-5), case
    assert off(found[1], grad) < 1e-4, case
    assert set(figures) - {"num_tokens"} == set(found[2]), case
    for name, value in found[2].items():
        assert value == pytest.approx(figures[name], rel=1e-5, abs=1e-5), (case, name)


def start_loss(trainer: Any) -> float:
    """The loss of the first pairs, once it was checked to be that of a zero margin."""
    return check_first_loss(trainer.loss, trainer.steps.first_batch(0))


def check_forward(trainer: Any, attention: str) -> None:
    """Compares the log-probabilities of the first pairs with those of a padded batch."""
    check_answer_forward(trainer.loss, trainer.steps, 0, attention)
