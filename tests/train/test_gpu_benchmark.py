"""benchmarks/gpu.py with tiny models, on a stand-in GPU and on a CPU; what becomes of parts that fail; the wheels it needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from benchmarks import gpu
from tests.standin import gpus as standin

# benchmarks/gpu.py puts its folder on the path
import gpu_ladder  # isort: skip
import gpu_wheels  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
LACKING = ("liger-kernel is not installed", "they need a GPU", "triton is not installed")
"""Why variants may be skipped."""


def measured(folder: Path, gpus: int, *only: str) -> dict[str, dict[str, Any]]:
    """What `gpu.py --tiny` has measured on so many stand-in GPUs (0: on the CPU), by part and variant."""
    try:
        given = standin.variables(gpus) if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    except FileNotFoundError as error:
        pytest.skip(str(error))
    environment = {**os.environ, **given, "OMP_NUM_THREADS": "1"}
    environment.pop("DS_ACCELERATOR", None)
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--minutes", "60", "--json", str(folder / "lines.jsonl")]
    command += ["--only", *only] if only else []
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, dict[str, Any]] = {}
    for line in gpu.lines_of(folder / "lines.jsonl"):
        found.setdefault(line["part"], {})[line["variant"]] = line
    assert found.keys() == {*(only or gpu.PARTS)}
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("gpus", [0, 1], ids=["cpu", "stand-in"])
def test_every_part_runs_with_tiny_models(tmp_path: Path, gpus: int) -> None:
    found = measured(tmp_path, gpus, *([] if gpus else [name for name in gpu.PARTS if name != "tests"]))
    for part in ("1.5B", "LoRA 8B", "8B"):  # variants of one model train the same
        losses = [line["loss"] for line in found[part].values() if "skipped" not in line]
        assert len(losses) >= 1 and max(losses) - min(losses) < 2e-2
        assert all("skipped" not in line or line["skipped"].startswith(LACKING) for line in found[part].values())
    layouts = [line["loss"] for line in found["dpo 0.6B"].values()]
    assert len(layouts) == 4 and layouts == pytest.approx([0.6931] * 4, abs=1e-3)
    assert set(found["product"]) == {"first three steps", "the others"}
    if gpus:
        assert found["1.5B"]["as it comes"]["mfu"] > 0 and 0 < found["1.5B"]["as it comes"]["peak_gib"] < 1


def test_parts_and_their_functions_are_the_same() -> None:
    assert gpu.PARTS.keys() == gpu_ladder.PARTS.keys()
    assert all(name in "\n".join(gpu.listed()) for name in gpu.PARTS)
    shares = gpu_ladder.shares(gpu_ladder.Counter({"nvjet_gemm": 3.0, "flash_fwd": 1.0}))
    assert shares == {"products": 0.75, "attention": 0.25}


def a_part(note: Any, tiny: bool, *, ms: float, name: str) -> None:
    note("a", ms=ms)
    if name == "good":
        note("b", skipped="for want of something")
    elif name == "refused":
        raise ValueError("there is none")
    elif name == "dying":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(1000)


def test_a_part_that_is_cut_off_leaves_its_lines_and_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, until = tmp_path / "lines.jsonl", time.monotonic() + 60
    names = ("good", "refused", "dying", "endless")
    parts = {name: partial(a_part, ms=1.5 + at, name=name) for at, name in enumerate(names)}
    monkeypatch.setattr(gpu_ladder, "PARTS", parts)
    monkeypatch.setattr(gpu, "PARTS", {name: (1 if name == "endless" else 30, "") for name in parts})
    assert [gpu.run(name, file, until, tiny=False) for name in parts] == [True, False, False, False]
    assert not gpu.run("good", file, time.monotonic(), tiny=False)
    found = gpu.lines_of(file)
    assert [line["ms"] for line in found if "ms" in line] == [1.5, 2.5, 3.5, 4.5]
    said = [line["failed"] for line in found if "failed" in line]
    assert said[0] == "ValueError: there is none" and "ended with -9" in said[1]
    assert "limit of 1 s" in said[2] and "no time was left" in said[3]
    with file.open("a") as half:
        half.write('{"part": "good", "vari')
    shown = "\n".join(gpu.table(gpu.lines_of(file)))
    assert "| a | 1.5 |  |" in shown and "- endless : stopped at its limit" in shown


def test_the_list_of_wheels_is_what_packtrain_needs_but_what_torch_brings() -> None:
    """Of packages that are installed here, so that both have the same requirements."""

    def needs(name: str, seen: set[str]) -> set[str]:
        for line in distribution(name).requires or []:
            one = Requirement(line)
            known = one.name.lower().replace("_", "-")
            here = one.marker is None or one.marker.evaluate({"extra": "", "python_version": "3.12"})
            if here and known not in seen:
                seen.add(known)
                needs(known, seen)
        return seen

    if gpu_wheels.listed()["huggingface-hub"][0].partition(".")[0] != version("huggingface-hub").partition(".")[0]:
        pytest.skip("this huggingface-hub needs other packages than the listed one")
    listed, brought = set(gpu_wheels.listed()), needs("torch", {"torch"}) | {"torch", "numpy"}
    for_tests = needs("pytest", {"pytest"}) | needs("hypothesis", {"hypothesis"})
    needed = needs("packtrain", set()) | for_tests | {"liger-kernel"}
    of_dateutil_2 = {"six"}  # which the tests' S3 client pins; the list has 4, with tzdata
    assert listed == needed - brought - set(gpu_wheels.NOT_NEEDED) - of_dateutil_2
    assert set(gpu_wheels.NOT_NEEDED) <= needed | {"tzdata"} and not gpu_wheels.missing()
