"""Registries: the things of one kind that packtrain and other installed packages bring.

A thing of packtrain is a folder (or a file) of the kind's package. A thing of another package is an entry point of the group with
the package's name: `packtrain.objectives` for objectives. Nothing else lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from packtrain.errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_NO_THINGS = ("spec", "registry")


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

    `package`: the folder of ours, such as "packtrain.objectives", which is also the group of entry points. `attribute` of the module
    `module` in each folder (of the file itself if it is "") is the thing, or a tuple of several. `kind` is its type, `word` its name in
    messages.
    """

    kind: type[Thing]
    word: str
    package: str
    module: str
    attribute: str

    def all(self) -> dict[str, Thing]:
        """Return every thing by its name, in order. Raises UserError if another package's cannot be used."""
        return _find(self)

    def __getitem__(self, name: str) -> Thing:
        """Return the thing with this name. Raises KeyError."""
        return self.all()[name]


@cache
def _find(registry: Registry[Thing]) -> dict[str, Thing]:
    package = import_module(registry.package)
    found: list[Thing] = []
    for item in iter_modules(package.__path__):
        if item.ispkg if registry.module else item.name not in _NO_THINGS:
            path = ".".join(filter(None, (registry.package, item.name, registry.module)))
            own = getattr(import_module(path), registry.attribute)
            found += own if isinstance(own, tuple) else [own]
    by_name = {thing.name: thing for thing in [*found, *_of_others(registry)]}
    return dict(sorted(by_name.items(), key=lambda item: (item[1].order, item[0])))


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


def _of_others(registry: Registry[Thing]) -> Iterator[Thing]:
    """Yield the things that other installed packages bring."""
    for entry in _entry_points(registry.package):
        where = f"{entry.dist.name if entry.dist else 'a package'}, {registry.package}: {entry.name} = {entry.value}"
        fix = "Mend or uninstall the package."
        try:
            thing = entry.load()
        except Exception as error:  # its code may raise anything
            what = f"this {registry.word} cannot be imported: {type(error).__name__}: {error}"
            raise UserError(what, where=where, fix=fix) from error
        if not isinstance(thing, registry.kind) or thing.name != entry.name:
            raise UserError(f"it is no {registry.kind.__name__} called {entry.name}", where=where, fix=fix)
        yield thing
