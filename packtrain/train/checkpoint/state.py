"""State of a run in a checkpoint (`Checkpoints`): weights, optimizer, schedule, random states, recent figures.

How a strategy writes and reads optimizer states and sharded weights is in its folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import DistributedType
from accelerate.utils import broadcast_object_list, gather_object, load
from transformers import GenerationConfig, PreTrainedTokenizerBase, set_seed

from packtrain.attention.kernel_choice import chosen_kernels
from packtrain.model.adapters import write_base
from packtrain.model.load import base_model
from packtrain.model.save import gathered, plan_files, weights_at_least, write_files
from packtrain.model.spread import elements
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.feed import PLACE
from packtrain.plan.memory import optimizer_bytes
from packtrain.plan.origin import ORIGIN, list_checkpoints, same_format, world_of, written_into
from packtrain.run_folder import write_json
from packtrain.train.checkpoint.folder import complete, folder_of, prune, staging_of
from packtrain.train.checkpoint.writer import CheckpointWriter
from packtrain.train.engine import Engine, Exact, engine_of
from packtrain.train.optim.dither import Dither
from packtrain.train.optim.float32_step import AVERAGE, MASTER
from packtrain.train.run_state import LoopSettings, RunState
from packtrain.train.spikes import STATE, RecentFigures
from packtrain.wording import size

SCHEDULER_NAME, KERNELS = "scheduler.pt", "kernels.json"
_SMALL_FILES = 2**20  # bytes of config, random states and the state of the run


class Checkpoints:
    """Checkpoints of a run: reads them, and writes them in the background (`writer`)."""

    def __init__(self, engine: Engine, settings: LoopSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._engine, self._settings, self._tokenizer = engine, settings, tokenizer
        self._model, self._accelerator = engine.model, engine.accelerator
        self._has_adapters = engine.has_adapters
        self.writer = CheckpointWriter(settings.say, settings.first_step or None)

    def save(self, state: RunState, spikes: RecentFigures) -> None:
        """Begin the checkpoint of this step. Its hidden folder is renamed once all ranks have written (writer.py)."""
        writer = self.writer
        writer.wait()
        writer.warn_of_failures()
        step, main, folder = state.step, self._accelerator.is_main_process, self._settings.checkpoints
        since = time.monotonic()
        staging = staging_of(folder, step)
        if reason := self._open(staging):
            writer.outcome.failed.append((step, reason))
            return
        if not self._settings.sharded and main:  # sharded weights are saved with the optimizer, without gathering
            writer.write_later(partial(self._write_model, staging, writer.copied(self._saved_weights(), alone=True)))
        self._engine.save(staging, writer)
        writer.write_now(lambda: torch.save(self._random_state(), staging / self._random_file))
        with waiting("the kernels of all ranks"):  # only some of them may meet rows with shared prompts
            kernels = {layer: name for chosen in gather_object([chosen_kernels()]) for layer, name in chosen.items()}
        if main:
            writer.write_now(lambda: torch.save(self._engine.lr_schedule.state_dict(), staging / SCHEDULER_NAME))
            writer.write_now(lambda: state.save(staging))
            writer.write_now(lambda: write_json(staging / ORIGIN, self._settings.origin))
            writer.write_now(lambda: write_json(staging / STATE, list(spikes.figures)))
            if kernels:
                writer.write_now(lambda: write_json(staging / KERNELS, kernels))
            if (feed := self._settings.steps.feed) is not None:
                writer.write_now(lambda: write_json(staging / PLACE, feed.place))
        writer.begin(step, staging, partial(self._seal, step, state.best_step) if main else None, since)

    def _saved_weights(self) -> dict[str, torch.Tensor]:
        """Return the state dict of the model. With adapters it has no frozen weights, except the adapter weights that optim.groups freezes."""
        frozen = set[str]()
        if self._has_adapters:
            rest = ((name, weight) for name, weight in self._model.named_parameters() if ".default" not in name)
            frozen = {name for name, weight in rest if not weight.requires_grad}
        return {name: weight for name, weight in self._model.state_dict().items() if name not in frozen}

    def _open(self, staging: Path) -> str:
        """Make the folder of a checkpoint if space and time suffice. Return the reason why not, on all ranks."""
        reason = ""
        if self._accelerator.is_main_process:
            shutil.rmtree(staging, ignore_errors=True)  # an interrupted write, perhaps by more ranks
            try:
                reason = _shortage_of_space(staging, self._checkpoint_bytes())
                reason = reason or self._settings.stop.shortage_of_time(self.writer.outcome.seconds)
                if not reason:
                    staging.mkdir(parents=True)
            except OSError as error:
                reason = str(error)
        with waiting("rank 0 to make the folder of the checkpoint"):
            return cast(list, broadcast_object_list([reason]))[0]

    def warning_of_space(self, every: int | None) -> str:
        """Return a warning if the disk is too small, else "". It must hold final/ and as many checkpoints as the run keeps at a time."""
        settings, final = self._settings, self._weights_bytes()
        # the last step writes one too
        number = math.ceil((len(settings.steps) - settings.first_step) / every) if every else 0
        keep, there = settings.trainer.keep_checkpoints, len(list_checkpoints(settings.checkpoints))
        # an old one is removed only when the new one is complete
        most = number if keep is None else min(number, keep + 1)
        each = self._checkpoint_bytes() if most else 0
        reason = _shortage_of_space(settings.checkpoints, final + max(most - there, min(most, 1)) * each)
        what = f"{most} checkpoints of {size(each)} and final/ of {size(final)}"
        return f"no room for {what}: {reason} (trainer.output_dir, keep_checkpoints)" if reason else ""

    def _checkpoint_bytes(self) -> int:
        """Return the bytes of the newest checkpoint, else an estimate from the weights."""
        for newest in reversed(list_checkpoints(self._settings.checkpoints).values()):
            if files := written_into(newest):
                return sum(number for number, _ in files.values())
        trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        number, bytes_each = sum(map(elements, trained)), trained[0].itemsize if trained else 0
        states = optimizer_bytes(self._settings.optim, self._engine.spec, number, bytes_each)
        return self._weights_bytes() + states + _SMALL_FILES

    def _weights_bytes(self) -> int:
        """Return the bytes of the saved weights. With adapters: only the adapters and other trained weights."""
        weights = [weight for weight in self._model.parameters() if weight.requires_grad or not self._has_adapters]
        return sum(elements(weight) * weight.itemsize for weight in weights)

    def _seal(self, step: int, best: int | None) -> None:
        """Complete the checkpoint that all ranks have written, and remove those that it replaces."""
        folder, keep = self._settings.checkpoints, self._settings.trainer.keep_checkpoints
        complete(staging_of(folder, step), folder_of(folder, step))
        with suppress(OSError):  # the next checkpoint tries again
            prune(folder, keep, best, self._settings.origin)

    def restore(self, checkpoint: Path) -> None:
        """Load weights, optimizer and schedule of `checkpoint`. Any strategy may have written it, on any number of processes.

        From here on the optimizer and schedule settings of this run apply, not the checkpoint's.
        """
        groups, schedule = self._engine.plain_optimizer.param_groups, self._engine.lr_schedule
        settings = [{key: value for key, value in one.items() if key not in ("params", "step")} for one in groups]
        self._restore_states(checkpoint)
        steps = torch.load(checkpoint / SCHEDULER_NAME, weights_only=True)["last_epoch"]
        bases = [own["initial_lr"] for own in settings]
        rates = [base * share(steps) for base, share in zip(bases, schedule.lr_lambdas, strict=True)]
        for group, own, rate in zip(self._engine.plain_optimizer.param_groups, settings, rates, strict=True):
            group.update(own, lr=rate)
        schedule.base_lrs, schedule.last_epoch, schedule._step_count, schedule._last_lr = bases, steps, steps + 1, rates

    def _restore_states(self, checkpoint: Path) -> None:
        """Load weights and optimizer. By name, unless strategy and number of processes are the checkpoint's."""
        engine, model, optimizer = self._engine, self._model, self._engine.plain_optimizer
        names = {weight: name for name, weight in model.named_parameters() if weight.requires_grad}
        beside = {} if self._has_adapters else model.state_dict(keep_vars=True)
        buffers = {value: name for name, value in beside.items() if not isinstance(value, torch.nn.Parameter)}
        strategy = world_of(checkpoint)[0]
        contents = engine_of(strategy).read_checkpoint(checkpoint, model)
        same = strategy == engine.spec.name and same_format(checkpoint, self._settings.origin)
        # other versions of libraries may order weights differently
        same = same and contents.order in (None, engine.weight_order)
        if not (same and engine.load_own(checkpoint, contents, names | buffers)):
            engine.load_by_name(contents, names, buffers)
        for states in () if engine.ema else optimizer.state.values():
            states.pop(AVERAGE, None)  # else a later run would continue with this outdated average

    def restore_random_state(self, checkpoint: Path, step: int) -> None:
        """Restore this rank's random state. With another number of processes, seed it by trainer.seed, the `step` and the rank."""
        if world_of(checkpoint)[1] == self._accelerator.num_processes:
            self._put_random_state(load(checkpoint / self._random_file))
            return
        drawn = f"{self._settings.trainer.seed} {step} {self._accelerator.process_index}".encode()
        set_seed(int.from_bytes(hashlib.blake2b(drawn, digest_size=4).digest(), "big"))

    @property
    def _random_file(self) -> str:
        """Name of this process's file in a checkpoint, as transformers' Trainer gives it."""
        alone = self._accelerator.num_processes == 1
        return "rng_state.pth" if alone else f"rng_state_{self._accelerator.process_index}.pth"

    def _random_state(self) -> dict[str, object]:
        """Return the states of all random generators. With several processes "cuda" has all GPUs that this one sees."""
        state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        if not torch.cuda.is_available():
            return state
        several = self._accelerator.distributed_type != DistributedType.NO
        return {**state, "cuda": torch.cuda.get_rng_state_all() if several else torch.cuda.get_rng_state()}

    @staticmethod
    def _put_random_state(state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available() and (kept := state.get("cuda")) is not None:
            own = [kept] if isinstance(kept, torch.Tensor) else kept[torch.cuda.current_device() :]
            for one in own[:1]:  # none if this machine has more GPUs
                torch.cuda.set_rng_state(one)

    def restore_best_weights(self, state: RunState) -> None:
        """Load the weights of the best evaluation (trainer.best_by) into the model."""
        best = state.best_step
        folder = folder_of(self._settings.checkpoints, best or 0)
        if best == state.step:
            return
        if best is None or not folder.is_dir():  # not written for lack of space, or in another run folder
            why = f"{folder} is not there" if best else "no evaluation is the best"
            self._settings.say(f"{why}: final/ has the weights of the last step, not the best ones")
            state.best_value = state.best_step = None
            return
        self._restore_states(folder)  # masters too: final/ may be made from them

    def save_model(self, folder: Path, dtype: torch.dtype | None = None, kept_as: str = MASTER) -> None:
        """Write a folder that from_pretrained loads. All processes call it; the main one writes.

        With `dtype` the weights are in it, and adapters in float32. Their source are the float32 masters, if any, or the optimizer's state
        named `kept_as`. Without it the model's own weights are written.
        """
        main, dither, base = self._accelerator.is_main_process, self._engine.dither, base_model(self._model)
        exact = self._engine.exact_weights(kept_as) if dtype else lambda weight: None
        names = {weight: name for name, weight in self._model.named_parameters()}

        def made(weight: torch.Tensor) -> torch.Tensor | None:
            kept = exact(weight)
            whole = gathered(weight) if kept is None else kept
            if not main:
                return None
            return rounded(names[weight], whole, dtype, dither) if dtype else whole.cpu()

        if not self._stream(folder, dtype or base.dtype, made):
            whole = self._whole_weights()
            if dtype and whole is None:
                whole = self._model.state_dict() if main else {}
            if dtype:
                whole = self._in_format(cast(dict, whole) if main else {}, exact, dtype)
            self._write_model(folder, whole)
        if dtype and main and not self._has_adapters:
            name_format(folder, dtype)

    def _in_format(self, whole: dict[str, torch.Tensor], exact: Exact, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the state dict `whole` with weights in `dtype` on the CPU, from `exact` tensors.

        Adapters stay float32, and so do weights that the model keeps in float32 beside others. All processes call it, with {} on all but one, which return {}. Tied weights stay one tensor.
        """
        made: dict[int, torch.Tensor | None] = {}
        final, adapted, dither = dict(whole), self._has_adapters, self._engine.dither
        for name, weight in self._model.named_parameters(remove_duplicate=False):
            if adapted and not weight.requires_grad:
                continue
            stays = weight.dtype == torch.float32 != base_model(self._model).dtype == dtype
            own = torch.float32 if stays or (adapted and ".modules_to_save." not in name) else dtype
            if id(weight) not in made:
                kept = exact(weight)
                value = whole[name] if kept is None and name in whole else kept
                made[id(weight)] = None if value is None or name not in whole else rounded(name, value, own, dither)
            if (converted := made[id(weight)]) is not None and name in whole:
                final[name] = converted
        return final

    def _stream(self, folder: Path, dtype: torch.dtype, made: Callable[[torch.Tensor], torch.Tensor | None]) -> bool:
        """Write a spread model weight by weight, each from `made`. Return whether it could (model/save.py): not for adapters."""
        if not self._settings.sharded or self._has_adapters:
            return False
        if (plan := plan_files(self._model, dtype)) is None:
            return False
        refusal, main = None, self._accelerator.is_main_process
        try:
            self._write_model(folder, {})  # config and tokenizer
        except Exception as error:  # the weights are written in any case
            refusal = error
        if main:
            for empty in folder.glob("*.safetensors"):
                empty.unlink()
        write_files(self._model, plan, folder, made, main=main)
        if refusal is not None:
            raise refusal
        return True

    def _whole_weights(self) -> dict[str, torch.Tensor] | None:
        """Return the state dict of sharded weights, on the main process. None if the weights are not sharded."""
        adapted, main = self._has_adapters, self._accelerator.is_main_process
        if (whole := self._engine.whole_weights(trained_only=adapted)) is None:
            return None
        for name, weight in self._model.named_parameters() if adapted else ():
            if ".default" in name and not weight.requires_grad:  # frozen adapters are saved with the others
                value = gathered(weight).cpu()
                whole |= {name: value} if main else {}
        return whole

    def _write_model(self, folder: Path, weights: dict[str, torch.Tensor] | None) -> None:
        """Write model and tokenizer, on the main process. The weights are written even if config or tokenizer fail."""
        if self._accelerator.is_main_process:
            base = base_model(self._model)
            weights = weights and {**getattr(self._model, "beside", {}), **weights}
            with weights_at_least(self._model, folder, weights):
                self._model.save_pretrained(str(folder), state_dict=weights)
                self._tokenizer.save_pretrained(str(folder))
                if self._has_adapters:
                    write_base(self._model, folder)
                if self._has_adapters and base.can_generate():  # PEFT leaves it out
                    cast(GenerationConfig, base.generation_config).save_pretrained(folder)


def rounded(name: str, whole: torch.Tensor, dtype: torch.dtype, dither: Dither) -> torch.Tensor:
    """Return a `whole` weight in `dtype` on the CPU. A float32 weight goes through `dither.in_format`."""
    whole = whole.detach()
    return (dither.in_format(name, whole, dtype) if whole.dtype == torch.float32 else whole).to(dtype).cpu()


def name_format(folder: Path, dtype: torch.dtype) -> None:
    """Write the format of a saved model's weights into its config.json. from_pretrained loads them in it."""
    path = folder / "config.json"

    def named(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        name = str(dtype).removeprefix("torch.")
        return {key: name if key in ("dtype", "torch_dtype") else named(inner) for key, inner in value.items()}

    path.write_text(json.dumps(named(json.loads(path.read_text())), indent=2) + "\n")


def _shortage_of_space(folder: Path, needed: int) -> str:
    """Return why the disk of `folder` has no room for `needed` bytes, else ""."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return f"it takes {size(needed)}, and the disk has {size(free)} left" if free < needed else ""
