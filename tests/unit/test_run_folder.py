"""The run folder: an attempt that fails costs an earlier run nothing, one that trains moves it aside; others' files are left alone."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from packtrain import system
from packtrain.errors import UserError
from packtrain.launch.attempt import LOCK
from packtrain.monitor.channel import PUBLISHED
from packtrain.monitor.watchdog import DIAGNOSIS, RANKS, stacks_of
from packtrain.run_folder import REPLACED_LOGS, RunFolder, write_json
from packtrain.system import in_time


def finished(root: Path) -> RunFolder:
    folder = RunFolder(root)
    folder.open_attempt("auto")
    folder.attempt.root.rmdir()
    folder.log(0).write_text("the earlier run\n")
    folder.config.write_text("earlier: 1\n")
    folder.plan.write_text("{}\n")
    folder.metrics.write_text("{}\n")
    write_json(folder.summary, {"status": "done"})
    return folder


def checkpoint_of(folder: RunFolder) -> Path:
    place = folder.checkpoints / "step-000003"
    place.mkdir(parents=True)
    return place


def attempt(folder: RunFolder, resume: str = "auto") -> None:
    folder.open_attempt(resume)
    folder.attempt.config.write_text("coming: 1\n")


def contents(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in root.iterdir() if path.is_file()}


@pytest.mark.parametrize("failed_before", [0, 1, 2])
def test_a_finished_run_is_moved_whole_when_another_begins_and_not_before(tmp_path: Path, failed_before: int) -> None:
    folder = finished(tmp_path / "run")
    (folder.root / "notes.md").write_text("the user's\n")
    earlier = contents(folder.root)
    for _ in range(failed_before):
        attempt(folder)
        folder.log(0).write_text("failed\n")
        assert contents(folder.root) == earlier
    attempt(folder)
    with folder.log(0).open("a") as log:
        moved = folder.begin(None)
        log.write("training\n")
    assert moved == tmp_path / "run.1"
    mark = {".packtrain": earlier.pop(".packtrain")}
    notes = {"notes.md": earlier.pop("notes.md")}
    assert contents(moved) == earlier | mark
    assert contents(RunFolder(moved).logs) == {"rank-00000.log": "the earlier run\n"}
    assert not RunFolder(moved).attempt.root.exists() and sorted(os.listdir(moved)) == sorted([*earlier, *mark, "logs"])
    assert contents(folder.root) == {"config.yaml": "coming: 1\n"} | mark | notes
    assert folder.log(0).read_text().endswith("training\n") and os.listdir(folder.logs) == ["rank-00000.log"]


@pytest.mark.parametrize(("resume", "moves"), [("auto", False), ("never", True)])
def test_an_unfinished_run_stays_unless_it_is_to_start_anew(tmp_path: Path, resume: str, moves: bool) -> None:
    folder = finished(tmp_path / "run")
    write_json(folder.summary, {"status": "stopped"})
    checkpoint = checkpoint_of(folder)
    attempt(folder, resume)
    assert folder.config.read_text() == "earlier: 1\n"
    assert (folder.begin(None if moves else checkpoint) is not None) == moves
    assert folder.config.read_text() == "coming: 1\n"
    assert folder.metrics.exists() != moves
    kept = [file.read_text() for file in folder.logs.glob("*-config.yaml")]
    assert kept == ([] if moves else ["earlier: 1\n"])


@pytest.mark.parametrize("damaged", [False, True])
def test_a_killed_run_that_nothing_can_go_on_from_is_moved(tmp_path: Path, damaged: bool) -> None:
    folder = finished(tmp_path / "run")
    folder.summary.unlink()
    if damaged:
        checkpoint_of(folder)
    attempt(folder)
    moved = folder.begin(None)
    assert moved is not None and (moved / "metrics.jsonl").exists() and not folder.metrics.exists()
    assert (moved / "config.yaml").read_text() == "earlier: 1\n" and (moved / "checkpoints").exists() == damaged


def test_whoever_is_killed_as_an_earlier_run_is_moved_does_not_go_on_from_it(tmp_path: Path, monkeypatch) -> None:
    folder = finished(tmp_path / "run")
    checkpoint_of(folder)
    attempt(folder)
    rename, moved = Path.rename, []

    def once(self: Path, target: Path) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(self.name)
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", once)
        folder.begin(None)
    assert moved == ["checkpoints"]
    attempt(folder)
    assert folder.begin(None) == tmp_path / "run.2"
    assert (tmp_path / "run.1" / "checkpoints" / "step-000003").exists()
    assert RunFolder(tmp_path / "run.2").status() == "done"


def test_a_run_that_goes_on_from_a_checkpoint_in_its_folder_stays_in_it_and_its_results_move(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    assert not folder.gives_way(str(folder.checkpoints / "step-000003"))
    assert folder.gives_way(str(tmp_path / "other" / "step-000003"))
    checkpoint = checkpoint_of(folder)
    folder.final.mkdir()
    attempt(folder, str(checkpoint))
    moved = folder.begin(checkpoint)
    assert moved is not None and set(os.listdir(moved)) == {".packtrain", "final", "summary.json", "metrics.jsonl"}
    assert folder.metrics.exists() and checkpoint.exists()


def test_a_link_to_a_run_folder_stays_one(tmp_path: Path) -> None:
    finished(tmp_path / "disk" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    folder = RunFolder(tmp_path / "link")
    attempt(folder)
    assert folder.begin(None) == tmp_path / "disk" / "run.1"
    assert folder.root.is_symlink() and (tmp_path / "disk" / "run" / "config.yaml").read_text() == "coming: 1\n"


def test_an_earlier_run_is_moved_into_its_folder_where_it_cannot_go_beside(tmp_path: Path, monkeypatch) -> None:
    folder, access = finished(tmp_path / "run"), os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    attempt(folder)
    assert folder.begin(None) == tmp_path / "run" / "run.1"
    assert (tmp_path / "run" / "run.1" / "summary.json").exists() and os.listdir(tmp_path) == ["run"]
    write_json(folder.summary, {"status": "done"})
    attempt(folder)
    assert folder.begin(None) == tmp_path / "run" / "run.2" and (tmp_path / "run" / "run.1").exists()


def test_the_log_that_slurm_has_opened_stays_when_an_earlier_run_gives_way(tmp_path, monkeypatch) -> None:
    folder = finished(tmp_path / "run")
    for name in ("slurm-7.log", "slurm-7.sbatch", "slurm-6.log"):
        (folder.logs / name).write_text(name)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    attempt(folder)
    moved = folder.begin(None)
    assert moved is not None
    assert {file.name for file in folder.logs.glob("slurm*")} == {"slurm-7.log", "slurm-7.sbatch"}
    assert (moved / "logs" / "slurm-6.log").exists() and (moved / "logs" / "rank-00000.log").exists()


FOREIGN = (
    *("config.yaml", "plan.json", "env.json", "accelerate.yaml", "deepspeed.json", "metrics.jsonl", "summary.json"),
    *("final/model.safetensors", "final-merged/a", "final-adapters/a", "checkpoints/step-000001/a", "tensorboard/a"),
    *("logs-before/a", "logs/lock", "logs/channel.json", "logs/attempt/config.yaml", "final", "checkpoints", "logs"),
)


@pytest.mark.parametrize("name", FOREIGN)
def test_what_others_made_under_a_name_of_ours_is_refused_and_nothing_touched(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("the user's\n")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for resume in ("auto", "never", "elsewhere/step-000001"):
        with pytest.raises(UserError) as refused:
            RunFolder(tmp_path / "run").open_attempt(resume)
        (problem,) = refused.value.problems
        assert str(tmp_path / "run" / Path(name).parts[0]) in problem.what and "touch" in problem.fix
        assert "output_dir" in problem.where
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_folders_made_for_a_run_are_used_as_long_as_they_are_empty(tmp_path: Path) -> None:
    folder, place = RunFolder(tmp_path / "run"), tmp_path / "run" / "checkpoints"
    folder.final.mkdir(parents=True)
    (tmp_path / "scratch").mkdir()
    place.symlink_to(tmp_path / "scratch")
    attempt(folder)
    assert folder.begin(None) is None and place.is_symlink()
    checkpoint_of(folder)
    assert folder.gives_way("never")


def test_what_has_other_names_or_is_only_added_to_is_no_reason_to_refuse(tmp_path: Path) -> None:
    for name in ("README.md", "logs/slurm-1.log", "logs/rank-00000.log", "slurm-1.out", "verify.json", "a/final"):
        folder = RunFolder(tmp_path / name.replace("/", "-"))
        file = folder.root / name
        file.parent.mkdir(parents=True)
        file.write_text("the user's\n")
        attempt(folder)
        assert folder.begin(None) is None and file.read_text() == "the user's\n"


def test_what_a_run_reads_may_lie_beside(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    beside = {"model.path": "run", "data.train": "run/data.jsonl"}
    folder.open_attempt("auto", [(key, str(tmp_path / name)) for key, name in beside.items()])
    folder.open_attempt("auto", [("the config", str(folder.config))])  # a run's own may be run again
    folder.plan.unlink()
    with pytest.raises(UserError, match=r"the config.*\[input-in-run-folder\]"):
        folder.open_attempt("auto", [("the config", str(folder.config))])


def test_the_names_in_logs_are_those_that_are_written_there(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    written = {folder.attempt.root.name, folder.restarted.name, LOCK, PUBLISHED, RANKS, DIAGNOSIS}
    assert written == {name for name in REPLACED_LOGS if "*" not in name}
    assert [name for name in REPLACED_LOGS if stacks_of(tmp_path, 3).match(name)]


def fails() -> str:
    raise OSError


def test_what_a_disk_does_not_take_in_time_is_left_behind_and_what_comes_after_it_is_done_later(monkeypatch):
    assert (in_time(lambda: "read", ""), in_time(fails, "nothing")) == ("read", "nothing")
    monkeypatch.setattr(system, "DISK_S", 0.05)
    back, done = threading.Event(), threading.Event()
    assert in_time(lambda: back.wait(300), None) is None
    monkeypatch.setattr(system, "DISK_S", 300)
    begun = time.monotonic()
    assert in_time(lambda: done.set() or "written", "not yet") == "not yet"
    assert time.monotonic() - begun < 100 and not done.is_set()
    back.set()
    assert done.wait(60)
