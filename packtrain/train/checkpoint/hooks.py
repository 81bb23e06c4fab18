"""What a step writes into a checkpoint, and reads from it.

`CheckpointHooks` does so for transformers' Trainer: FSDP2's by torch's distributed checkpoints (model/spread.py), all others by
its own methods.
"""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from transformers import set_seed
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from packtrain.model.load import base_model
from packtrain.model.save import weights_at_least
from packtrain.model.spread import load_shards, save_shards, shards_of, whole_weights
from packtrain.monitor.heartbeat import waiting
from packtrain.plan.origin import ORIGIN, same_format, world_of
from packtrain.run_folder import write_json
from packtrain.train.checkpoint.folder import complete, folder_of, prune, staging_of
from packtrain.train.checkpoint.reshard import go_on, put_into_torch, put_into_zero, put_weights, settings_of
from packtrain.train.checkpoint.room import checkpoint_bytes, lack_of_room
from packtrain.train.checkpoint.saved import ORDER, saved_in
from packtrain.train.optim.final_weights import exact_weights, in_format, name_format
from packtrain.train.optim.lost_updates import local, optimizer_inside
from packtrain.train.settings import TrainerHooks


class CheckpointHooks(TrainerHooks):
    """The hooks of a step that write and read checkpoints."""

    def save_checkpoint(self) -> None:
        """Begins the checkpoint of this step, in a hidden folder that is renamed when all ranks have written (writer.py)."""
        self.clock.enter("checkpoint", step=self.state.global_step)
        self.take_counts()
        with waiting("the loss of all ranks"):
            last = cast(torch.Tensor, self.accelerator.reduce(self.last_loss, reduction="sum")).item()
        self.refuse_nan(last)
        self.writer.wait()
        self.writer.tell()
        step, main, folder = self.state.global_step, self.accelerator.is_main_process, self.settings.checkpoints
        staging = staging_of(folder, step)
        if lack := self._opened(staging):
            self.writer.outcome.failed.append((step, lack))
            return
        if not self.settings.sharded and main:  # sharded weights are saved with the optimizer, without gathering them
            self.writer.later(partial(self._save, str(staging), self.writer.copied(self._saved_weights(), alone=True)))
        self._save_optimizer_and_scheduler(str(staging))
        self.writer.at_once(lambda: self._save_rng_state(str(staging)))
        if main:
            self.writer.at_once(lambda: self.state.save_to_json(str(staging / TRAINER_STATE_NAME)))
            self.writer.at_once(lambda: write_json(staging / ORIGIN, self.settings.origin))
            usual = list(self.usual.figures)
            self.writer.at_once(lambda: write_json(staging / "spikes.json", usual))
        self.writer.begin(step, staging, partial(self._seal, step, self.state.best_global_step) if main else None)

    def prepare_checkpoints(self) -> None:
        """Begins to make the memory of copies; to be called when the first step has made the optimizer's states.

        Not where each step makes them anew: the old ones would be kept beside the new ones until they are copied.
        """
        main, strategy = self.accelerator.is_main_process, self.settings.strategy
        alone = strategy == "ddp"
        inside = optimizer_inside(self.optimizer)
        if self.args.save_strategy == "no" or (alone and not main) or not getattr(inside, "masters", True):
            return
        weights = self._saved_weights() if strategy == "fsdp2" or (main and not self.settings.sharded) else {}
        states = [one for kept in inside.state.values() for one in kept.values() if isinstance(one, torch.Tensor)]
        masters = [one for group in inside.param_groups for one in group["params"]]
        self.writer.make_memory([local(one.detach()) for one in (*weights.values(), *masters, *states)], alone=alone)

    def _saved_weights(self) -> dict[str, torch.Tensor]:
        """The state dict of the model; of adapters without the frozen weights."""
        weights, whole = self.model.state_dict(), base_model(self.model) is self.model
        frozen = () if whole else {name for name, one in self.model.named_parameters() if not one.requires_grad}
        return {name: one for name, one in weights.items() if name not in frozen}

    def _opened(self, staging: Path) -> str:
        """Makes the folder of a checkpoint if its disk has room; returns, on all ranks, why there is none."""
        lack = ""
        if self.accelerator.is_main_process:
            shutil.rmtree(staging, ignore_errors=True)  # an interrupted write, maybe by more ranks
            try:
                of_run = self.settings.optim, self.settings.strategy, self.settings.checkpoints
                lack = lack_of_room(staging, checkpoint_bytes(self.model, *of_run))
                if not lack:
                    staging.mkdir(parents=True)
            except OSError as error:
                lack = str(error)
        with waiting("rank 0 to make the folder of the checkpoint"):
            return cast(list, broadcast_object_list([lack]))[0]

    def _seal(self, step: int, best: int | None) -> None:
        """Completes the checkpoint that all ranks have written, and removes what gives way to it."""
        folder, keep = self.settings.checkpoints, self.settings.keep_checkpoints
        complete(staging_of(folder, step), folder_of(folder, step))
        with suppress(OSError):  # the next one tries again
            prune(folder, keep, best, self.settings.origin)

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
        """As the base class, of copies and in the background."""
        writer, folder, optimizer = self.writer, Path(output_dir), cast(Any, self.optimizer)
        if self.is_deepspeed_enabled:
            self._save_engine(folder)
        elif self.settings.strategy == "fsdp2":
            shards = writer.copied(shards_of(self.model, optimizer.optimizer))
            writer.later(lambda: save_shards(shards, folder, writer.group))
        elif self.accelerator.is_main_process:
            states = writer.copied({**optimizer.state_dict(), ORDER: self.order}, alone=True)
            writer.later(partial(torch.save, states, folder / OPTIMIZER_NAME))
        if self.accelerator.is_main_process:
            schedule = cast(Any, self.lr_scheduler).state_dict()
            writer.at_once(lambda: torch.save(schedule, folder / SCHEDULER_NAME))

    def _save_engine(self, folder: Path) -> None:
        """DeepSpeed's checkpoint: its engine says what is in which file, the files are written in the background."""
        engine, writer = cast(Any, self.model_wrapped), self.writer
        files, adapters = engine.checkpoint_engine, base_model(self.model) is not self.model
        save, add_scripts = files.save, engine._copy_recovery_script
        files.save = lambda state_dict, path: writer.later(partial(save, writer.copied(state_dict), path))
        engine._copy_recovery_script = lambda path: writer.later(partial(add_scripts, path))
        tag = f"global_step{engine.global_steps}"
        try:
            engine.save_checkpoint(str(folder), tag, save_latest=False, exclude_frozen_parameters=adapters)
        finally:
            del files.save, engine._copy_recovery_script
        if self.accelerator.is_main_process:
            writer.later(partial((folder / "latest").write_text, tag))

    def restore(self, checkpoint: Path) -> None:
        """Puts weights, optimizer and schedule of `checkpoint` in place, whichever strategy wrote it on however many processes.

        What this run's config says of optimizer and schedule holds from here on.
        """
        settings = settings_of(optimizer_inside(self.optimizer))
        self._restore_states(checkpoint)
        steps = torch.load(checkpoint / SCHEDULER_NAME, weights_only=True)["last_epoch"]
        go_on(optimizer_inside(self.optimizer), cast(Any, self.lr_scheduler), settings, steps)

    def _restore_states(self, checkpoint: Path) -> None:
        """Weights and optimizer: as they were written where the world is the same, else by name."""
        strategy, processes = world_of(checkpoint)
        names = {weight: name for name, weight in self.model.named_parameters() if weight.requires_grad}
        beside = self.model.state_dict(keep_vars=True) if base_model(self.model) is self.model else {}
        buffers = {one: name for name, one in beside.items() if not isinstance(one, torch.nn.Parameter)}
        saved = saved_in(checkpoint, strategy, self.model)
        inside = optimizer_inside(self.optimizer)
        same = strategy == self.settings.strategy and same_format(checkpoint, self.settings.origin)
        same = same and saved.order in (None, self.order)  # which libraries of another version may number otherwise
        if same and strategy == "fsdp2":
            load_shards(self.model, inside, checkpoint)
        elif same and strategy == "ddp":
            put_weights(saved, names | buffers)
            super()._load_optimizer_and_scheduler(str(checkpoint))
        elif same and processes == self.accelerator.num_processes:
            adapters = base_model(self.model) is not self.model
            deepspeed_load_checkpoint(self.model_wrapped, str(checkpoint), load_module_strict=not adapters)
            cast(Any, self.model_wrapped).optimizer.clip_grad = self.args.max_grad_norm
        elif self.is_deepspeed_enabled:
            put_into_zero(saved, cast(Any, self.model_wrapped).optimizer, names)
            put_weights(saved, buffers)
        else:
            put_weights(saved, names | buffers)
            put_into_torch(saved, inside, names)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As the base class; processes of another number draw anew, each from the seed, the step and its rank."""
        if checkpoint is None or world_of(Path(checkpoint))[1] == self.accelerator.num_processes:
            return super()._load_rng_state(checkpoint)
        drawn = f"{self.args.seed} {self.state.global_step} {self.accelerator.process_index}".encode()
        set_seed(int.from_bytes(hashlib.blake2b(drawn, digest_size=4).digest(), "big"))

    def load_best_weights(self) -> None:
        """Puts the weights of the evaluation with the lowest loss back into the model."""
        best = self.state.best_global_step
        folder = folder_of(self.settings.checkpoints, best or 0)
        if best == self.state.global_step:
            return
        if not folder.is_dir():  # not written for want of room, or in another run folder
            self.settings.say(
                f"{folder} is not there: final/ has the weights of the last step, not those of the best one"
            )
            self.state.best_metric = self.state.best_global_step = None
            return
        self.state.best_model_checkpoint = str(folder)
        self._restore_states(folder)  # masters too, which final/ may be made of
