"""Checkpoints that are either complete or absent.

A checkpoint is written into a hidden folder, listed in a manifest (size and BLAKE2 hash of every file), synced to disk and
renamed. A folder `step-…` is therefore complete even if the writer was killed; one that was damaged later does not match
its manifest, and the newest intact one is used instead. `CheckpointHooks` writes and reads them for
transformers' Trainer: FSDP2's by torch's distributed checkpoints (model/spread.py), all others by its own methods.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from packtrain.errors import Problem, UserError
from packtrain.model.load import base_model
from packtrain.model.save import weights_at_least
from packtrain.model.spread import load_shards, save_shards, whole_weights
from packtrain.monitor.heartbeat import waiting
from packtrain.run_folder import write_json
from packtrain.train.optim.final_weights import exact_weights, in_format, name_format
from packtrain.train.optim.lost_updates import optimizer_inside
from packtrain.train.settings import TrainerHooks

MANIFEST = "manifest.json"
ORIGIN = "origin.json"
_NAME = re.compile(r"step-(\d+)")


def folder_of(checkpoints: Path, step: int) -> Path:
    """The folder of the complete checkpoint of `step`."""
    return checkpoints / f"step-{step:06d}"


def staging_of(checkpoints: Path, step: int) -> Path:
    """Its folder while it is being written."""
    return checkpoints / f".step-{step:06d}.partial"


def step_of(checkpoint: Path) -> int:
    """The step that a complete checkpoint was written after, whatever its folder is called."""
    return int(json.loads((checkpoint / TRAINER_STATE_NAME).read_text())["global_step"])


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
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    manifest = {
        str(path.relative_to(staging)): {"bytes": path.stat().st_size, "blake2b": _hash(path)} for path in files
    }
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*files, staging / MANIFEST):
        _sync(path)
    _sync(staging)
    if target.exists():  # without its manifest, so perhaps not ours
        _move_aside(target)
    staging.rename(target)
    _sync(target.parent)


def listed(checkpoints: Path) -> dict[int, Path]:
    """The complete checkpoints by their steps, oldest first; folders with other names belong to the user."""
    found = {int(name[1]): path for path in checkpoints.glob("step-*") if (name := _NAME.fullmatch(path.name))}
    return {step: found[step] for step in sorted(found) if (found[step] / MANIFEST).is_file()}


def set_aside(checkpoints: Path, after: int) -> list[str]:
    """Renames the checkpoints of steps after `after`, the step that a run resumes from. Returns remarks.

    They are damaged or of an abandoned continuation, and would otherwise be kept and resumed from as the newest.
    """
    remarks = []
    for step, later in listed(checkpoints).items():
        if step > after:
            remarks.append(f"checkpoint {later.name} is set aside: it is {_move_aside(later).name} now")
    return remarks


def _move_aside(checkpoint: Path) -> Path:
    return checkpoint.rename(checkpoint.with_name(f"aside-{time.strftime('%Y%m%d-%H%M%S')}-{checkpoint.name}"))


def damage(checkpoint: Path) -> str | None:
    """The first mismatch of a checkpoint with its manifest; None if it is intact."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError):
        return f"{MANIFEST} is missing or unreadable"
    for name, entry in manifest.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"] or _hash(path) != entry["blake2b"]:
            return f"{name} is not as it was written"
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
    for checkpoint in reversed(listed(checkpoints).values()):
        if (wrong := damage(checkpoint)) is None:
            return checkpoint, remarks
        remarks.append(f"checkpoint {checkpoint.name} is passed over: {wrong}")
    return None, remarks


def check_origin(checkpoint: Path, origin: dict[str, Any]) -> None:
    """Raises UserError if this run would not continue the steps of `checkpoint`.

    `origin` holds the plain values that must be equal (run.py, `origin_of`); the checkpoint holds those of its run.
    """
    written = origin_in(checkpoint)
    absent = [name for name in origin if name not in written]
    if absent:
        what = (
            f"the checkpoint {checkpoint.name} does not record this: an earlier packtrain made it, or another objective"
        )
        fix = "go on with what made it, or start over with trainer.resume=never"
        raise UserError(what, where=", ".join(absent), fix=fix)
    differing = [
        Problem(
            f"the checkpoint {checkpoint.name} was made with {written.get(name)}, this run has {value}",
            where=name,
            fix="set it back, or start over with trainer.resume=never",
        )
        for name, value in origin.items()
        if written.get(name) != value
    ]
    if differing:
        raise UserError(differing)


def origin_in(checkpoint: Path) -> dict[str, Any]:
    """The origin of the run that wrote `checkpoint`."""
    return json.loads((checkpoint / ORIGIN).read_text())


