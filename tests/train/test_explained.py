"""What goes wrong outside packtrain is a sentence with what to do; what may be its own bug keeps its traceback."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from here import ALONE
from safetensors import SafetensorError

from packtrain.attention.backends import NEEDED, deterministic
from packtrain.config.schema import Batch, Model, Peft, RunConfig, Trainer
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import LostPeers, PeerFailed, UserError
from packtrain.model.load import load_model
from packtrain.monitor.heartbeat import own_heartbeat
from packtrain.run_folder import RunFolder
from packtrain.train import run
from packtrain.train.library_errors import explained

CONFIG = RunConfig(batch=Batch(tokens_per_device=8192), trainer=Trainer(output_dir="runs/x"))
GPU_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has …")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (GPU_MEMORY, UserError, "Tried to allocate 20.00 GiB"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), UserError, "out of memory on cpu"),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), PeerFailed, "of rank 0 failed"),
        (RuntimeError("CUDA error: device-side assert triggered"), None, ""),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), PeerFailed, "worker (pid 7)"),
        (OSError(errno.ENOSPC, "No space left on device"), UserError, "cannot write"),
        (SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"), UserError, "quota"),
        (RuntimeError(f"put_ {NEEDED}, but you set 'torch.use_…"), UserError, "put_ does not have a deterministic"),
        (RuntimeError("shapes differ"), None, ""),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), UserError, "was removed"),
    ],
)
def test_what_is_no_bug_is_told_by_what_it_is(error: Exception, kind: Any, words: str) -> None:
    found = explained(error, ALONE, RunFolder.of(CONFIG.trainer), CONFIG.batch)
    assert type(found) is (kind or type(None))
    if found is not None:
        assert words in found.problems[0].what and found.problems[0].fix


def test_a_dropout_that_is_no_probability_is_refused_as_the_model_is_loaded() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Model(
        init="random", tokenizer="quickstart", config={"model_type": "llama", **sizes, "attention_dropout": 2}
    )
    with pytest.raises(UserError) as refusal:
        load_model(model, Peft(), load_tokenizer(model), seed=0)
    assert refusal.value.problems[0].where == "model.config.attention_dropout"


@pytest.mark.parametrize(("processes", "kind"), [(1, type(None)), (2, LostPeers)])
def test_a_connection_is_lost_where_there_are_others(processes: int, kind: type) -> None:
    error, ranks = (
        RuntimeError("[/gloo/transport/tcp/pair.cc:1] Connection closed by peer"),
        replace(ALONE, world_size=processes),
    )
    assert type(explained(error, ranks, RunFolder.of(CONFIG.trainer), CONFIG.batch)) is kind


def test_torch_refuses_in_words_that_are_known_what_is_not_deterministic() -> None:
    with deterministic(), pytest.raises(RuntimeError, match=NEEDED):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_that_is_to_be_deterministic_runs_with_deterministic_operations_only(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    config = replace(CONFIG, trainer=Trainer(output_dir=str(tmp_path), deterministic=wanted))
    assert run.train("sft", config, lambda *_: int(torch.are_deterministic_algorithms_enabled())) == wanted
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if wanted else None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def test_what_ends_a_run_is_told_in_short_kept_in_full_in_the_log_and_no_hang(tmp_path: Path) -> None:
    def work(*_: Any) -> int:
        own_heartbeat().enter("backward", step=8, micro=2)
        seen.append(own_heartbeat().message()["changes"])
        raise GPU_MEMORY

    seen: list[Any] = []
    (tmp_path / "logs").mkdir()
    with pytest.raises(UserError, match=r"20\.00 GiB"):
        run.train("sft", replace(CONFIG, trainer=replace(CONFIG.trainer, output_dir=str(tmp_path))), work)
    assert str(GPU_MEMORY).splitlines()[1] in (tmp_path / "logs/rank-00000.log").read_text()
    message = own_heartbeat().message()
    assert (message["phase"], message["step"], message["micro"]) == ("backward", 8, 2)
    assert message["changes"] > seen[0]
