"""What a process says: to the terminal where it is the main one, and to its own plain log file always."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import render


class RankLog:
    """`say` takes rich markup; the file gets it plain, with the time in front."""

    def __init__(self, path: Path, *, main: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)  # kept open: the folder may be moved meanwhile
        self.console = Console(file=sys.stdout, highlight=False, quiet=not main, soft_wrap=True)

    def say(self, text: str) -> None:
        """To the terminal and the file."""
        self.console.print(text)
        self.note(render(text).plain)

    def note(self, text: str) -> None:
        """To the file only."""
        for line in text.splitlines():
            self._file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n")
