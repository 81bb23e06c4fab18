"""ddp: every process has the whole model, and gradients are exchanged once a step."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from packtrain.model.load import base_model
from packtrain.model.spread import Placement, loading_whole
from packtrain.strategies.spec import StrategySpec
from packtrain.train.checkpoint.writer import CheckpointWriter
from packtrain.train.engine import CheckpointContents, Engine, Names, States, put_weights

OPTIMIZER_NAME = "optimizer.pt"
"""File of a checkpoint, named as by transformers' Trainer."""
_ORDER = "order"
"""Key in the optimizer's file: the weight names, in the order of the optimizer's numbers."""


class _DDPPlacement(Placement):
    def open_accelerator(
        self, spec: StrategySpec, weights: torch.dtype, autocast: torch.dtype | None, *, max_norm: float, unused: bool
    ) -> Accelerator:
        """Buffers (rotary frequencies) are equal on all ranks: sending them would make forward passes wait for rank 0.

        Reduced gradients stay in the buckets: DDP need not copy them back.
        """
        ddp = DistributedDataParallelKwargs(
            broadcast_buffers=False, find_unused_parameters=unused, gradient_as_bucket_view=True
        )
        return Accelerator(mixed_precision="bf16" if autocast else "no", kwargs_handlers=[ddp])


class _DDP(Engine):
    @staticmethod
    def is_spread(spec: StrategySpec, wrapped: nn.Module, model: nn.Module) -> bool:
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        return alone or isinstance(wrapped, nn.parallel.DistributedDataParallel)

    def save(self, folder: Path, writer: CheckpointWriter) -> None:
        if self.accelerator.is_main_process:
            states = writer.copied({**self.optimizer.state_dict(), _ORDER: self.weight_order}, alone=True)
            writer.write_later(partial(torch.save, states, folder / OPTIMIZER_NAME))

    @staticmethod
    def read_checkpoint(checkpoint: Path, model: nn.Module) -> CheckpointContents:
        return _ModelFolder(checkpoint, model)

    def load_own(self, checkpoint: Path, contents: CheckpointContents, names: Names) -> bool:
        put_weights(contents, names)
        # the ranks of a machine share the mapped file, and copy it to their GPUs tensor by tensor
        mapped = self.accelerator.device.type == "cuda"
        states = torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=mapped)
        self.optimizer.load_state_dict(states)
        return True


class _ModelFolder:
    """Reader of a checkpoint of ddp. The optimizer's state dict numbers its states."""

    def __init__(self, checkpoint: Path, model: nn.Module) -> None:
        self._folder, self._model = checkpoint, model
        whole = torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", mmap=True, weights_only=True)
        self.order = whole[_ORDER]
        self._states = {name: whole["state"].get(number, {}) for number, name in enumerate(self.order)}

    def weight(self, name: str) -> torch.Tensor:
        if name in self._files:
            file, key = self._files[name]
            return file.get_tensor(key)
        return self._converted[name]

    def states(self, name: str) -> States:
        return self._states[name]

    @cached_property
    def _files(self) -> dict[str, tuple[safe_open, str]]:
        """Map each name in the model to the weight's open file and its name there."""
        model: Any = self._model
        if isinstance(model, PeftModel):
            files = [self._folder / ADAPTER_SAFE_WEIGHTS_NAME]
            marks = {name: torch.empty(0) for name in model.state_dict()}
            name_of = {id(mark): name for name, mark in marks.items()}
            kept = get_peft_model_state_dict(model, marks, save_embedding_layers=False)
            named = {key: name_of[id(mark)] for key, mark in kept.items()}
        else:
            files, named = sorted(self._folder.glob("*.safetensors")), {}
        opened = [safe_open(file, "pt") for file in files]
        return {named.get(key) or key: (file, key) for file in opened for key in file.keys()}  # noqa: SIM118

    @cached_property
    def _converted(self) -> dict[str, torch.Tensor]:
        """Return all weights. Used if transformers saves the model in another form than it computes with (experts) or ties weights."""
        base = base_model(self._model)
        with loading_whole():
            loaded = type(base).from_pretrained(self._folder, dtype=base.dtype)
        held = (*loaded.named_parameters(remove_duplicate=False), *loaded.named_buffers(remove_duplicate=False))
        return {name: tensor.detach() for name, tensor in held}


PLACEMENT, ENGINE = _DDPPlacement(), _DDP
