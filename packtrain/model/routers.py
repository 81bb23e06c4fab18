"""The load-balancing loss of mixture-of-experts routers, over a whole optimizer step.

transformers computes N · Σ_e f_e · P_e over one forward call: f_e is how often a (token, layer) pair chooses expert e,
P_e the expert's mean probability. Per micro-batch that would depend on the layout. So here f and P are over the real tokens of the whole step,
as if all documents were in one padded batch. Once f is known the loss is a sum over tokens. To know f, a step of several micro-batches or ranks
runs its model once more, without gradients and output head, on the same random numbers: about a quarter more time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from packtrain.errors import CheckFailed, UserError
from packtrain.model.forward import Batch
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import IGNORE
from packtrain.proof.comparison import evaluating, model_refusals, tolerance_of

KEY = "model.config.output_router_logits"
_EXPECTED_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def balance(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the share of `part` in N · Σ f · P over `whole`.

    Both are loads, float64 [2N + 1], summed over tokens: how often each of N experts was chosen, the sum of its probability
    over (token, layer) pairs, and the number of these pairs. The result is a scalar; only the probabilities of `part` have a gradient.
    """
    experts = len(whole) // 2
    pairs = whole[-1].clamp(min=1)
    return experts * (whole[:experts] / pairs * part[experts:-1]).sum() / pairs


def router_loss(model: PreTrainedModel, weight: float | None = None) -> RouterLoss | None:
    """Return the loss with this `weight`, or the model's own; None if it is off.

    It is off if the weight is 0, or neither given nor switched on in the model. Raises UserError if transformers has no such loss for `model`,
    or a different one.
    """
    switched_on = getattr(model.config.get_text_config(), "output_router_logits", False)
    if weight == 0 or (weight is None and not switched_on):
        return None
    its_own = vars(sys.modules[type(model).__module__]).get("load_balancing_loss_func")
    top_k = getattr(model, "num_experts_per_tok", None)
    if its_own is None or list(inspect.signature(its_own).parameters) != _EXPECTED_ARGUMENTS or top_k is None:
        kind = "no" if its_own is None else "another"
        what = f"{type(model).__name__} has {kind} load-balancing loss over the logits of its routers"
        fix = f"set {KEY} to false"
        raise UserError(what, where=KEY, fix=fix, code="no-router-loss")
    if weight is None:
        weight = getattr(model, "router_aux_loss_coef", None) or getattr(model, "aux_loss_coef", 0.0)
    return RouterLoss(model, weight, int(top_k)) if weight else None


