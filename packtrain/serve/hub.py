"""Upload of a model to the Hugging Face hub, with its model card.

It is one commit, private unless made public. The card has the model's origin, held-out figures and config; no secret, no local path."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import yaml

from packtrain import __version__
from packtrain.config.rules.paths_and_packages import BUILT_IN, DATA_SUFFIXES, MODEL_SUFFIXES, TEMPLATE_SUFFIXES
from packtrain.config.schema import groups
from packtrain.errors import UserError, boundary, read_json
from packtrain.objectives.spec import OBJECTIVES
from packtrain.report.run_record import read_config, read_metrics
from packtrain.run_folder import object_of
from packtrain.serve.trained import Trained
from packtrain.wording import Redactor

_NAMED = ("_name_or_path", "name_or_path", "base_model_name_or_path")
"""Keys of libraries for the place that a model was loaded from."""
_LOCAL = "(local)"
_OF_A_PLACE = ("topology", "tracking")
"""Groups of the config about the place of the run."""
_FOLDERS = ("output_dir", "cache_dir")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_ROOTED = re.compile(r"[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|file:")
_FILES = (*MODEL_SUFFIXES, *DATA_SUFFIXES, *TEMPLATE_SUFFIXES)
_FIGURES = {
    "train_loss": "training loss, last logged step",
    "first_eval_loss": "held-out loss before",
    "eval_loss": "held-out loss after",
    "steps": "optimizer steps",
    "examples": "examples trained on",
    "tokens": "tokens",
}


def push(trained: Trained, name: str | None, *, public: bool) -> str:
    """Upload a model's folder; return the address. Raises UserError if others could not load it, or the hub refuses."""
    from huggingface_hub import CommitOperationAdd, HfApi

    if not name:
        fix = "Give --repo YOU/NAME, or --repo NAME."
        raise UserError("the hub needs a name for the model", where="--repo", fix=fix, code="no-repo-name")
    if trained.base is not None and not is_public_name(trained.base):
        what = "these adapters belong to a model in a local folder, which nobody else has"
        fix = f"packtrain export {trained.path} --to merged, then export that folder."
        raise UserError(what, where=f"{trained.path}: base_model_name_or_path", fix=fix, code="base-not-public")
    files = dict(_files(trained.folder))
    if trained.run is not None or "README.md" not in files:
        files["README.md"] = model_card(trained).encode()
    fix = "Log in by hf auth login, or set HF_TOKEN to a token that may write; see whether the name is yours."
    with boundary("the hub did not take the model", "--repo", fix, code="upload-refused"):
        api = HfApi()
        address = api.create_repo(name, private=not public, exist_ok=True)
        if not (public or api.model_info(address.repo_id).private):
            fix = "Take another name, or say that everybody may see the model: --public."
            what = "this is a public repository already"
            raise UserError(what, where=f"--repo {name}", fix=fix, code="repo-is-public")
        operations = [CommitOperationAdd(path, source) for path, source in files.items()]
        api.create_commit(address.repo_id, operations, commit_message="Model trained with packtrain")
    return f"{address} ({'public' if public else 'private'})"


