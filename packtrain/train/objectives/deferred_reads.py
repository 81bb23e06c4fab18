"""TRL's loss of a micro-batch without waiting for the device (`compute_deferred`).

TRL's code is run as it is. It reads a dozen figures of each batch to log them, and a GPU that is read from has nothing to do until the
next operations are queued. Here a read gives a tensor that stays on the device (loss.py sums them), and what the size of a result
depends on is known on the host or not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from packtrain.packing.collate import to_device


def compute_deferred(loss: Callable[..., torch.Tensor], model: Any, inputs: dict[str, Any], *rest: Any) -> torch.Tensor:
    """`loss(model, inputs, *rest)`, TRL's, with deferred reads outside of the calls of `model`."""
    reads = _DeferredReads()

    def call(*args: Any, **kwargs: Any) -> Any:
        reads.__exit__(None, None, None)
        try:
            return model(*args, **kwargs)
        finally:
            reads.__enter__()

    with reads:
        return loss(call, inputs, *rest)


class _DeferredReads(TorchFunctionMode):
    """Answers what would wait: `item` by a tensor, float64 as a Python number is; "a count > 0" by True, since a figure of a
    micro-batch that has none of its unit has no weight; tensors that come from the CPU are copied without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self._known: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors on the device with the same values on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first: Any = args[0] if args else None
        second: Any = args[1] if args[1:] else None
        match name:
            case "item":
                return (first.double() if first.is_floating_point() else first).detach().reshape(())
            case "gt" | "__gt__" if (
                isinstance(second, int) and second == 0 and not (first.dim() or first.is_floating_point())
            ):
                return True
            case "__getitem__" if isinstance(second, torch.Tensor) and second.dtype == torch.bool:
                return _Kept(first, second)
            case "to" if isinstance(second, torch.device):
                return self._note(to_device(first, second), first)
            case "tensor" if "device" in kwargs:
                return to_device(func(*args, **{**kwargs, "device": "cpu"}), torch.device(kwargs["device"]))
            case "as_tensor" if (host := self._on_host(first)) is not None:
                return self._note(first.to(kwargs.get("dtype", first.dtype)), host)
            case "__invert__" if (host := self._on_host(first)) is not None:
                return self._note(func(*args), ~host)
            case "nonzero" if (host := self._on_host(first)) is not None:
                return to_device(_places(host), first.device)
        return func(*args, **kwargs)

    def _note(self, tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        if host.device.type == "cpu":
            self._known.append((tensor, host))
        return tensor

    def _on_host(self, tensor: Any) -> torch.Tensor | None:
        return next((host for known, host in self._known if known is tensor), None)


def _places(host: torch.Tensor) -> torch.Tensor:
    """int64 [n, 1]: where a mask on the host is true."""
    return host.nonzero()


class _Kept:
    """`values[mask]`, whose size the host does not know: its sum and its mean."""

    def __init__(self, values: torch.Tensor, mask: torch.Tensor) -> None:
        self._values, self._mask = values, mask

    def sum(self) -> torch.Tensor:
        """Scalar."""
        return torch.where(self._mask, self._values, 0).sum()

    def mean(self) -> torch.Tensor:
        """Scalar."""
        return self.sum() / self._mask.sum()
