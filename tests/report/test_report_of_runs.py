"""Every run leaves a report, whatever becomes of it, and a report that fails changes nothing of a run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from running import Run, base_config, packtrain, train

from packtrain.report import page
from packtrain.report.run_record import read_run
from packtrain.run_folder import RunFolder
from tests.train import forked

FACTS = ("optimizer", "strategy", "data", "packing", "steps", "attention", "isolation")


def test_a_run_of_two_processes_writes_one_report_with_the_times_of_its_ranks(tmp_path: Path) -> None:
    run = train(tmp_path, base_config(tmp_path, trainer={"max_steps": 24, "log_every": 12}), processes=2)
    text = (run.folder / "report.html").read_text()
    assert ">Ranks</h2>" in text and "2 processes" in text and "Seconds of a step, over ranks" in text
    assert {*run.summary["rank_seconds"]} == {"forward", "backward", "data", "counts"}
    assert [line["seconds"] > 0 and line["memory_bytes"] > 1 << 20 for line in run.steps] == [True] * len(run.steps)
    assert json.loads((run.folder / "data.json").read_text())["processes"] == 2
    facts = read_run(RunFolder(run.folder)).facts
    assert list(facts) == ["model", "precision", *FACTS, "ready"] and facts["attention"] == run.summary["attention"]


def test_seconds_go_on_where_a_run_is_resumed_and_its_curve_is_whole(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"checkpoint_every": 3, "max_steps": 4})
    first = train(tmp_path, config)
    (first.folder / "summary.json").unlink()  # as if it had been killed
    again = train(tmp_path, config, "trainer.max_steps=6", f"trainer.resume={first.folder}/checkpoints/step-000003")
    seconds = [line["seconds"] for line in again.steps]
    assert seconds == sorted(seconds) and [line["step"] for line in again.steps] == [1, 2, 3, 4, 5, 6]
    assert seconds[-1] > first.steps[2]["seconds"]
    record = read_run(RunFolder(again.folder))
    assert record.metrics.skipped == 0 and "step-000003" in record.facts["ready"]


def test_a_failed_run_has_a_report_and_an_attempt_over_an_earlier_run_leaves_that_one_its_own(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 3})
    refused = train(tmp_path, config, "model.attention=flash", expect=2)
    text = (refused.folder / "report.html").read_text()
    assert "Why this run failed" in text and "flash attention is not available" in text
    diverged = train(tmp_path, config, "optim.learning_rate=1e8", "optim.max_grad_norm=1e9", expect=3)
    text = (diverged.folder / "report.html").read_text()
    assert "the loss is nan" in text and "Curves</h2>" in text
    assert not [*tmp_path.glob("run.1")]  # the first one had not begun
    train(tmp_path, config, "model.attention=flash", "trainer.resume=never", expect=2)
    assert (diverged.folder / "report.html").read_text() == text
    assert "A later attempt did not begin to train" in packtrain_report(diverged.folder)


def packtrain_report(folder: Path) -> str:
    packtrain("report", str(folder))
    return (folder / "report.html").read_text()


def on_a_full_disk(*given: Any) -> None:
    """`forked.run`, where nothing is left for the report."""

    def full(file: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    page.write_text = full
    forked.run(*given)


def test_a_report_that_cannot_be_written_takes_one_line_and_the_run_is_done(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 1})
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    done = packtrain("sft", str(path), begin=on_a_full_disk)
    lines = [line for line in done.stderr.splitlines() if "report" in line]
    assert len(lines) == 1 and lines[0].startswith("no report.html: /") and "Traceback" not in done.stderr
    assert Run(tmp_path / "run").summary["status"] == "done"
