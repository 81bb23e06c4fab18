"""Rules about files, folders and packages that must exist, checked before anything is loaded.

A run folder stands for its final/, and a name in LLaMA-Factory's dataset_info.json for the file with its place: `lf:alpaca_en_demo` →
`lf:data/dataset_info.json#alpaca_en_demo`."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

from packtrain.config import Fault, is_list, is_mapping
from packtrain.config.keys import near, suggest
from packtrain.config.objective import REFERENCES
from packtrain.config.rules.table import holds
from packtrain.config.schema import BUILT_IN, LISTED, Data, DataSource, Model, RunConfig, sources
from packtrain.errors import Json, UserError

DATA_SUFFIXES = (
    *(".jsonl", ".ndjson", ".json", ".gz", ".csv", ".parquet", ".arrow"),
    *(".txt", ".tsv", ".xlsx", ".zip", ".zst"),  # common data formats; no hub id ends in one
)
MODEL_SUFFIXES = (".gguf", ".safetensors", ".bin")
FOR_GPUS = ("model.quantize", "model.kernels", "model.experts", "trainer.mixed_precision", "optim.name")
"""Keys whose packages are for GPUs. On a machine without GPUs, a plan is for another machine."""
_TRACKER_PACKAGES = {"comet": "comet_ml"}
_PACKAGES = {
    "model.kernels=liger": ("liger_kernel", "'packtrain[liger]'"),
    "model.experts=fused": ("liger_kernel", "'packtrain[liger]'"),
    "model.quantize=nf4": ("bitsandbytes", "'packtrain[quantize]'"),
    "model.quantize=int8": ("bitsandbytes", "'packtrain[quantize]'"),
    "model.quantize=fp8": ("torchao", "'packtrain[fp8]'"),
    "trainer.mixed_precision=fp8": ("torchao", "'packtrain[fp8]'"),
}
"""Package that a value needs, and where pip gets it."""
TEMPLATE_SUFFIXES = (".jinja", ".j2")
_MODEL_FILES = ("config.json", "adapter_config.json")
_LIST = "dataset_info.json"
_LISTS = (_LIST, f"data/{_LIST}", f"*/{_LIST}", f"*/*/{_LIST}")
"""Places of LLaMA-Factory's list of data sets, the nearest first. Its own configs are in examples/, its list is in data/."""


