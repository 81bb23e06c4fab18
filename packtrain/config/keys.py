"""Keys of schema.py as a flat list: types in words, advice, changes allowed on resuming.

For an unknown key, the advice names the key that was meant. It searches names that other tools use, the same name in
other groups, and similar spellings.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from packtrain.config import Fault
from packtrain.config.objective import Resume
from packtrain.config.schema import DataSource, Stage, groups
from packtrain.objectives.spec import OBJECTIVES
from packtrain.optimizers import REFUSED

_OF_SBATCH = {name: name for name in ("account", "constraint", "gres", "partition", "qos")}
ELSEWHERE = {
    f"topology.{name}": f"Add a line to topology.sbatch: --{to}=…"
    for name, to in {"cpus_per_node": "cpus-per-task", "job_name": "job-name", "memory": "mem", **_OF_SBATCH}.items()
}
"""Key that other tools have → its place here."""
OTHER_VALUES: dict[tuple[str, bool | str], str] = {
    **{("optim.name", name): why for name, why in REFUSED.items()},
    ("trainer.gradient_checkpointing", False): "Set none.",
    ("trainer.gradient_checkpointing", True): "Set full, or auto to take what fits.",
}
"""Key and a value that other tools have → advice."""
_OTHER_NAMES = {  # names in TRL, transformers and axolotl that are spelt unlike ours
    "base_model": "model.path",
    "batch_size": "batch.examples_per_step",
    "bf16": "trainer.mixed_precision",
    "dataset": "data.train",
    "eval_steps": "trainer.eval_every",
    "fp8": "trainer.mixed_precision",
    "gpus": "topology.gpus_per_node",
    "liger": "model.kernels",
    "log_steps": "trainer.log_every",
    "loss_type": "objective.loss",
    "lr": "optim.learning_rate",
    "lr_scheduler_type": "optim.schedule",
    "model_name_or_path": "model.path",
    "nnodes": "topology.nodes",
    "partition": "topology.sbatch",
    "per_device_train_batch_size": "batch.examples_per_device",
    "ref_model": "objective.reference",
    "resume_from_checkpoint": "trainer.resume",
    "save_steps": "trainer.checkpoint_every",
    "sequence_len": "data.max_length",
    "use_liger_kernel": "model.kernels",
}
OTHER_FACTS: dict[str, Resume] = {
    "model": "fixed",
    "model.weights": "decisive",
    "model.frozen": "decisive",
    "checkpoint.format": "fixed",
    "data.day": "free",
}
"""Facts that a checkpoint records beside its keys. Facts without a group (versions, processes) are free too."""
ADVICE = {
    "deepspeed": "The strategy is chosen by name: strategy=zero2, strategy=zero3 …",
    "fsdp": "The strategy is chosen by name: strategy=fsdp2.",
    "lora": "Choose peft=lora; r, alpha and the others are keys of peft.",
    "gradient_accumulation_steps": "Accumulation is derived: set batch.examples_per_step, and what fits a device "
    "with batch.examples_per_device or batch.tokens_per_device.",
    "warmup_ratio": "Set optim.warmup_steps; a value below 1 is a fraction of all steps.",
}


Kind = Any
"""A type, or a form of typing such as Literal["a", "b"] | None, which has no type itself."""


@dataclass(frozen=True, slots=True)
class Key:
    """One config key; `path` is "optim.learning_rate".

    Bounds are `>= minimum`, `> above`, `< below` and `<= maximum`. Only `objectives` use the key, () means all. config/objective.py::key
    explains `resume` and `advanced`.
    """

    path: str
    type: Kind
    default: object
    doc: str
    objectives: tuple[str, ...]
    resume: Resume | None = "free"
    advanced: bool = False
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float = 10**9


@cache
def keys_of(cls: type, prefix: str = "") -> dict[str, Key]:
    """Return the keys of one dataclass by name, in the order of declaration."""
    hints = typing.get_type_hints(cls)
    return {item.name: _key(item, hints[item.name], f"{prefix}{item.name}") for item in fields(cls)}


@cache
def keys() -> dict[str, Key]:
    """Return every key by its path."""
    return {key.path: key for name, cls in groups().items() for key in keys_of(cls, f"{name}.").values()}


def members(kind: Kind) -> tuple[Kind, ...]:
    """Return the alternatives of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def choices(kind: Kind) -> tuple[str, ...]:
    """Return the values of a Literal anywhere inside `kind`; () if there is none."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(value for part in get_args(kind) for value in choices(part))


def describe(key: Key) -> str:
    """Describe the values of a key: "whole number ≥ 1, or null"."""
    bounds = f" ≥ {key.minimum:g}" if key.minimum is not None else f" > {key.above:g}" if key.above is not None else ""
    bounds += f", below {key.below:g}" if key.below is not None else ""
    optional = ", or null" if type(None) in members(key.type) else ""
    return words(members(key.type)) + bounds + optional


def words(kinds: Iterable[Kind]) -> str:
    """Return types in words: "number or text"."""
    kinds = [kind for kind in kinds if kind is not type(None)]
    lists = {list[kind] for kind in kinds}
    return " or ".join("a list of these" if kind in lists and choices(kind) else _words(kind) for kind in kinds)


def near(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the `known` names spelt most like `name`. Case does not matter."""
    spelt = {item.lower(): item for item in known}
    return [spelt[item] for item in difflib.get_close_matches(name.lower(), spelt, n=count)]


