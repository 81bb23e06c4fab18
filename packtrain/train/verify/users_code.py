"""Code of the user's, by the name that a command line gives it: MODULE:NAME or FILE.py:NAME."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.errors import PacktrainError, UserError

OPTION = "--collator"


@dataclass(frozen=True, slots=True)
class Foreign:
    """What the user named: an object, and how it is `shown`."""

    thing: Any
    shown: str

    def made(self, known: Mapping[str, Any]) -> Callable[..., Any]:
        """The collator: the object itself, or what it makes.

        A class, and a function none of whose required arguments is a batch (all of them are among the `known` names, or there
        are none), are called, with those that they require. Raises UserError where that is not enough.
        """
        thing = self.thing
        if not callable(thing):
            raise UserError(f"{self.shown} is {type(thing).__name__}, which cannot be called", where=OPTION)
        if not isinstance(thing, type) and not inspect.isfunction(thing):
            return thing
        required = [one.name for one in inspect.signature(thing).parameters.values() if _is_required(one)]
        unknown = [name for name in required if name not in known]
        if isinstance(thing, type) and unknown:
            what = f"{self.shown} needs {', '.join(unknown)}, which packtrain does not know"
            raise UserError(what, where=OPTION, fix=f"Name a function that makes it; it may take {', '.join(known)}.")
        if unknown:
            return thing
        with self.blamed("cannot be made", ""):
            made = thing(**{name: known[name] for name in required})
        if not callable(made):
            raise UserError(f"{self.shown} makes {type(made).__name__}, which cannot be called", where=OPTION)
        return made

    @contextmanager
    def blamed(self, what: str, fix: str) -> Iterator[None]:
        """An exception inside the block becomes a UserError in its own words; its traceback goes to a file."""
        try:
            yield
        except PacktrainError:
            raise
        except (Exception, SystemExit) as error:
            handle, log = tempfile.mkstemp(prefix="packtrain-collator-", suffix=".log", text=True)
            with os.fdopen(handle, "w") as file:
                file.write("".join(traceback.format_exception(error)))
            first = (str(error).strip().splitlines() or [""])[0]
            advice = f"{fix} The traceback is in {log}.".strip()
            raise UserError(
                f"{self.shown} {what}: {type(error).__name__}: {first}", where=OPTION, fix=advice
            ) from error


def _is_required(parameter: inspect.Parameter) -> bool:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variable


def load_foreign(spec: str) -> Foreign:
    """What `spec` names. Modules are looked for in the working folder, too, and what a file imports beside it.

    Raises UserError where there is no such thing, or importing it fails.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UserError(f"{spec!r} names no function", where=OPTION, fix="Give MODULE:NAME or FILE.py:NAME.")
    found: Any = _module_of(place, spec)
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [one for one in dir(found) if one[0] != "_"], 1)
            fix = f"Did you mean {place}:{near[0]}?" if near else ""
            raise UserError(f"{place} has no {part}", where=OPTION, fix=fix)
        found = getattr(found, part)
    return Foreign(found, spec)


def _module_of(place: str, spec: str) -> Any:
    of_file = place.endswith(".py")
    path = Path(os.path.realpath(os.path.expanduser(place)))
    if of_file and not path.is_file():
        raise UserError(f"there is no file {place}", where=OPTION, fix="Name a file, or a module without .py.")
    folder = str(path.parent if of_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with Foreign(None, spec).blamed("cannot be imported", ""):
        if not of_file:
            return importlib.import_module(place)
        made = importlib.util.spec_from_file_location(path.stem, path)
        assert made is not None and made.loader is not None
        module = importlib.util.module_from_spec(made)
        sys.modules.setdefault(path.stem, module)  # what pickles of its classes look for
        made.loader.exec_module(module)
        return module
