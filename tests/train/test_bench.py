"""`packtrain bench` as a user calls it: on tiny models, in one process and two, and where memory runs out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running import LLAMA, base_config, packtrain
from test_dpo_user import pairs

from packtrain.bench.bench_table import show
from packtrain.launch import execute, supervisor
from tests.cluster.forked_launches import Fork
from tests.train import forked, running

ROOM = 300
"""Tokens that the stand-in for a GPU's memory holds."""
REMOTE_CODE = f"""
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel


class CrampedConfig(LlamaConfig):
    model_type = "cramped"


class CrampedModel(LlamaModel):
    config_class = CrampedConfig

    def forward(self, input_ids=None, **kwargs):
        if self.training and input_ids.numel() > {ROOM} and os.environ.get("RANK", "1") == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(input_ids=input_ids, **kwargs)


class CrampedForCausalLM(LlamaForCausalLM):
    config_class = CrampedConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = CrampedModel(config)
        self.post_init()
"""
HEAD = {
    *("model", "objective", "device", "processes", "strategy", "precision", "attention", "step", "trials", "best"),
}
TRIAL = {
    *("mode", "share_prefix", "tokens_per_device", "examples_per_device", "overrides", "configured", "why"),
    *("tokens_per_second", "spread", "ratio", "rounds", "mfu", "peak_memory", "padding", "micro_batches"),
    "first_step_seconds",
}


WORKER = """
from packtrain.__main__ import _work
from packtrain.launch.worker import run_worker

run_worker(_work)
"""


def launching_forks(*given: Any) -> None:
    """`forked.run` whose launches fork their two ranks: to import everything for each takes longer than they measure."""

    def small(argv: Sequence[str], log: Path) -> list[str]:
        port = argv[argv.index("--main_process_port") + 1]
        return ["--start", str(log), "1", "0", "2", "127.0.0.1", port, *argv[-2:]]

    execute._torchrun = small
    supervisor.subprocess = SimpleNamespace(Popen=Fork, TimeoutExpired=subprocess.TimeoutExpired)
    forked.run(*given)


