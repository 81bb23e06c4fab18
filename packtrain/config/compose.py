"""YAML + command line → `RunConfig`, with all problems at once and the place of each.

Hydra's compose API does what it is good at: defaults lists, groups, override grammar, interpolation. Its search path is
the folder of the user's YAML, then packtrain's configs/, so a user's own files of a group win over ours. Unlike Hydra's
structured configs, types are checked after composition (validate.py): that is what allows more than one error per start.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from packtrain.config import missing, rules
from packtrain.config.findings import Finding
from packtrain.config.keys import groups
from packtrain.config.origins import Origins
from packtrain.config.overrides import COMMAND_LINE, NO_HYDRA, Argument, check_choice, no_choice, parse
from packtrain.config.schema import RunConfig
from packtrain.config.shipped import shipped
from packtrain.config.validate import build
from packtrain.config.yamlfile import SUFFIX, check_text, choices_as_text, find_config, key_lines, shown
from packtrain.errors import Problem, UserError


def load_config(config_path: str | None, overrides: list[str]) -> RunConfig:
    """The config of a run: the YAML at `config_path` (None: none), then `overrides` in Hydra's grammar.

    Raises UserError with every problem that can be found without loading data or model.
    """
    file = find_config(config_path) if config_path is not None else None
    problems = check_text(file) if file else []
    arguments, unreadable = parse(overrides)
    problems += unreadable
    if file and problems and problems[0] not in unreadable:
        raise UserError(problems)  # nothing can be said about the values of a file that cannot be read
    if file:
        own = [one.line for one in key_lines(file) if one.path == "hydra"]
        problems += [Problem(NO_HYDRA, f"{shown(file)}:{line}, hydra", "Take the key away.") for line in own]
    with _hydra(file) as search:
        usable = []
        for argument in arguments:
            wrong = check_choice(argument, _options(argument.key, file))
            problems += wrong
            usable += [] if wrong else [argument]
        composed, texts = _compose(file, search, usable, problems)
        config, findings = _checked(composed, file)
        if findings:
            origins = _origins(file, texts, usable)
            problems += [origins.locate(finding) for finding in findings]
    if problems:
        raise UserError(problems)
    return config


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as plain containers."""
    return asdict(config)


