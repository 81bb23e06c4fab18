"""`packtrain bench` on the command line: make short runs in a temporary folder, show the figures.

Each run is launched like a run of its verb, from a process of its own: a run that is killed for lack of memory
ends nothing else. This file imports torch only if runs are forked from it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from packtrain.bench.search import Candidate, Failure, RunFigures, Trial, fastest_of, is_clear, search, trial_json
from packtrain.config.rules import check_combinations
from packtrain.config.schema import Batch, RunConfig, Tracking
from packtrain.errors import CheckFailed, Json, UserError
from packtrain.plan.launch_plan import LaunchPlan
from packtrain.run_folder import RunFolder, object_of
from packtrain.system import fast_imports, redirect_output
from packtrain.train.verify.command import on_this_machine

MIN_S, MAX_S = 5, 86_400
MEMORY_SHARE = 0.7
"""Share of the machine's free memory that training on CPUs may fill: above it, Linux may kill processes."""
_STEPS_IN_TIME, _RUNS_IN_TIME = 24, 30  # a step may take 1/24 of the time, a run about 1/30
_MIN_STEPS, _MAX_STEPS = 2, 50
_OUT_OF_MEMORY = re.compile(r"out of memory on [\w:]+|not enough memory")


def run_bench(
    config: RunConfig,
    execute: Callable[[LaunchPlan, RunConfig], int],
    *,
    seconds: float,
    as_json: bool,
    given: list[str],
) -> int:
    """Measure for about `seconds` in as many processes as training uses on this machine. Show the report.

    Return the exit code. `execute` carries out a plan and returns its exit code; `given` named the config.
    """
    if not MIN_S <= seconds <= MAX_S:  # nan is neither
        fix = f"Give {MIN_S} to {MAX_S}."
        raise UserError(f"bench cannot measure in {seconds:g} s", where="--seconds", fix=fix, code="bad-seconds")
    with tempfile.TemporaryDirectory(prefix="packtrain-bench-", ignore_cleanup_errors=True) as folder:
        runs = ShortRuns(_keep_nothing(config, Path(folder)), execute, Path(folder))
        print(f"measuring for about {seconds:g} s after loading; nothing is kept", file=sys.stderr)
        configured = Candidate.of(config.packing, config.batch)
        if (failure := runs.choose_length(configured, seconds)) and failure.code != CheckFailed.exit_code:
            print(failure.text, file=sys.stderr)
            return failure.code
        trials = search(
            configured,
            runs.measure,
            runs.why_not_larger,
            seconds=seconds,
            examples=config.batch.examples_per_step,
            pairs=config.objective.spec.pairs,
        )
        if fastest_of(trials) is None:
            raise (CheckFailed if failure else UserError)(
                trials[0].why, where="packtrain bench", code="nothing-measured"
            )
        print_report(runs.report(trials), given, as_json=as_json)
        return 0


def _keep_nothing(config: RunConfig, folder: Path) -> RunConfig:
    """Return the config without checkpoints, evaluations, sample answers and trackers."""
    trainer = replace(config.trainer.bare(), output_dir=str(folder))
    return replace(config, trainer=trainer, tracking=Tracking(), data=replace(config.data, eval=None))


