"""benchmarks/gpu.py on a CPU: all of it, and what becomes of parts that fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu


@pytest.mark.exhaustive
def test_every_part_runs_with_tiny_models_and_the_section_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "RESULTS.md"
    output.write_text("# Results\n\n## Before\n\nkept\n\n## On GPUs\n\nold\n\n## After\n\nkept, too\n")
    arguments = ["--tiny", "--output", str(output), "--logs", str(tmp_path / "logs")]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "PYTHONWARNINGS"):  # which it sets for its parts
        monkeypatch.setenv(name, "")
    # in this process: its parts are forked from the one that has imported everything for other tests, too
    assert gpu.main() == 0, capsys.readouterr().out
    text = output.read_text()
    assert text.startswith("# Results\n\n## Before\n\nkept\n\n## On GPUs\n")
    assert text.endswith("\n\n## After\n\nkept, too\n") and "old" not in text
    section = text.split("## On GPUs")[1].split("## After")[0]
    assert "Nothing failed." in section and "tests/gpu: " in section and "sdpa, dense block mask" in section
    trained = [part.name for part in gpu.parts_of(0, tiny=True) if part.group]
    losses = {name: section.split(f"| {name} |")[1].split("\n")[0].split(" | ")[-2] for name in trained}
    assert len(trained) == 16
    for task in ("sft 0.6B", "dpo 0.6B", "LoRA 8B"):  # all of them train on the same, TRL too
        own = [float(loss) for name, loss in losses.items() if name.startswith(task)]
        assert max(own) - min(own) <= 2e-3  # rounding of bfloat16


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
        endless: "after 1 s",
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
    section = gpu.section({"tests/gpu": tests}, failed, [], "")
    assert section.endswith("What failed:\n\n- a part: why\n- tests/gpu/test_x.py::test_y: assert 1 == 2")