def changes(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Group → key → value of the keys that do not have their defaults."""
    defaults = asdict(RunConfig())
    changed = {
        group: {name: value for name, value in values.items() if value != defaults[group][name]}
        for group, values in asdict(config).items()
    }
    return {group: values for group, values in changed.items() if values}


def to_yaml(config: RunConfig, *, only_changes: bool = False) -> str:
    """The config as YAML that `load_config` reads back to an equal one; on demand without what has its default."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(changes(config) if only_changes else to_dict(config))))


@contextmanager
def _hydra(file: Path | None) -> Iterator[list[str]]:
    """Hydra with the user's folder first; yields the override that puts packtrain's configs/ behind it."""
    configs = str(shipped("configs")).replace("\\", "\\\\").replace("'", "\\'")
    with initialize_config_dir(str(file.parent if file else shipped("configs")), version_base="1.3"):
        yield [f"hydra.searchpath=['file://{configs}']"]


def _compose(
    file: Path | None, search: list[str], arguments: list[Argument], problems: list[Problem]
) -> tuple[DictConfig, list[str]]:
    """The composed config, and the overrides it was made with.

    An argument that Hydra refuses is taken out of `arguments` and added to `problems`. Raises UserError, with `problems`
    first, where Hydra cannot make a config for another reason.
    """
    name = file.stem if file else None
    while True:
        try:
            written = _choices_as_text(file, arguments)
            listed = _listed_groups(name, search) if written or any(one.choice for one in arguments) else set()
            chosen = [f"+{group}={choice}" for group, choice in written.items() if group not in listed]
            texts = [*search, *chosen, *(argument.for_hydra(listed) for argument in arguments)]
            with warnings.catch_warnings():
                # Without _self_ the user's own values come last, which is what one expects: nothing to warn of.
                warnings.filterwarnings("ignore", message=".*Defaults list is missing `_self_`")
                return compose(name, overrides=texts), texts
        except MissingConfigException as error:
            raise UserError([*problems, _missing(error, file)]) from error
        except yaml.YAMLError as error:
            raise UserError([*problems, *_broken_file(error)]) from error
        except RecursionError as error:
            what = "the defaults list leads back to the file it is in"
            raise UserError([*problems, Problem(what, shown(file) if file else COMMAND_LINE)]) from error
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            problem, culprit = _refused(error, arguments, file)
            problems.append(problem)
            if culprit is None:
                raise UserError(problems) from error
            arguments.remove(culprit)


def _choices_as_text(file: Path | None, arguments: list[Argument]) -> dict[str, str]:
    """The groups that the user's file gives as text (`optim: sgd`) and the command line does not choose.

    Hydra gets them as choices: left as text, they would be lost as soon as the command line sets a key of the group.
    """
    given = choices_as_text(file) if file else {}
    taken = {argument.key for argument in arguments}
    return {
        group: choice
        for group, choice in given.items()
        if group in groups() and group not in taken and choice in _options(group, file) and choice.isidentifier()
    }


def _defaults(name: str | None, texts: list[str]) -> list[ResultDefault]:
    """The defaults list in the order of composition."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compose() has warned already
        return GlobalHydra.instance().config_loader().compute_defaults_list(name, texts, RunMode.RUN).defaults


def _listed_groups(name: str | None, search: list[str]) -> set[str]:
    return {one.override_key for one in _defaults(name, search) if one.override_key}


def _checked(composed: DictConfig, file: Path | None) -> tuple[RunConfig, list[Finding]]:
    """The typed config and everything that is wrong with it, each key blamed once."""
    values, findings = _values(composed, file)
    config, wrong_values = build(values)
    findings += _new(wrong_values, findings)
    given = {f"{group}.{name}" for group, changed in changes(config).items() for name in changed}
    later = [*rules.check(config, given), *missing.check(config)]
    return config, findings + _new(later, findings)


def _origins(file: Path | None, texts: list[str], arguments: list[Argument]) -> Origins:
    origins = Origins(shown(file) if file else "")
    for one in _defaults(file.stem if file else None, texts):
        _note_lines(one, file, arguments, origins)
    for argument in arguments:
        if argument.choice is None:
            origins.add_argument(argument.key)
    return origins


def _note_lines(one: ResultDefault, file: Path | None, arguments: list[Argument], origins: Origins) -> None:
    """Tells `origins` the keys of one file of the defaults list; those of ours belong to whoever chose it."""
    package = one.package or ""
    if one.config_path is None or package.partition(".")[0] == "hydra":
        return
    group, _, choice = one.config_path.rpartition("/")
    path = next((path for folder in _folders(file) if (path := folder / f"{one.config_path}{SUFFIX}").is_file()), None)
    if path is None:
        return
    chosen = [argument.text for argument in arguments if (argument.key, argument.choice) == (group, choice)]
    if chosen:
        origins.add_choice(f"{COMMAND_LINE}, {chosen[-1]}", package, key_lines(path))
    elif group and shipped("configs") in path.parents:
        origins.add_choice(_line_of_default(file, group, choice), package, key_lines(path))
    else:
        origins.add_file(shown(path), package, key_lines(path))


def _folders(file: Path | None) -> list[Path]:
    return [*([file.parent] if file else []), shipped("configs")]


def _options(group: str, file: Path | None) -> list[str]:
    return sorted({path.stem for folder in _folders(file) for path in (folder / group).glob(f"*{SUFFIX}")})


def _missing(error: MissingConfigException, file: Path | None) -> Problem:
    """The problem of a defaults list that names a file which is not there."""
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    where = _line_of_default(file, group, choice)
    if group and error.options:
        return no_choice(group, choice, sorted(error.options), where)
    hint = f"The groups are {', '.join(groups())}." if group else f"There is no {choice}{SUFFIX} beside this file."
    return Problem(f"the defaults list names {error.missing_cfg_file!r}, which does not exist", where, hint)


def _line_of_default(file: Path | None, group: str, choice: str) -> str:
    if file is None:
        return COMMAND_LINE
    names = {f"defaults[{at}]{dot}" for at in range(100) for dot in ("", f".{group}")}
    text = file.read_text(encoding="utf-8").splitlines()
    for one in key_lines(file):
        if one.path == group and re.search(rf":\s*['\"]?{re.escape(choice)}\b", text[one.line - 1]):
            return f"{shown(file)}:{one.line}"
        if one.path in names and re.search(rf"\b{re.escape(choice)}\b", text[one.line - 1]):
            return f"{shown(file)}:{one.line}, defaults"
    return f"{shown(file)}, defaults"


def _broken_file(error: yaml.YAMLError) -> list[Problem]:
    """The problems of a file that the user's YAML names under defaults."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return [Problem(f"not valid YAML: {error}")]
    what = f"not valid YAML: {getattr(error, 'problem', None) or error}"
    return check_text(Path(mark.name)) or [Problem(what, f"{shown(Path(mark.name))}:{mark.line + 1}")]


def _refused(error: Exception, arguments: list[Argument], file: Path | None) -> tuple[Problem, Argument | None]:
    """What Hydra said, at the argument that it named (which is returned too), else at the file."""
    said = str(error).strip() or str(error.__cause__ or type(error).__name__)
    said = said.split("\n")[0]
    named = [
        argument
        for argument in arguments
        if f"'{argument.key}'" in said or f"'{argument.text.lstrip('+~')}'" in said or argument.text in said
    ]
    for argument in sorted(named, key=lambda one: one.text[:1] not in "+~"):  # plain ones are made to fit
        where = f"{COMMAND_LINE}, {argument.text}"
        plain = argument.text.lstrip("+~")
        if argument.parsed.is_delete():
            differs = "The value of" in said  # ~key=value takes away only that value
            return Problem(said if differs else f"there is no {argument.key} to take away", where), argument
        return Problem(said, where, f"Write {plain} (or ++{plain}) to replace a value."), argument
    if file is None:
        return Problem(said, COMMAND_LINE), None
    of_defaults = isinstance(error, HydraException) or "default" in said.lower()
    if of_defaults and (lines := [one.line for one in key_lines(file) if one.path == "defaults"]):
        return Problem(said, f"{shown(file)}:{lines[0]}, defaults", "Write defaults: [GROUP: CHOICE, …, _self_]."), None
    return Problem(said, shown(file)), None


def _values(composed: DictConfig, file: Path | None) -> tuple[dict[str, Any], list[Finding]]:
    """What the user set, as plain containers with every interpolation resolved, and what cannot be resolved.

    Interpolations see the defaults of schema.py too. A group that is given as text is the choice of that name.
    """
    findings = list(_unfilled(composed))
    merged = OmegaConf.merge(_defaults_beside(composed), composed)
    values: dict[str, Any] = {}
    for group in composed:
        name = str(group)
        value = _resolved(merged, name, name, findings) if name in groups() else None
        if isinstance(value, str):
            value = _choice(name, value, file, findings)
        elif isinstance(value, dict) and isinstance(node := composed._get_node(group), DictConfig):
            own = {str(key) for key in node} if not node._is_interpolation() else value.keys()
            value = {key: one for key, one in value.items() if key in own}
        values[name] = value
    return values, findings


def _unfilled(composed: DictConfig) -> Iterator[Finding]:
    """The groups and keys that are left as ???; a default would hide them. What is inside a value, `_resolved` meets."""
    for group in composed:
        node = composed._get_node(group)
        if OmegaConf.is_missing(composed, group):
            yield _unfilled_at(str(group))
        elif isinstance(node, DictConfig) and not node._is_interpolation() and not node._is_none():
            yield from (_unfilled_at(f"{group}.{key}") for key in node if OmegaConf.is_missing(node, key))


def _unfilled_at(path: str) -> Finding:
    return Finding((path,), "found ???, a value that is still to be filled in", "Give it a value, or take it away.")


def _defaults_beside(composed: DictConfig) -> dict[str, Any]:
    """The defaults of all keys that `composed` does not set: a list, say, cannot be merged over the mapping it replaces."""
    nodes = {str(group): composed._get_node(group) for group in composed}
    defaults: dict[str, Any] = {}
    for group, own in asdict(RunConfig()).items():
        node = nodes.get(group)
        if isinstance(node, DictConfig) and not node._is_interpolation() and not node._is_none():
            defaults[group] = {key: value for key, value in own.items() if key not in node}
        elif not isinstance(node, ListConfig):
            defaults[group] = own
    return defaults


def _choice(group: str, choice: str, file: Path | None, findings: list[Finding]) -> dict[str, Any]:
    for folder in _folders(file):
        path = folder / group / f"{choice}{SUFFIX}"
        if path.is_file():
            return OmegaConf.to_container(OmegaConf.load(path), resolve=True) or {}  # type: ignore[return-value]
    wrong = no_choice(group, choice, _options(group, file), "")
    findings.append(Finding((group,), wrong.what, wrong.fix))
    return {}


def _resolved(parent: DictConfig | ListConfig, key: Any, path: str, findings: list[Finding]) -> Any:
    """`parent[key]` as plain containers; what cannot be resolved is None there and becomes a finding."""
    try:
        value = parent[key]
    except (OmegaConfBaseException, RecursionError) as error:
        findings.append(_unresolved(error, path))
        return None
    if isinstance(value, DictConfig):
        return {str(one): _resolved(value, one, f"{path}.{one}", findings) for one in value}
    if isinstance(value, ListConfig):
        return [_resolved(value, at, f"{path}[{at}]", findings) for at in range(len(value))]
    return value


def _unresolved(error: Exception, path: str) -> Finding:
    if isinstance(error, MissingMandatoryValue):
        return _unfilled_at(path)
    said = str(error).split("\n")[0]
    if variable := re.search(r"Environment variable '(.*?)' not found", said):
        name = variable[1]
        return Finding(
            (path,), f"the environment variable {name} is not set", f"Set it, or write ${{oc.env:{name},DEFAULT}}."
        )
    if missing := re.search(r"Interpolation key '(.*?)' not found", said):
        return Finding(
            (path,), f"there is no {missing[1]!r} to interpolate", "Name a key by its full path: ${group.key}."
        )
    if isinstance(error, RecursionError) or "recursi" in said.lower():
        return Finding((path,), "the interpolation goes round in a circle", "Give one of its keys a value.")
    return Finding((path,), said, "Give it a value.")


def _new(findings: list[Finding], known: list[Finding]) -> list[Finding]:
    """The findings of which no key, nor what it is in or holds, is `known` to be wrong."""
    spoilt = {key for finding in known for key in finding.keys}
    return [
        finding
        for finding in findings
        if not any(
            key == bad or bad.startswith((f"{key}.", f"{key}[")) or key.startswith(f"{bad}.")
            for key in finding.keys
            for bad in spoilt
        )
    ]


def _escaped(value: Any) -> Any:
    """Text that contains `${` literally, written so that it is read back as such."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    if isinstance(value, dict):
        return {key: _escaped(one) for key, one in value.items()}
    return [_escaped(one) for one in value] if isinstance(value, list) else value
