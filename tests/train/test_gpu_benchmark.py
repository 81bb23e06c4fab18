"""benchmarks/gpu.py with tiny models, on a stand-in GPU and on a CPU; what becomes of parts that fail; the wheels it needs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import nullcontext
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from torch.autograd import DeviceType

from benchmarks import gpu
from tests.standin import gpus as standin

# benchmarks/gpu.py puts its folder on the path
import gpu_profile  # isort: skip
import gpu_wheels  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ["sft 1.5B, profile", "GRPO"]
LACKING = "liger_kernel is not installed"
"""Why parts may not have run: Liger's kernels are no dependency."""


def measured(folder: Path, gpus: int, *only: str) -> tuple[dict[str, Any], str]:
    """What `gpu.py --tiny` has measured on so many stand-in GPUs (0: on the CPU), and the section that it wrote."""
    output = folder / "RESULTS.md"
    output.write_text("# Results\n\n## Before\n\nkept\n\n## On GPUs\n\nold\n\n## After\n\nkept, too\n")
    try:
        given = standin.variables(gpus) if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    except FileNotFoundError as error:
        pytest.skip(str(error))
    environment = {**os.environ, **given, "OMP_NUM_THREADS": "1"}
    environment.pop("DS_ACCELERATOR", None)
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--minutes", "60", "--output", str(output)]
    command += ["--logs", str(folder / "logs"), *(["--only", *only] if only else [])]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    found = json.loads((folder / "logs" / "results.json").read_text())
    unexplained = {name: why for name, why in found["failed"].items() if LACKING not in why}
    assert not unexplained, run.stdout + run.stderr
    text = output.read_text()
    assert text.startswith("# Results\n\n## Before\n\nkept\n\n## On GPUs\n")
    assert text.endswith("\n\n## After\n\nkept, too\n") and "old" not in text
    return found["results"], text.split("## On GPUs")[1].split("## After")[0]


