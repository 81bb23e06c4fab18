"""What a step writes into a checkpoint, and reads from it.

`CheckpointHooks` does so for transformers' Trainer: FSDP2's by torch's distributed checkpoints (model/spread.py), all others by
its own methods.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import torch
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from packtrain.model.load import base_model
from packtrain.model.save import weights_at_least
from packtrain.model.spread import load_shards, save_shards, whole_weights
from packtrain.monitor.heartbeat import waiting
from packtrain.run_folder import write_json
from packtrain.train.checkpoint.folder import complete, folder_of, prune, staging_of
from packtrain.train.checkpoint.origin import ORIGIN
from packtrain.train.optim.final_weights import exact_weights, in_format, name_format
from packtrain.train.optim.lost_updates import optimizer_inside
from packtrain.train.settings import TrainerHooks


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
