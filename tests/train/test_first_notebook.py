"""examples/first-run.ipynb: a stranger's first run, cell by cell. Its commands are forked processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.train import forked

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first-run.ipynb"
FEW = 12  # steps


def cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text())["cells"]


def sources() -> list[str]:
    """The code, with fewer steps and without what installs."""
    code = ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]
    few = [re.sub(r"^steps = \d+$", f"steps = {FEW}", one, flags=re.M) for one in code]
    assert few != code
    return [one for one in few if not one.startswith("%pip install")]


def shell(line: str, folder: Path) -> str:
    """Run `packtrain …` or `echo "…" | packtrain …`, and return its output."""
    said, _, command = line.rpartition(" | ")
    text = shlex.split(said)[1:] if said else []
    begin = partial(forked.piped, f"{' '.join(text)}\n") if said else None
    name, *arguments = shlex.split(command)
    assert name == "packtrain" and (not said or shlex.split(said)[0] == "echo")
    done = forked.command(*arguments, cwd=folder, begin=begin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_notebook_trains_reads_its_metrics_and_asks_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    said: dict[str, str] = {}
    for source in sources():
        if source.startswith("!"):
            line = source[1:].format(**names)
            said[shlex.split(line.rpartition(" | ")[2])[1]] = shell(line, tmp_path)
        else:
            exec(source, names)
    assert "⟦A calf." in said["inspect"] and "isolation  exact" in said["sft"] and said["chat"].strip()
    first, *_, last = names["metrics"]
    assert (first["step"], last["step"]) == (1, FEW) and last["loss"] < first["loss"] / 2
    assert (tmp_path / "runs/first-run/report.html").is_file()


def test_the_notebook_holds_no_outputs_and_no_path_of_a_machine() -> None:
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    text = "".join("".join(cell["source"]) for cell in cells())
    assert not re.search(r"(?<![\w/:.])/(?!/)\w+/|[A-Z]:\\", re.sub(r"https://\S+", "", text))


@pytest.mark.exhaustive
def test_a_kernel_of_jupyter_executes_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    book.cells = [one for one in book.cells if not one.source.startswith("%pip")]
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {one.id: "".join(part.get("text", "") for part in one.outputs) for one in book.cells if "outputs" in one}
    assert "A gosling." in shown["ask"] and "exact: outputs" in shown["train"]
