"""AdamW for bfloat16 weights, in one kernel for each. A check compares its bits with the CPU's first."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim import AdamW, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from packtrain.monitor.heartbeat import waiting
from packtrain.train.optim import float32_step
from packtrain.train.optim.dither import Dither, local, own_part, stream_of
from packtrain.train.optim.float32_step import AVERAGE, MASTER, ROUNDINGS, Float32Step, loses_updates

_DEVICE = "cuda"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def step_by_kernel(optimizer: Optimizer, device: torch.device, say: Callable[[str], None]) -> None:
    """Make `optimizer` step by the kernel if every rank can. Collective, so that all ranks round alike."""
    if not (isinstance(optimizer, Float32Step) and isinstance(optimizer, AdamW)) or device.type != _DEVICE:
        return
    if (
        not optimizer.defaults["fused"] or optimizer.defaults["betas"][0] <= 0.5
    ):  # there torch's lerp takes another formula
        return
    why = _refusal(device, masters=optimizer.masters)
    refused = torch.tensor(float(why != ""), device=device)
    if torch.distributed.is_initialized():
        with waiting("the optimizer's kernel of all ranks"):
            torch.distributed.all_reduce(refused)
    if refused.item() == 0:
        optimizer.kernel = FusedAdamW(device)
    say(f"AdamW      {'one kernel for each weight' if optimizer.kernel else 'plain: ' + (why or 'as on another rank')}")


class FusedAdamW:
    """The step of torch's AdamW over bfloat16 weights, in one kernel for each weight.

    A weight's first step is plain: it makes the states. Plain steps and the kernel go on from each other's states.
    """

    def __init__(self, device: torch.device) -> None:
        from packtrain.train.optim.adamw_kernel import adamw_  # it needs triton

        self._adamw_, self._device = adamw_, device
        self._counts: MutableMapping[torch.Tensor, tuple[int, float]] = WeakTensorKeyDictionary()

    def step(self, optimizer: Float32Step) -> list[torch.Tensor]:
        """Update the weights of `optimizer` that the kernel can step. Return them."""
        taken, states, seen = list[torch.Tensor](), optimizer.state, optimizer.seen
        for group in optimizer.param_groups:
            own = [one for one in group["params"] if self._fits(one, states.get(one, {}), masters=optimizer.masters)]
            if seen is not None:
                masters = [states[weight][MASTER] for weight in own if optimizer.masters]
                seen.before([{**group, "params": masters}], by_kernel=True)
            for weight in own:
                self._update(weight, group, states[weight], optimizer)
            if seen is not None:
                seen.after()
            taken += own
        return taken

    def _fits(self, weight: torch.Tensor, state: dict[str, Any], *, masters: bool) -> bool:
        kept = (*_MOMENTS, MASTER) if masters else _MOMENTS
        if weight.grad is None or state.keys() - {AVERAGE} != {"step", *kept, *([] if masters else [ROUNDINGS])}:
            return False
        formats, right = {state[name].dtype for name in kept}, {torch.float32 if masters else torch.bfloat16}
        contiguous = all(local(one).is_contiguous() for one in (weight, *(state[name] for name in kept)))
        return loses_updates(weight) and weight.device.type == self._device.type and formats == right and contiguous

    def _update(self, weight: torch.Tensor, group: dict[str, Any], state: dict[str, Any], by: Float32Step) -> None:
        step, streams, first = state["step"], [0, 0, 0], 0
        kept: Any = (weight, *(state[name] for name in _MOMENTS), state.get(MASTER, weight), weight.grad)
        if not by.masters:
            key, (_, first) = f"{by.names[weight]} {state[ROUNDINGS]}", own_part(weight)
            streams = [stream_of(by.seed, one) for one in (key, *(f"{key} {name}" for name in _MOMENTS))]
            state[ROUNDINGS] += 1
        version, count = self._counts.get(step, (-1, 0.0))
        if version != step._version:  # not written by the kernel: only then read the device, and wait for it
            count = step.item()
        self._counts[step] = step._version, count + 1  # the kernel's own writes do not raise the version
        self._adamw_([*(local(one.detach()).reshape(-1) for one in kept), step], group, count + 1, streams, first)


def _refusal(device: torch.device, *, masters: bool) -> str:
    """Return why the kernel cannot be used. "" if it gives a small weight the bits of the CPU."""
    if find_spec("triton") is None:
        return "triton is not installed"

    def step(optimizer: Any, gradient: torch.Tensor) -> list[torch.Tensor]:
        weight = optimizer.param_groups[0]["params"][0]
        weight.grad = gradient.to(weight.device)
        optimizer.step()
        tensors = (one for one in (weight, *optimizer.state[weight].values()) if torch.is_tensor(one))
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    try:
        first, *gradients = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
        weights: list[torch.Tensor] = [torch.nn.Parameter(first.to(where, copy=True)) for where in ("cpu", device)]
        names = dict.fromkeys(weights, "weight")
        kind: Any = float32_step.stepping_in_float32(AdamW, masters=masters, seed=0, names=names, dither=Dither())
        plain, ours = (kind([weight], lr=1e-2, weight_decay=0.1, fused=True) for weight in weights)
        step(plain, gradients[0])
        ours.load_state_dict(deepcopy(plain.state_dict()))
        weights[1].data.copy_(weights[0])
        ours.kernel = FusedAdamW(device)
        pairs = [both for one in gradients[1:] for both in zip(step(plain, one), step(ours, one), strict=True)]
    except Exception as error:  # of Triton, of its compiler or of the device
        return f"{type(error).__name__}: {error}"
    return "" if all(torch.equal(*both) for both in pairs) else "its bits differ from the CPU's"
