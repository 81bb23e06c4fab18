"""`packtrain bench` on the command line: starts the processes with a temporary run folder, and shows what they measured.

A process that is alone catches what does not fit into its GPU, and goes on. Of several, one that ran out of memory ends the
launch, since the others may be inside an operation with it; the next launch replays what was measured and leaves that out. This
file imports no torch.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain.bench.bench_table import show
from packtrain.config.schema import RunConfig, Tracking
from packtrain.errors import PacktrainError, UserError
from packtrain.plan.launch_plan import LaunchPlan
from packtrain.run_folder import RunFolder, write_json
from packtrain.train.verify.command import on_this_machine, stdout_on_stderr

LEAST_S, MOST_S, MOST_LAUNCHES = 5, 86_400, 10
OUT_OF_MEMORY = "out-of-memory-*.json"


def run_bench(
    config: RunConfig,
    execute: Callable[[LaunchPlan, RunConfig], int],
    *,
    seconds: float,
    as_json: bool,
    given: list[str],
) -> int:
    """Measures for about `seconds` in as many processes as `config` trains in on this machine, and shows the report.

    Returns the exit code. `execute` carries out the plan, in this process if there is only one; `given` named the config.
    trainer.output_dir is not touched. Raises UserError for a time that is too short or long.
    """
    if not LEAST_S <= seconds <= MOST_S:  # nan is neither
        fix = f"Give {LEAST_S} to {MOST_S}."
        raise UserError(f"{seconds:g} s is no time to measure in", where="--seconds", fix=fix)
    folder = Path(tempfile.mkdtemp(prefix="packtrain-bench-"))
    aside = replace(config, trainer=_aside(config, folder), tracking=Tracking())
    if not isinstance(config.data.eval, (int, float)):  # else it decides what is left to train on
        aside = replace(aside, data=replace(config.data, eval=None))
    launch, state = on_this_machine(aside, "bench"), RunFolder(folder).benchmark
    write_json(state, {"seconds": seconds, "started": time.time(), "events": []})
    keep = False
    try:
        with stdout_on_stderr():
            print(f"measuring for about {seconds:g} s after loading; nothing is kept", file=sys.stderr)
            code = _launches(launch, aside, execute, state)
        keep = 0 < code <= 128 and not launch.in_process  # an error names the logs; a signal does not
        report = json.loads(state.read_text()).get("report")
        if report is not None:
            show(report, given, as_json=as_json)
        return code
    except PacktrainError:
        keep = not launch.in_process
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _aside(config: RunConfig, folder: Path) -> Any:
    """The config's trainer, without anything that is kept, evaluated or answered."""
    return replace(
        config.trainer,
        output_dir=str(folder),
        resume="never",
        checkpoint_every=None,
        eval_every=None,
        early_stop_patience=None,
        samples=[],
    )


def _launches(
    launch: LaunchPlan, config: RunConfig, execute: Callable[[LaunchPlan, RunConfig], int], state: Path
) -> int:
    """Launches until one ends for another reason than that a process has run out of memory."""
    code = 0
    for left in reversed(range(MOST_LAUNCHES)):
        code = execute(launch, config)
        notes = sorted(state.parent.glob(OUT_OF_MEMORY))
        if code == 0 or not notes or launch.in_process or not left:
            break
        event = json.loads(notes[0].read_text())
        for note in notes:
            note.unlink()
        known = json.loads(state.read_text())
        write_json(state, {**known, "events": [*known["events"], event]})
        print("that was out of memory: going on without it", file=sys.stderr)
    return code
