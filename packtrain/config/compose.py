"""YAML + command line → `RunConfig`, or one for each point of a sweep. All problems are reported at once, with places.

Files are composed by Hydra's rules (defaults lists, groups, interpolation). OmegaConf merges them one after the other, so that
the place of each key is known. A user's own files of a group win over ours. Types are checked after composition (validate.py),
so that all errors are shown at once.

The command line may leave a file's key with nothing to act on; that key is dropped: `data.eval=null` takes `trainer.eval_every` with it.
A contradiction within the files, or within the command line, is refused."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from packtrain.config import Fault, is_list, is_mapping
from packtrain.config.keys import keys
from packtrain.config.overrides import COMMAND_LINE, Argument, assignment, carry_out, no_choice, parse, values_of_sweep
from packtrain.config.rules import check_combinations
from packtrain.config.rules.paths_and_packages import check_packages, check_paths, model_of, name_files
from packtrain.config.rules.slurm import note_secrets
from packtrain.config.schema import RunConfig, groups
from packtrain.config.validate import build, plain_values
from packtrain.config.yaml_files import ConfigFile, find_choice, find_config, options, read_config, shipped, shown
from packtrain.errors import Problem, UserError

MAX_POINTS = 1000
_LONGEST_NAME = 150  # characters; file systems allow 255 bytes
_SELF = "_self_"  # in a defaults list: the keys of the file itself
_DEFAULTS_FORM = "Write defaults: [GROUP: CHOICE, …, _self_]."


def load_config(
    config_path: str | None,
    overrides: list[str],
    say: Callable[[str], object] = lambda _: None,
    *,
    weak: Sequence[str] = (),
    packages: bool = True,
) -> RunConfig:
    """Return the config of a run: the YAML at `config_path`, changed by `overrides`.

    `overrides` are in Hydra's grammar. `weak` ones come before them, and yield to them as a file's keys do. `say` gets a line about each key that is dropped because the command line leaves it nothing to act
    on. With `packages`, needed packages must be installed. Raises UserError with every problem that can be found without loading data or model.
    """
    file = find_config(config_path) if config_path is not None else None
    arguments, problems = parse([*weak, *overrides], file.parent if file else None)
    composed = _Composition(file, {item.key: item for item in arguments if item.choice is not None})
    try:
        composed.read()
    except UserError as error:  # nothing can be said about the values of a file that cannot be read
        raise UserError([*error.problems, *problems]) from error
    problems += composed.problems
    for argument in arguments:
        if argument.choice is None:
            problems += composed.change(argument, "packtrain" if argument.text in weak else COMMAND_LINE)
    config, faults = _check(composed.values, composed.invalid_groups, packages=packages)
    while idle := [fault for fault in faults if composed.is_idle(fault)]:
        for fault in idle:
            say(composed.drop(fault))
        config, faults = _check(composed.values, composed.invalid_groups, packages=packages)
    problems += [composed.locate(fault) for fault in faults]
    if problems:
        raise UserError(problems)
    for note in note_secrets(config.topology.setup):
        say(f"note: {note}")
    folders = [*([file.parent] if file else []), Path()]
    model, objective = config.model, config.objective  # a run folder stands for its final/
    model = replace(model, path=model.path and model_of(model.path))
    objective = replace(objective, reference=model_of(objective.reference))
    return replace(config, data=name_files(config.data, folders), model=model, objective=objective)


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep: its `config`, and the overrides `chosen` for it. Its run folder is one of them."""

    config: RunConfig
    chosen: tuple[str, ...] = ()


def load_points(
    config_path: str | None,
    overrides: list[str],
    leading: Sequence[str] = (),
    say: Callable[[str], object] = lambda line: None,
) -> tuple[list[Point], list[str]]:
    """Return the points of the sweep in `overrides` (`-m key=a,b`), and the overrides that they share.

    The grammar is Hydra's, and the last key varies fastest, as in Hydra's own sweeper. Every point gets a run folder of its own.
    `leading` overrides come before the others in every point. `say` gets each line of load_config once.

    Raises UserError if no override has several values, and with the problems of the first point that has any.
    """
    swept = {text: values for text in overrides if (values := values_of_sweep(text, MAX_POINTS)) is not None}
    shared, number = [text for text in overrides if text not in swept], math.prod(map(len, swept.values()))
    if not swept or number > MAX_POINTS:
        what = f"more than {MAX_POINTS:,} runs" if swept else "there is nothing to sweep: no key has several values"
        code = "too-many-runs" if swept else "nothing-to-sweep"
        fix = "Write key=a,b or key=range(1,4) for at least one key; Slurm's own limit is usually 1,000 (MaxArraySize)."
        raise UserError(what, where=f"{COMMAND_LINE}, -m", fix=fix, code=code)
    notes: dict[str, None] = {}  # in order
    points = [
        Point(load_config(config_path, [*leading, *shared, *chosen], notes.setdefault), chosen)
        for chosen in itertools.product(*swept.values())
    ]
    for line in notes:
        say(line)
    trainers = [point.config.trainer for point in points]
    alike = [key for key in ("output_dir", "mirror") if len({getattr(trainer, key) for trainer in trainers}) < number]
    names = [re.sub(r"[^\w.=-]+", "-", "_".join(item.lstrip("+") for item in point.chosen)) for point in points]
    names = [name[:_LONGEST_NAME] for name in names]
    if len(set(names)) < number:
        names = [f"{at}-{name}" for at, name in enumerate(names)]
    named: list[Point] = []
    for point, name in zip(points, names, strict=True):
        own = {key: f"{place}/{name}" for key in alike if (place := getattr(point.config.trainer, key))}
        config = replace(point.config, trainer=replace(point.config.trainer, **own))
        named.append(
            Point(config, (*point.chosen, *(assignment(f"trainer.{key}", value) for key, value in own.items())))
        )
    return named, shared


