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
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from packtrain.config.findings import Finding
from packtrain.config.keys import groups
from packtrain.config.origins import Origins
from packtrain.config.overrides import COMMAND_LINE, NO_HYDRA, Argument, check_choice, parse
from packtrain.config.refusals import broken_file, line_of_default, missing_file, refused
from packtrain.config.resolve import plain_values
from packtrain.config.rules import combinations as rules
from packtrain.config.rules import files as missing
from packtrain.config.rules import secrets as secret_rules
from packtrain.config.rules import slurm as slurm_rules
from packtrain.config.schema import RunConfig
from packtrain.config.shipped import find_choice, options, shipped
from packtrain.config.validate import build
from packtrain.config.yamlfile import check_text, choices_as_text, find_config, key_lines, shown
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
    beside = file.parent if file else None
    with _hydra(file) as search:
        usable = []
        for argument in arguments:
            wrong = check_choice(argument, options(argument.key, beside))
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


def to_yaml(config: RunConfig) -> str:
    """The config as YAML that `load_config` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(to_dict(config))))


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
            raise UserError([*problems, missing_file(error, file)]) from error
        except yaml.YAMLError as error:
            raise UserError([*problems, *broken_file(error)]) from error
        except RecursionError as error:
            what = "the defaults list leads back to the file it is in"
            raise UserError([*problems, Problem(what, shown(file) if file else COMMAND_LINE)]) from error
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            problem, culprit = refused(error, arguments, file)
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
        if group in groups()
        and group not in taken
        and choice in options(group, file.parent if file else None)
        and choice.isidentifier()
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
    values, findings = plain_values(composed, file.parent if file else None)
    config, wrong_values = build(values)
    findings += _new(wrong_values, findings)
    given = {f"{group}.{name}" for group, changed in changes(config).items() for name in changed}
    later = [
        *rules.check(config, given),
        *slurm_rules.check(config, given),
        *secret_rules.check(config),
        *missing.check(config),
    ]
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
    path = find_choice(group, choice, file.parent if file else None)
    if path is None:
        return
    chosen = [argument.text for argument in arguments if (argument.key, argument.choice) == (group, choice)]
    if chosen:
        origins.add_choice(f"{COMMAND_LINE}, {chosen[-1]}", package, key_lines(path))
    elif group and shipped("configs") in path.parents:
        origins.add_choice(line_of_default(file, group, choice), package, key_lines(path))
    else:
        origins.add_file(shown(path), package, key_lines(path))


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
