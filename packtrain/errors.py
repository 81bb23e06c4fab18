"""Errors that are not bugs of packtrain, and their exit codes. They are raised where the fault is detected;
exit_code.py prints them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: `what` is wrong, `where` ("run.yaml:12, optim.learning_rate"), and how to `fix` it."""

    what: str
    where: str = ""
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n    → {self.fix}" if self.fix else head


class PacktrainError(Exception):
    """Base of all errors for the user. `exit_code` is the process's; `shown` says whether the error is printed."""

    exit_code = 1
    shown = True

    def __init__(self, problems: str | Problem | Sequence[Problem], *, where: str = "", fix: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem(problems, where, fix)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self):  # exceptions of data workers are pickled
        return (type(self), (self.problems,))

    def to_json(self) -> dict[str, Any]:
        """Return exit code and problems in plain containers, for `error_from_json` in another process."""
        return {"code": self.exit_code, "problems": [asdict(problem) for problem in self.problems]}


class UserError(PacktrainError):
    """The config, the data or the arguments are wrong."""

    exit_code = 2


class CheckFailed(PacktrainError):
    """A check before or during training failed: isolation, preflight, environment."""

    exit_code = 3


class Disagreement(CheckFailed):
    """The processes of a run disagree. All raise it with the same text; only those with `shown` print it."""

    def __init__(self, problems: str | Problem | Sequence[Problem], *, shown: bool = True) -> None:
        super().__init__(problems)
        self.shown = shown


class PeerFailed(PacktrainError):
    """Another process or the network failed while running."""

    exit_code = 4


class LostPeers(PeerFailed):
    """The other ranks disappeared during an operation. The rank that failed first usually says why."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of the user. Raises UserError if it is anything else."""
    what = "not a JSON object" if path.is_file() else "there is no such file"  # reading a pipe could block
    try:
        if path.is_file() and isinstance(content := json.loads(path.read_bytes()), dict):
            return content
    except (OSError, ValueError, RecursionError) as error:
        what = f"not valid JSON: {error}"
    raise UserError(what, where=str(path), fix="Correct it, or download it again.")


def error_from_json(content: Mapping[str, Any]) -> PacktrainError:
    """Return the error of another process, from its `to_json`."""
    kind = {UserError.exit_code: UserError, CheckFailed.exit_code: CheckFailed}.get(content["code"], PeerFailed)
    return kind([Problem(**problem) for problem in content["problems"]])
