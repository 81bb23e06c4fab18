"""A process that has imported everything beside stand-in GPUs, and forks each command from there: `python -m tests.standin.warm`.

It reads a line of JSON for each launch, {"arguments", "cwd", "variables": [those of each rank]}, and answers with one: exit code (none
where it did not end in time), stdout and stderr of each. With "function" ("module:name") in place of the arguments each process calls that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.train import forked


def call(function: str, _: tuple[str, ...], environment: Mapping[str, str], cwd: Path, outputs: list[Path]) -> None:
    """The function in place of packtrain's command line; what it raises ends the process with 1."""
    module, _, name = function.partition(":")
    forked.enter(environment, cwd, outputs)
    getattr(import_module(module), name)()


def launch(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What became of each process of a launch."""
    begin = partial(call, asked["function"]) if "function" in asked else None
    arguments, variables = tuple(asked.get("arguments", ())), asked["variables"]
    try:
        results = forked.results_of(arguments, variables, Path(asked["cwd"]), asked["timeout"], begin)
    except TimeoutError as error:
        return [{"code": None, "stdout": "", "stderr": str(error)}] * len(variables)
    return [{"code": one.returncode, "stdout": one.stdout, "stderr": one.stderr} for one in results]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(launch(json.loads(line))), flush=True)