def _files(folder: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the files of a model by path. Configs come without local paths."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        path = file.relative_to(folder)
        if any(part.startswith(".") for part in path.parts) or file.name in ("training_args.bin", "optimizer.pt"):
            continue
        content = read_json(file) if file.name.endswith("config.json") else {}
        local = [key for key in _NAMED if isinstance(content.get(key), str) and os.path.exists(content[key])]
        for key in local:
            content[key] = ""
        yield path.as_posix(), json.dumps(content, indent=2).encode() if local else str(file)


def is_public_name(path: str | None) -> bool:
    """Return whether it is a name on the hub, and nothing on this machine."""
    if path is None or path.lower().endswith(_FILES) or os.path.exists(os.path.expanduser(path)):
        return False
    return _HUB_NAME.fullmatch(path) is not None and not path.startswith(".")


def model_card(trained: Trained) -> str:
    """Write a model's README.md, with facts from its run folder if there is one."""
    from huggingface_hub import ModelCardData

    run = trained.run
    config = read_config(run.config) if run else {}
    model, data = _mapping(config.get("model")), _mapping(config.get("data"))
    default = next(name for name, spec in OBJECTIVES.all().items() if spec.scores == trained.scores)
    kind = str(_mapping(config.get("objective")).get("kind", default))
    base = next((name for name in (trained.base, model.get("path")) if is_public_name(name)), None)
    train = data.get("train") if isinstance(data.get("train"), list) else [data.get("train")]
    paths = [str(source["path"] if isinstance(source, Mapping) else source) for source in train or () if source]
    head = ModelCardData(
        library_name="transformers" if trained.base is None else "peft",
        pipeline_tag="text-classification" if trained.scores else "text-generation",
        tags=["packtrain", kind],
        base_model=base,
        datasets=[path for path in paths if is_public_name(path)] or None,
    )
    local = "new weights" if model.get("init") == "random" else "a local model"
    of = f"[{base}](https://huggingface.co/{base})" if base else local
    what = "Adapters for" if trained.base is not None else "Trained from"
    about = OBJECTIVES[kind].about if kind in OBJECTIVES.all() else kind
    parts = [f"---\n{head.to_yaml()}\n---", "# Model card", f"{what} {of}: {about} with packtrain {__version__}."]
    if run is not None:
        summary = object_of(run.summary)
        named = [path if is_public_name(path) or path == BUILT_IN else "local files" for path in paths]
        parts += ["## Data", f"Trained on {', '.join(dict.fromkeys(named)) or 'local files'}."]
        if report := _mapping(summary.get("data")):
            held = f"; {_number(report['held_out'])} documents were held out" if report.get("held_out") else ""
            size = f"{_number(report.get('documents'))} documents, {_number(report.get('tokens'))} tokens"
            parts += [f"An epoch has {size}{held}."]
        figures = {text: summary.get(key) for key, text in _FIGURES.items()}
        columns = read_metrics(run.metrics).columns
        best = np.flatnonzero(columns.get("eval_loss", np.zeros(0)) == summary.get("eval_loss"))[-1:]
        others = [key for key in columns if key.startswith("eval_") and key != "eval_loss" and len(best)]
        found = {key: float(columns[key][best[0]]) for key in others}
        figures |= {f"held-out {key[5:]}": at for key, at in found.items() if np.isfinite(at)}
        rows = [f"| {name} | {_number(value)} |" for name, value in figures.items() if value is not None]
        parts += ["## Figures", "\n".join(["| | |", "|---|---|", *rows])]
        parts += ["## Config", f"```yaml\n{yaml.safe_dump(public_config(config), sort_keys=False)}```"]
        versions = _mapping(object_of(run.environment).get("versions"))
        made = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
        parts += ["## Libraries", made or "not recorded"]
    return Redactor(os.environ).text("\n\n".join(parts)) + "\n"


def public_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the config's changes of defaults. The place of the run, secrets and local paths are left out."""
    defaults = {name: asdict(group()) for name, group in groups().items() if name not in _OF_A_PLACE}
    kept = {}
    for name, own in defaults.items():
        changed = {key: value for key, value in _mapping(config.get(name)).items() if value != own.get(key)}
        if shown := _without_paths(changed):
            kept[name] = shown
    return Redactor(os.environ).plain(kept)


def _without_paths(value: object) -> object:
    if isinstance(value, Mapping):
        inner = {name: _without_paths(entry) for name, entry in value.items() if name not in _FOLDERS}
        return {name: entry for name, entry in inner.items() if entry not in (None, [], {})}
    if isinstance(value, list):
        return [_without_paths(entry) for entry in value]
    if not isinstance(value, str) or is_public_name(value) or value == BUILT_IN:
        return value
    is_path = _ROOTED.match(value) or (re.search(r"[/\\]", value) and not re.search(r"\s", value))
    return _LOCAL if is_path or value.lower().endswith(_FILES) or os.path.exists(value) else value


def _mapping(value: object) -> Mapping:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> str:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return f"{value:,.0f}" if whole else f"{value:.4f}" if isinstance(value, float) else "none"
