"""What `packtrain plan` shows first: one screen, whatever the run, the width and the names in it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from command_line import packtrain

from packtrain.config.schema import Data, Model
from packtrain.plan.data_size import DataSize, recall, remember

LLAMA = [f"model.config.{name}" for name in ("vocab_size=600", "num_key_value_heads=5")]
QUICKSTART = ["recipes/quickstart-sft.yaml", *LLAMA]
LARGE = [
    "recipes/sft-16x8.yaml",
    *("--gpu-memory", "80"),
    "model.config.model_type=qwen3",
    "model.config.hidden_size=5120",
    "model.config.intermediate_size=25600",
    "model.config.num_hidden_layers=64",
    "model.config.num_attention_heads=64",
    "model.config.num_key_value_heads=8",
    "model.config.head_dim=128",
    "model.config.vocab_size=151936",
]
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


def test_memory_is_a_bar_by_part_against_the_gpu(tmp_path: Path) -> None:
    fits, tight = ("\n".join(planned(tmp_path, *LARGE, "--gpu-memory", size)) for size in ("80", "8"))
    total = float(re.search(r"memory +([\d.]+) of the 80.00 GiB of each GPU: fits", fits)[1])  # pyright: ignore
    parts = [float(found) for found in re.findall(r"^ {11}[\w, ]+? +([\d.]+) +█", fits, re.M)]
    assert len(parts) == 7 and parts[-1] == pytest.approx(total) == pytest.approx(sum(parts[:-1]), abs=0.04)
    assert "░" in fits and "▒" not in fits
    assert "DOES NOT FIT, try " in tight and "▒" in tight


def test_what_it_prints_of_names_moves_no_cursor(tmp_path: Path) -> None:
    (tmp_path / "x\x1b]0;title\x07.jsonl").touch()
    (tmp_path / "run.yaml").write_text(
        'model: {path: "a\\e[31mb\\nc"}\ndata: {train: "x\\e]0;title\\a.jsonl"}\nbatch: {examples_per_step: 4}\n'
        'trainer: {output_dir: "runs/\\e[31mevil [bold]"}\n'
    )
    shown = "\n".join(planned(tmp_path, "run.yaml"))
    assert "runs/␛[31mevil [bold]" in shown and "x␛]0;title␇.jsonl" in shown
    assert not {one for one in shown if ord(one) < 32} - {"\n"}


def test_odd_settings_are_named(tmp_path: Path) -> None:
    odd = ["optim.warmup_steps=900", "batch.examples_per_step=3", "topology=local", "topology.gpus_per_node=4"]
    shown = " ".join(" ".join(planned(tmp_path, *QUICKSTART, *odd, "trainer.checkpoint_every=5000")).split())
    for part in (
        "leaves 1 of 4 processes without work",
        "never reaches its peak",
        "trainer.checkpoint_every=5000 is more than the run's 800 steps",
        "the 4 processes would train on the CPU",
    ):
        assert part in shown


def test_steps_and_tokens_of_an_epoch_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("{}\n")
    arguments = ["model.path=m", "data.train=chats.jsonl", "batch.examples_per_step=10", "trainer.epochs=2"]
    assert any("is known once packtrain inspect or" in line for line in planned(tmp_path, *arguments))
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    remember(DataSize(105, 42_000, 900), Model(path="m"), Data(train="chats.jsonl"), "sft", 0)
    assert recall(Model(path="m"), Data(train="chats.jsonl", shuffle=False), "sft", 0) == DataSize(105, 42_000, 900)
    assert recall(Model(path="m"), Data(train="chats.jsonl", max_length=512), "sft", 0) is None
    shown = planned(tmp_path, *arguments)
    assert any(
        line.startswith("steps      22: 2 epochs of 11 steps (105 documents, 3,818 tokens a step)") for line in shown
    )
    assert "gets about 4,000 tokens a step: rows of batch.tokens_per_device=8,192 never fill" in " ".join(
        " ".join(shown).split()
    )
    os.utime(file, (time.time() + 9, time.time() + 9))  # another content, for all that is known
    assert any("is known once" in line for line in planned(tmp_path, *arguments))


def test_documents_beyond_the_positions_and_names_that_are_seen_later_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chats.jsonl").write_text("{}\n")
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "gpt2", "n_positions": 512}
    model = Model(path=None, init="random", tokenizer="m", config=config)
    new = [
        "model.init=random",
        "model.path=null",
        "model.tokenizer=m",
        "model.config={model_type: gpt2, n_positions: 512}",
    ]
    arguments = [
        *new,
        "data.train=chats.jsonl",
        "batch.examples_per_step=1000",
        "peft=lora",
        "peft.target_modules=.*c_attn",
    ]

    def shown(*more: str) -> str:
        return " ".join(" ".join(planned(tmp_path, *arguments, *more)).split())

    assert "data.max_length=1,024 is more than the model's 512 positions" in shown("data.max_length=1024")
    assert "not known before loading: the keys of model.config, the names of layers in peft" in shown()
    assert "the names of layers in peft" not in shown("peft.target_modules=all-linear")
    assert "how many positions the model has" not in shown()
    assert "how many positions the model has" in shown("~model.config.n_positions")
    remember(DataSize(105, 42_000, 900), model, Data(train="chats.jsonl"), "sft", 0)
    assert "the longest document has 900 tokens, the model is made for 512 positions: the run will refuse it" in shown()
    assert "a step of 1,000 is more than all 105 documents of an epoch" in shown()
