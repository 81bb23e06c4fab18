"""What a run prints does not end it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import packtrain

SHARED = """
import os
from packtrain.system import outlive_terminal
outlive_terminal()
os.set_blocking(1, False)
for number in range(3000):
    print("x" * 100, number)
"""


def test_a_slow_reader_is_waited_for_on_a_pipe_that_another_process_made_non_blocking() -> None:
    writer = subprocess.Popen([sys.executable, "-c", SHARED], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    time.sleep(1)  # the pipe is full
    assert len(writer.stdout.readlines()) == 3000
    assert writer.wait() == 0


NOISY = """
import logging, os, subprocess, sys
print("print"), print("to stderr", file=sys.stderr), logging.getLogger("library").warning("logged"), os.write(2, b"from C\\n")
subprocess.run(["echo", "from a child"])
class Leak:
    def __del__(self, write=os.write):
        write(2, b"nanobind: leaked function\\n")
leak = Leak()
leak.itself = leak
"""
IMPORTS = """
from packtrain import fast_imports
from packtrain.system import kept
with fast_imports():
    import noisy
print("ours", sorted("".join(kept).splitlines()))
"""


def test_what_libraries_print_while_they_are_imported_and_taken_apart_is_not_shown_but_kept(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(packtrain.__file__).parents[1]}"}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True, check=True)
    expected = ["from C", "from a child", "logged", "print", "to stderr"]
    assert (done.stdout, done.stderr) == (f"ours {expected}\n", "")
    (tmp_path / "noisy.py").write_text(f"{NOISY}import nothing_like_it\n")
    failed = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stdout == ""
    assert all(
        f"{line}\n" in failed.stderr for line in (*expected, "ModuleNotFoundError: No module named 'nothing_like_it'")
    )
