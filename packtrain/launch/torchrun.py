"""`python -m packtrain.launch.torchrun LOG ARGUMENTS…` is `accelerate launch ARGUMENTS…` with torchrun's own words (among them a
traceback for every worker that ends with an error, whatever the reason) in LOG, and how workers ended in a file.

Workers inherit the real stdout and stderr, so a terminal stays one.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from packtrain.launch.worker import EXIT_DIR, PARENT, end_with_parent

_ENDS = "torchrun.json"


def ends_in(exits: Path) -> dict[int, int]:
    """By rank: exit codes of workers that failed, negative for a signal, as torchrun left them in the folder `exits`."""
    with suppress(OSError, ValueError):
        return {int(rank): int(code) for rank, code in json.loads((exits / _ENDS).read_text()).items()}
    return {}


def leave_ends(exits: Path, ends: dict[int, int]) -> None:
    """Leaves them there."""
    aside = exits / f".{_ENDS}"
    aside.write_text(json.dumps(ends))
    aside.rename(exits / _ENDS)


def main(log: str, arguments: list[str]) -> None:
    """`accelerate launch arguments…` in this process; ends it with torchrun's exit code (1 for any failure).

    It ends with the launcher that started it, and its workers with it.
    """
    end_with_parent(int(os.environ[PARENT]))
    os.environ[PARENT] = str(os.getpid())
    # Never closed: Python writes the last traceback to it after main() has ended.
    sys.stderr = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        leave_ends(Path(os.environ[EXIT_DIR]), {rank: one.exitcode for rank, one in error.failures.items()})
        raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
