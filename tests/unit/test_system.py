"""What is published is whole or absent whatever happens, and what a run prints does not end it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import packtrain
from packtrain.system import aside, publish, remove, told_at_once, write_text


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is synced and renamed, in order."""
    made: list[str] = []
    fsync, replace = os.fsync, os.replace

    def syncing(descriptor: int) -> None:
        made.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def replacing(old: Path, new: Path) -> None:
        made.append(f"{Path(old).name} -> {Path(new).name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    return made


def test_a_folder_is_synced_with_all_that_is_in_it_before_it_is_renamed(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "made" / "inside").mkdir(parents=True)
    (tmp_path / "made" / "one").write_text("1")
    (tmp_path / "made" / "inside" / "two").write_text("2")
    publish(tmp_path / "made", tmp_path / "done")
    assert calls == ["one", "made", "two", "inside", "made -> done", tmp_path.name]
    assert (tmp_path / "done" / "inside" / "two").read_text() == "2"


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path, calls, monkeypatch):
    write_text(file := tmp_path / "note", "old")
    assert calls == [".note.partial", ".note.partial -> note", tmp_path.name] and os.listdir(tmp_path) == ["note"]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(file, "new")
    assert file.read_text() == "old"


def test_what_is_removed_loses_its_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "step-000002").mkdir()
    (folder / "weights").write_text("")
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed there
    remove(folder)
    assert os.listdir(tmp_path) == [".step-000002.partial"]
    assert aside(folder).exists() and not folder.exists()


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
from packtrain.system import fast_imports
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
    expected.append("ModuleNotFoundError: No module named 'nothing_like_it'")
    assert all(f"{line}\n" in failed.stderr for line in expected)


def test_the_thread_that_waits_for_signals_ends_with_its_block() -> None:
    """It would keep the model beyond its process group, and such a process crashes at exit."""
    for _ in range(20):
        with told_at_once(lambda number: None):
            pass
        assert "signals" not in {thread.name for thread in threading.enumerate()}


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        write_text(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo() and [*tmp_path.iterdir()] == [tmp_path / "pipe"]
