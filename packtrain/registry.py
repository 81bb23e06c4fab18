"""Registries: all things of one kind, built in or from other installed packages.

A built-in objective is a folder of packtrain/objectives; other kinds are folders, files or a table. An objective of another package is an
entry point of the group `packtrain.objectives`. Nothing else lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from packtrain.errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_FIX = "Mend or uninstall the package."


class Named(Protocol):
    """A thing with a name, and its place among the others of its kind."""

    @property
    def name(self) -> str:
        """The name in configs."""
        ...

    @property
    def order(self) -> int:
        """Things with a lower number are listed first."""
        ...


Thing = TypeVar("Thing", bound=Named)


@dataclass(frozen=True)
class Registry(Generic[Thing]):
    """All things of one kind.

    `kind`: their type. `word`: what messages call one, such as "objective". `package`: where the built-in ones are, such as
    "packtrain.objectives"; entry points have the same group. `attribute`: the constant that declares one, in the `module` of each folder,
    or in each file but spec.py if `module` is "". `own`: the built-in ones, if a table declares them.
    """

    kind: type[Thing]
    word: str
    package: str
    module: str = ""
    attribute: str = ""
    own: tuple[Thing, ...] = ()

    def all(self) -> dict[str, Thing]:
        """Return every thing by its name, in order. Raises UserError if an entry point cannot be used."""
        return cast("dict[str, Thing]", _find(self)[0])

    def __getitem__(self, name: str) -> Thing:
        """Return the thing with this name. Raises KeyError."""
        return self.all()[name]

    def imported(self, name: str, module: str, constant: str) -> object:
        """Return the `constant` in the `module` that carries out the thing. Raises UserError if it cannot be imported."""
        try:
            return getattr(import_module(module), constant)
        except Exception as error:  # the code of others may raise anything
            raise self.refusal(name, f"cannot be imported: {type(error).__name__}: {error}") from error

    def refusal(self, name: str, what: str) -> UserError:
        """Return the error that the thing is not usable. It says where the thing is declared."""
        what = f"the {self.word} {name} {what}"
        return UserError(what, where=_find(self)[1].get(name, self.package), fix=_FIX, code="plugin-unusable")


@cache
def _find(registry: Registry[Thing]) -> tuple[dict[str, Thing], dict[str, str]]:
    """Return things by name, and the places where other packages declare theirs."""
    by_name = {thing.name: thing for thing in registry.own or _built_in(registry)}
    places = dict[str, str]()
    for thing, where in _of_others(registry):
        if thing.name in by_name:
            what = f"there is another {registry.word} called {thing.name}"
            raise UserError(what, where=where, fix=_FIX, code="plugin-name-taken")
        by_name[thing.name], places[thing.name] = thing, where
    return dict(sorted(by_name.items(), key=lambda item: (item[1].order, item[0]))), places


def _built_in(registry: Registry[Thing]) -> Iterator[Thing]:
    for item in iter_modules(import_module(registry.package).__path__):
        if item.ispkg if registry.module else item.name != "spec":
            path = ".".join(filter(None, (registry.package, item.name, registry.module)))
            own = getattr(import_module(path), registry.attribute)
            yield from own if isinstance(own, tuple) else [own]


def names_of_others(group: str) -> list[str]:
    """Return the names of things that other installed packages bring, without their code."""
    return sorted(entry.name for entry in _entry_points(group))


def _entry_points(group: str) -> Iterable[EntryPoint]:
    # importlib.metadata takes 60 ms to import, and most people have no such package
    if f"[{group}]" not in _declared_in(tuple(sys.path)):
        return ()
    from importlib.metadata import entry_points

    return entry_points(group=group)


@cache
def _declared_in(folders: tuple[str, ...]) -> str:
    files = (file for folder in folders for file in Path(folder).glob("*-info/entry_points.txt"))
    return "\n".join(file.read_text(errors="replace") for file in files)


def _of_others(registry: Registry[Thing]) -> Iterator[tuple[Thing, str]]:
    """Yield the things that other installed packages bring, and where each is declared."""
    for entry in _entry_points(registry.package):
        where = f"{entry.dist.name if entry.dist else 'a package'}, {registry.package}: {entry.name} = {entry.value}"
        try:
            thing = entry.load()
        except Exception as error:  # its code may raise anything
            what = f"this {registry.word} cannot be imported: {type(error).__name__}: {error}"
            raise UserError(what, where=where, fix=_FIX, code="plugin-unusable") from error
        if not isinstance(thing, registry.kind) or thing.name != entry.name:
            what = f"it is no {registry.kind.__name__} called {entry.name}"
            raise UserError(what, where=where, fix=_FIX, code="plugin-misdeclared")
        yield thing, where
