"""Distillation from a teacher's most likely tokens, which are computed once and kept: `objective.options.teacher_top_k`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from here import loaded, verified
from matrix import ALONE, Cell, Runs, assert_same_training
from running import Run, assert_same_bits, conversations, packtrain, train, write_jsonl
from safetensors.torch import load_file, save_file

from packtrain.errors import UserError
from packtrain.objectives.distill import teacher_cache
from packtrain.objectives.distill.run import Distill, DistillLoss
from packtrain.objectives.distill.teacher_cache import TeacherCache
from packtrain.train.loop import StepTrainer
from tests.train import forked

PACKED, PADDED = Cell("distill", ALONE), Cell("distill", ALONE, "padding")
K = "objective.options.teacher_top_k="


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The matrix's, with a teacher that has favourites."""
    runs = Runs(tmp_path_factory.mktemp("top"))
    weights = load_file(file := runs.folder / "teacher/model.safetensors")
    weights["lm_head.weight"] *= 25
    save_file(weights, file, metadata={"format": "pt"})
    return runs


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The documents of each micro-batch that the teacher ran before step 1."""
    numbers, own = list[list[int]](), DistillLoss.record

    def record(self: Any, batch: Any) -> np.ndarray:
        numbers.append([*map(int, batch.numbers)])
        return own(self, batch)

    monkeypatch.setattr(DistillLoss, "record", record)
    return numbers


def keeps(
    runs: Runs,
    name: str,
    k: object = 8,
    cell: Cell = PACKED,
    *overrides: str,
    cache: str = "",
    begin: Any = None,
    **how: Any,
) -> Run:
    """The run of that name, with a cache of its own."""
    place = f"data.cache_dir={runs.folder / (cache or f'cache-{name}')}"
    return runs.run(cell, name, f"{K}{k}", place, *cell.of.own, *overrides, begin=begin)


def files_of(runs: Runs, cache: str) -> list[Path]:
    return sorted((runs.folder / cache / "teacher").glob("*.bin"), key=lambda file: file.stat().st_size)


def test_all_tokens_kept_equal_the_teacher_beside_the_student(runs: Runs) -> None:
    run, beside = keeps(runs, "whole", 99_999), runs.run(PACKED, "beside")
    assert_same_training(run, beside, near=1e-6)
    assert min(line["kl"] for line in run.steps) > 0.5 and len(run.evals) == 3
    assert "log-probabilities to make" in run.log and "log-probabilities to make" not in beside.log


@pytest.mark.exhaustive
def test_some_tokens_kept_teach_the_same_in_rows_as_in_padded_batches(runs: Runs) -> None:
    run, padded = keeps(runs, "some"), keeps(runs, "padded", 8, PADDED)
    assert_same_training(run, padded)
    beside = runs.run(PACKED, "beside")
    assert 0.5 < run.evals[0]["eval_kl"] < beside.evals[0]["eval_kl"] - 1e-3  # data processing


@pytest.mark.parametrize(
    ("name", "both", "own"),
    [
        ("shared", (), ("packing.share_prefix=true",)),
        ("by-document", (), ("model.attention=per_document",)),
        ("jsd", ("objective.loss=jsd", "objective.options.temperature=2"), ()),
    ],
)
@pytest.mark.exhaustive
def test_more_ways_teach_the_same_as_padded_batches(
    runs: Runs, name: str, both: tuple[str, ...], own: tuple[str, ...]
) -> None:
    run, padded = (
        keeps(runs, name, 8, PACKED, *both, *own),
        keeps(runs, f"padded-{name}" if both else "padded", 8, PADDED, *both),
    )
    assert_same_training(run, padded)


def with_freed_teachers(*given: Any) -> None:
    """The command, in a process that has freed the teacher before the first evaluation."""
    teachers, own, own_evaluate = list[weakref.ref[Any]](), Distill._keep_records, StepTrainer.evaluate

    def keep(self: Distill, start: Any) -> None:
        teachers.extend(map(weakref.ref, [self.teacher, *self.teacher.model.parameters()]))
        own(self, start)

    def evaluate(self: StepTrainer) -> None:
        teacher, *weights = [one() for one in teachers]
        assert weights and not (teacher and vars(teacher))
        assert not any(one is not None and one.ds_tensor.numel() for one in weights)  # DeepSpeed keeps the rest
        own_evaluate(self)

    Distill._keep_records, StepTrainer.evaluate = keep, evaluate
    forked.run(*given)


@pytest.mark.parametrize("variant", ["plain", "split documents"])
@pytest.mark.parametrize("world", ["ddp", "fsdp2", "zero3"])
@pytest.mark.exhaustive
def test_several_processes_write_and_read_the_same(runs: Runs, world: str, variant: str) -> None:
    cell = Cell("distill", world, variant=variant)
    padded = keeps(runs, "padded", 8, PADDED)
    written = keeps(runs, f"{cell}-wrote", 8, cell, begin=with_freed_teachers)
    assert_same_training(written, padded)
    assert "0 bytes of the teacher's log-probabilities" not in written.log
    read = keeps(runs, f"{cell}-read", 8, PADDED, cache=f"cache-{cell}-wrote")  # by another number of processes
    assert read.log.count("0 bytes of the teacher's log-probabilities") == 2
    assert_same_training(read, padded)
    for ours, theirs in zip(files_of(runs, f"cache-{cell}-wrote"), files_of(runs, "cache-padded"), strict=True):
        assert ours.name == theirs.name


def killed_while_writing(*given: Any) -> None:
    """The command. It is killed after one micro-batch and a half."""
    own, calls = TeacherCache.write, list[int]()

    def write(self: TeacherCache, targets: np.ndarray, rows: np.ndarray) -> None:
        calls.append(len(targets))
        if len(calls) == 2:
            own(self, targets[: len(targets) // 2], rows[: len(targets) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        own(self, targets, rows)

    TeacherCache.write = write
    forked.run(*given)


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_with_what_is_missing_and_trains_the_same(runs: Runs, taught: list[list[int]]) -> None:
    whole = keeps(runs, "whole-8")
    batches = [*taught]
    assert sorted(number for some in batches for number in some) == sorted([*range(22), *range(5)])
    cache = f"data.cache_dir={runs.folder / 'cache-killed'}"
    train(runs.folder, runs.config_of("distill", 0), f"{K}8", cache, command="distill", name="killed", expect=-9, begin=killed_while_writing)  # fmt: skip
    shutil.copytree(runs.folder / "cache-killed", runs.folder / "cache-killed-3")
    taught.clear()
    resumed = keeps(runs, "resumed", cache="cache-killed")
    assert taught == batches[1:]
    assert_same_bits(resumed, whole)
    taught.clear()
    assert_same_bits(keeps(runs, "again", cache="cache-killed"), whole)
    assert not taught
    more = runs.run(Cell("distill", "ddp"), "by-three", f"{K}8", f"{cache}-3", processes=3)
    assert_same_training(more, whole)


def test_damage_is_noticed_and_mended(runs: Runs, taught: list[list[int]]) -> None:
    whole = keeps(runs, "whole-8")
    shutil.copytree(runs.folder / "cache-whole-8", runs.folder / "cache-damaged")
    held_out, train_file = files_of(runs, "cache-damaged")
    held_out.write_bytes(held_out.read_bytes()[:-5])
    content = bytearray(train_file.read_bytes())
    content[1000] ^= 1
    train_file.write_bytes(content)
    taught.clear()
    mended = keeps(runs, "mended", cache="cache-damaged")
    assert len(taught) == 2 and len(taught[-1]) < 6
    assert_same_bits(mended, whole)
    for before, after in zip(files_of(runs, "cache-whole-8"), files_of(runs, "cache-damaged"), strict=True):
        assert before.read_bytes() == after.read_bytes()


@pytest.mark.exhaustive
def test_another_teacher_template_k_temperature_or_data_has_another_cache(runs: Runs, taught: list[list[int]]) -> None:
    keeps(runs, "whole-8")
    shutil.copytree(runs.folder / "cache-whole-8", runs.folder / "cache-keys")
    taught.clear()

    def made(name: str, *overrides: str, k: int = 8) -> int:
        """The number of documents that the teacher ran."""
        keeps(runs, name, k, PACKED, "trainer.max_steps=1", *overrides, cache="cache-keys")
        count = sum(map(len, taught))
        taught.clear()
        return count

    assert made("same") == 0
    assert made("shuffled", "trainer.seed=3", "objective.loss=reverse_kl", "packing.mode=padding_free") == 0
    assert made("k", k=9) == made("temperature", "objective.options.temperature=2") == 27
    weights = load_file(runs.folder / "teacher/model.safetensors")
    shutil.copytree(runs.folder / "teacher", other := runs.folder / "other")
    weights["lm_head.weight"][7, 3] += 0.25
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert made("teacher", f"objective.options.teacher={other}") == 27
    rows = write_jsonl(runs.folder / "more.jsonl", conversations(22)[:9])
    assert made("data", f"data.train={rows}") == 9
    template = runs.folder / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] + '\\n' + m['content'] + eos_token }}{% endfor %}")
    assert made("template", f"data.chat_template={template}", "data.loss_on=all") == 27


@pytest.mark.exhaustive
def test_of_two_runs_at_once_one_waits(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is held until the run has waited for it twice."""
    whole = keeps(runs, "whole-8")
    name = files_of(runs, "cache-whole-8")[1].with_suffix(".lock").name
    (folder := runs.folder / "cache-locked" / "teacher").mkdir(parents=True)
    other, waits = FileLock(folder / name), list[int]()

    def progress() -> None:
        waits.append(1)
        if len(waits) == 3:
            other.release()

    monkeypatch.setattr(teacher_cache, "_POLL_S", 0.05)
    monkeypatch.setattr(teacher_cache, "progress", progress)
    other.acquire()
    run = keeps(runs, "waited", cache="cache-locked")
    assert run.log.count("another run makes the teacher's log-probabilities") == 2
    assert_same_bits(run, whole)


