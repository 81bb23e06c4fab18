"""`trainer.activation_offload`: what recomputation keeps of a layer, its input, waits in the host's memory for the backward pass.

TRL's OffloadActivations (torchtune's) copies tensors to pinned memory on a stream of its own while the next layers compute, and back before
they are used. Around a whole step it would also move what is not activations: gradients that the output head has made already, autocast's
copies of weights, weights that FSDP2 has gathered. So it is given what each layer's checkpoint keeps, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from packtrain.errors import UserError

KEY = "trainer.activation_offload"


def check_offload(device: torch.device) -> None:
    """Raises UserError where `device` has no memory of its own."""
    if device.type == "cpu":
        what = "on a CPU activations are in the host's memory already"
        raise UserError(what, where=KEY, fix="set it to false, or run on a machine with GPUs")


def offloading(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """`checkpoint`, torch's or with its options, whose inputs are moved to the host until the backward pass."""
    from trl.models.activation_offloading import OffloadActivations

    return partial(_checkpoint_moving, OffloadActivations(), checkpoint)


def _checkpoint_moving(moving: Any, checkpoint: Callable[..., Any], *given: Any, **options: Any) -> Any:
    # not `with moving`: that forgets what earlier layers have moved. What the layer saves inside of the checkpoint has hooks of its own
    with saved_tensors_hooks(moving.pack_hook, moving.unpack_hook):
        return checkpoint(*given, **options)