@pytest.mark.exhaustive
def test_a_sample_of_the_run_goes_through_the_code_for_gpus(tmp_path: Path) -> None:
    results, section = measured(tmp_path, 1, *SAMPLE)
    assert "stand-in" in results["versions"]["devices"][0] and "of 80 GiB" in section and "Nothing failed." in section
    profiled, grpo = (results[part.name] for part in gpu.parts_of(1, tiny=True) if part.name.startswith(tuple(SAMPLE)))
    assert profiled["attention"].startswith("flash") and profiled["mfu"] > 0
    assert 0 < profiled["peak"] < 1 and 0 < profiled["planned"] < 1  # GiB, of tensors on the device
    shares = profiled["profile"]["shares"]
    assert sum(shares.values()) == pytest.approx(1) and min(shares[kind] for kind in ("products", "head")) > 0
    assert grpo["attention"] == "flash" and grpo["attached"]["peak"] > 0
    assert grpo["attached"]["loss"] == pytest.approx(grpo["padded"]["loss"], abs=1e-3)
    assert grpo["attached"]["norm"] == pytest.approx(grpo["padded"]["norm"], rel=1e-2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gpus", [0, 1], ids=["cpu", "stand-in"])
def test_every_part_runs_with_tiny_models(tmp_path: Path, gpus: int) -> None:
    results, section = measured(tmp_path, gpus)
    assert "tests/gpu, models: " in section and "sdpa, dense block mask" in section and "Quickstart: 3 steps" in section
    parts = gpu.parts_of(gpus, tiny=True)
    assert {part.name for part in parts if "Liger" not in part.name} <= {*results}
    for task in ("sft 1.5B", "sft 0.6B", "dpo 0.6B", "LoRA 8B"):  # all of them train on the same, TRL too
        own = [one["losses"][1] for name, one in results.items() if name.startswith(task) and "profile" not in name]
        assert len(own) >= 3 and max(own) - min(own) <= 2e-3  # rounding of bfloat16


def test_a_profile_of_kernels_is_split_by_kind_and_by_who_launched_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's profiler gives it: kernels as events of the device, and below the operators of the CPU that launched them."""
    event = partial(SimpleNamespace, kernels=[], cpu_parent=None, is_user_annotation=False)

    def kernel(name: str, start: float, end: float, **more: Any) -> SimpleNamespace:
        return event(name=name, device_type=DeviceType.CUDA, time_range=SimpleNamespace(start=start, end=end), **more)

    head = event(name="ChunkedLogProbFunctionBackward", device_type=DeviceType.CPU)
    product = SimpleNamespace(name="nvjet_tst_gemm", duration=10.0)
    launched = event(name="aten::mm", device_type=DeviceType.CPU, cpu_parent=head, kernels=[product])
    events = [
        *(head, launched),
        *(kernel("nvjet_tst_gemm", 0, 30), kernel("nvjet_tst_gemm", 30, 40), kernel("void flash_fwd_kernel", 40, 60)),
        *(
            kernel("Memcpy HtoD", 50, 70),
            kernel("silu", 80, 90),
            kernel("Optimizer.step", 0, 90, is_user_annotation=True),
        ),
    ]
    monkeypatch.setattr(gpu_profile.time, "perf_counter", lambda: 100e-6)
    profile = gpu_profile.stop((SimpleNamespace(stop=lambda: None, events=lambda: events), 0.0))
    shares = profile["shares"]
    assert profile["of"] == "kernels" and profile["longest"][0][:2] == ["nvjet_tst_gemm", "products"]
    assert sum(shares.values()) == pytest.approx(1) and shares["waiting"] == pytest.approx(0.2)
    assert shares["products"] == pytest.approx(3 * shares["head"]) and shares["attention"] == shares["copies"]
    assert shares["elementwise"] == pytest.approx(shares["head"]) and shares["head"] == pytest.approx(0.8 * 10 / 90)


@pytest.mark.usefixtures("nothing_imported")
def test_what_was_measured_is_written_after_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    parts = [gpu.Part("first", good), gpu.Part("second", refused), gpu.Part("third", good)]
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    written: list[str] = []

    def write() -> None:
        gpu.replace_section(tmp_path / "out.md", gpu.section(results, failed, parts, ""))
        written.append((tmp_path / "out.md").read_text())

    gpu.measure(parts, tmp_path, time.monotonic() + 600, results, failed, write, tiny=True)
    assert ["Not reached" in text for text in written] == [True, True, True, False]
    assert written[1].endswith("Not reached: second; third.\n") and "- second: model.path: there is none" in written[2]
    assert set(results) == {"versions", "first", "third"} and [*tmp_path.glob(".*")] == []


def test_the_list_of_wheels_is_what_packtrain_needs_but_what_torch_brings() -> None:
    """Of packages that are installed here, so that both have the same requirements."""

    def needs(name: str, seen: set[str]) -> set[str]:
        for line in distribution(name).requires or []:
            one = Requirement(line)
            known = one.name.lower().replace("_", "-")
            if known not in seen and (
                one.marker is None or one.marker.evaluate({"extra": "", "python_version": "3.12"})
            ):
                seen.add(known)
                needs(known, seen)
        return seen

    listed, brought = set(gpu_wheels.listed()), needs("torch", {"torch"}) | {"torch", "numpy"}
    for_tests = needs("pytest", {"pytest"}) | needs("hypothesis", {"hypothesis"})
    needed = needs("packtrain", set()) | for_tests | {"liger-kernel"}
    of_dateutil_2 = {"six"}  # which the tests' S3 client pins; the list has 4, with tzdata
    assert listed == needed - brought - set(gpu_wheels.NOT_NEEDED) - of_dateutil_2
    assert set(gpu_wheels.NOT_NEEDED) <= needed | {"tzdata"} and not gpu_wheels.missing()


def test_wheels_are_shrunk_and_found_by_a_process_that_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    contents = {"pandas/__init__.py": "", "pandas/tests/large.py": "x", "not_there_at_all.py": "# " + "long " * 20_000}
    for tags in ("py3-none-any", "cp39-cp39-manylinux_2_28_x86_64"):
        with zipfile.ZipFile(folder / f"pandas-3.1.1-{tags}.whl", "w") as wheel:
            for name, text in contents.items():
                wheel.writestr(name, text)
    assert gpu_wheels.shrink(folder) < 0.01
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    assert gpu_wheels.put_on_path(folder) == ["pandas-3.1.1-cp39-cp39-manylinux_2_28_x86_64.whl"]
    place = Path(sys.path[0])
    assert place.name == "site-packages" and not (place / "pandas" / "tests").exists()
    subprocess.run([sys.executable, "-c", "import not_there_at_all, gpu_wheels, packtrain"], check=True, cwd=tmp_path)
    monkeypatch.setattr(gpu_wheels, "missing", lambda **_: ["pyarrow", "antlr4-python3-runtime"])
    said = gpu_wheels.advice([])
    assert "pip download" in said and "pyarrow==" in said and "pip wheel --no-deps -w wheels antlr4" in said


def good(folder: Path, *, tiny: bool) -> dict[str, Any]:
    return {"tiny": tiny, "rank": os.environ.get("RANK")}


def refused(folder: Path, *, tiny: bool) -> None:
    print("error:\n  model.path: there is none\n    → Set it.", flush=True)
    sys.exit(2)


def dying(folder: Path, *, tiny: bool) -> None:
    print("Segmentation fault", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def endless(folder: Path, *, tiny: bool) -> None:
    time.sleep(1000)


@pytest.fixture
def nothing_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By parts, which need nothing here."""
    monkeypatch.setattr(gpu, "WARM", ("json", "not_there_at_all"))


@pytest.mark.usefixtures("nothing_imported")
def test_what_fails_is_told_and_ends_nothing_else(tmp_path: Path) -> None:
    context, until = multiprocessing.get_context("fork"), time.monotonic() + 60

    def run(part: gpu.Part, until: float = until) -> Any:
        return gpu.run(part, tmp_path, tmp_path, context, until, nullcontext(), tiny=True)

    said = {
        refused: "there is none → Set it",
        dying: "Segmentation",
        endless: f"after {gpu.SLOWER} s",
    }
    for work, reason in said.items():
        with pytest.raises(gpu.Failed, match=reason):
            run(gpu.Part(work.__name__, work, limit_s=1 if work is endless else 20))
    with pytest.raises(gpu.Failed, match="no time was left"):
        run(gpu.Part("good", good), until=time.monotonic())
    with pytest.raises(gpu.Failed, match="not_there is not installed"):
        run(gpu.Part("good", good, needs="not_there"))
    assert run(gpu.Part("good", good, processes=2)) == {"tiny": True, "rank": "0"}
    failed = {"a part": "why"}
    tests = {"passed": 1, "failed": [["tests/gpu/test_x.py::test_y", "assert 1 == 2"]], "skipped": {"reason": 2}}
    section = gpu.section({"tests/gpu, kernels": tests}, failed, [], "")
    assert section.endswith(
        "What failed, or could not run:\n\n- a part: why\n- tests/gpu/test_x.py::test_y: assert 1 == 2"
    )
