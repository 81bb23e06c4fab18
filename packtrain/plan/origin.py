"""Facts that machines, ranks and checkpoints of a run must share. Pure; no torch.

Facts are config keys, and the documents, weights and versions behind them (train/checkpoint/folder.py). config/keys.py says which of them
may differ from a checkpoint. Machines and ranks compare values as text (launch/rendezvous.py, train/sync.py), secret ones as short digests,
enough to see that two differ.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from packtrain.config import is_mapping
from packtrain.config.keys import is_fixed, is_free, keys
from packtrain.config.objective import Objective
from packtrain.config.schema import PLACE
from packtrain.errors import Json, Problem, UserError
from packtrain.run_folder import RunFolder, object_of
from packtrain.wording import is_certain, speaks_of_secrets

SAME_CONFIG = "start every process with the same config file and the same KEY=VALUE arguments"
SAME_VERSIONS = "install the same versions everywhere, e.g. from one lock file or container image"
# Keys that may differ between machines: node number, main address, cache folder, network interfaces and visible devices.
_OWN = re.compile(
    r"topology\.(node_rank|main_address)|data\.cache_dir|topology\.environment\..*(_IFNAME|_HCA|VISIBLE_DEVICES)"
)
_VARIABLES = "topology.environment."  # a user's own variables, which may hold secrets
_Peer = TypeVar("_Peer")
ORIGIN, MANIFEST = "origin.json", "manifest.json"
STRATEGY, PROCESSES = "strategy.name", "the number of processes"
SHAPE, TOKENIZER = "model.config.", "the tokenizer"
FORMAT = "checkpoint.format"
"""Number to raise when checkpoints can no longer be read as before."""
_LENGTH, _STEPS, _DESPITE = "trainer.max_steps", "the number of steps", "trainer.resume_despite"
_AFTER_LOADING = (_LENGTH, "data.train", "model.dtype", "objective.reference", "trainer.mixed_precision")
"""Decisive keys whose fact the run finds or decides after loading; it replaces their value."""
_EMPTY = (None, "{}", "[]")
"""Values of a fact that mean the same."""
_NAME = re.compile(r"step-(\d+)")
Facts = Json
"""Facts by name, with values of JSON."""


def shared_values(config: Mapping[str, object]) -> dict[str, str]:
    """Return key → text of all config values that machines must share; secrets as digests. `config`: plain containers."""
    flat: dict[str, object] = {}
    _flatten(config, "", flat)
    return {key: _shown(key, value) for key, value in flat.items() if not _OWN.fullmatch(key)}


def shared_versions(environment: Json) -> dict[str, str]:
    """Return package → version from `run_folder.environment()`, and Python's version without its patch level."""
    packages = {name: version or "not installed" for name, version in environment["versions"].items()}
    return {"python": ".".join(str(environment["python"]).split(".")[:2]), **packages}


def digest_of(text: str) -> str:
    """Return a short digest that shows whether two secrets differ."""
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def list_differences(
    facts_of: Mapping[_Peer, Mapping[str, str]], fixes: Mapping[str, str], in_words: Callable[[Sequence[_Peer]], str]
) -> list[Problem]:
    """Return one problem for each fact that is not the same for all.

    Example: "rank 2 has 4; ranks 0 and 1 have 3"; the smaller group comes first. `facts_of`: machine or rank → fact → value in words.
    `in_words` names several machines or ranks. `fixes`: fact → what to do about it.
    """
    everyone, problems = list(facts_of), list[Problem]()
    for name in dict.fromkeys(name for facts in facts_of.values() for name in facts):
        groups: dict[str, list[_Peer]] = defaultdict(list)
        for member, facts in facts_of.items():
            groups[facts.get(name, "no such thing")].append(member)
        # small groups first; among equal groups, the one with the first machine or rank last
        ordered = sorted(groups.items(), key=lambda item: (len(item[1]), -everyone.index(item[1][0])))
        has = [f"{in_words(ours)} {'have' if len(ours) > 1 else 'has'} {value}" for value, ours in ordered]
        if len(has) > 1:
            problems.append(Problem("; ".join(has), name, fixes.get(name, ""), code="peers-differ"))
    following = [*(item.fix for item in problems[1:]), ""]
    return [  # state a fix once, below all neighbouring problems that it mends
        replace(item, fix="" if item.fix == then else item.fix) for item, then in zip(problems, following, strict=False)
    ]


