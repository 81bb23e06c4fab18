"""metrics.jsonl as killed runs, full disks and a million steps leave it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from packtrain.report import metrics_file
from packtrain.report.metrics_file import read_metrics
from tests.unit.report.run_folders import lines_of


def written(folder: Path, *lines: str | dict, end: str = "\n") -> Path:
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines) + end)
    return file


def test_lines_become_columns_with_gaps_where_a_line_has_no_number(tmp_path: Path) -> None:
    metrics = read_metrics(written(tmp_path, {"step": 0, "eval_loss": 3}, {"step": 1, "loss": 2.5, "mfu": None}))
    assert metrics.steps.tolist() == [0, 1] and metrics.skipped == 0
    lines, values = metrics.points("loss")
    assert (lines.tolist(), values.tolist()) == ([1], [2.5])
    assert metrics.last("eval_loss") == 3 and metrics.last("mfu") is metrics.last("unknown") is None


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])  # a block's end anywhere; and all in one
def test_what_is_no_line_of_a_run_is_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(metrics_file, "_BLOCK_BYTES", block_bytes)
    bad = [
        '{"step": 2, "loss": 1.',
        "",
        "[1]",
        "nonsense",
        '{"loss": 3}',
        '{"step": null}',
        '{"step": -1}',
        '{"step": "7"}',
    ]
    file = written(
        tmp_path, {"step": 1, "loss": 4.0}, *bad, {"step": 3, "loss": "high"}, {"step": 4, "loss": 2}, end=""
    )
    file.write_bytes(file.read_bytes() + b'\n{"step": 5, "lo\xff')
    metrics = read_metrics(file)
    assert metrics.steps.tolist() == [1, 3, 4]
    assert metrics.points("loss")[1].tolist() == [4, 2]
    assert metrics.skipped == 8  # an empty line is none


@pytest.mark.parametrize("block_bytes", [100, 1 << 20])
def test_numbers_that_are_not_finite_leave_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(metrics_file, "_BLOCK_BYTES", block_bytes)
    lines = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": float("inf")}, {"step": 3, "loss": True}]
    metrics = read_metrics(
        written(tmp_path, *lines, f'{{"step": 4, "loss": 1{"0" * 400}}}', {"step": 5, "loss": 1e300})
    )
    assert metrics.points("loss")[1].tolist() == [1e300]


def test_of_steps_that_a_resumed_run_took_again_the_later_lines_count(tmp_path: Path) -> None:
    lines = [
        {"step": step, "loss": float(attempt)}
        for attempt, steps in ((1, range(1, 8)), (2, range(4, 10)))
        for step in steps
    ]
    metrics = read_metrics(written(tmp_path, *lines))
    assert metrics.steps.tolist() == [*range(1, 10)]
    assert metrics.points("loss")[1].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 2] and metrics.skipped == 4


def test_both_readers_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, *lines_of(200), '{"step": 201, "deep": {"a": [1]}, "word": "x", "loss": 1}')
    by_line = read_metrics(file)
    monkeypatch.setattr(metrics_file, "_BLOCK_BYTES", 1000)  # blocks of this size are Arrow's
    by_arrow = read_metrics(file)
    assert by_line.steps.tolist() == by_arrow.steps.tolist() and by_line.skipped == by_arrow.skipped == 0
    for name in by_line.columns:
        np.testing.assert_array_equal(by_line.columns[name], by_arrow.columns[name], err_msg=name)


def test_lines_that_are_not_there_are_counted(tmp_path: Path) -> None:
    lines = [line for line in lines_of(100, every=10) if line["step"] not in (30, 70)]
    metrics = read_metrics(written(tmp_path, {"step": 1, "loss": 9.0}, *lines))
    assert metrics.lines_missing(10) == 2
    assert read_metrics(tmp_path / "none.jsonl").lines_missing(10) == 0


def test_no_file_and_an_empty_one_have_no_lines(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for name in ("none.jsonl", "empty.jsonl"):
        metrics = read_metrics(tmp_path / name)
        assert (len(metrics.steps), metrics.skipped) == (0, 0)