def check_paths(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault for each path that is certainly local and does not exist."""
    reference = config.objective.reference
    yield from _data(config.data)
    yield from resume_folder(config.trainer.resume)
    yield from _missing("model.tokenizer", config.model.tokenizer or "", MODEL_SUFFIXES)
    models = {"model.path": config.model.path or ""}
    models |= {found[0]: found[1].path or "" for found in [config.objective.spec.frozen(config)] if found}
    if "/" in reference or _there(reference):
        models["objective.reference"] = reference
    elif reference not in REFERENCES:
        hint = suggest(reference, REFERENCES, f"Allowed: {', '.join(REFERENCES)}, a folder, or a hub id.")
        yield Fault(("objective.reference",), f"there is no reference {reference!r}", hint, code="no-such-reference")
    for key, path in models.items():
        yield from _missing(key, path, MODEL_SUFFIXES)
        try:
            model_of(path)
        except UserError as error:
            yield from (Fault((key,), f"{one.where}: {one.what}", one.fix, code=one.code) for one in error.problems)
    for key, folder in (("trainer.output_dir", config.trainer.output_dir), ("data.cache_dir", config.data.cache_dir)):
        if folder and _there(folder) and not os.path.isdir(os.path.expanduser(folder)):
            yield Fault((key,), f"{folder} is a file", "Name a folder, existing or new.", code="file-not-folder")


def frozen_of(config: RunConfig) -> tuple[str, Model] | None:
    """Return the other model of the objective, without updates, and the key of its path. A run folder stands for its final/."""
    if (found := config.objective.spec.frozen(config)) is None:
        return None
    return found[0], replace(found[1], path=model_of(found[1].path or ""))


def check_packages(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault for each package or program that is not installed."""
    optimizer, strategy, asked = config.optim.spec.package, config.strategy.spec.package, config.tracking.report_to
    needed = [
        ("optim.name", config.optim.name, optimizer, optimizer),
        ("strategy.name", config.strategy.name, strategy, f"'packtrain[{strategy}]', or use strategy=fsdp2"),
        *((*word.split("="), *package) for word, package in _PACKAGES.items() if holds(word, config)),
        *(("tracking.report_to", name, _TRACKER_PACKAGES.get(name, name), f"'packtrain[{name}]'") for name in asked),
    ]
    for key, other in filter(None, [config.objective.spec.frozen(config)]):
        needed.append((key, other.quantize, *_PACKAGES.get(f"model.quantize={other.quantize}", ("", ""))))
    for key, wanted, package, install in dict.fromkeys(needed):
        if package:
            yield from _not_installed(key, wanted, package, install)
    if tasks := config.trainer.tasks:
        yield from _not_installed("trainer.tasks", ", ".join(tasks), "lm_eval", "lm-eval", "lm-eval-missing")
    compiler = config.topology.variables.get("CXX") or os.environ.get("CXX") or "g++"  # torch searches in the same way
    if config.trainer.torch_compile and not shutil.which(compiler):
        fix = "apt-get install g++ (or dnf install gcc-c++, conda install gxx_linux-64), name one in CXX, or set it to false."
        yield Fault(("trainer.torch_compile",), f"there is no C++ compiler ({compiler})", fix, code="no-compiler")
    yield from _bucket("trainer.mirror", config.trainer.mirror)


@cache
def template_names() -> tuple[str, ...]:
    """Return the names that data.chat_template understands: chatml and TRL's template files."""
    return tuple(sorted({"chatml", *template_files()}))


@cache
def template_files() -> dict[str, Path]:
    """Return TRL's chat templates by name, found without importing TRL."""
    spec = importlib.util.find_spec("trl")
    folders = [Path(place, "chat_templates") for place in (spec.submodule_search_locations or ())] if spec else []
    return {file.stem: file for folder in folders for file in folder.glob("*.jinja")}


def as_name(text: str) -> str:
    """Return a name's spelling for look-ups: "Llama-3.2" becomes llama_3_2."""
    return re.sub(r"[-.\s]", "_", text.lower())


def _not_installed(key: str, wanted: str, package: str, install: str, code: str = "package-missing") -> Iterator[Fault]:
    if importlib.util.find_spec(package) is None:
        what = f"{wanted} needs the package {package}, which is not installed"
        yield Fault((key,), what, f"pip install {install}", code=code)


def _bucket(key: str, url: str | None) -> Iterator[Fault]:
    """Yield a fault for a URL that fsspec cannot open. Its protocol is unknown, or the protocol's package is missing."""
    if url is None:
        return
    known: Mapping[str, Mapping[str, str]] = importlib.import_module("fsspec.registry").known_implementations
    protocol, _, name = url.partition("://")
    if not name.strip("/") or protocol not in known:
        fix = suggest(protocol, known, "It begins with s3://, gs://, az://, … (docs/resume.md).")
        yield Fault((key,), f"{url!r} is no URL of a bucket", fix, code="not-a-bucket")
    else:
        package = known[protocol]["class"].partition(".")[0]
        yield from _not_installed(key, f"{protocol}://", package, package)


def _data(data: Data) -> Iterator[Fault]:
    for key, value in (("data.train", data.train), ("data.eval", data.eval)):
        for at, source in enumerate(sources(value)):
            place = f"{key}[{at}]" if isinstance(value, list) else key
            if "://" in source.path or source.path.startswith(LISTED):
                continue
            if not any(sign in source.path for sign in "*?["):
                yield from _missing(place, source.path, DATA_SUFFIXES)
            elif not _there(source.path) and not glob.glob(os.path.expanduser(source.path), recursive=True):
                fix = f"Relative paths start at {Path.cwd()}."
                yield Fault((place,), f"there is no file that matches {source.path}", fix, code="no-such-path")
    if data.leave_out and not _there(data.leave_out):
        yield Fault(
            ("data.leave_out",), f"there is no file {data.leave_out}", nearest(data.leave_out), code="no-such-path"
        )
    template = data.chat_template or ""
    if template.lower().endswith(TEMPLATE_SUFFIXES):
        yield from _missing("data.chat_template", template, TEMPLATE_SUFFIXES)
    elif template and not _there(template) and as_name(template) not in template_names():
        otherwise = "The names are chatml and TRL's templates, such as qwen3 and llama3."
        hint = suggest(as_name(template), template_names(), otherwise, 3)
        what, fix = f"there is no chat template {template!r}", f"{hint} Or name a .jinja file."
        yield Fault(("data.chat_template",), what, fix, code="no-such-template")


def resume_folder(resume: str) -> Iterator[Fault]:
    """Yield a fault if the folder in trainer.resume is missing, or is no checkpoint."""
    folder, words = os.path.expanduser(resume), ("auto", "never")
    if resume in words or os.path.lexists(os.path.join(folder, "manifest.json")):
        return
    if not os.path.isdir(folder):
        fix = suggest(resume, words, f"Allowed: auto, never, or a folder. {nearest(resume)}")
        what = f"there is no checkpoint folder {resume or repr(resume)}"
        yield Fault(("trainer.resume",), what, fix, code="no-such-checkpoint")
        return
    inside = [item for place in ("", "checkpoints/") for item in glob.glob(f"{glob.escape(folder)}/{place}step-*")]
    fix = f"Name one in it, such as {max(inside)}." if inside else "Allowed: auto, never, or RUN/checkpoints/step-N."
    what = f"{resume} is no checkpoint: it has no manifest.json"
    yield Fault(("trainer.resume",), what, fix, code="not-a-checkpoint")


def _missing(key: str, path: str, suffixes: tuple[str, ...]) -> Iterator[Fault]:
    if path and path not in BUILT_IN and is_local(path, suffixes) and not _there(path):
        what = f"there is no file or folder {path}"
        yield Fault((key,), what, f"{nearest(path)} A hub id has the form owner/name.", code="no-such-path")


def _there(path: str) -> bool:
    """Return whether `path` exists. Impossible paths (~nobody, an endless name) give False, unlike with pathlib."""
    return os.path.exists(os.path.expanduser(path))


def is_local(path: str, suffixes: tuple[str, ...]) -> bool:
    """Return whether `path` cannot be a hub name (owner/name) or a built-in name.

    A misspelt run folder is local, too: no owner on the hub has packtrain runs beside it.
    """
    rooted = path.startswith((".", "/", "~", os.sep)) or path.count("/") > 1
    return rooted or path.lower().endswith(suffixes) or any(_is_run(place) for place in _near(Path(path)))


def model_of(path: str) -> str:
    """Return final/ of a run folder, else `path` itself.

    Raises UserError for a run that has not ended, and for other folders without a model.
    """
    place = Path(os.path.expanduser(path))
    has_model = any((place / name).exists() for name in _MODEL_FILES)
    if path in ("", *BUILT_IN, *REFERENCES) or not place.is_dir() or has_model:
        return path
    if not _is_run(place):
        what = f"there is neither a {_MODEL_FILES[0]} nor an {_MODEL_FILES[1]}"
        fix = "Name a run folder (trainer.output_dir), or a model's own folder."
        raise UserError(what, where=path, fix=fix, code="not-a-model")
    if (place / "final").is_dir():
        return os.path.join(path, "final")
    steps = sorted(place.glob("checkpoints/step-*"))
    fix = f"Name its newest checkpoint, {steps[-1]}, or let" if steps else "Name another folder, or let"
    raise UserError("this run has no final/ yet", where=path, fix=f"{fix} the run end.", code="run-not-ended")


def _is_run(place: Path) -> bool:
    return any((place / name).exists() for name in (".packtrain", "summary.json"))


def nearest(path: str) -> str:
    """Describe what is near a missing path."""
    wanted = Path(os.path.expanduser(path))
    if not os.path.isdir(wanted.parent):
        return f"The folder {wanted.parent} does not exist; relative paths start at {Path.cwd()}."
    close = ", ".join(map(str, _near(wanted)))
    return f"Near it: {close}." if close else f"{wanted.parent.absolute()} has nothing with a similar name."


def _near(wanted: Path) -> list[Path]:
    """Return entries beside a missing path with a similar name."""
    entries = [] if wanted.exists() else glob.glob(f"{glob.escape(str(wanted.parent))}/*")
    return [wanted.parent / name for name in near(wanted.name, map(os.path.basename, entries))]


def name_files(data: Data, folders: Sequence[Path]) -> Data:
    """Add the list to each `lf:NAME` without one.

    It is the nearest list below the `folders` (the config's, and the one where the command runs). Raises UserError for a name that no list
    has, or several have.
    """

    def named(value: object, key: str) -> object:
        if is_list(value):
            return [named(item, key) for item in value]
        if is_mapping(value):
            return {name: named(item, f"{key}.{name}") for name, item in value.items()}
        if isinstance(value, DataSource):
            return replace(value, path=named(value.path, key))
        if not isinstance(value, str) or not value.startswith(LISTED) or "#" in value:
            return value
        return f"{LISTED}{_file_of(value.removeprefix(LISTED), folders, key)}#{value.removeprefix(LISTED)}"

    return replace(data, train=named(data.train, "data.train"), eval=named(data.eval, "data.eval"))


def read_info(file: Path) -> dict[str, Json]:
    """Return the entries of a dataset_info.json by name. Raises UserError if it is unreadable or not LLaMA-Factory's."""
    try:
        entries = json.loads(file.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = "Write lf:NAME, or lf:FOLDER/dataset_info.json#NAME."
        what = f"cannot read the list of data sets: {error}"
        raise UserError(what, where=str(file), fix=fix, code="unreadable-data-set-list") from error
    if not is_mapping(entries) or not all(map(is_mapping, entries.values())):
        what = "this is no list of data sets as LLaMA-Factory has it, an object for each name"
        raise UserError(what, where=str(file), fix="Name another file.", code="not-a-data-set-list")
    return dict(entries)


def _file_of(name: str, folders: Sequence[Path], key: str) -> Path:
    found = [next(filter(None, (sorted(folder.glob(place)) for place in _LISTS)), list[Path]()) for folder in folders]
    files = list(dict.fromkeys(chain.from_iterable(found)))
    lists: dict[Path, dict[str, Path]] = {}
    for file in files:
        with suppress(UserError):  # `datasets` saves a file of this name beside its own
            lists.setdefault(file.resolve(), {}).update(dict.fromkeys(read_info(file), file))
    having = [entries[name] for entries in lists.values() if name in entries]
    if len(having) == 1:
        return having[0]
    fix = f"Write {LISTED}FOLDER/{_LIST}#{name}."
    if having:
        raise UserError(f"{' and '.join(map(str, having))} both have {name!r}", where=key, fix=fix, code="in-two-lists")
    if not lists:
        what = f"no {_LIST} is beside this config or below its folder"
        raise UserError(what, where=key, fix=fix, code="no-data-set-list")
    known = [entry for entries in lists.values() for entry in entries]
    what = f"{' and '.join(map(str, files))} has no data set {name!r}"
    fix = suggest(name, known, f"It has {', '.join(known[:8])} …", 3)
    raise UserError(what, where=key, fix=fix, code="no-such-data-set")
