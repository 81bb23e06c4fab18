"""`packtrain report`: the page of run folders, on request and at the end of every run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from packtrain.config.compose import load_config
from packtrain.config.yaml_files import shown
from packtrain.errors import PacktrainError, UserError
from packtrain.plan.data_size import recall
from packtrain.report.comparison import told_apart
from packtrain.report.page import page, write_page
from packtrain.report.run_record import RunRecord, harmless, read_run
from packtrain.run_folder import RunFolder, write_json

COMPARED = "report.html"
"""Where several runs are reported by default, in this folder; one run has its report in its own."""


def report_runs(places: Sequence[str], output: Path | None) -> int:
    """Writes the report of the runs in these folders, says where it is, returns the exit code. Raises UserError where it cannot be."""
    folders = [RunFolder(one) for one in dict.fromkeys(Path(os.path.expanduser(place)) for place in places)]
    records = [_with_data(read_run(folder), folder) for folder in folders]
    if len(records) > 1:
        names = told_apart([folder.root for folder in folders])
        records = [replace(one, name=name) for one, name in zip(records, names, strict=True)]
    file = output or (folders[0].report if len(folders) == 1 else Path(COMPARED))
    if file.is_dir() or file.is_fifo():
        raise UserError(
            f"this is a {'folder' if file.is_dir() else 'pipe'}", where=str(file), fix="Name a file with -o."
        )
    write_page(file, text := page(records))
    print(f"{harmless(shown(file))} ({len(text.encode()) / 1e6:.1f} MB)")
    for one in records:
        if one.metrics.skipped:
            print(
                f"{one.name}: {one.metrics.skipped} lines of metrics.jsonl were skipped (torn, or repeated later)",
                file=sys.stderr,
            )
    return 0


def _with_data(run: RunRecord, folder: RunFolder) -> RunRecord:
    """The record with a description of its data, made now if its run made none and its tokens are still in the cache."""
    if run.data is not None or not folder.config.exists():
        return run
    try:
        config = load_config(str(folder.config), [])
        if recall(config.model, config.data, config.objective.kind, config.trainer.seed) is None:
            return run
        from packtrain.inspect.summary import data_summary

        write_json(folder.data, made := data_summary(config, run.processes))
    except (PacktrainError, OSError) as error:
        print(f"{run.name}: its data is not described: {str(error).splitlines()[0]}", file=sys.stderr)
        return run
    return replace(run, data=made)


def report_at_end(folder: RunFolder) -> None:
    """The report of a run that has just ended, in its folder; a failure is told, and changes nothing else."""
    if folder.attempt.root.is_dir() and folder.metrics.exists():
        return  # it ended before its first step, and what is in the folder is an earlier run's
    try:
        write_page(folder.report, page([read_run(folder, over=True)]))
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        said = said if isinstance(error, PacktrainError) else f"{type(error).__name__}: {said}"
        print(harmless(f"no report.html: {said}"), file=sys.stderr)
