"""The run folder: an attempt that fails costs an earlier run nothing, one that trains moves it aside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packtrain.run_folder import RunFolder, write_json


def finished(root: Path) -> RunFolder:
    folder = RunFolder(root)
    folder.logs.mkdir(parents=True)
    folder.log(0).write_text("the earlier run\n")
    folder.config.write_text("earlier: 1\n")
    folder.metrics.write_text("{}\n")
    write_json(folder.summary, {"status": "done"})
    return folder


def attempt(folder: RunFolder, resume: str = "auto") -> None:
    folder.open_attempt(resume)
    folder.attempt.config.write_text("coming: 1\n")


def contents(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in root.iterdir() if path.is_file()}


@pytest.mark.parametrize("failed_before", [0, 1, 2])
def test_a_finished_run_is_moved_whole_when_another_begins_and_not_before(tmp_path: Path, failed_before: int) -> None:
    folder = finished(tmp_path / "run")
    earlier = contents(folder.root)
    for _ in range(failed_before):
        attempt(folder)
        folder.log(0).write_text("failed\n")
        assert contents(folder.root) == earlier
    attempt(folder)
    with folder.log(0).open("a") as log:
        moved = folder.begin("auto")
        log.write("training\n")
    assert moved == tmp_path / "run.1"
    assert contents(moved) == earlier
    assert contents(RunFolder(moved).logs) == {"rank-00000.log": "the earlier run\n"}
    assert not RunFolder(moved).attempt.root.exists() and sorted(os.listdir(moved)) == sorted([*earlier, "logs"])
    assert contents(folder.root) == {"config.yaml": "coming: 1\n"}
    assert folder.log(0).read_text().endswith("training\n") and os.listdir(folder.logs) == ["rank-00000.log"]


@pytest.mark.parametrize(("resume", "moves"), [("auto", False), ("never", True)])
def test_an_unfinished_run_stays_unless_it_is_to_start_anew(tmp_path: Path, resume: str, moves: bool) -> None:
    folder = finished(tmp_path / "run")
    write_json(folder.summary, {"status": "stopped"})
    attempt(folder, resume)
    assert folder.config.read_text() == "earlier: 1\n"
    assert (folder.begin(resume) is not None) == moves
    assert folder.config.read_text() == "coming: 1\n"
    assert folder.metrics.exists() != moves


def test_a_run_that_goes_on_from_a_checkpoint_in_its_folder_stays_in_it(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    assert not folder.gives_way(str(folder.checkpoints / "step-000003"))
    assert folder.gives_way(str(tmp_path / "other" / "step-000003"))


def test_the_folder_that_one_stands_in_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(OSError, match="cannot be moved"):
        RunFolder(Path(".")).open_attempt("auto")
    assert (tmp_path / "run" / "logs").exists() and not (tmp_path / "run" / "logs-before").exists()


def test_the_log_that_slurm_has_opened_stays_when_an_earlier_run_gives_way(tmp_path, monkeypatch) -> None:
    folder = finished(tmp_path / "run")
    for name in ("slurm-7.log", "slurm-7.sbatch", "slurm-6.log"):
        (folder.logs / name).write_text(name)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    attempt(folder)
    moved = folder.begin("auto")
    assert moved is not None
    assert {file.name for file in folder.logs.glob("slurm*")} == {"slurm-7.log", "slurm-7.sbatch"}
    assert (moved / "logs" / "slurm-6.log").exists() and (moved / "logs" / "rank-00000.log").exists()
