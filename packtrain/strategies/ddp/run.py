"""ddp: every process has the whole model, and gradients are exchanged once a step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME

from packtrain.model.spread import Placement, Ranks
from packtrain.strategies.ddp.model_folder import ORDER, ModelFolder
from packtrain.strategies.spec import StrategySpec
from packtrain.train.checkpoint.contents import CheckpointContents
from packtrain.train.checkpoint.reshard import Names, put_weights
from packtrain.train.checkpoint.writer import CheckpointWriter
from packtrain.train.engine import Engine


class _DDPPlacement(Placement):
    def spread(self, model: PreTrainedModel, ranks: Ranks, autocast: torch.dtype | None) -> None:
        """Move the model. Frozen weights are equal on all ranks (train/sync.py), so that none has to be sent.

        DDP would send a whole base from the first rank, and cannot send 8-bit weights.
        """
        super().spread(model, ranks, autocast)
        frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        cast(Any, model)._ddp_params_and_buffers_to_ignore = frozen


class _DDP(Engine):
    @staticmethod
    def is_spread(spec: StrategySpec, wrapped: Any, model: nn.Module) -> bool:
        """See Engine."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        return alone or isinstance(wrapped, nn.parallel.DistributedDataParallel)

    def save(self, folder: Path, writer: CheckpointWriter) -> None:
        """See Engine."""
        if self.accelerator.is_main_process:
            states = writer.copied({**self.optimizer.state_dict(), ORDER: self.weight_order}, alone=True)
            writer.write_later(partial(torch.save, states, folder / OPTIMIZER_NAME))

    @staticmethod
    def read_checkpoint(checkpoint: Path, model: nn.Module) -> CheckpointContents:
        """See Engine."""
        return ModelFolder(checkpoint, model)

    def load_own(self, checkpoint: Path, contents: CheckpointContents, names: Names) -> bool:
        """See Engine."""
        put_weights(contents, names)
        # the ranks of a machine share the mapped file, and copy it to their GPUs tensor by tensor
        mapped = self.accelerator.device.type == "cuda"
        states = torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=mapped)
        self.optimizer.load_state_dict(states)
        return True


PLACEMENT, ENGINE = _DDPPlacement(), _DDP
