"""A run's copy in a bucket, killed at every operation, damaged, forbidden and away: what a fresh machine gets is whole or not there."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from packtrain.config.compose import load_points
from packtrain.errors import PeerFailed, UserError
from packtrain.mirror import Mirror
from packtrain.run_folder import RunFolder
from packtrain.system import hash_of
from tests.unit.command_line import packtrain

QUICKSTART = str(Path(__file__).resolve().parents[2] / "recipes/quickstart-sft.yaml")


MEMORY = fsspec.filesystem("memory")


class Killed(BaseException):
    pass


class Mortal:
    """A file system that is killed at its operation number `after`, in the middle of what it writes."""

    def __init__(self, system: Any, after: int) -> None:
        self.system, self.left = system, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.system, name)

    def put_file(self, path: str, target: str, **_: Any) -> None:
        content = Path(path).read_bytes()
        self.system.pipe_file(target, content[: len(content) // 2] if self.left == 0 else content)
        self._count()

    def get_file(self, path: str, target: str) -> None:
        self._count()
        self.system.get_file(path, target)

    def rm_file(self, path: str) -> None:
        self.system.rm_file(path)
        self._count()

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


def write_checkpoint(folder: RunFolder, step: int, content: str, *, rate: str = "1", best: int | None = None) -> None:
    place = folder.checkpoints / f"step-{step:06d}"
    (place / "inner").mkdir(parents=True, exist_ok=True)
    (place / "origin.json").write_text(json.dumps({"optim.learning_rate": rate}))
    (place / "trainer_state.json").write_text(json.dumps({"best_global_step": best}))
    for name in ("weights", "inner/states"):
        (place / name).write_text(f"{content} {name}" * 5)
    manifest = {
        name: {"bytes": (place / name).stat().st_size, "blake2b": hash_of(place / name)}
        for name in ("weights", "inner/states", "origin.json", "trainer_state.json")
    }
    (place / "manifest.json").write_text(json.dumps(manifest))
    folder.metrics.write_text(f"until {step}")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.set_mark()
    write_checkpoint(folder, 3, "three")
    return folder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/runs/a"


def copied(run: RunFolder, url: str, after: int = 10**6) -> bool:
    """Whether a copy of all that is new came to its end before operation `after`."""
    mirror = Mirror(url, run)
    mirror._look()
    mirror._system = Mortal(mirror._system, after)
    try:
        mirror._copy_new(small=True)
    except Killed:
        return False
    return True


def fetched(url: str, folder: Path, resume: str = "auto") -> RunFolder:
    fresh = RunFolder(folder)
    Mirror(url, fresh).fetch(resume)
    return fresh


def test_a_copy_killed_at_any_operation_leaves_an_older_checkpoint_or_the_new_one(run, url, tmp_path):
    assert copied(run, url)
    (run.checkpoints / "step-000003").rename(tmp_path / "step-000003")  # the newest one alone is kept
    write_checkpoint(run, 6, "six")
    kills, got = 0, list[int]()
    while not copied(run, url, kills):
        fresh = fetched(url, tmp_path / f"fresh-{kills}")
        checkpoint = max(fresh.checkpoints.glob("step-*"))
        assert (checkpoint / "inner/states").read_text() in ("three inner/states" * 5, "six inner/states" * 5)
        assert (checkpoint / "weights").stat().st_size and not [*fresh.checkpoints.glob(".*")]
        got.append(int(checkpoint.name[5:]))
        if got[-1] == 6:
            assert fresh.metrics.read_text() == "until 6"  # which the run that goes on from it cuts
        kills += 1
    assert got == sorted(got) and {3, 6} == set(got) and kills > 5
    assert fetched(url, tmp_path / "whole").metrics.read_text() == "until 6"
    assert not [name for name in MEMORY.find(url[9:]) if "step-000003" in name]


def test_a_checkpoint_that_is_damaged_there_gives_way_to_an_older_one(run, url, tmp_path, capsys):
    write_checkpoint(run, 6, "six")
    assert copied(run, url)
    MEMORY.pipe_file(f"{url[8:]}/checkpoints/step-000006/weights", b"x")
    fresh = fetched(url, tmp_path / "fresh")
    assert [path.name for path in fresh.checkpoints.iterdir()] == ["step-000003"]
    assert "step-000006" in capsys.readouterr().err
    MEMORY.rm_file(f"{url[8:]}/checkpoints/step-000003/weights")
    with pytest.raises(UserError, match=r"\[mirror-damaged\]"):
        fetched(url, tmp_path / "none")


def test_a_checkpoint_written_anew_takes_the_place_of_the_old_one(run: RunFolder, url: str, tmp_path: Path) -> None:
    assert copied(run, url)
    (run.checkpoints / "step-000003").rename(tmp_path / "old")
    write_checkpoint(run, 3, "another")
    assert copied(run, url)
    fresh = fetched(url, tmp_path / "fresh")
    assert "another" in (fresh.checkpoints / "step-000003" / "weights").read_text()


def test_a_run_does_not_replace_another_one(run: RunFolder, url: str, tmp_path: Path) -> None:
    assert copied(run, url)
    for resume in ("never", str(tmp_path)):
        with pytest.raises(UserError, match=r"\[mirror-of-another-run\]"):
            fetched(url, tmp_path / "fresh", resume)
    run.final.mkdir()
    (run.final / "model").write_text("weights")
    run.summary.write_text('{"status": "done"}')
    for kills in range(30):
        done = copied(run, url, kills)
        has_summary = MEMORY.exists(f"{url[8:]}/summary.json")
        assert not has_summary or MEMORY.cat(f"{url[8:]}/final/model") == b"weights"
        if done:
            break
    with pytest.raises(UserError, match="has a finished run"):
        fetched(url, tmp_path / "fresh")
    run.summary.unlink()  # it goes on to more steps
    (run.final / "model").unlink()
    assert copied(run, url)
    assert fetched(url, tmp_path / "fresh").checkpoints.is_dir()
    assert not MEMORY.exists(f"{url[8:]}/final/model")


def test_a_bucket_that_is_forbidden_or_away_is_said_at_the_start(run, url, monkeypatch):
    monkeypatch.setattr("packtrain.mirror._PAUSES_S", (0.0,))
    mirror, asked = Mirror(url, run), []

    def refuse(error: Exception) -> None:
        def pipe_file(*_: Any) -> None:
            asked.append(1)
            raise error

        monkeypatch.setattr(mirror._system, "pipe_file", pipe_file)

    refuse(PermissionError("AccessDenied"))
    with pytest.raises(UserError, match="AccessDenied"):
        mirror.fetch("auto")
    refuse(ConnectionError("no route"))
    with pytest.raises(PeerFailed, match=r"no route.*\[mirror-unreachable\]"):
        mirror.fetch("auto")
    assert len(asked) == 1 + 3
    monkeypatch.setattr("packtrain.mirror._SILENT_S", 0.3)
    monkeypatch.setattr(mirror._system, "pipe_file", lambda *_: time.sleep(1))
    with pytest.raises(PeerFailed, match="TimeoutError"):
        mirror.fetch("auto")


def test_what_is_no_bucket_is_refused_and_each_folder_of_a_sweep_has_its_own(tmp_path: Path) -> None:
    for value, says in {
        "runs/a": "[not-a-bucket]",
        "s3://": "[not-a-bucket]",
        "s4://a": "s3",
        "abfs://a": "needs the package adlfs",
    }.items():
        done = packtrain("sft", QUICKSTART, f"trainer.mirror={value}", "--dry-run", folder=tmp_path)
        assert done.returncode == 2 and says in done.stderr and "trainer.mirror" in done.stderr
    # a sweep with folders of its own has copies of their own
    points, _ = load_points(QUICKSTART, ["trainer.output_dir=a,b", "trainer.mirror=memory://runs"])
    assert [point.config.trainer.output_dir for point in points] == ["a", "b"]
    assert len({point.config.trainer.mirror for point in points}) == 2


def test_what_the_run_folder_has_of_another_run_or_of_the_user_is_left_alone(run, url, tmp_path, monkeypatch):
    assert copied(run, url)
    own = tmp_path / "own"
    own.mkdir()
    (own / "metrics.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"\[not-made-by-packtrain\]"):
        fetched(url, own)
    mirror = Mirror(url, RunFolder(tmp_path / "killed"))
    monkeypatch.setattr(mirror, "_system", Mortal(mirror._system, 1))
    with pytest.raises(Killed):
        mirror.fetch("auto")  # which goes on by the same command
    assert fetched(url, tmp_path / "killed").checkpoints.is_dir()
    done = RunFolder(tmp_path / "done")
    write_checkpoint(done, 2, "done")
    done.set_mark()
    done.summary.write_text('{"status": "done"}')
    with pytest.raises(UserError, match=r"\[mirror-of-another-run\]"):
        fetched(url, done.root)
    assert (own / "metrics.jsonl").read_text() == "mine" and done.metrics.read_text() == "until 2"
    assert [path.name for path in done.checkpoints.iterdir()] == ["step-000002"]


def test_a_bucket_of_another_run_is_not_written_to(run: RunFolder, url: str, tmp_path: Path) -> None:
    write_checkpoint(run, 3, "three", rate="0.1")
    assert copied(run, url)
    for step in (2, 9):  # newer there, newer here
        other = RunFolder(tmp_path / f"other-{step}")
        other.set_mark()
        write_checkpoint(other, step, "other", rate="0.2")
        with pytest.raises(UserError, match=r"\[mirror-of-another-run\]"):
            fetched(url, other.root)
        assert other.metrics.read_text() == f"until {step}"
    run.summary.write_text('{"status": "done"}')
    write_checkpoint(run, 6, "six", rate="0.1")
    assert copied(run, url)
    behind = RunFolder(tmp_path / "behind")  # a machine that was lost, and is back when the run is done
    behind.set_mark()
    write_checkpoint(behind, 3, "three", rate="0.1")
    with pytest.raises(UserError, match="has a finished run"):
        fetched(url, behind.root)


@pytest.mark.parametrize(("keep", "stay"), [(None, [3, 6, 9, 12, 15]), (3, [6, 9, 12, 15]), (1, [6, 12, 15])])
def test_older_checkpoints_stay_as_keep_checkpoints_says_and_the_best_one_comes_too(run, url, tmp_path, keep, stay):
    for step in (6, 9, 12):
        write_checkpoint(run, step, "more", best=6)
    assert copied(run, url)
    fresh = RunFolder(tmp_path / "fresh")
    mirror = Mirror(url, fresh, keep)
    mirror.fetch("auto")
    assert sorted(path.name for path in fresh.checkpoints.iterdir()) == ["step-000006", "step-000012"]
    write_checkpoint(fresh, 15, "more", best=6)
    mirror._copy_new(small=True)
    there = MEMORY.find(url[9:])
    assert [int(name.split("/")[-2][5:]) for name in there if name.endswith("manifest.json")] == stay


def test_the_end_waits_from_the_end_on_and_says_why_a_copy_failed(run, url, capsys, monkeypatch):
    monkeypatch.setattr("packtrain.mirror._PAUSES_S", (0.0,))
    monkeypatch.setattr("packtrain.mirror._POLL_S", 0.05)
    mirror = Mirror(url, run)
    mirror.fetch("auto")
    mirror._heard_at -= 1000  # nothing new for long
    mirror._ending.set()
    mirror.start()
    mirror.close()
    assert "has not all" not in capsys.readouterr().err
    assert MEMORY.exists(f"{url[8:]}/checkpoints/step-000003/manifest.json")
    write_checkpoint(run, 6, "six")
    mirror = Mirror(url, run)
    mirror.fetch("auto")

    def put_file(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError("given up")

    monkeypatch.setattr(mirror._system, "put_file", put_file)
    mirror.start()
    mirror.close()
    assert "has not all of the run (given up)" in capsys.readouterr().err
