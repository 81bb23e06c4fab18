"""What Triton needs to compile its kernels is looked for where Triton looks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from packtrain.plan import surroundings
from packtrain.plan.surroundings import lack_of_compiler


def test_a_compiler_and_the_headers_of_python_are_looked_for_where_triton_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    (tmp_path / "Python.h").write_text("")
    there, nowhere = {"PATH": str(tmp_path)}, {"PATH": str(tmp_path / "empty")}
    monkeypatch.setattr(surroundings, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setattr(surroundings.sysconfig, "get_path", lambda _: str(tmp_path))
    assert lack_of_compiler(there) == ""
    assert lack_of_compiler(nowhere).startswith("no C compiler (gcc or clang), so Triton cannot build")
    assert lack_of_compiler({**there, "CC": "icx -O1"}).startswith("no C compiler (icx)")
    assert lack_of_compiler({**nowhere, "CC": str(tmp_path / "gcc")}) == ""
    (tmp_path / "Python.h").unlink()
    assert lack_of_compiler(there).startswith(f"no Python.h in {tmp_path}")
    monkeypatch.setattr(surroundings, "find_spec", lambda _: None)
    assert lack_of_compiler(nowhere) == ""
