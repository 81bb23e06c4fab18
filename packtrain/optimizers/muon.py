"""Muon for matrices of layers, AdamW for all other weights."""

from __future__ import annotations

from typing import Any

from torch.optim import AdamW, Muon, Optimizer


class MuonAndAdamW(Optimizer):
    """torch's Muon for groups with `muon`, and AdamW for the others. Muon's updates are as large as AdamW's (arXiv 2502.16982)."""

    def __init__(self, params: list[dict[str, object]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr})
        muons, others = ([group for group in self.param_groups if group["muon"] is muon] for muon in (True, False))
        # both fill in their settings
        self._parts: list[tuple[bool, Optimizer]] = (
            [(True, Muon(muons, adjust_lr_fn="match_rms_adamw"))] if muons else []
        )
        self._parts += [(False, AdamW(others, betas=betas, eps=eps))] if others else []

    def step(self, closure: Any = None) -> None:
        """Update all weights that have a gradient. Groups and states belong to this optimizer, also after a load."""
        for muon, part in self._parts:
            part.state, part.param_groups = self.state, [group for group in self.param_groups if group["muon"] is muon]
            part.step()
