"""metrics.jsonl as killed runs, full disks and a million steps leave it."""

from __future__ import annotations

import json
from pathlib import Path

from packtrain.report.run_record import read_metrics


def written(folder: Path, *lines: str | dict, end: str = "\n") -> Path:
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
    return file


def test_lines_become_columns_with_gaps_where_a_line_has_no_number(tmp_path: Path) -> None:
    metrics = read_metrics(written(tmp_path, {"step": 0, "eval_loss": 3}, {"step": 1, "loss": 2.5, "mfu": None}))
    assert metrics.steps.tolist() == [0, 1] and metrics.skipped == 0
    lines, values = metrics.points("loss")
    assert (lines.tolist(), values.tolist()) == ([1], [2.5])
    assert metrics.last("eval_loss") == 3 and metrics.last("mfu") is metrics.last("unknown") is None
    assert len(read_metrics(tmp_path / "none.jsonl").steps) == len(read_metrics(written(tmp_path)).steps) == 0


def test_what_is_no_line_of_a_run_is_skipped_and_counted(tmp_path: Path) -> None:
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
    good = [{"step": 3, "loss": "high"}, {"step": 4, "loss": 2, "deep": {"a": [1]}}]
    file = written(tmp_path, {"step": 1, "loss": 4.0}, *bad, *good, end="")
    file.write_bytes(file.read_bytes() + b'\n{"step": 5, "lo\xff')
    metrics = read_metrics(file)
    assert metrics.steps.tolist() == [1, 3, 4]
    assert metrics.points("loss")[1].tolist() == [4, 2]
    assert metrics.skipped == 8  # an empty line is none


def test_numbers_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": float("inf")}, {"step": 3, "loss": True}]
    lines += [{"step": 4, "loss": 10**400}, {"step": 5, "loss": 1e308}]
    assert read_metrics(written(tmp_path, *lines)).points("loss")[1].tolist() == [1e308]


def test_of_steps_that_a_resumed_run_took_again_the_later_lines_count(tmp_path: Path) -> None:
    lines = [
        {"step": step, "loss": float(attempt)}
        for attempt, steps in ((1, range(1, 8)), (2, range(4, 10)))
        for step in steps
    ]
    metrics = read_metrics(written(tmp_path, *lines))
    assert metrics.steps.tolist() == [*range(1, 10)]
    assert metrics.points("loss")[1].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 2] and metrics.skipped == 4
