"""Checkpoint folders, either complete or absent.

A checkpoint is written into a hidden folder, listed in a manifest (size and BLAKE2 hash of every file), synced to disk and
renamed. A folder `step-…` is therefore complete even if the writer was killed. A folder that was damaged later does not match
its manifest, and the run resumes from the newest intact one instead.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from packtrain.data.dataset import PairDataset, TokenDataset
from packtrain.errors import UserError
from packtrain.model.load import base_model
from packtrain.model.spread import elements
from packtrain.model.weights import weights_hash
from packtrain.plan.origin import (
    MANIFEST,
    ORIGIN,
    PROCESSES,
    SHAPE,
    TOKENIZER,
    digest_of,
    facts_of,
    list_checkpoints,
    same_course,
    shared_versions,
    written_into,
)
from packtrain.run_folder import RunFolder, environment, object_of
from packtrain.system import aside, hash_of, publish, remove, sync
from packtrain.train.run_state import RUN_STATE, RunState

_UNSAID = re.compile(r"_.*|transformers_version|architectures|dtype|use_cache")
"""Model settings without effect on the computation."""


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the folder of the complete checkpoint of `step`."""
    return checkpoints / f"step-{step:06d}"


def staging_of(checkpoints: Path, step: int) -> Path:
    """Return the hidden folder that the checkpoint of `step` is written into."""
    return aside(folder_of(checkpoints, step))


def step_of(checkpoint: Path) -> int:
    """Return the step of a complete checkpoint. It is read from a file: the folder may have any name."""
    return RunState.load(checkpoint).step


def tidy(folder: Path) -> None:
    """Remove files that libraries add beside the weights, and give all files the umask's permissions.

    README.md is an empty model card. safetensors writes files for the owner only.
    """
    (folder / "README.md").unlink(missing_ok=True)
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def complete(staging: Path, target: Path) -> None:
    """Seal `staging` with a manifest and move it to `target`. One process calls it after all have written."""
    tidy(staging)
    files = {str(path.relative_to(staging)): path for path in sorted(staging.rglob("*")) if path.is_file()}
    manifest = {name: {"bytes": path.stat().st_size, "blake2b": hash_of(path)} for name, path in files.items()}
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
    if target.exists():  # it has no manifest, so it may be somebody else's
        _move_aside(target)
    run = RunFolder(target.parent.parent)
    for log in filter(Path.exists, run.records):
        sync(log)
    sync(run.root)
    publish(staging, target)


def set_aside(checkpoints: Path, after: int) -> list[str]:
    """Rename the checkpoints after step `after`, which the run resumes from. Return remarks.

    They are damaged or belong to an abandoned continuation. Left in place, they would count as the newest. Also remove the remains of
    interrupted writes.
    """
    _sweep(checkpoints)
    remarks = []
    for step, later in list_checkpoints(checkpoints).items():
        if step > after:
            remarks.append(f"checkpoint {later.name} is set aside: it is {_move_aside(later).name} now")
    return remarks


def _move_aside(checkpoint: Path) -> Path:
    target = checkpoint.with_name(f"aside-{time.strftime('%Y%m%d-%H%M%S')}-{checkpoint.name}")
    while target.exists():
        target = target.with_name(f"{target.name}-again")
    return checkpoint.rename(target)


def damage(checkpoint: Path) -> str | None:
    """Return the first mismatch of a checkpoint with its manifest; None if it is intact."""
    written = written_into(checkpoint)
    if ORIGIN not in written or RUN_STATE not in written:
        return f"{MANIFEST} is missing or unreadable"
    for name, (size, digest) in written.items():
        path = checkpoint / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size or hash_of(path) != digest:
                return f"{name} is not as it was written"
        except (OSError, ValueError) as error:
            return f"{name!r} cannot be read: {type(error).__name__}: {error}"
    return None


def find_resume(resume: str, checkpoints: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint for `trainer.resume` (auto | never | folder), and remarks on damaged ones.

    `auto` passes over damaged checkpoints. Raises UserError if a named folder is not a whole checkpoint.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        named = Path(resume).expanduser()
        if wrong := damage(named):
            what = f"{resume} is not a whole checkpoint: {wrong}"
            raise UserError(what, where="trainer.resume", code="not-a-checkpoint")
        return named, []
    remarks = []
    for checkpoint in reversed(list_checkpoints(checkpoints).values()):
        if (wrong := damage(checkpoint)) is None:
            return checkpoint, remarks
        remarks.append(f"checkpoint {checkpoint.name} is passed over: {wrong}")
    return None, remarks


def prune(checkpoints: Path, keep: int | None, best: int | None, origin: Mapping[str, object]) -> None:
    """Remove old checkpoints of this run, and the remains of interrupted writes.

    The newest `keep` stay, and the checkpoint of step `best`. One with another `origin` (see `check_origin`) or with a file that its manifest
    does not list stays too: somebody put it there.
    """
    _sweep(checkpoints)
    if keep is None:
        return
    ours = [checkpoint for checkpoint in list_checkpoints(checkpoints).values() if _belongs_to(checkpoint, origin)]
    for old in ours[:-keep]:
        if best is None or old != folder_of(checkpoints, best):
            remove(old)


def _sweep(checkpoints: Path) -> None:
    for leftover in checkpoints.glob(".step-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)


def _belongs_to(checkpoint: Path, origin: Mapping[str, object]) -> bool:
    with suppress(OSError, ValueError):
        files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if not path.is_dir()}
        written = written_into(checkpoint)
        ours = bool(written) and files <= {MANIFEST, *written}
        return ours and same_course(object_of(checkpoint / ORIGIN), {**origin})
    return False


def origin_of(
    config: dict[str, object],
    data: TokenDataset | PairDataset,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    processes: int,
) -> dict[str, object]:
    """Return the facts of a run as plain values. They are the keys of `config` (secrets as digests), data, model, tokenizer, processes."""
    base, weights = base_model(model), sum(elements(weight) for weight in model.parameters() if weight.requires_grad)
    shape = {name: value for name, value in base.config.to_dict().items() if not _UNSAID.fullmatch(name)}
    rust = getattr(tokenizer, "backend_tokenizer", None)
    text = str(sorted(tokenizer.get_vocab().items())) if rust is None else rust.to_str()
    frozen = any(not weight.requires_grad for weight in model.parameters())  # under adapters, or by the model's code
    return {
        **facts_of(config),
        **shared_versions(environment()),
        **{f"{SHAPE}{name}": json.dumps(value, default=str) for name, value in shape.items()},
        "data.train": f"{len(data):,} documents, {data.lengths.sum():,} tokens (fingerprint {data.fingerprint[:12]})",
        "model": f"{type(base).__name__} with {weights:,} trained weights",
        "model.dtype": str(base.dtype).removeprefix("torch."),
        "model.weights": f"frozen ones with hash {weights_hash(model, trained=False)[:12]}" if frozen else None,
        TOKENIZER: digest_of(f"{len(tokenizer)} {text} {tokenizer.chat_template}"),
        PROCESSES: processes,
    }