def faults_of(values: Mapping[str, object]) -> list[Fault]:
    """Return the faults of plain values (group → key → value). Files and packages on this machine do not matter."""
    config, faults = build(values)
    return faults + _not_yet_reported(_impossible(config), faults, [])


def changes(config: RunConfig) -> dict[str, dict[str, object]]:
    """Return group → key → value of the keys that differ from their defaults."""
    defaults = asdict(RunConfig())
    changed = {
        group: {name: value for name, value in values.items() if value != defaults[group][name]}
        for group, values in asdict(config).items()
    }
    return {group: values for group, values in changed.items() if values}


def to_yaml(config: RunConfig) -> str:
    """Return the config as YAML. `load_config` reads it back as an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(asdict(config))))


class _Composition:
    """Values that grow with each file and argument, and the place where each was written."""

    def __init__(self, file: Path | None, chosen: dict[str, Argument]) -> None:
        OmegaConf.register_new_resolver("now", datetime.now().strftime, use_cache=True, replace=True)  # as in Hydra
        self.values: DictConfig = OmegaConf.create({})
        self.problems: list[Problem] = []
        self.invalid_groups: list[str] = []
        self._file, self._beside = file, file.parent if file else None
        self._chosen = {key: (str(item.choice), item.where) for key, item in chosen.items()}
        self._places: dict[str, str] = {}
        self._used: set[str] = set()
        self._open: list[Path] = []

    def read(self) -> None:
        """Read the user's file and the files it names, then the command line's other choices.

        Raises UserError if a file cannot be read.
        """
        if self._file:
            self._add(read_config(self._file), "", "")
        for group in [item for item in self._chosen if item not in self._used]:
            self._choose(group, *self._chosen[group])

    def change(self, argument: Argument, place: str) -> list[Problem]:
        """Carry out an argument that sets or removes a key, at this `place`."""
        problem = carry_out(argument, self.values)
        if problem is None:
            inside = (f"{argument.key}.", f"{argument.key}[")
            self._places = {key: place for key, place in self._places.items() if not key.startswith(inside)}
            self._places[argument.key] = place
        return [problem] if problem else []

    def is_idle(self, fault: Fault) -> bool:
        """Return whether the command line leaves a file's key with nothing to act on."""
        place = self._places.get(fault.keys[0], COMMAND_LINE)
        by_command = fault.because.partition(".")[0] in self._chosen
        by_command |= self._places.get(fault.because, "") == COMMAND_LINE
        return by_command and not place.startswith(COMMAND_LINE)

    def drop(self, fault: Fault) -> str:
        """Give the idle key its default; return a line about it."""
        idle = fault.keys[0]
        text = f"{self._where(idle)}={OmegaConf.select(self.values, idle)}: dropped, as the command line sets {fault.because}"
        OmegaConf.update(self.values, idle, keys()[idle].default, merge=False)
        self._places[idle] = COMMAND_LINE  # it is not dropped twice, and keys that need it may follow
        return f"{text} ({fault.what})"

    def locate(self, fault: Fault) -> Problem:
        """Return the fault with the places of its keys."""
        return Problem(fault.what, "; ".join(self._where(key) for key in fault.keys), fault.fix, fault.code)

    def _where(self, key: str) -> str:
        """Return the place where `key` was set. Else a key inside it, one around it, or the user's file stands for it."""
        cuts = [at for at, letter in enumerate(key) if letter in ".["]
        inner = [item for item in self._places if item.startswith(f"{key}.")]
        outer = [key[:at] for at in reversed(cuts)]
        for item in [key, *inner[-1:], *outer]:
            if item in self._places:
                return f"{self._places[item]}, {key}"
        return f"{shown(self._file)}, {key}" if self._file else key

    def _add(self, file: ConfigFile, group: str, place: str) -> None:
        """Merge into `group` the files of a defaults list and the file's own keys.

        The file's own keys are merged at `_self_`, else last. `place` is the line that chose one of packtrain's own files.
        """
        if file.path in self._open:
            what = "the defaults list leads back to the file it is in"
            raise UserError(what, where=shown(self._file or file.path), code="circular-defaults")
        self._open.append(file.path)
        for inner, choice, where in _entries(file, group):
            if choice == _SELF:
                self._merge(file, group, place)
            else:
                self._choose(inner, choice, place or where)
        self._open.pop()

    def _choose(self, group: str, choice: str, place: str) -> None:
        """Add a choice of a group. A choice on the command line wins over it."""
        choice, place = self._chosen.get(group, (choice, place))
        self._used.add(group)
        path = find_choice(group, choice, self._beside)
        if path is not None:
            self._add(read_config(path), group, place if shipped("configs") in path.parents else "")
        elif group:
            self.problems.append(no_choice(group, choice, options(group, self._beside), f"{place}, {group}"))
            self.invalid_groups.append(group)
        else:
            what, fix = f"{choice!r} does not exist", f"There is no {choice}.yaml beside this file."
            raise UserError(what, where=place, fix=fix, code="no-such-config")

    def _merge(self, file: ConfigFile, group: str, place: str) -> None:
        own = file.values
        for name in [] if group else list(own):
            if name in groups() and (choice := _text(own, str(name))):  # `optim: sgd` chooses sgd
                del own[name]
                self._choose(str(name), choice, file.place(str(name)))
        try:
            self.values = cast(DictConfig, OmegaConf.merge(self.values, {group: own} if group else own))
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            raise UserError(str(error).split("\n")[0], where=shown(file.path), code="cannot-merge") from error
        for key in file.lines:
            self._places[f"{group}.{key}" if group else key] = place or file.place(key)