@dataclass(slots=True)
class ShortRuns:
    """Maker of short runs. A run has one step and then `steps` measured ones, each on a `part` (0 to 1) of a step's documents.
    `last_summary`: the last run's summary (measured_run.py)."""

    config: RunConfig
    execute: Callable[[LaunchPlan, RunConfig], int]
    folder: Path
    part: float = 1.0
    steps: int = _MIN_STEPS
    last_summary: Json = field(default_factory=dict)
    launch: LaunchPlan = field(init=False)
    _number: int = 0

    def __post_init__(self) -> None:
        self.launch = on_this_machine(self.config, "bench")
        if not self.launch.in_process:
            return
        if self.launch.num_processes > 1:
            fix = "Start packtrain bench alone: it starts the processes."
            what = "bench cannot measure in the processes of another launcher"
            raise UserError(what, where="topology", fix=fix, code="launch-in-launch")
        if not self.launch.gpus:  # forks of this process need not import it again
            os.environ.update(self.launch.command.env)
            with fast_imports():
                import_module("packtrain.bench.measured_run")
                import_module(self.config.objective.spec.run)

    def choose_length(self, configured: Candidate, seconds: float) -> Failure | None:
        """Find the part of a step and the number of steps that fit the time.

        The part begins small. Return the failure of a run; if memory runs out, steps stay whole, and there are as few as possible.
        """
        batch, world = self.config.batch, self.launch.num_processes
        rows = (configured.tokens or 1) / (batch.tokens_per_step or 1)
        part = min(1.0, world * (rows if batch.tokens_per_step else 2 / (batch.examples_per_step or 1)))
        most_s = seconds / _STEPS_IN_TIME  # for a step
        while True:
            self.part, outcome = part, self.measure(configured)
            if isinstance(outcome, Failure):
                self.part = 1.0
                return None if outcome.memory else outcome
            whole_s = max(self.last_summary["step_seconds"], 1e-6) / self.part
            part = min(1.0, most_s / whole_s)
            if part < 1.5 * self.part or part == 1:
                break
        self.part = max(part, self.part)
        steps = round(seconds / _RUNS_IN_TIME / (whole_s * self.part))
        self.steps = min(max(steps, _MIN_STEPS), _MAX_STEPS)
        return None

    def measure(self, candidate: Candidate) -> RunFigures | Failure:
        """Make a run with a candidate's settings, and print its figures."""
        outcome = self._make_run(candidate)
        said = outcome.why if isinstance(outcome, Failure) else f"{outcome.tokens_per_second:,.0f} tokens/s"
        print(f"{' '.join(candidate.overrides())}: {said}", file=sys.stderr, flush=True)
        return outcome

    def _make_run(self, candidate: Candidate) -> RunFigures | Failure:
        self._number += 1
        root, length = self.folder / f"{self._number}", self.steps + 1
        trainer = replace(self.config.trainer, output_dir=str(root / "run"), max_steps=length, log_every=length)
        packing = replace(self.config.packing, mode=candidate.mode, share_prefix=candidate.shared)
        batch = replace(self.config.batch, tokens_per_device=candidate.tokens, examples_per_device=candidate.examples)
        config = replace(self.config, trainer=trainer, packing=packing, batch=batch)
        try:
            on_this_machine(config, "bench")  # raises UserError for sizes that do not divide
            config = replace(config, batch=_shrink_step(batch, self.part, self.launch.num_processes))
            for fault in check_combinations(config, set()):
                return Failure(fault.what)
            launch = on_this_machine(config, "bench")
        except UserError as error:
            return Failure(error.problems[0].what, text=f"error: {error}")
        root.mkdir()
        get = multiprocessing.get_context
        context = get("spawn") if launch.gpus else get("fork")  # CUDA does not survive a fork
        process = context.Process(target=_run, args=(self.execute, launch, config, root / "output"))
        process.start()
        try:
            process.join()
        finally:  # or interrupted by a signal
            process.kill()
        if process.exitcode:
            return _failure_of(process.exitcode, (root / "output").read_text(errors="replace"))
        before, self.last_summary = self.last_summary, object_of(RunFolder.of(config.trainer).summary)
        for name in ("attention", "attention_cost"):  # padded batches have none
            self.last_summary[name] = self.last_summary[name] or before.get(name)
        return RunFigures(**self.last_summary["figures"])

    def why_not_larger(self, measured: RunFigures) -> str:
        """Return why sizes above `measured` must not be tried. On CPUs, doubling a size may double the peak."""
        free = int(MEMORY_SHARE * psutil.virtual_memory().available / self.launch.num_processes)
        if self.launch.gpus or 2 * measured.peak_memory <= free:
            return ""
        return f"it might take more than {free / 2**30:.1f} GiB, a process's share of the free memory"

    def report(self, trials: list[Trial]) -> Json:
        """Return all results in plain values. The keys are a promise to users."""
        config, about, best, configured = self.config, self.last_summary, fastest_of(trials), trials[0]
        batch, number = config.batch, min(config.batch.examples_per_step or 0, about["documents"])
        unit = config.objective.spec.examples
        return {
            "model": config.model.path or f"a new {config.model.config.get('model_type')}",
            "objective": config.objective.kind,
            "device": about["device"],
            "processes": self.launch.num_processes,
            "strategy": config.strategy.name,
            "precision": about["precision"],
            "attention": about["attention"],
            "attention_cost": about["attention_cost"],
            "step": {
                "size": f"{batch.tokens_per_step} tokens" if batch.tokens_per_step else f"{number} {unit}",
                "tokens": float(batch.tokens_per_step or number * about["mean_tokens"]),
                "part": self.part,
            },
            "trials": [trial_json(trial, configured) for trial in trials],
            "best": best and trial_json(best, configured) | {"clear": is_clear(best, configured)},
        }


