"""A run folder is used by one run at a time, and files of others in it or that the run reads stay."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from packtrain.errors import UserError
from packtrain.launch.attempt import LOCK, RunLock, check_free, is_locked
from packtrain.run_folder import RunFolder
from tests.unit.command_line import packtrain


def test_a_launcher_takes_its_lock_again_and_no_other_does(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open_attempt("auto")
    with RunLock() as mine, RunLock() as other:
        mine.take(folder.root)
        mine.take(folder.root)
        with pytest.raises(UserError, match=r"\[run-folder-in-use\]"):
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
    with RunLock() as lock, RunLock() as other:
        lock.take(folder.root)
        assert folder.begin(None) is not None
        assert is_locked(folder.root)
        with pytest.raises(UserError, match=r"\[run-folder-in-use\]"):
            check_free(folder.root)
        (folder.logs / "channel.json").write_text(json.dumps({"host": "n2"}))
        with pytest.raises(UserError, match=r"a run of another machine is going on in .* \(n2\)"):
            other.take(folder.root)
        assert not is_locked(tmp_path / "another")
    assert not is_locked(folder.root)


def test_machines_that_look_together_find_no_run_and_a_file_of_others_is_not_touched(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open_attempt("auto")
    (folder.logs / LOCK).touch()
    with ThreadPoolExecutor(8) as machines:
        assert not any(machines.map(lambda _: is_locked(folder.root), range(400)))
    (tmp_path / "logs" / LOCK).write_text("the user's\n")
    check_free(tmp_path)
    assert (tmp_path / "logs" / LOCK).read_text() == "the user's\n"


LAUNCHED = ("topology.kind=local", "topology.gpus_per_node=2")
MINE = "the user's\n"
CONFIG = """
model: {init: random, config: {model_type: llama}, tokenizer: quickstart}
data: {train: data.jsonl, cache_dir: cache}
batch: {examples_per_step: 1}
trainer: {max_steps: 1, output_dir: exp}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with data and a config whose run folder is exp/, and below it the user's data."""
    (tmp_path / "exp").mkdir()
    for name in ("data.jsonl", "exp/data.jsonl"):
        (tmp_path / name).write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    found = {}
    for path in folder.rglob("*"):
        kind = os.lstat(path)
        found[str(path)] = (kind.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
    return found


def refused(home: Path, *arguments: str, config: str = "run.yaml", verb: str = "sft", folder: str = ".") -> str:
    """The words in which a run is refused; nothing was touched."""
    before = state(home)
    done = packtrain(verb, config, *arguments, folder=home / folder)
    assert done.returncode == 2 and state(home) == before, done.stderr
    return done.stderr


@pytest.mark.parametrize("more", [(), LAUNCHED, ("trainer.resume=never",), ("objective=dpo",)], ids=str)
@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "final/model.safetensors", "checkpoints/step-000001/x"]
)
def test_files_under_names_of_a_run_are_refused(home: Path, name: str, more: tuple[str, ...]) -> None:
    file = home / "exp" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(MINE)
    said = refused(home, *more, verb="dpo" if "objective=dpo" in more else "sft")
    what = f"packtrain did not make exp/{name.partition('/')[0]} and will not overwrite it"
    assert f"trainer.output_dir (exp): {what}" in said
    assert "→ Name another folder, or move it away. If an earlier packtrain made this one: touch exp/.packtrain" in said


@pytest.mark.parametrize("more", [("--dry-run",), ()])
def test_what_only_plans_touches_nothing(home: Path, more: tuple[str, ...]) -> None:
    (home / "exp" / "config.yaml").write_text(MINE)
    before = state(home)
    done = packtrain("sft" if more else "plan", "run.yaml", *more, folder=home)
    assert done.returncode == 2 and "[not-made-by-packtrain]" in done.stderr  # as the run would
    assert state(home) == before


def test_the_config_itself_is_not_replaced(home: Path) -> None:
    shutil.move(home / "run.yaml", home / "exp" / "config.yaml")
    said = "the config ({}) lies where the run writes its own config.yaml"
    assert said.format("exp/config.yaml") in refused(home, config="exp/config.yaml")
    here = refused(home, "trainer.output_dir=.", config="config.yaml", folder="exp")
    assert said.format("config.yaml") in here
    RunFolder(home / "exp").mark.touch()  # an attempt of before, which left nothing else
    assert said.format("exp/config.yaml") in refused(home, config="exp/config.yaml")


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("data.train", "exp/metrics.jsonl"),
        ("data.train", "exp/*.jsonl"),
        ("data.eval", "exp/metrics.jsonl"),
        ("model.tokenizer", "exp/final"),
        ("data.chat_template", "exp/final/chat.jinja"),
        ("model.path", "link"),
    ],
)
def test_what_a_run_reads_is_not_replaced(home: Path, key: str, path: str) -> None:
    run = RunFolder(home / "exp")
    run.open_attempt("auto")
    run.metrics.write_text(MINE)
    run.final.mkdir()
    (run.final / "chat.jinja").write_text(MINE)
    (run.final / "config.json").write_text("{}")
    (home / "link").symlink_to("exp/final")
    init = ["model.init=pretrained", "model.config={}"] if key == "model.path" else []
    assert f"{key} (" in (said := refused(home, *init, f"{key}={path}")) and "[input-in-run-folder]" in said


def test_the_base_of_adapters_is_read_too(home: Path) -> None:
    run = RunFolder(home / "exp")
    run.open_attempt("auto")
    run.final.mkdir()
    (home / "adapters").mkdir()
    (home / "adapters" / "adapter_config.json").write_text('{"base_model_name_or_path": "exp/final"}')
    said = refused(home, "model.init=pretrained", "model.config={}", "model.path=adapters", "peft=lora")
    assert "the base of model.path (exp/final) lies where the run writes its own final" in said
