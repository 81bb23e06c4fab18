"""Whether compilers are there: for Triton, which builds its kernels and a launcher for each when they are first used, and torch.compile."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

INSTALL_CXX = "apt-get install g++ (or dnf install gcc-c++, conda install gxx_linux-64), or name one in CXX"
INSTALL = (
    "apt-get install gcc python3-dev (or dnf install gcc python3-devel, conda install gcc_linux-64), or name one in CC"
)


def lack_of_compiler(env: Mapping[str, str] = os.environ) -> str:
    """What Triton lacks to compile its kernels on a GPU, in words; "" if nothing, or if there is no Triton.

    As in Triton's own search: the compiler is CC, else gcc or clang, and needs Python's headers.
    """
    if find_spec("triton") is None:
        return ""
    asked = env.get("CC")
    names = [asked.split()[0]] if asked and asked.split() else ["gcc", "clang"]
    if not any(shutil.which(name, path=env.get("PATH")) for name in names):
        return f"no C compiler ({' or '.join(names)}), so Triton cannot build its kernels for the GPU"
    headers = {Path(sysconfig.get_path(kind)) for kind in ("include", "platinclude")}
    if not any((folder / "Python.h").is_file() for folder in headers):
        return (
            f"no Python.h in {' or '.join(map(str, sorted(headers)))}, so Triton cannot build its kernels for the GPU"
        )
    return ""


def lack_of_cxx(env: Mapping[str, str] = os.environ) -> str:
    """What torch.compile lacks to compile a model, in words; "" if nothing. As in torch's own search: CXX, else g++."""
    name = env.get("CXX") or "g++"
    return "" if shutil.which(name, path=env.get("PATH")) else f"no C++ compiler ({name})"
