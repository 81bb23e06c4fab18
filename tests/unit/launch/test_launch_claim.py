"""One run at a time in a run folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from packtrain.errors import UserError
from packtrain.launch.claim import claimed, claimed_for_others
from packtrain.run_folder import RunFolder


def test_a_folder_is_claimed_by_one_run_until_it_ends_even_when_it_is_moved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with claimed(folder):
        folder.rename(tmp_path / "run.1")
        with pytest.raises(UserError, match="a run is going on"), claimed(folder):
            pass
        with claimed(tmp_path / "another"):
            pass
    with claimed(folder):
        pass


CLAIM = """
import sys, time
from pathlib import Path
from packtrain.errors import UserError
from packtrain.launch.claim import claimed
claims, folder = 0, Path(sys.argv[1])
while claims < 200:
    try:
        with claimed(folder):
            (folder / "mine").mkdir()
            (folder / "mine").rmdir()
            claims += 1
    except UserError:
        pass
"""


def test_a_lock_goes_with_its_run_and_is_never_held_twice(tmp_path: Path) -> None:
    places = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", CLAIM, str(tmp_path / "run")]
    several = [subprocess.Popen(command, env=places, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for one in several:
        assert one.communicate(timeout=120)[1] == ""
    assert not list((tmp_path / "tmp").iterdir())


def test_a_machine_that_shares_the_disk_sees_the_run_even_when_the_folder_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.summary.parent.mkdir()
    folder.summary.write_text('{"status": "done"}')
    with claimed(folder.root):
        folder.open_attempt("auto")
        with claimed_for_others(folder.root):
            assert folder.begin("auto") is not None
            (tmp_path / "tmp of another machine").mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp of another machine"))
            with pytest.raises(UserError, match="a run of another machine is going on"), claimed(folder.root):
                pass
    with claimed(folder.root), claimed_for_others(folder.root):
        pass
