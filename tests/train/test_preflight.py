"""Before step 1 and at it: the proof and the first-step watch in a real run, also on code that comes with a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from here import run_here
from running import LLAMA, base_config, packtrain, written
from tiny_models import break_borders, bring_code, documents, tiny_model
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention import segmented
from packtrain.attention.backends import attend_by, own_attention
from packtrain.errors import CheckFailed
from packtrain.model.forward import add_loss_sum
from packtrain.packing.collate import collate_flat
from packtrain.packing.segments import Segments
from packtrain.train.preflight import FirstStepWatch

REMOTE_CODE = '''
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"
    mean_from = 0

class RunningMeanEmbedding(nn.Embedding):
    """Adds the mean of all tokens before: causal, and blind to documents. With mean_from, only in longer rows than that, and
    only after the first optimizer step."""
    mean_from, first = 0, None

    def forward(self, ids):
        embedded = super().forward(ids)
        if self.first is None:
            self.first = self.weight.detach().clone()
        if ids.shape[1] <= self.mean_from or (self.mean_from and torch.equal(self.first, self.weight)):
            return embedded
        count = torch.arange(1, ids.shape[1] + 1, device=ids.device)[:, None]
        return embedded + embedded.cumsum(1) / count

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = RunningMeanEmbedding(config.vocab_size, config.hidden_size)
        self.model.embed_tokens.mean_from = config.mean_from
        self.post_init()
'''


def remote_config(folder: Path, mean_from: int) -> dict[str, Any]:
    (folder / "remote").mkdir()
    given = {**LLAMA, "mean_from": mean_from, "vocab_size": 951, "initializer_range": 0.2}
    model = {"path": bring_code(folder / "remote", REMOTE_CODE, given), "init": "random", "trust_remote_code": True}
    model |= {"tokenizer": "quickstart", "config": {}}
    return base_config(folder, model=model, trainer={"max_steps": 3})


def test_remote_code_is_proved_like_any_other_and_trains_the_same_in_every_mode(tmp_path: Path) -> None:
    config = remote_config(tmp_path, mean_from=0)
    packed, padded = (run_here(tmp_path, config, f"packing.mode={one}", name=one) for one in ("packed", "padding"))
    assert packed.summary["verify"]["backend"] == "mixers"
    assert packed.losses == pytest.approx(padded.losses, rel=1e-5)


def test_a_leak_that_shows_only_in_real_rows_of_step_2_ends_the_run_there_with_both_losses(tmp_path: Path) -> None:
    """The proof's row has 37 tokens; these rows have up to 256, of documents that are shorter than 200."""
    config = remote_config(tmp_path, mean_from=200)
    result = packtrain("sft", written(tmp_path, config), expect=3)
    assert "step 2" in result.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "run" / "final").exists()


def watched() -> tuple[Any, dict[str, Any], FirstStepWatch]:
    model = tiny_model("llama")
    watch = FirstStepWatch(own_attention(model), 1e-4)
    add_fused_lm_head(model)
    add_loss_sum(model)
    items = [replace(one, loss_mask=one.loss_mask | True) for one in documents((30, 12, 44, 1, 9))]
    return model, collate_flat(items), watch


def test_the_watch_compares_rows_with_documents_alone_and_leaves_everything_as_it_was() -> None:
    model, row, watch = watched()
    attend_by(model, "segmented")
    state = torch.get_rng_state()
    model.train()
    assert watch.check(model, row, step=1) < 1e-5
    assert model.training and own_attention(model) == segmented.NAME
    assert torch.equal(torch.get_rng_state(), state)


def test_the_watch_sees_a_single_forgotten_border(monkeypatch: pytest.MonkeyPatch) -> None:
    model, row, watch = watched()
    break_borders(monkeypatch, lambda _, row: Segments((sum(row.lengths[:2]), *row.lengths[2:])))
    attend_by(model, "segmented")
    with pytest.raises(CheckFailed, match=r"document 2 .* step 1 has loss [\d.]+ packed and [\d.]+ alone"):
        watch.check(model, row, step=1)


def test_the_watch_sees_errors_that_cancel_in_the_sum_and_none_where_the_loss_is_small() -> None:
    model, row, watch = watched()
    inner = model.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        losses = inner(*args, **kwargs)
        if "segments" in kwargs:
            losses[0, 3] += 0.5
            losses[0, 50] -= 0.5
        return losses * scale

    model.forward = shifted
    scale = 1.0
    with pytest.raises(CheckFailed, match=r"document [13] of the first row of step 1 has loss"):
        watch.check(model, row, step=1)
    scale = 1e-5  # a model that knows its data: a thousandth of a loss that is hardly there is rounding
    watch.check(model, row, step=1)
