"""One run at a time in a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.errors import UserError
from packtrain.launch.claim import claimed


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
