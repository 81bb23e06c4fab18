"""Reading a machine: what the driver, torch and the system say, and what they say when something is wrong."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest

from packtrain.diagnose import machine
from packtrain.diagnose.machine import Gpu, Torch, ask_python
from packtrain.system import start

MIB = 2**20
ROW = "{}, NVIDIA H100 80GB HBM3, GPU-{}, 81559, 4, {}, 570.133.20"


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Has nvidia-smi do what the shell script says."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpus_are_read_with_what_is_wrong_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, f"echo '{ROW.format(0, 0, 0)}'; echo '{ROW.format(1, 1, 2)}'")
    found = machine.ask_driver(60)
    well, sick = found.gpus
    assert (found.error, found.version) == ("", "570.133.20")
    assert well == Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-0", 81559 * MIB, 4 * MIB)
    assert (sick.index, sick.trouble.partition(" ")[0]) == (1, "2")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'GPU is lost'; exit 15", "GPU is lost"),
        ("echo mismatch >&2; exit 18", "mismatch"),
        ("exec sleep 600", "timed out"),
        ("", "shows no GPU"),
    ],
)
def test_a_driver_that_does_not_answer_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    nvidia_smi(tmp_path, monkeypatch, script)
    found = machine.ask_driver(1)
    assert (found.gpus, why in found.error) == ((), True)


def test_a_folder_that_is_not_there_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    new = machine.read_folder("trainer.output_dir", str(tmp_path / "a/b/c"))
    assert not new.lack and new.free and list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for place in ("/proc/run", str(tmp_path / "file/run")):  # whatever their rights say to root
        assert machine.read_folder("trainer.output_dir", place).lack


def test_packages_that_do_not_fit_are_found_by_what_packtrain_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.9.0+cu128", "trl": "1.16.0", "flash-attn": "2.6.0"}
    wanted = ["torch>=2.10", "trl>=1.16,<2", "peft>=0.21", 'flash-attn>=2.8; extra == "flash"']
    monkeypatch.setattr(machine, "installed_version", installed.get)
    monkeypatch.setattr(machine.metadata, "requires", lambda package: wanted)
    assert list(machine.conflicts()) == [("torch>=2.10", "2.9.0+cu128"), ("peft>=0.21", "none")]


def test_what_torch_could_not_finish_saying_counts_as_far_as_it_came() -> None:
    said = '{"version": "2.13.0", "cuda": "13.0"}\n{"kind": "cu'
    expected = Torch("no answer within 8 s", version="2.13.0", cuda="13.0")
    assert machine.read_torch(said, "no answer within 8 s") == expected


HANGS = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
open("pid", "w").write(str(child.pid))
print("half", flush=True)
time.sleep(600)
"""


def test_a_process_that_hangs_is_given_up_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.chdir(tmp_path)
    for limit_s in (0.5, 5, 60):  # which a machine that has other things to do may need to come to the first word
        began = time.monotonic()
        output, why = ask_python("hangs", limit_s=limit_s)
        assert time.monotonic() - began < limit_s + 60 and why == f"no answer within {limit_s} s"
        if output:
            break
    assert output == "half"
    child, end = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_question_whose_answer_fails_or_never_comes_costs_only_itself() -> None:
    with pytest.raises(TimeoutError):
        start(lambda: threading.Event().wait(300)).result(0.1)
    with pytest.raises(ZeroDivisionError):
        start(lambda: 1 / 0).result(60)
    assert start(lambda: 7).result(60) == 7
