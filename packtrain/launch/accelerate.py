"""accelerate's launcher with torchrun's own words kept in a file.

`python -m packtrain.launch.accelerate LOG ARGUMENTS…` is `accelerate launch ARGUMENTS…` with the launcher's own words
(among them a traceback for every worker that ends with an error, whatever the reason) in LOG. Workers inherit the real
stdout and stderr, so a terminal stays one.
"""

from __future__ import annotations

import os
import subprocess
import sys

from packtrain.launch.worker import PARENT, end_with_parent


class _Told(subprocess.Popen):
    """A worker of torchrun. How it ended is written down as soon as torchrun knows, which says so itself only if it has the time."""

    def poll(self) -> int | None:
        """As Popen's."""
        known, code = self.returncode, super().poll()
        if known is None and code is not None:
            print(f"exitcode: {code} (pid: {self.pid})", file=sys.stderr, flush=True)
        return code


def main(log: str, arguments: list[str]) -> None:
    """`accelerate launch arguments…` in this process; ends it with torchrun's exit code (1 for any failure).

    It ends with the launcher that started it, and its workers with it.
    """
    end_with_parent(int(os.environ[PARENT]))
    os.environ[PARENT] = str(os.getpid())
    subprocess.Popen = _Told
    # Never closed: Python writes the last traceback to it after main() has ended.
    sys.stderr = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(arguments))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