class RouterLoss:
    """`weight` times the load-balancing loss of `model`. Each step calls `open_step`, each micro-batch `watching` and `part`."""

    def __init__(self, model: PreTrainedModel, weight: float, top_k: int) -> None:
        self.weight, self._top_k = weight, top_k
        self._backbone: nn.Module = model.base_model
        self._step: torch.Tensor | None = None
        self._values: list[torch.Tensor] = []

    def open_step(self, batches: Sequence[Any], run: Callable[[Any], object], accelerator: Accelerator) -> None:
        """Count the load of the step over all its micro-batches and ranks. `run` is the forward pass of one batch; a filler has 0 `examples`."""
        self._step = None
        if len(batches) == 1 and accelerator.num_processes == 1:
            return
        device = accelerator.device
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            own = []
            for batch in batches:
                with self.watching(real=batch.examples > 0) as loads:
                    run(batch)
                own.extend(loads)
        with waiting("the loads of all ranks"):
            self._step = cast(torch.Tensor, accelerator.reduce(_sum(own), reduction="sum"))
        self._values.append(balance(self._step, self._step))

    @contextmanager
    def watching(self, *, real: bool = True) -> Iterator[list[torch.Tensor]]:
        """Append the load (see `balance`) of every call of the model's backbone to the list. Padding and recomputed calls do not count;
        without `real` the load is empty."""
        loads: list[torch.Tensor] = []

        def ask(module: nn.Module, arguments: tuple, keywords: Batch) -> tuple[tuple, Batch]:
            return arguments, {**keywords, "output_router_logits": True}

        def take(module: nn.Module, arguments: tuple, keywords: Batch, output: ModelOutput) -> None:
            loads.append(self._load(output, keywords.get("attention_mask"), real))

        asking = self._backbone.register_forward_pre_hook(ask, with_kwargs=True)
        with asking, self._backbone.register_forward_hook(take, with_kwargs=True):
            yield loads

    def part(self, loads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this micro-batch's part of the weighted loss, from the `loads` of its calls. The parts add up to the step's loss."""
        load = _sum(loads)
        if not load.requires_grad:
            what = "no gradient reaches the routers"
            raise CheckFailed(what, where=KEY, fix=f"set {KEY} to 0", code="routers-without-gradient")
        step = self._step
        if step is None:
            step = load.detach()
            self._values.append(balance(step, step))
        return self.weight * balance(load, step)

    def mark(self) -> Callable[[], None]:
        """Return a function that forgets the losses of steps from now on."""
        values, known = self._values, len(self._values)
        return lambda: values.__delitem__(slice(known, None))

    def value(self) -> float | None:
        """Return the unweighted mean loss of the steps since the last call; None without steps."""
        values, self._values = self._values, []
        return torch.stack(values).mean().item() if values else None

    def check(self, model: PreTrainedModel, batch: Batch, *, autocast: torch.dtype | None = None) -> None:
        """Compare the loss of one collated micro-batch with the model's own, in `autocast`. Raises CheckFailed if they differ more than by
        rounding, UserError if no layer has a router."""
        plain = {name: value for name, value in batch.items() if name not in ("shift_labels", "label_places")}
        with torch.no_grad(), evaluating(model, autocast):
            with self.watching() as loads:
                model(**without_labels(batch), loss_sum=True)
            with model_refusals(f"{type(model).__name__} cannot make its router loss", fix=f"set {KEY} to 0"):
                theirs = model(**plain, use_cache=False, output_router_logits=True).aux_loss.item()
        load = _sum(loads)
        ours = balance(load, load).item()
        if not abs(ours - theirs) <= tolerance_of(autocast or model.dtype).outputs * abs(theirs):  # NaN fails too
            what = f"the router loss of {type(model).__name__} is {theirs:.6g}, packtrain makes it {ours:.6g}"
            fix = f"please report this model; set {KEY} to 0 to train without"
            raise CheckFailed(what, where=KEY, fix=fix, code="router-loss-differs")

    def _load(self, output: ModelOutput, mask: torch.Tensor | None, real: bool) -> torch.Tensor:
        """Return the load of one call. `output.router_logits` are [tokens, experts], or [rows, length, experts], per layer."""
        layers: tuple[torch.Tensor, ...] = getattr(output, "router_logits", None) or ()
        if not layers:
            raise UserError("no layer of this model has a router", where=KEY, fix=f"set {KEY} to 0", code="no-routers")
        rows = [logits.flatten(0, -2).float() for logits in layers]
        counted = torch.ones(len(rows[0]), device=rows[0].device) if mask is None else mask.flatten().float()
        counted = counted if real else counted * 0  # a filler counts no token, but stays connected to the graph
        probability, chosen = 0.0, torch.zeros(rows[0].shape[-1], dtype=torch.float64, device=rows[0].device)
        for logits in rows:
            shares = logits.softmax(dim=-1)
            probability = probability + (shares * counted[:, None]).sum(dim=0).double()
            experts = shares.topk(self._top_k, dim=-1).indices
            chosen.index_add_(0, experts.flatten(), counted.double().repeat_interleave(self._top_k))
        pairs = counted.double().sum() * len(rows)
        return torch.cat([chosen, cast(torch.Tensor, probability), pairs[None]])


def without_labels(batch: Batch) -> Batch:
    """Return `batch` without labels, so that its forward pass can skip the output head."""
    labels = torch.full_like(batch["shift_labels"], IGNORE)
    none = np.zeros(0, np.int64)
    return {**batch, "shift_labels": labels, "label_places": none, "label_owners": none}


def _sum(loads: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(loads)).sum(dim=0)