def suggest(name: str, known: Iterable[str], otherwise: str = "", count: int = 1) -> str:
    """Return "Did you mean …?" with the nearest of `known`; `otherwise` without one."""
    meant = near(name, known, count)
    return f"Did you mean {' or '.join(meant)}?" if meant else otherwise


def advice_for(path: str) -> str:
    """Advise on a replacement for the unknown key `path`."""
    group, _, rest = path.partition(".")
    leaf, known = path.rpartition(".")[2], keys()
    if advice := ELSEWHERE.get(path) or ADVICE.get(leaf):
        return advice
    if group == "objective" and any(rest in spec.options for spec in OBJECTIVES.all().values()):
        return f"Set objective.options.{rest}."
    if path in known:  # a dotted name used as one key
        return f"Nest it: {group}: {{{rest}: …}}."
    in_group = [item.partition(".")[2] for item in known if item.startswith(f"{group}.")]
    meant = [item for item in known if item.rpartition(".")[2] == leaf]
    meant = meant or ([_OTHER_NAMES[leaf]] if leaf in _OTHER_NAMES else [])
    meant = meant or [f"{group}.{name}" for name in near(rest, in_group) if rest] or near(path, [*known, *groups()])
    leaves = near(leaf, [item.rpartition(".")[2] for item in known])
    meant = meant or [item for name in leaves for item in known if item.endswith(f".{name}")]
    if meant:
        return f"Did you mean {' or '.join(meant)}?"
    if in_group:
        return f"The keys of {group} are {', '.join(in_group)}."
    return f"The groups are {', '.join(groups())}; `packtrain sft -h all` lists all keys."


def is_free(name: str) -> bool:
    """Return whether a resumed run may change this fact unasked."""
    return _resume_of(name) in ("free", None)


def is_fixed(name: str) -> bool:
    """Return whether no resumed run may change this fact."""
    return _resume_of(name) == "fixed"


def _resume_of(name: str) -> Resume | None:
    """Return what a resumed run may change. A fact that this version does not know is decisive."""
    if name in OTHER_FACTS or "." not in name:
        return OTHER_FACTS.get(name, "free")
    if name in keys():
        return keys()[name].resume
    of_mapping = ".".join(name.split(".")[:2])  # the path of data.train may change: its documents are a fact too
    return "free" if of_mapping in keys() and of_mapping != "model.config" else "decisive"


def check_resume_despite(names: list[str]) -> Iterator[Fault]:
    """Yield the faults of trainer.resume_despite."""
    where, known = ("trainer.resume_despite",), [*keys(), *(name for name in OTHER_FACTS if not is_free(name))]
    for name in names:
        if is_fixed(name):
            what = f"{name} cannot change: the weights or optimizer states of the checkpoint would not fit"
            yield Fault(where, what, "Start over with trainer.resume=never.", code="key-cannot-change")
        elif name not in known and not name.startswith("model.config."):
            what = f"there is no key {name!r}"
            yield Fault(where, what, suggest(name, known, "Name keys as the refusal does."), code="no-such-key")


def _key(item: Field[object], kind: Kind, path: str) -> Key:
    default = item.default_factory() if item.default_factory is not MISSING else item.default
    declared = dict(item.metadata)
    of, among, doc = declared.pop("of"), declared.pop("among"), declared.pop("doc")
    doc = str(doc() if callable(doc) else doc)
    objectives = tuple(name for name, spec in OBJECTIVES.all().items() if of(spec)) if of else ()
    doc = f"{', '.join(objectives)}: {doc}" if objectives else doc
    return Key(path, _narrowed(kind, tuple(among())) if among else kind, default, doc, objectives, **declared)


def _narrowed(kind: Kind, among: tuple[str, ...]) -> Kind:
    """Return the type with a Literal of `among` in place of text."""
    if kind is str:
        return Literal[among]
    if get_origin(kind) is list:
        return list[_narrowed(get_args(kind)[0], among)]
    if len(members(kind)) > 1:
        return Union[tuple(_narrowed(one, among) for one in members(kind))]  # noqa: UP007
    return kind


def _words(kind: Kind) -> str:
    simple = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    if kind in simple:
        return simple[kind]
    if is_dataclass(kind):
        entries: dict[object, str] = {DataSource: "source", Stage: "stage"}
        return entries.get(kind, "group of weights")
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is list:
        return f"list of {words(members(get_args(kind)[0]))}"
    entry = members(get_args(kind)[1])
    return "mapping" if entry == (Any,) else f"mapping to {words(entry) if entry == (str,) else 'sources'}"
