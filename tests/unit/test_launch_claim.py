"""One run at a time in a run folder."""

from __future__ import annotations

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
