"""`packtrain bench` as a user calls it: on tiny models, in one process and two, and where memory runs out."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import after, base_config, conversations, joined, packtrain, write_jsonl, written

from packtrain.bench.launches import print_report
from packtrain.cli import main
from packtrain.objectives.sft.run import SFTLoss
from tests.cluster.forked_launches import Fork
from tests.cluster.small_launch import instead_of_torchrun
from tests.train import forked

HEAD = {"model", "objective", "device", "processes", "strategy", "precision", "attention", "step", "trials", "best"}
HEAD.add("attention_cost")
TRIAL = {"mode", "share_prefix", "tokens_per_device", "examples_per_device", "overrides", "configured", "why", "ratio"}
TRIAL |= {"tokens_per_second", "spread", "rounds", "mfu", "peak_memory", "padding", "micro_batches"}
TRIAL.add("first_step_seconds")


WORKER = 'import runpy, sys\nsys.argv.insert(1, "worker")\nrunpy.run_module("packtrain", run_name="__main__")\n'


def short_of_memory(*given: Any) -> None:
    """`forked.run` where rank 1, or a process alone, has memory for 300 token slots; launches fork their two ranks, since to import
    everything for each takes longer than they measure."""

    def check(_: SFTLoss, model: Any, batch: Any, counts: Any) -> None:
        if batch.slots > 300 and os.environ.get("RANK", "1") == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    SFTLoss.compute = after(check, SFTLoss.compute)
    instead_of_torchrun(Fork)
    forked.run(*given)


def benched(
    folder: Path, config: dict[str, Any], *overrides: str, begin: Callable[..., None] | None = None
) -> dict[str, Any]:
    """The report; no run folder, checkpoint or tracker is left behind."""
    path = written(folder, config)
    before = {path for path in folder.rglob("*") if "cache" not in path.parts}
    done = packtrain("bench", path, *overrides, "--json", "--seconds", "5", cwd=folder, begin=begin)
    assert {path for path in folder.rglob("*") if "cache" not in path.parts} == before
    return json.loads(done.stdout)


def test_all_modes_are_measured_and_the_best_is_given_to_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = {"checkpoint_every": 1, "samples": ["x"]}
    config = base_config(tmp_path, trainer=trainer, tracking={"report_to": ["tensorboard"]})
    report = benched(tmp_path, config)
    assert {*report} == HEAD
    assert all({*trial} == TRIAL for trial in report["trials"])
    measured = [trial for trial in report["trials"] if trial["tokens_per_second"]]
    assert {trial["mode"] for trial in measured} == {"padding", "padding_free", "packed"}
    for trial in measured:
        assert trial["tokens_per_second"] > 0 and trial["peak_memory"] > 2**20 and trial["first_step_seconds"] > 0
        assert (trial["padding"] == 0 or trial["mode"] == "padding") and trial["mfu"] is None
    assert report["trials"][0]["configured"] and report["trials"][0]["ratio"] == 1
    assert report["step"]["size"] == "7 documents" and report["step"]["tokens"] == pytest.approx(829.5)
    assert 0 < report["step"]["part"] <= 1  # less than all of it where a step takes long
    assert report["best"]["overrides"][0].startswith("packing.mode=")
    assert report["attention"].startswith("segmented") and report["processes"] == 1
    assert report["attention_cost"]["token_seconds"] > 0 and report["attention_cost"]["attention_cost"] >= 0
    print_report(report, ["run.yaml", "a b=1"], as_json=False)
    table = capsys.readouterr().out.splitlines()
    assert max(map(len, table[:-1])) <= 100 and sum("config" in line for line in table) >= 1
    assert table[-1].startswith("run       packtrain sft run.yaml 'a b=1'")


@pytest.mark.exhaustive
def test_documents_that_share_are_compared_with_rows_that_do_not(tmp_path: Path) -> None:
    rows = [{"messages": one["messages"][:2]} for one in conversations(10) for _ in range(2)]
    data = {"train": str(write_jsonl(tmp_path / "twice.jsonl", rows)), "shuffle": "by_prefix"}
    config = base_config(tmp_path, data=data, packing={"share_prefix": True})
    report = benched(tmp_path, config)
    tried = {(trial["mode"], trial["share_prefix"]) for trial in report["trials"] if trial["tokens_per_second"]}
    assert tried >= {("packed", True), ("packed", None), ("padding", None), ("padding_free", None)}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_what_runs_out_of_memory_is_a_result_and_the_rest_is_measured(tmp_path: Path, processes: int) -> None:
    config = base_config(tmp_path, batch={"examples_per_step": 16, "tokens_per_device": 512})
    (tmp_path / "worker.py").write_text(WORKER)  # what a launch starts
    launch = ["topology=local", "topology.gpus_per_node=2"] if processes == 2 else []
    report = benched(tmp_path, config, *launch, "verify.preflight=false", begin=short_of_memory)
    assert report["processes"] == processes and report["best"]["tokens_per_device"] <= 256
    first, *others = report["trials"]
    assert first["configured"] and first["why"].startswith("out of memory on cpu")
    assert {trial["mode"] for trial in others if trial["rounds"]} == {"padding", "padding_free", "packed"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--seconds", "1"), "--seconds"),
        (("--seconds", "nan"), "--seconds"),
        (("batch.examples_per_step=null",), "batch.examples_per_step"),
        (("data.train=nowhere.jsonl",), "nowhere.jsonl"),
    ],
)
def test_wrong_arguments_end_with_exit_code_2(overrides: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = packtrain("bench", written(tmp_path, base_config(tmp_path)), *overrides, expect=2, cwd=tmp_path)
    assert said in done.stderr and not done.stdout


@pytest.mark.exhaustive
def test_a_mode_that_the_model_cannot_run_is_listed_with_its_reason(tmp_path: Path) -> None:
    mamba = {"model_type": "mamba", "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}
    config = base_config(tmp_path, model={"config": mamba, "attention": "segmented"}, packing={"mode": "padding"})
    report = benched(tmp_path, config)
    trials = {trial["mode"]: trial for trial in report["trials"] if not trial["configured"]}
    assert "mixer" in trials["packed"]["why"] and "mixer" in trials["padding_free"]["why"]
    assert report["best"]["mode"] == "padding"


def test_what_measures_reaches_a_process_that_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where CUDA does not survive a fork; tests/standin measures there."""
    measures: list[Any] = []
    monkeypatch.setattr("packtrain.bench.launches.run_bench", lambda _, measure, **__: measures.append(measure) or 0)
    monkeypatch.setattr("sys.argv", ["packtrain", "bench", written(tmp_path, base_config(tmp_path))])
    for stream in ("sys.stdout", "sys.stderr"):  # which `main` replaces
        monkeypatch.setattr(stream, io.StringIO())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 and pickle.loads(pickle.dumps(measures[0])) is measures[0]


def test_processes_of_another_launcher_are_refused(tmp_path: Path) -> None:
    assert "topology" in joined(2, "bench", written(tmp_path, base_config(tmp_path)), expect=2)[0].stderr
