"""What goes wrong outside packtrain is a sentence with what to do; a lack of memory shows before step 1, by the largest micro-batch."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from here import ALONE, run_here
from matrix import needs
from running import LLAMA, Run, after, assert_same_bits, base_config, train
from safetensors import SafetensorError

from packtrain.attention.backends import NEEDED, deterministic
from packtrain.config.schema import Batch, Model, Peft, RunConfig, Trainer
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import LostPeers, PeerFailed, UserError
from packtrain.model.load import load_model
from packtrain.monitor.heartbeat import own_heartbeat
from packtrain.objectives.sft.run import SFTLoss
from packtrain.run_folder import RunFolder
from packtrain.train import run
from packtrain.train import run as run_module
from packtrain.train.library_errors import explained
from tests.train import forked

CONFIG = RunConfig(batch=Batch(tokens_per_device=8192), trainer=Trainer(output_dir="runs/x"))
GPU_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has …")


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (GPU_MEMORY, UserError, "out-of-memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), UserError, "out-of-memory"),
        (torch.AcceleratorError("CUDA error: out of memory"), UserError, "out-of-memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            UserError,
            "out-of-memory",
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), PeerFailed, "device-failed"),
        (RuntimeError("CUDA error: device-side assert triggered"), None, ""),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), PeerFailed, "loader-killed"),
        (OSError(errno.ENOSPC, "No space left on device"), UserError, "disk-full"),
        (
            SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
            UserError,
            "disk-full",
        ),
        (RuntimeError(f"put_ {NEEDED}, but you set 'torch.use_…"), UserError, "not-deterministic"),
        (RuntimeError("shapes differ"), None, ""),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), UserError, "run-folder-removed"),
    ],
)
def test_what_is_no_bug_is_told_by_what_it_is(error: Exception, kind: Any, code: str) -> None:
    found = explained(error, ALONE, RunFolder.of(CONFIG.trainer), CONFIG.batch)
    assert type(found) is (kind or type(None))
    if found is not None:
        assert found.problems[0].code == code and found.problems[0].fix


def test_a_dropout_that_is_no_probability_is_refused_as_the_model_is_loaded() -> None:
    model = Model(init="random", tokenizer="quickstart", config={**LLAMA, "attention_dropout": 2})
    with pytest.raises(UserError) as refusal:
        load_model(model, Peft(), load_tokenizer(model), seed=0)
    assert refusal.value.problems[0].where == "model.config.attention_dropout"


@pytest.mark.parametrize(("processes", "kind"), [(1, type(None)), (2, LostPeers)])
def test_a_connection_is_lost_where_there_are_others(processes: int, kind: type) -> None:
    error = RuntimeError("[/gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    given = (replace(ALONE, world_size=processes), RunFolder.of(CONFIG.trainer), CONFIG.batch)
    assert type(explained(error, *given)) is kind


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


ROOM = 180
"""Tokens that the stand-in for a GPU's memory holds: less than the longest document has."""
DROPOUT = {"attention_dropout": 0.1}  # so that a change of the random state would show


def config_of(folder: Path) -> dict[str, Any]:
    config = base_config(folder, trainer={"max_steps": 4})
    config["model"]["config"] = {**LLAMA, **DROPOUT}
    return config


def as_on_a_gpu(*given: Any) -> None:
    """The command, which tries the largest micro-batch on a CPU, too."""
    run_module.tries_largest = lambda *_: True
    forked.run(*given)


@pytest.mark.sample("ddp-1-sft")
@pytest.mark.parametrize(
    ("strategy", "processes", "verb"),
    [
        ("ddp", 1, "sft"),
        ("ddp", 2, "dpo"),
        ("fsdp2", 2, "sft"),
        *(pytest.param(one, 2, "sft", marks=needs("deepspeed")) for one in ("zero2", "zero3")),
    ],
)
def test_it_changes_no_bit_of_the_training(tmp_path: Path, strategy: str, processes: int, verb: str) -> None:
    config = config_of(tmp_path)
    if verb == "dpo":
        config["data"] |= {"train": "quickstart"}
        config["batch"] = {"examples_per_step": 4, "tokens_per_device": 512}
        config["model"]["config"] = LLAMA  # dpo switches dropout off
    runs = [
        train(tmp_path, config, f"strategy={strategy}", name=name, processes=processes, command=verb, begin=begin)
        for name, begin in (("plain", None), ("tried", as_on_a_gpu))
    ]
    assert_same_bits(*runs)


def cramped(monkeypatch: pytest.MonkeyPatch, room: int = ROOM, *, from_step: int = 0) -> None:
    """A forward pass in training of more than `room` tokens lacks memory."""

    def check(_: Any, model: Any, batch: Any, counts: Any) -> None:
        if batch.slots > room and steps[0] > from_step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    steps = [int(from_step == 0)]
    monkeypatch.setattr(SFTLoss, "compute", after(check, SFTLoss.compute))
    monkeypatch.setattr(SFTLoss, "open_step", lambda *_: steps.append(steps.pop() + 1))


def refused(folder: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        run_here(folder, config_of(folder), *overrides)
    return caught.value


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["batch.tokens_per_device=256"], "batch.tokens_per_device", 200),  # all of the longest document
        (["batch.tokens_per_device=1024"], "batch.tokens_per_device", 420),  # half of the fullest row
        (["batch.tokens_per_device=null", "packing.mode=padding"], "batch.examples_per_device", 3),
        (["batch.tokens_per_device=200"], "data.max_length", None),
    ],
)
def test_a_lack_of_memory_shows_before_step_1_with_documents_and_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], key: str, value: int | None
) -> None:
    cramped(monkeypatch)
    monkeypatch.setattr(run_module, "tries_largest", lambda *_: True)
    (problem,) = refused(tmp_path, *overrides).problems
    assert all(part in problem.what for part in ("step 1", "data.jsonl:", "2.00 GiB"))
    assert problem.where == key and (value is None or f"{key}={value}," in problem.fix)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_it_the_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cramped(monkeypatch, room=0, from_step=2)
    (problem,) = refused(tmp_path).problems
    assert "step 3 (micro-batch 1)" in problem.what
    assert len(Run(tmp_path / "run").losses) == 2


def test_what_is_tried_is_what_no_other_micro_batch_exceeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def note(_: Any, model: Any, batch: Any, counts: Any) -> None:
        seen.extend([batch.slots] * torch.is_grad_enabled())

    monkeypatch.setattr(SFTLoss, "compute", after(note, SFTLoss.compute))
    monkeypatch.setattr(run_module, "tries_largest", lambda *_: True)
    for mode in ("packed", "padding"):
        seen.clear()
        run_here(tmp_path, config_of(tmp_path), f"packing.mode={mode}", "trainer.resume=never", name=mode)
        assert seen[0] == seen[1] == max(seen[2:])


@pytest.mark.parametrize(
    ("device", "compiled", "tried"), [("cpu", False, False), ("cuda", False, True), ("cuda", True, False)]
)
def test_it_is_tried_on_gpus_unless_the_layers_are_compiled(device: str, compiled: bool, tried: bool) -> None:
    ranks = replace(ALONE, device=torch.device(device))
    assert run_module.tries_largest(Trainer(torch_compile=compiled), ranks) == tried
