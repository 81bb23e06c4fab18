"""The same documents through TRL's own SFTTrainer (padding) give the same losses, gradients and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pytest
import torch
from running import base_config, train, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl_trainers import settings

DOCUMENTS, BATCH, STEPS = 24, 4, 6


@pytest.fixture(scope="module")
def tokenised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Documents of 2 to 90 tokens, with parts that are not trained, as a jsonl of `input_ids` and `labels`."""
    rng = np.random.default_rng(0)
    rows = []
    for length in rng.integers(2, 90, DOCUMENTS):
        ids = rng.integers(5, 400, length)
        # the label of a document's first token is never a target: TRL counts it all the same unless it is masked
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        rows.append({"input_ids": ids.tolist(), "labels": np.where(mask, ids, -100).tolist()})
    return write_jsonl(tmp_path_factory.mktemp("tokens") / "tokens.jsonl", rows), rows


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that both begin with."""
    folder = tmp_path_factory.mktemp("start")
    config = base_config(folder, trainer={"max_steps": 1}, optim={"learning_rate": 0.0})
    return train(folder, config, name="start").folder / "final"


@pytest.fixture(scope="module")
def theirs(tokenised: tuple[Path, list[dict]], start: Path, tmp_path_factory: pytest.TempPathFactory) -> SFTTrainer:
    """TRL's trainer, at its end."""
    given = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "learning_rate": 1e-3, "weight_decay": 0.1}
    given |= {"optim": "adamw_torch_fused", "lr_scheduler_type": "linear", "warmup_steps": 2, "max_grad_norm": 0.5}
    given |= {"train_sampling_strategy": "sequential", "dataset_kwargs": {"skip_prepare_dataset": True}}
    trainer = SFTTrainer(
        model=cast(Any, AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)),
        args=SFTConfig(**settings(tmp_path_factory.mktemp("trl"), **given)),
        train_dataset=datasets.Dataset.from_list(tokenised[1]),
        processing_class=AutoTokenizer.from_pretrained(start),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("mode", ["padding", "packed"])
def test_losses_gradients_and_weights_equal_trl_padding(
    mode: str, tokenised: tuple[Path, list[dict]], start: Path, theirs: SFTTrainer, tmp_path: Path
) -> None:
    expected = [line for line in theirs.state.log_history if "loss" in line]

    config = base_config(
        tmp_path,
        model={"init": "pretrained", "path": str(start), "config": {}, "tokenizer": None},
        data={"train": str(tokenised[0]), "shuffle": False, "max_length": 100},
        batch={"examples_per_step": BATCH, "tokens_per_device": 128},
        optim={"schedule": "linear", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5},
        trainer={"max_steps": STEPS},
    )
    ours = train(tmp_path, config, f"packing.mode={mode}", name="ours")
    assert ours.losses == pytest.approx([line["loss"] for line in expected], rel=1e-5)
    assert [s["grad_norm"] for s in ours.steps] == pytest.approx([line["grad_norm"] for line in expected], rel=1e-5)
    assert [s["lr"] for s in ours.steps] == pytest.approx([line["learning_rate"] for line in expected])
    weights = ours.weights()
    for name, parameter in theirs.model.named_parameters():
        if name in weights:  # a tied head is stored once
            assert ((weights[name] - parameter).norm() / parameter.norm()).item() < 1e-5, name