def _entries(file: ConfigFile, group: str) -> list[tuple[str, str, str]]:
    """Return (group, choice, place) of each entry in a file's defaults list. Files in no folder have group "".

    (_, _SELF, _) stands for the file's own keys. They come last if the list does not place them.
    """
    if not is_list(file.defaults):
        where = f"{file.place('defaults')}, defaults"
        raise UserError("it must be a list", where=where, fix=_DEFAULTS_FORM, code="defaults-not-a-list")
    entries: list[tuple[str, str, str]] = []
    for at, entry in enumerate(file.defaults):
        where = f"{file.place(f'defaults[{at}]')}, defaults"
        name, choice = next(iter(entry.items()), ("", 0)) if is_mapping(entry) else ("", entry)
        several = is_mapping(entry) and len(entry) > 1
        if choice is None and not several:  # no choice for this group
            continue
        if (
            several
            or not isinstance(choice, str if not name else (str, int))
            or "$" in f"{name}{choice}"
            or " " in str(name)
        ):
            what = f"{entry!r} is not a valid entry of a defaults list (interpolation, override and optional are not supported)"
            raise UserError(what, where=where, fix=_DEFAULTS_FORM, code="bad-defaults-entry")
        if not name and choice != _SELF:
            name, _, choice = str(choice).rpartition("/")
            name = name or group
        name = str(name).removeprefix("/")
        if name and any(item == name for item, _, _ in entries):
            raise UserError(f"two choices for {name}", where=where, fix="Keep one of them.", code="two-choices")
        entries.append((name, str(choice), where))
    return entries if any(choice == _SELF for _, choice, _ in entries) else [*entries, ("", _SELF, "")]


def _check(composed: DictConfig, invalid_groups: list[str], *, packages: bool) -> tuple[RunConfig, list[Fault]]:
    """Return the typed config and all its faults. Each key is named once, and `invalid_groups` are not named again."""
    values, faults = plain_values(composed)
    config, wrong_values = build(values)
    faults += _not_yet_reported(wrong_values, faults, invalid_groups)
    here = [*check_paths(config), *(check_packages(config) if packages else ())]
    return config, faults + _not_yet_reported([*_impossible(config), *here], faults, invalid_groups)


def _impossible(config: RunConfig) -> list[Fault]:
    given = {f"{group}.{name}" for group, changed in changes(config).items() for name in changed}
    return check_combinations(config, given)


def _not_yet_reported(faults: list[Fault], known: list[Fault], invalid_groups: list[str]) -> list[Fault]:
    """Return the faults whose keys are not `known` to be wrong. A key inside or around a wrong key counts as known."""
    bad = {*invalid_groups, *(key for fault in known for key in fault.keys)}

    def overlap(key: str, item: str) -> bool:
        return key == item or item.startswith((f"{key}.", f"{key}[")) or key.startswith(f"{item}.")

    return [fault for fault in faults if not any(overlap(key, item) for key in fault.keys for item in bad)]


def _text(values: DictConfig, name: str) -> str | None:
    """Return the value of a key if it is text, written or interpolated, else None."""
    with suppress(OmegaConfBaseException):
        value = values[name]
        return value if isinstance(value, str) else None
    return None


def _escaped(value: object) -> Any:
    """Escape `${` in text, so that it is read back literally."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    if is_mapping(value):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if is_list(value) else value