@pytest.mark.exhaustive
def test_what_cannot_be_kept_is_refused_before_the_teacher_runs(
    runs: Runs, taught: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(runs.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError) as refusal:
        keeps(runs, "small disk")
    assert refusal.value.problems[0].code == "teacher-cache-space" and not taught
    (place := runs.folder / "cache-no-folder").mkdir()
    (place / "teacher").touch()
    with pytest.raises(UserError, match="the teacher's log-probabilities cannot be written"):
        keeps(runs, "no folder", cache=place.name)
    config = runs.config_of("distill", 0)
    stream = ("data.streaming=true", f"data.eval={config['data']['eval']}")
    for options in (stream, ("data.stages=[{weights: {distill: 1}}]",)):
        with pytest.raises(UserError) as refusal:
            loaded(runs.folder, config, f"{K}8", *options)
        assert "top-k-without-epochs" in [one.code for one in refusal.value.problems]


@pytest.mark.exhaustive
def test_eval_and_verify_see_what_the_student_sees(runs: Runs) -> None:
    """The teacher then runs beside the student; nothing is kept."""
    run = keeps(runs, "whole-8")
    kept = files_of(runs, "cache-whole-8")
    found = json.loads(packtrain("eval", str(run.folder), "--json").stdout)
    for name in ("loss", "kl", "nll", "teacher_nll", "agreement"):
        assert found["figures"][f"eval_{name}"] == pytest.approx(run.evals[-1][f"eval_{name}"], rel=1e-5), name
    assert files_of(runs, "cache-whole-8") == kept
    config = loaded(runs.folder, runs.config_of("distill", 0), f"{K}8", "data.render=conversation", name="verified")
    report = verified(config)
    assert report["verdict"] == "exact" and report["modes"]["packed"]["loss_rel_diff"] < 1e-6
