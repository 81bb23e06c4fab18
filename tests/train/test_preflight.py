"""Before step 1 and at it: the proof and the first-step watch in a real run, also on code that comes with a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import LLAMA, base_config, packtrain, train
from tiny_models import tiny_model
from transformers import AttentionInterface
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention import segmented
from packtrain.attention.backends import attend_by, own_attention
from packtrain.data.dataset import Document
from packtrain.errors import CheckFailed
from packtrain.model.forward import add_loss_sum
from packtrain.packing.collate import collate_flat
from packtrain.packing.segments import Segments
from packtrain.train.preflight import FirstStepWatch

REMOTE_CODE = '''
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class RunningMeanConfig(LlamaConfig):
    model_type = "running_mean"
    mean_from = 0


class RunningMeanEmbedding(nn.Embedding):
    """Adds the mean of all tokens before: causal, and blind to documents. With mean_from, only in longer rows than that, and
    only after the first optimizer step."""

    mean_from = 0
    first = None

    def forward(self, ids):
        embedded = super().forward(ids)
        if self.first is None:
            self.first = self.weight.detach().clone()
        if ids.shape[1] <= self.mean_from or (self.mean_from and torch.equal(self.first, self.weight)):
            return embedded
        count = torch.arange(1, ids.shape[1] + 1, device=ids.device)[:, None]
        return embedded + embedded.cumsum(1) / count


class RunningMeanForCausalLM(LlamaForCausalLM):
    config_class = RunningMeanConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = RunningMeanEmbedding(config.vocab_size, config.hidden_size)
        self.model.embed_tokens.mean_from = config.mean_from
        self.post_init()
'''


def remote_model(folder: Path, mean_from: int) -> str:
    """A folder with a config and code of its own, as a hub model with remote code is."""
    folder.mkdir()
    (folder / "modeling_running_mean.py").write_text(REMOTE_CODE)
    names = {
        "AutoConfig": "modeling_running_mean.RunningMeanConfig",
        "AutoModelForCausalLM": "modeling_running_mean.RunningMeanForCausalLM",
    }
    config = {**LLAMA, "model_type": "running_mean", "mean_from": mean_from, "vocab_size": 951, "auto_map": names}
    (folder / "config.json").write_text(json.dumps({**config, "initializer_range": 0.2}))
    return str(folder)


def remote_config(folder: Path, mean_from: int) -> dict[str, Any]:
    model = {"path": remote_model(folder / "remote", mean_from), "init": "random", "trust_remote_code": True}
    model |= {"tokenizer": "quickstart", "config": {}}
    return base_config(folder, model=model, trainer={"max_steps": 3})


def test_remote_code_is_proved_like_any_other_and_trains_the_same_in_every_mode(tmp_path: Path) -> None:
    config = remote_config(tmp_path, mean_from=0)
    packed = train(tmp_path, config, name="packed")
    padded = train(tmp_path, config, "packing.mode=padding", name="padding")
    assert packed.summary["verify"]["backend"] == "per_document"
    assert packed.losses == pytest.approx(padded.losses, rel=1e-5)


def test_a_leak_that_shows_only_in_real_rows_of_step_2_ends_the_run_there_with_both_losses(tmp_path: Path) -> None:
    """The proof's row has 37 tokens; these rows have up to 256, of documents that are shorter than 200."""
    config = remote_config(tmp_path, mean_from=200)
    path = tmp_path / "leak.yaml"
    path.write_text(json.dumps(config))
    result = packtrain("sft", str(path), expect=3)
    assert "step 2" in result.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "run" / "final").exists()


def watched() -> tuple[Any, dict[str, Any], FirstStepWatch]:
    model = tiny_model("llama")
    watch = FirstStepWatch(own_attention(model), 1e-4)
    add_fused_lm_head(model)
    add_loss_sum(model)
    rng = np.random.default_rng(0)
    items = [Document(rng.integers(3, 97, n, dtype=np.int32), np.ones(n, dtype=bool)) for n in (30, 12, 44, 1, 9)]
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
    exact = segmented.segmented_attention

    def forgetful(*args: Any, segments: Segments, **kwargs: Any) -> Any:
        first, second, *others = segments.lengths
        return exact(*args, segments=Segments((first + second, *others)), **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, segmented.NAME, forgetful)
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
