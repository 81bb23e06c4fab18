"""Where every key of a composed config was written: a line of a YAML file, or the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

from packtrain.config.findings import Finding
from packtrain.config.overrides import COMMAND_LINE
from packtrain.config.yamlfile import KeyLine
from packtrain.errors import Problem


@dataclass(slots=True)
class Origins:
    """Filled in the order of composition: what comes later wins. `main` is the user's file as messages show it."""

    main: str
    _lines: dict[str, str] = field(default_factory=dict)
    _arguments: set[str] = field(default_factory=set)

    def add_file(self, shown: str, package: str, lines: list[KeyLine]) -> None:
        """The keys of one file, which land under `package` ("" for the root)."""
        for one in lines:
            self._lines[f"{package}.{one.path}" if package else one.path] = f"{shown}:{one.line}"

    def add_choice(self, place: str, package: str, lines: list[KeyLine]) -> None:
        """The keys of a file that the user chose, but did not write, at `place`."""
        for one in lines:
            self._lines[f"{package}.{one.path}"] = place

    def add_argument(self, key: str) -> None:
        """A key that the command line sets."""
        self._arguments.add(key)

    def where(self, key: str) -> str:
        """The place of `key`: of the key itself, else of what it is in, else of the user's file as a whole."""
        if key not in self._lines and any(one.startswith(f"{key}.") for one in self._arguments):
            return f"{COMMAND_LINE}, {key}"
        for outer in _outwards(key):
            if outer in self._arguments:
                return f"{COMMAND_LINE}, {key}"
            if outer in self._lines:
                return f"{self._lines[outer]}, {key}"
        return f"{self.main}, {key}" if self.main else key

    def locate(self, finding: Finding) -> Problem:
        """The finding with the places of its keys."""
        return Problem(finding.what, "; ".join(self.where(key) for key in finding.keys), finding.fix)


def _outwards(key: str) -> list[str]:
    """`data.train[1].path` → itself, `data.train[1]`, `data.train`, `data`."""
    cuts = [at for at, letter in enumerate(key) if letter in ".["]
    return [key, *(key[:at] for at in reversed(cuts))]