def _flatten(value: object, path: str, into: dict[str, object]) -> None:
    if is_mapping(value) and value:
        for name, inner in value.items():
            _flatten(inner, f"{path}.{name}" if path else str(name), into)
    else:
        into[path] = value


def _shown(key: str, value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    if value is not None and (key.startswith(_VARIABLES) or speaks_of_secrets(key) or is_certain(text)):
        return f"a value not shown ({digest_of(text)})"
    return text if len(text) <= 200 else f"{text[:160]}… ({digest_of(text)})"


def facts_of(config: Json) -> Facts:
    """Return the facts in the `config` of a run (plain containers). Secrets become digests."""
    facts: Facts = {}
    for key in keys().values():
        group, _, name = key.path.partition(".")
        if key.resume is None or group in PLACE or key.path == _LENGTH:
            continue
        if isinstance(key.default, (dict, list)) and not is_free(key.path):  # one fact: a removed entry is a change too
            facts[key.path] = json.dumps(config[group][name], sort_keys=True)
        else:
            texts = shared_values({group: {name: config[group][name]}})
            facts |= {fact: text.strip('"') for fact, text in texts.items()}
    batch, data, held_out = config["batch"], config["data"], config["data"]["eval"]
    if batch["tokens_per_step"] is not None:  # the rows of an epoch decide which documents form a step
        facts["batch.tokens_per_step"] += f" in rows of {batch['tokens_per_device']}"
    else:
        facts["packing.strategy"] = None
    facts["data.eval"] = "other files" if isinstance(held_out, str) else held_out
    facts["data.streaming"] = f"true, with shuffle_buffer={data['shuffle_buffer']}" if data["streaming"] else None
    facts["optim.name"] = config["optim"]["name"].removesuffix("_fused")  # fused or not, the steps are the same
    facts["objective.loss"] = json.dumps(Objective(**config["objective"]).losses)
    facts[FORMAT] = 2
    facts[_DESPITE] = sorted(config["trainer"]["resume_despite"])
    return facts


def length_of(schedule: str, warmup: float, steps: int) -> Facts:
    """Return the facts about a run's length. It is decisive if the learning rate depends on the number of steps."""
    endless = schedule in ("constant", "constant_with_warmup", "inverse_sqrt") and (warmup >= 1 or not warmup)
    endless = endless or schedule == "constant"
    return {_LENGTH: "of any length" if endless else f"{steps} steps", _STEPS: steps}


def check_origin(checkpoint: Path, origin: Facts) -> tuple[list[str], list[str]]:
    """Return what has changed since `checkpoint`: decisive facts allowed by trainer.resume_despite, and free facts.

    `origin` has this run's facts. Raises UserError for other decisive changes: the run would not continue the checkpoint's steps.
    """
    written, allowed = origin_in(checkpoint), _allowed(origin)
    recorded = {name for name in origin if name in written or not (is_free(name) or name.startswith(SHAPE))}
    changed = [name for name in origin if name in recorded - {_DESPITE} and not _same(name, written, origin)]
    decisive = [name for name in changed if not is_free(name)]
    if refused := [name for name in decisive if name not in allowed or is_fixed(name)]:
        causes = [name for name in changed if name.startswith(("data.", TOKENIZER)) and name != "data.train"]
        unknown = "nothing recorded (an earlier packtrain, or another objective)"
        problems = [_refusal(checkpoint, name, written.get(name, unknown), origin[name], causes) for name in refused]
        names = "" if any(map(is_fixed, refused)) else ",".join(sorted({*refused, *allowed}))
        despite = f", go on all the same with {shlex.quote(f'{_DESPITE}=[{names}]')}" if names else ""
        fix = f"set it back{despite}, or start over with trainer.resume=never"
        raise UserError([*problems[:-1], replace(problems[-1], fix=fix)])
    lines = {name: f"{name} {written.get(name)} → {origin[name]}" for name in changed}
    return [lines[name] for name in decisive], [lines[name] for name in changed if is_free(name)]


def check_config(config: Json, folder: RunFolder, resume: str) -> None:
    """Check the keys of `config` (plain containers) like `check_origin`, before anything is loaded. Raises UserError.

    The checkpoint named by `resume` counts, else the newest. A damaged one is not checked: the run looks for another when it reads them.
    """
    named = resume not in ("auto", "never")
    if not named and (resume == "never" or folder.gives_way("auto")):
        return
    at_once = {_DESPITE, *(name for name in keys() if not is_free(name))} - {*_AFTER_LOADING}
    for newest in [Path(resume).expanduser()] if named else [*list_checkpoints(folder.checkpoints).values()][-1:]:
        written = _intact_origin(newest)
        if known := {name: value for name, value in facts_of(config).items() if name in at_once & written.keys()}:
            check_origin(newest, known)


def list_checkpoints(checkpoints: Path) -> dict[int, Path]:
    """Return the checkpoints by step, oldest first, with damaged ones. Folders with other names belong to the user."""
    by_step = {int(name[1]): path for path in checkpoints.glob("step-*") if (name := _NAME.fullmatch(path.name))}
    return {step: by_step[step] for step in sorted(by_step)}


def written_into(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """Return bytes and hash of each file by name, from a checkpoint's manifest. {} if it is missing or malformed."""
    try:
        manifest = object_of(checkpoint / MANIFEST)
        return {name: (int(entry["bytes"]), str(entry["blake2b"])) for name, entry in manifest.items()}
    except (ValueError, TypeError, KeyError, OverflowError):
        return {}


def _intact_origin(checkpoint: Path) -> Facts:
    """Return the origin of a checkpoint. {} if it is unreadable or any file's size has changed."""
    written = written_into(checkpoint)
    with suppress(OSError, ValueError):
        intact = all((checkpoint / name).stat().st_size == size for name, (size, _) in written.items())
        if intact and ORIGIN in written:
            return object_of(checkpoint / ORIGIN)
    return {}


def check_length(checkpoint: Path, done: int, steps: int) -> None:
    """Raise UserError if the run would end (after `steps`) before the checkpoint's step (`done`)."""
    if steps < done:
        what = f"the checkpoint {checkpoint.name} is of step {done:,}, and this run would end after {steps:,}"
        fix = "train for more steps, or name an earlier checkpoint with trainer.resume=FOLDER"
        raise UserError(what, where="trainer.max_steps, trainer.epochs", fix=fix, code="ends-before-checkpoint")


def _refusal(checkpoint: Path, name: str, before: object, now: object, causes: list[str]) -> Problem:
    what = f"the checkpoint {checkpoint.name} was made with {before}, this run has {now}"
    if name == "data.train" and causes:
        what += f" (also changed: {', '.join(causes)})"
    if name == _LENGTH:
        what += ": the learning rate would jump to where a schedule over the new length is by then"
    return Problem(what, where=name, code="changed-since-checkpoint")


def origin_in(checkpoint: Path) -> Facts:
    """Return the origin of the run that wrote `checkpoint`."""
    return json.loads((checkpoint / ORIGIN).read_text())


def same_course(written: Facts, origin: Facts) -> bool:
    """Return whether a checkpoint belongs to this run: decisive facts agree, except those in trainer.resume_despite."""
    names = {name for name in written.keys() | origin.keys() if not is_free(name)} - _allowed(origin)
    return all(_same(name, written, origin) for name in names)


def _same(name: str, written: Facts, origin: Facts) -> bool:
    """Return whether a fact is the same. 1 equals 1.0, none equals an empty list, and the order of layers does not matter."""
    before, now = (None if facts.get(name) in _EMPTY else facts.get(name) for facts in (written, origin))
    if before != now and isinstance(before, str) and isinstance(now, str):
        with suppress(ValueError, RecursionError):
            before, now = json.loads(before), json.loads(now)
        if name.startswith("peft.") and isinstance(before, list) and isinstance(now, list):
            return {*before} == {*now}
    return before == now


def same_format(checkpoint: Path, origin: Facts) -> bool:
    """Return whether this run's optimizer keeps its states as the optimizer of `checkpoint` did."""
    written = origin_in(checkpoint)
    return all(written.get(name) == origin[name] for name in ("model.dtype", "optim.bf16_rounding"))


def _allowed(origin: Facts) -> set[str]:
    """Return the keys of trainer.resume_despite. A run's length has one name, in steps or in epochs."""
    return {_LENGTH if name == "trainer.epochs" else name for name in origin.get(_DESPITE, ())}


def world_of(checkpoint: Path) -> tuple[str, int]:
    """Return the strategy.name and the number of processes that wrote `checkpoint`."""
    origin = origin_in(checkpoint)
    return origin[STRATEGY], origin[PROCESSES]
