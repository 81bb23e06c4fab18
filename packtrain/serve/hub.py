"""A model on the Hugging Face hub, with a model card, in one commit; private unless it is to be public."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from packtrain.boundary import boundary
from packtrain.errors import UserError, read_json
from packtrain.serve.model_card import is_public_name, model_card
from packtrain.serve.trained import Trained

_NAMED = ("_name_or_path", "name_or_path", "base_model_name_or_path")
"""Keys in which libraries write where a model was loaded from."""


def push(trained: Trained, name: str | None, *, public: bool) -> str:
    """Uploads the folder of a model; returns the address. Raises UserError for what others could not load, and what the hub refuses."""
    from huggingface_hub import CommitOperationAdd, HfApi

    if not name:
        raise UserError(
            "the hub needs a name for the model", where="--repo", fix="Give --repo YOU/NAME, or --repo NAME."
        )
    if trained.base is not None and not is_public_name(trained.base):
        what = "these adapters belong to a model in a local folder, which nobody else has"
        fix = f"packtrain export {trained.path} --to merged, then export that folder."
        raise UserError(what, where=f"{trained.path}: base_model_name_or_path", fix=fix)
    files = dict(_files(trained.folder))
    if trained.run is not None or "README.md" not in files:
        files["README.md"] = model_card(trained).encode()
    fix = "Log in by hf auth login, or set HF_TOKEN to a token that may write; see whether the name is yours."
    with boundary("the hub did not take the model", "--repo", fix):
        api = HfApi()
        address = api.create_repo(name, private=not public, exist_ok=True)
        if not (public or api.model_info(address.repo_id).private):
            fix = "Take another name, or say that everybody may see the model: --public."
            raise UserError("this is a public repository already", where=f"--repo {name}", fix=fix)
        operations = [
            CommitOperationAdd(path, str(source) if isinstance(source, Path) else source)
            for path, source in files.items()
        ]
        api.create_commit(address.repo_id, operations, commit_message="Model trained with packtrain")
    return f"{address} ({'public' if public else 'private'})"


def _files(folder: Path) -> Iterator[tuple[str, Path | bytes]]:
    """What belongs to a model, by its path; configs without local paths."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        path = file.relative_to(folder)
        if any(part.startswith(".") for part in path.parts) or file.name in ("training_args.bin", "optimizer.pt"):
            continue
        content = read_json(file) if file.name.endswith("config.json") else {}
        local = [key for key in _NAMED if isinstance(content.get(key), str) and os.path.exists(content[key])]
        for key in local:
            content[key] = ""
        yield path.as_posix(), json.dumps(content, indent=2).encode() if local else file