def written(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "bench.yaml"
    path.write_text(json.dumps(config))
    return str(path)


def benched(
    folder: Path,
    config: dict[str, Any],
    *overrides: str,
    seconds: int = 5,
    begin: Callable[..., None] | None = None,
) -> dict[str, Any]:
    """The report, after looking whether anything was left behind."""
    before = {path for path in folder.rglob("*") if "cache" not in path.parts}
    path = written(folder, config)
    done = packtrain("bench", path, *overrides, "--json", "--seconds", str(seconds), cwd=folder, begin=begin)
    after = {path for path in folder.rglob("*") if "cache" not in path.parts}
    assert after - before <= {Path(path)}  # no run folder, no checkpoint, no tracker
    return {**json.loads(done.stdout), "stderr": done.stderr}


def cramped(folder: Path) -> dict[str, Any]:
    """A config whose model runs out of memory on more than ROOM tokens at a time, as one on a GPU does."""
    remote = folder / "remote"
    remote.mkdir()
    (remote / "modeling_cramped.py").write_text(REMOTE_CODE)
    names = {
        name: f"modeling_cramped.Cramped{kind}"
        for name, kind in (("AutoConfig", "Config"), ("AutoModelForCausalLM", "ForCausalLM"))
    }
    (remote / "config.json").write_text(
        json.dumps({**LLAMA, "model_type": "cramped", "vocab_size": 951, "auto_map": names})
    )
    model = {"path": str(remote), "init": "random", "trust_remote_code": True, "tokenizer": "quickstart", "config": {}}
    config = base_config(folder, model=model, batch={"examples_per_step": 16, "tokens_per_device": 256})
    return {**config, "verify": {"preflight": False}}


def too_large(trials: list[dict[str, Any]]) -> None:
    """Of micro-batches that do not fit one is told to have run out of memory, and the others are left alone."""
    small, large = ([one for one in trials if (one["tokens_per_device"] <= 256) == fits] for fits in (True, False))
    assert all(one["tokens_per_second"] for one in small) and not any(one["tokens_per_second"] for one in large)
    assert [one["why"] for one in large].count("out of memory on cpu") == 1
    assert any(one["why"] == "512 tokens of another mode ran out of memory" for one in large)


def test_all_modes_are_measured_and_the_best_is_given_to_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = base_config(
        tmp_path, trainer={"checkpoint_every": 1, "samples": ["x"]}, tracking={"report_to": ["tensorboard"]}
    )
    report = benched(tmp_path, config)
    assert {*report} - {"stderr"} == HEAD
    assert all({*one} == TRIAL for one in report["trials"])
    measured = [one for one in report["trials"] if one["tokens_per_second"]]
    assert {one["mode"] for one in measured} == {"padding", "padding_free", "packed"}
    for one in measured:
        assert one["tokens_per_second"] > 0 and one["peak_memory"] > 2**20 and one["first_step_seconds"] > 0
        assert (one["padding"] == 0 or one["mode"] == "padding") and one["mfu"] is None
    assert report["trials"][0]["configured"] and report["trials"][0]["ratio"] == 1
    assert report["best"]["overrides"][0].startswith("packing.mode=")
    assert report["attention"].startswith("segmented") and report["processes"] == 1
    assert "measuring for about 5 s" in report["stderr"] and "tokens/s" in report["stderr"]
    show(report, ["run.yaml", "a b=1"], as_json=False)
    table = capsys.readouterr().out.splitlines()
    assert max(map(len, table[:-1])) <= 100 and sum("config" in line for line in table) >= 1
    assert table[-1].startswith("run       packtrain sft run.yaml 'a b=1'")


def test_pairs_are_measured_with_shared_prompts_and_without(tmp_path: Path) -> None:
    running.write_jsonl(tmp_path / "pairs.jsonl", pairs(20))
    config = base_config(
        tmp_path,
        data={"train": str(tmp_path / "pairs.jsonl"), "max_length": 100},
        objective={"kind": "dpo", "reference": "precomputed"},
    )
    report = benched(tmp_path, config)
    speeds = {(one["mode"], one["share_prefix"]): one["tokens_per_second"] for one in report["trials"]}
    kinds = [(mode, shared) for mode in ("padding_free", "packed") for shared in (True, False)]
    assert {*speeds} == {("padding", None), *kinds} and report["objective"] == "dpo"
    assert report["trials"][0]["share_prefix"] is True and report["trials"][0]["configured"]


def test_what_runs_out_of_memory_is_told_and_the_rest_is_measured(tmp_path: Path) -> None:
    report = benched(tmp_path, cramped(tmp_path), seconds=12)
    too_large(report["trials"])
    assert report["best"]["tokens_per_device"] == 256


def test_two_processes_go_on_without_what_one_of_them_had_no_memory_for(tmp_path: Path) -> None:
    two = ("topology=local", "topology.gpus_per_node=2")
    (tmp_path / "worker.py").write_text(WORKER)
    report = benched(tmp_path, cramped(tmp_path), *two, seconds=12, begin=launching_forks)
    assert report["processes"] == 2
    too_large(report["trials"])
    assert (
        "out of memory on cpu:0: CUDA out of memory" in report["stderr"] and "going on without it" in report["stderr"]
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--seconds", "1"), "--seconds: 1 s is no time"),
        (("--seconds", "nan"), "--seconds: nan s is no time"),
        (("--seconds", "inf"), "--seconds: inf s is no time"),
        (("batch.examples_per_step=null",), "batch.examples_per_step: the size of an optimizer step is not set"),
    ],
)
def test_wrong_arguments_end_with_exit_code_2(overrides: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = packtrain("bench", written(tmp_path, base_config(tmp_path)), *overrides, expect=2, cwd=tmp_path)
    assert said in done.stderr and not done.stdout


def test_a_mode_that_the_model_cannot_run_is_listed_with_its_reason(tmp_path: Path) -> None:
    mamba = {"model_type": "mamba", "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}
    config = base_config(tmp_path, model={"config": mamba, "attention": "segmented"}, packing={"mode": "padding"})
    report = benched(tmp_path, config)
    found = {one["mode"]: one for one in report["trials"] if one["tokens_per_device"] == 256 or one["why"]}
    assert "backbone.layers.0.mixer" in found["packed"]["why"] and "mixer" in found["padding_free"]["why"]
    assert report["best"]["mode"] == "padding"
