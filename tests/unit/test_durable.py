"""What is published is on the disk before it has its name, and whole or absent whatever happens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packtrain.system import aside, publish, remove, write_text


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


def test_a_text_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
