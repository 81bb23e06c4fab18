"""Stand-in GPUs for a command: `python tests/standin/gpus.py 2 packtrain sft run.yaml` runs it with two of them.

A small library in C++, built for the torch that is installed, has torch believe in CUDA devices; site/ is put on the command's
path, where Python finds the rest (site/standin_gpus/). Without a C++ compiler there are none, and `library` says so.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
SITE = HERE / "site"
COMPILER = shutil.which("g++") or shutil.which("c++")


def library() -> Path:
    """The library, built if it was not yet for this torch; raises FileNotFoundError without a C++ compiler."""
    if COMPILER is None:
        raise FileNotFoundError("the stand-in GPUs need a C++ compiler (g++)")
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    torch, source = Path(spec.submodule_search_locations[0]), HERE / "guard.cpp"
    built_of = f"{torch} {(torch / 'version.py').read_text()} {source.read_text()}"
    name = f"standin-gpus-{os.getuid()}-{hashlib.sha256(built_of.encode()).hexdigest()[:12]}.so"
    built = Path(tempfile.gettempdir(), name)
    if not built.exists():
        aside = built.with_suffix(f".{os.getpid()}")
        includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        link = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
        command = [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", *includes, str(source), "-o", str(aside), *link]
        subprocess.run(command, check=True)
        aside.rename(built)
    return built


def variables(devices: int, report: Path | None = None) -> dict[str, str]:
    """The variables with which a process has so many devices; what they report (device.py) goes to `report`, as lines of JSON."""
    own = {"STANDIN_GPUS": str(devices), "STANDIN_LIBRARY": str(library())}
    own |= {"PATH": f"{SITE}:{os.environ['PATH']}"}
    own |= {"PYTHONPATH": ":".join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])}
    return own if report is None else {**own, "STANDIN_REPORT": str(report)}


if __name__ == "__main__":
    environment = {**os.environ, **variables(int(sys.argv[1]))}
    environment.pop("DS_ACCELERATOR", None)  # DeepSpeed takes its CUDA side
    os.execvpe(sys.argv[2], sys.argv[2:], environment)