def prune(checkpoints: Path, keep: int | None, best: Path | None, origin: dict[str, Any]) -> None:
    """Removes all but the newest `keep` checkpoints of this run and the best one, and the remains of interrupted writes.

    Those with another `origin` (see `check_origin`) were put there by someone.
    """
    for leftover in checkpoints.glob(".step-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep is None:
        return
    for old in [one for one in listed(checkpoints).values() if _of_run(one, origin)][:-keep]:
        if best is None or old.resolve() != best.resolve():
            shutil.rmtree(old)


def _of_run(checkpoint: Path, origin: dict[str, Any]) -> bool:
    with suppress(OSError, ValueError):
        return origin_in(checkpoint) == origin
    return False


def _hash(path: Path) -> str:
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointHooks(TrainerHooks):
    """The hooks of a step that write and read checkpoints."""

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Writes the checkpoint of this step into a hidden folder, and renames it when all ranks have written."""
        self.clock.enter("checkpoint", step=self.state.global_step)
        self.take_counts()
        with waiting("the loss of all ranks"):
            last = cast(torch.Tensor, self.accelerator.reduce(self.last_loss, reduction="sum")).item()
        self.refuse_nan(last)
        step, main, folder = self.state.global_step, self.accelerator.is_main_process, self.settings.checkpoints
        staging = staging_of(folder, step)
        if main:
            shutil.rmtree(staging, ignore_errors=True)  # an interrupted write, maybe by more ranks
            staging.mkdir(parents=True)
        self._barrier("rank 0 to make the folder of the checkpoint")
        if not self.settings.sharded:  # sharded weights are saved with the optimizer, without gathering them
            self.save_model(str(staging), _internal_call=True)
        self._save_optimizer_and_scheduler(str(staging))
        self._save_rng_state(str(staging))
        if main:
            for callback in (*self.callback_handler.callbacks, self.control):
                if isinstance(callback, ExportableState):
                    self.state.stateful_callbacks[type(callback).__name__] = callback.state()
            self.state.save_to_json(str(staging / TRAINER_STATE_NAME))
            write_json(staging / ORIGIN, self.settings.origin)
        self._barrier("all ranks to write their parts of the checkpoint")
        if main:
            complete(staging, folder_of(folder, step))
            best = self.state.best_global_step
            prune(
                folder, self.settings.keep_checkpoints, folder_of(folder, best) if best else None, self.settings.origin
            )
        self._barrier("rank 0 to complete the checkpoint")

    def _barrier(self, what: str) -> None:
        with waiting(what):
            self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a folder that from_pretrained loads; called by all processes, written by the main one."""
        main, adapters = self.accelerator.is_main_process, base_model(self.model) is not self.model
        if self.settings.strategy == "fsdp2":
            weights = whole_weights(self.model, trained_only=adapters)
            if main:
                self._save(output_dir, state_dict=weights)
        elif self.settings.sharded:
            super().save_model(output_dir, _internal_call)
        elif main:
            self._save(output_dir)

    def save_weights_in(self, dtype: torch.dtype, output_dir: Path, seed: int | None) -> None:
        """As `save_model`, with the weights in `dtype` (but for adapters, which are float32): made of the float32 masters, if any.

        With a `seed` they are rounded by chance.
        """
        whole: Any = {}
        main, adapters = self.accelerator.is_main_process, base_model(self.model) is not self.model
        if self.settings.strategy == "fsdp2":
            whole = whole_weights(self.model, trained_only=adapters)
        elif self.settings.sharded:
            whole = self.accelerator.get_state_dict(self.model_wrapped) or {}
        elif main:
            whole = self.model.state_dict()
        exact = exact_weights(self.optimizer, deepspeed=self.is_deepspeed_enabled)
        saved = in_format(whole if main else {}, self.model, exact, dtype, seed)
        if main:
            self._save(str(output_dir), state_dict=saved)
            if not adapters:
                name_format(output_dir, dtype)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As the base class; the weights are written whatever becomes of config and tokenizer."""
        with weights_at_least(self.model, output_dir or str(self.args.output_dir), state_dict):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.settings.strategy != "fsdp2":
            return super()._save_optimizer_and_scheduler(output_dir)
        save_shards(self.model, cast(Any, self.optimizer).optimizer, Path(output_dir))
        if self.accelerator.is_main_process:
            torch.save(cast(Any, self.lr_scheduler).state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.settings.strategy != "fsdp2":
            return super()._load_optimizer_and_scheduler(checkpoint)
        load_shards(self.model, cast(Any, self.optimizer).optimizer, Path(checkpoint))
        cast(Any, self.lr_scheduler).load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.settings.strategy != "fsdp2":  # FSDP2's weights come with the optimizer's state
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def load_best_weights(self) -> None:
        """Puts the weights of the evaluation with the lowest loss back into the model."""
        best = self.state.best_global_step
        folder = folder_of(self.settings.checkpoints, best or 0)
        if best == self.state.global_step or not folder.is_dir():  # the best step was in another run folder
            return
        self.state.best_model_checkpoint = str(folder)
        if self.settings.strategy == "fsdp2":
            load_shards(self.model, cast(Any, self.optimizer).optimizer, folder)
            return
        self._load_best_model()
        if getattr(optimizer_inside(self.optimizer), "masters", False):  # which final/ may be made of
            self._load_optimizer_and_scheduler(str(folder))
