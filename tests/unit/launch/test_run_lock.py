"""One run at a time in a run folder."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from packtrain.errors import UserError
from packtrain.launch.execute import LOCK, RunLock, check_free, is_locked, locked
from packtrain.run_folder import RunFolder


def test_a_launcher_takes_its_lock_again_and_no_other_does(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open_attempt("auto")
    with RunLock() as mine, RunLock() as other:
        mine.take(folder.root)
        mine.take(folder.root)
        with pytest.raises(UserError, match="a run is going on in"):
            other.take(folder.root)
        mine.close()
        other.take(folder.root)
        assert is_locked(folder.root)
    assert not is_locked(folder.root)


def test_a_folder_is_locked_by_one_run_until_it_ends_even_when_it_is_moved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    check_free(folder.root)
    folder.open_attempt("auto")
    folder.summary.write_text('{"status": "done"}')
    check_free(folder.root)
    folder.open_attempt("auto")
    with locked(folder.root):
        assert folder.begin(None) is not None
        assert is_locked(folder.root)
        with pytest.raises(UserError, match="a run is going on in"):
            check_free(folder.root)
        (folder.logs / "channel.json").write_text(json.dumps({"host": "n2"}))
        with pytest.raises(UserError, match=r"a run of another machine is going on in .* \(n2\)"), locked(folder.root):
            pass
        assert not is_locked(tmp_path / "another")
    assert not is_locked(folder.root)


def test_machines_that_look_together_find_no_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open_attempt("auto")
    (folder.logs / LOCK).touch()
    with ThreadPoolExecutor(8) as machines:
        assert not any(machines.map(lambda _: is_locked(folder.root), range(400)))


def test_a_file_of_that_name_that_others_made_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / LOCK).write_text("the user's\n")
    check_free(tmp_path)
    assert (tmp_path / "logs" / LOCK).read_text() == "the user's\n"