def _shrink_step(batch: Batch, part: float, processes: int) -> Batch:
    """Shrink steps to a `part` of their size. A step keeps at least a document for each process, or whole rows."""
    if part < 1 and batch.examples_per_step:
        least = min(processes, batch.examples_per_step)
        return replace(batch, examples_per_step=max(round(part * batch.examples_per_step), least))
    if part < 1 and batch.tokens_per_step and batch.tokens_per_device:
        unit = batch.tokens_per_device * processes
        return replace(batch, tokens_per_step=max(int(part * batch.tokens_per_step) // unit, 1) * unit)
    return batch


def _run(execute: Callable[[LaunchPlan, RunConfig], int], launch: LaunchPlan, config: RunConfig, output: Path) -> None:
    """Run in a process that launches a run, or trains itself."""
    redirect_output(output)
    sys.exit(execute(launch, config))


def _failure_of(code: int, output: str) -> Failure:
    """Explain from its output why a run ended with `code` (negative: a signal)."""
    lines = output.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("error:")]
    text = lines[starts[-1] :] if starts else lines[-20:]
    if match := _OUT_OF_MEMORY.search(output):
        return Failure(match[0], 2, "\n".join(text), memory=True)
    if code == -signal.SIGKILL:
        return Failure("killed: the machine was out of memory", 4, "\n".join(text), memory=True)
    messages = [line.strip() for line in text if line.strip() and not line.startswith("error:")]
    why = messages[0] if messages else f"it ended with exit code {code}"
    return Failure(why, code if code > 0 else 128 - code, "\n".join(text))


_WIDTH = 100


def print_report(report: Json, given: Sequence[str], *, as_json: bool) -> None:
    """Print the report (launches.py) to stdout. `given` are the arguments that named the config."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True, width=_WIDTH)  # lines wrap, so that cells are not cut
    several = f"{report['processes']} processes ({report['strategy']}), each on " if report["processes"] > 1 else ""
    step, best = report["step"], report["best"]
    cut = f"; measured on {step['part']:.0%} of it, as a whole one takes too long here" if step["part"] < 1 else ""
    head = {
        "model": f"{report['model']}, {report['precision']}, on {several}{report['device']}",
        "attention": report["attention"] or "the model's own",
        "a step": f"{step['size']}, about {step['tokens']:,.0f} tokens{cut}",
    }
    if cost := report["attention_cost"]:
        head[""] = (
            f"{cost['token_seconds'] * 1e6:.3g} µs · (l + {cost['attention_cost']:.2g} · l²) for l tokens; planned with "
            f"packing.attention_cost={cost['planned']:.2g}"
        )
    for name, text in head.items():
        console.print(f"[bold]{name:<10}[/]{escape(text)}")
    console.print(_table(report["trials"], best))
    for trial in report["trials"]:
        if trial["why"]:
            name = f"{_mode(trial)} {_number(trial['tokens_per_device'])}".strip()
            line = f"not measured: {name}: {trial['why']}"
            console.print(f"[yellow]{escape(line)}[/]")
    command = shlex.join(["packtrain", report["objective"], *given, *([] if best["configured"] else best["overrides"])])
    console.print(f"[bold]{'best':<10}[/]{escape(_describe_best(best))}")
    console.print(f"[bold]{'run':<10}[/][green]{escape(command)}[/]")


def _table(trials: Sequence[Json], best: Json) -> Table:
    table, most_rounds = Table(box=None, pad_edge=False), max(trial["rounds"] for trial in trials)
    for trial in trials:
        if trial["tokens_per_second"] is None:
            continue
        is_best = trial["overrides"] == best["overrides"]
        cells = {
            "mode": _mode(trial),
            "tokens": _number(trial["tokens_per_device"]),
            "docs": _number(trial["examples_per_device"]),
            "tokens/s": f"{trial['tokens_per_second']:,.0f}",
            "spread": "" if trial["spread"] is None else f"{trial['spread']:.0%}",
            # the ratio of two single runs at different moments is not worth much
            "ratio": f"{trial['ratio']:.2f}" if trial["ratio"] and (trial["rounds"] > 1 or most_rounds == 1) else "",
            "MFU": "" if trial["mfu"] is None else f"{trial['mfu']:.1%}",
            "peak": f"{trial['peak_memory'] / 2**30:.2f} GiB",
            "padding": f"{trial['padding']:.0%}",
            "first": f"{trial['first_step_seconds']:.2f} s",
            "": ", ".join(["best"] * is_best + ["config"] * trial["configured"]),
        }
        if not table.columns:
            for name in cells:
                table.add_column(name, justify="left" if name in ("mode", "") else "right", no_wrap=True)
        table.add_row(*cells.values(), style="bold" if is_best else None)
    return table


def _describe_best(best: Json) -> str:
    speed = f"{best['tokens_per_second']:,.0f} tokens/s"
    if best["configured"]:
        return f"the configured settings, {speed}"
    if best["ratio"] is None:
        return f"{speed}; the configured settings could not be measured"
    unclear = "" if best["clear"] else "; not in every round: try more --seconds"
    return f"{speed}, {best['ratio']:.2f} times the configured speed{unclear}"


def _mode(trial: Json) -> str:
    return trial["mode"] + {None: "", True: ", shared", False: ", unshared"}[trial["share_prefix"]]


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
