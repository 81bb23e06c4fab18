"""Arguments of a verb, `[CONFIG] [key=value …]`, read as a config, a plan or a job.

Nothing heavy is imported before it is needed, since cli.py imports this file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.errors import UserError
from packtrain.wording import clean

if TYPE_CHECKING:
    from packtrain.config.schema import RunConfig
    from packtrain.launch.jobs import Job
    from packtrain.plan.launch_plan import LaunchPlan


def check_folder(run: RunConfig, arguments: list[str] | None) -> None:
    """Raise UserError if the run's folder would refuse the run."""
    from packtrain.launch.attempt import check_attempt
    from packtrain.run_folder import RunFolder

    check_attempt(run, split_arguments(arguments)[0], RunFolder.of(run.trainer), run.trainer.resume)


def load_and_plan(
    arguments: list[str] | None, verb: str | None = None, *, packages: bool = True
) -> tuple[RunConfig, LaunchPlan]:
    """Return the config that the arguments name, and its plan. Without a `verb`, plan for the config's own."""
    from packtrain.config.compose import load_config
    from packtrain.plan.launch_plan import plan_launch
    from packtrain.plan.surroundings import detect_surroundings

    path, changes = split_arguments(arguments)
    run = load_config(path, [*_implied_by(verb), *changes], note, packages=packages)
    check_verb(run, verb or run.objective.kind)
    return run, plan_launch(run, detect_surroundings(), run.objective.kind, arguments or [])


def load_job(verb: str, arguments: list[str] | None, sweep: bool, *, packages: bool = True) -> Job:
    """Return the run, or the runs of a sweep, as a Slurm job. The job starts in the current folder."""
    from packtrain.config.compose import Point, load_config, load_points
    from packtrain.launch.jobs import Job
    from packtrain.plan.surroundings import command_of

    path, changes = split_arguments(arguments)
    if sweep:
        points, shared = load_points(path, changes, _implied_by(verb), note)
    else:
        points, shared = [Point(load_config(path, [*_implied_by(verb), *changes], note, packages=packages))], changes
    for point in points:
        check_verb(point.config, verb)
    called = ("packtrain", "sbatch", verb, *(arguments or []), *(["-m"] if sweep else []))
    named = (*([path] if path else []), *shared)
    return Job(verb, called, named, tuple(points), Path.cwd(), tuple(command_of("packtrain", absolute=True)))


def for_collator(arguments: list[str]) -> list[str]:
    """Add built-in data and a tiny model where no config is named."""
    if arguments and split_arguments(arguments)[0] is not None:
        return arguments
    model = [] if any(one.startswith("model") for one in arguments) else ["model=quickstart"]
    return [*model, "data=quickstart", "batch=small", *arguments]


def note(line: str) -> None:
    """Print on stderr how the config was interpreted. If another launcher started several processes, only rank 0 prints."""
    if os.environ.get("RANK", "0") == "0":
        print(clean(line), file=sys.stderr)


def _implied_by(verb: str | None) -> list[str]:
    """Return the overrides that a verb implies: under `packtrain dpo` objective.kind need not be written."""
    from packtrain.config.objective import Objective

    return [] if verb in (None, Objective().kind) else [f"objective.kind={verb}"]


def check_verb(run: RunConfig, verb: str) -> None:
    """Raise UserError if the config is for another verb, or its model cannot exist."""
    from packtrain.plan.known_model import check_model_config

    if verb != run.objective.kind:
        what = f"this config is for packtrain {run.objective.kind}, not {verb}"
        raise UserError(what, where="objective.kind", fix=f"Use packtrain {run.objective.kind}.", code="wrong-verb")
    check_model_config(run.model, scores=run.objective.spec.scores)


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """Split arguments into the config's path and the overrides. Raises UserError without arguments.

    The path is the first argument, or None if that is an override.
    """
    if not arguments:
        fix = "Name a YAML file, e.g. packtrain sft recipes/quickstart-sft.yaml."
        raise UserError("no config", fix=fix, code="no-config")
    first = arguments[0]
    if os.path.isfile(first) or not ("=" in first or first.startswith(("~", "+", "-"))):
        return first, arguments[1:]
    return None, arguments
