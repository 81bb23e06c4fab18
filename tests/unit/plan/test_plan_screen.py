"""What `packtrain plan` shows first: one screen, whatever the run, the width and the names in it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from command_line import packtrain

LLAMA = [f"model.config.{name}" for name in ("vocab_size=600", "num_key_value_heads=5")]
QUICKSTART = ["recipes/quickstart-sft.yaml", *LLAMA]
SIZES = "hidden_size=5120 intermediate_size=25600 num_hidden_layers=64 num_attention_heads=64 num_key_value_heads=8"
SIZES = f"model_type=qwen3 {SIZES} head_dim=128 vocab_size=151936".split()
LARGE = ["recipes/sft-16x8.yaml", "--gpu-memory", "80", *(f"model.config.{size}" for size in SIZES)]
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-16]", "SLURM_NODEID": "0", "SLURM_GPUS_ON_NODE": "8"}
HUGE = ["model.config.hidden_size=1000000000", "model.config.num_hidden_layers=9000", "--gpu-memory", "0.001"]


def planned(folder: Path, *arguments: str, **variables: str) -> list[str]:
    own = {"PACKTRAIN_CACHE": str(folder / "cache"), "HF_HOME": str(folder), "NO_COLOR": "1"}
    done = packtrain("plan", *arguments, folder=folder, **own, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (QUICKSTART, {}),
        (["recipes/sft-1x8.yaml"], {}),
        (["recipes/sft-4x8.yaml"], {}),
        (LARGE, {}),
        ([*LARGE, "--gpu-memory", "8"], {}),
        (LARGE, JOB),
        ([*QUICKSTART, *HUGE], {}),
    ],
    ids=["1", "8", "32", "128", "too small", "in a job", "huge"],
)
def test_the_answer_fits_on_a_screen(arguments: list[str], variables: dict[str, str], tmp_path: Path) -> None:
    for width in (60, 80, 100):
        lines = planned(tmp_path, *arguments, COLUMNS=str(width), **variables)
        wide = [line for line in lines if len(line) > width]
        assert all("packtrain" in line for line in wide)  # commands are for pasting
        if width == 100:
            assert len(lines) <= 25
        assert sum(line.startswith("run ") for line in lines) == 1


def test_memory_is_shown_by_part_against_the_gpu(tmp_path: Path) -> None:
    fits, tight = (" ".join(planned(tmp_path, *LARGE, "--gpu-memory", size)) for size in ("80", "8"))
    total = float(re.search(r"memory +([\d.]+) of the 80.00 GiB of each GPU: fits", fits)[1])  # pyright: ignore
    parts = [
        float(item) for item in re.findall(r"(?:weights|gradients|optimizer|buffers|activations|NCCL) ([\d.]+)", fits)
    ]
    assert len(parts) == 6 and total == pytest.approx(sum(parts), abs=0.04)
    assert "DOES NOT FIT, try " in tight


def test_what_it_prints_of_names_moves_no_cursor(tmp_path: Path) -> None:
    (tmp_path / "x\x1b]0;title\x07.jsonl").touch()
    (tmp_path / "run.yaml").write_text(
        'model: {path: "a\\e[31mb\\nc"}\ndata: {train: "x\\e]0;title\\a.jsonl"}\nbatch: {examples_per_step: 4}\n'
        'trainer: {output_dir: "runs/\\e[31mevil [bold]"}\n'
    )
    shown = "\n".join(planned(tmp_path, "run.yaml"))
    assert "runs/␛[31mevil [bold]" in shown and "x␛]0;title␇.jsonl" in shown
    assert not {letter for letter in shown if ord(letter) < 32} - {"\n"}


HERE = [*QUICKSTART, "strategy=zero2"]
QLORA = ["model.quantize=nf4", "peft=lora", "model.path=a/b", "model.init=pretrained", "model.config={}"]


@pytest.mark.parametrize(
    ("arguments", "gpus", "needed"),
    [
        ([*QUICKSTART, *QLORA], 0, ["bitsandbytes"]),
        ([*HERE, *QLORA], 0, ["deepspeed", "bitsandbytes"]),
        ([*HERE, "--gpu-memory", "24"], 0, ["deepspeed"]),
        ([*HERE, "topology.nodes=2", "topology.gpus_per_node=8"], 0, ["deepspeed"]),
        ([*HERE, "topology.gpus_per_node=8"], 1, ["deepspeed"]),  # here there are fewer
        (QUICKSTART, 0, []),
        (HERE, 0, None),  # these would start here
        ([*QUICKSTART, *QLORA], 1, None),
        ([*QUICKSTART, "tracking=wandb"], 0, None),
    ],
)
def test_packages_are_needed_there_where_a_run_would_not_start_here(arguments, gpus, needed, tmp_path, monkeypatch):
    find, missing = importlib.util.find_spec, ("bitsandbytes", "deepspeed", "wandb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in missing else find(name, *more))
    monkeypatch.setattr("packtrain.plan.surroundings._gpus_of_machine", lambda: [80 * 2**30] * gpus)
    visible = {"CUDA_VISIBLE_DEVICES": "0"}
    if needed is None:
        refused, run = (packtrain(verb, *arguments, folder=tmp_path, **visible) for verb in ("plan", "sft"))
        assert refused.returncode == run.returncode == 2 and refused.stderr == run.stderr
        assert "[package-missing]" in refused.stderr
        return
    lines = " ".join(" ".join(planned(tmp_path, *arguments, COLUMNS="100", **visible)).split())
    assert [*re.findall(r"needs the package (\w+)", lines)] == needed and ("needed there:" in lines) == bool(needed)
    report = json.loads(packtrain("plan", "--json", *arguments, folder=tmp_path, **visible).stdout)
    assert len(report["needed_there"]) == len(needed)
