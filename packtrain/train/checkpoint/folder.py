"""Folders of checkpoints that are either complete or absent.

A checkpoint is written into a hidden folder, listed in a manifest (size and BLAKE2 hash of every file), synced to disk and
renamed. A folder `step-…` is therefore complete even if the writer was killed; one that was damaged later does not match
its manifest, and the newest intact one is used instead.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME

from packtrain.data.dataset import PairDataset, TokenDataset
from packtrain.durable import aside, hash_of, publish, remove, sync
from packtrain.errors import UserError
from packtrain.model.load import base_model
from packtrain.model.spread import elements
from packtrain.model.weights.hashes import weights_hash
from packtrain.plan.agreement import digest_of, shared_versions
from packtrain.plan.origin import (
    MANIFEST,
    ORIGIN,
    PROCESSES,
    SHAPE,
    TOKENIZER,
    facts_of,
    list_checkpoints,
    same_course,
    written_into,
)
from packtrain.run_folder import RunFolder, environment, object_of

_UNSAID = re.compile(r"_.*|transformers_version|architectures|dtype|use_cache")
"""Settings of a model that say nothing of what it computes."""


def folder_of(checkpoints: Path, step: int) -> Path:
    """The folder of the complete checkpoint of `step`."""
    return checkpoints / f"step-{step:06d}"


def staging_of(checkpoints: Path, step: int) -> Path:
    """Its folder while it is being written."""
    return aside(folder_of(checkpoints, step))


def step_of(checkpoint: Path) -> int:
    """The step that a complete checkpoint was written after, whatever its folder is called."""
    return int(json.loads((checkpoint / TRAINER_STATE_NAME).read_text())["global_step"])


def best_step_of(checkpoint: Path) -> int | None:
    """The step whose evaluation was the best by then, where that is watched."""
    return json.loads((checkpoint / TRAINER_STATE_NAME).read_text()).get("best_global_step")


def tidy(folder: Path) -> None:
    """Removes files that libraries add beside the weights, and gives all files the permissions of the umask.

    training_args.bin is a pickle of local paths, README.md an empty model card; safetensors writes files for the owner only.
    """
    for name in ("training_args.bin", "README.md"):
        (folder / name).unlink(missing_ok=True)
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def complete(staging: Path, target: Path) -> None:
    """Seals `staging` with a manifest and moves it to `target`; called by one process after all have written."""
    tidy(staging)
    files = {str(path.relative_to(staging)): path for path in sorted(staging.rglob("*")) if path.is_file()}
    manifest = {name: {"bytes": path.stat().st_size, "blake2b": hash_of(path)} for name, path in files.items()}
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
    if target.exists():  # without its manifest, so perhaps not ours
        _move_aside(target)
    run = RunFolder(target.parent.parent)
    for log in filter(Path.exists, (run.metrics, run.spikes)):  # the run that goes on from here relies on their lines
        sync(log)
    sync(run.root)
    publish(staging, target)


def set_aside(checkpoints: Path, after: int) -> list[str]:
    """Renames the checkpoints of steps after `after`, the step that a run resumes from. Returns remarks.

    They are damaged or of an abandoned continuation, and would otherwise be kept and resumed from as the newest. The remains of
    interrupted writes are removed.
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
    """The first mismatch of a checkpoint with its manifest; None if it is intact."""
    written = written_into(checkpoint)
    if ORIGIN not in written or TRAINER_STATE_NAME not in written:
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
    """The checkpoint that `trainer.resume` (auto | never | folder) means, and remarks on damaged ones passed over.

    Raises UserError if a named folder is not a whole checkpoint.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        named = Path(resume).expanduser()
        if wrong := damage(named):
            raise UserError(f"{resume} is not a whole checkpoint: {wrong}", where="trainer.resume")
        return named, []
    remarks = []
    for checkpoint in reversed(list_checkpoints(checkpoints).values()):
        if (wrong := damage(checkpoint)) is None:
            return checkpoint, remarks
        remarks.append(f"checkpoint {checkpoint.name} is passed over: {wrong}")
    return None, remarks


def prune(checkpoints: Path, keep: int | None, best: int | None, origin: dict[str, Any]) -> None:
    """Removes all but the newest `keep` checkpoints of this run and that of the step `best`, and the remains of interrupted writes.

    Those with another `origin` (see `check_origin`) were put there by someone, as was a file that no manifest lists: these stay.
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


def _belongs_to(checkpoint: Path, origin: dict[str, Any]) -> bool:
    with suppress(OSError, ValueError):
        files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if not path.is_dir()}
        written = written_into(checkpoint)
        return bool(written) and files <= {MANIFEST, *written} and same_course(object_of(checkpoint / ORIGIN), origin)
    return False


def origin_of(
    config: dict[str, Any], data: TokenDataset | PairDataset, model: PreTrainedModel, tokenizer: Any, processes: int
) -> dict[str, Any]:
    """The facts of a run by `config`, as plain containers: its keys, secrets as digests, and what became of some of them."""
    base, weights = base_model(model), sum(elements(weight) for weight in model.parameters() if weight.requires_grad)
    shape = {name: value for name, value in base.config.to_dict().items() if not _UNSAID.fullmatch(name)}
    rust = getattr(tokenizer, "backend_tokenizer", None)
    text = str(sorted(tokenizer.get_vocab().items())) if rust is None else rust.to_str()
    frozen = any(not weight.requires_grad for weight in model.parameters())  # below adapters, or as the model is made
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
