"""`python -m packtrain.launch.torchrun LOG ARGUMENTS…` is `accelerate launch ARGUMENTS…` with torchrun's messages (among them a
traceback for every worker that ends with an error, whatever the reason) in LOG. The workers' exit codes are written for the launcher.

Workers inherit the real stdout and stderr, so a terminal stays one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from packtrain import fast_imports
from packtrain.launch.worker import EXIT_DIR, PARENT, end_with_parent, write_exit


def main(log: str, arguments: list[str]) -> None:
    """`accelerate launch arguments…` in this process; ends it with torchrun's exit code (1 for any failure).

    The system kills it when the launcher that started it ends, and its workers with it.
    """
    end_with_parent(int(os.environ[PARENT]))
    os.environ[PARENT] = str(os.getpid())
    # Never closed: Python writes the last traceback to it after main() has ended.
    sys.stderr = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    with fast_imports():
        from accelerate.commands.launch import launch_command, launch_command_parser
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            write_exit(Path(os.environ[EXIT_DIR]), rank, ended=failure.exitcode)
        raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
