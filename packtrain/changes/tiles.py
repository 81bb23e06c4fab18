"""`trainer.tokens_per_mlp_tile`: the MLP of a layer runs on tiles of tokens.

Each tile runs again in the backward pass. An MLP sees one token at a time, so tiles compute the same as all tokens at once. Its inside,
3 × intermediate size for each token, exists for one tile at a time (Arctic Long Sequence Training, arXiv 2506.13996). DeepSpeed's TiledMLP runs
backward passes inside a backward pass, past the hooks of DDP and FSDP2. torch's checkpoint adds gradients up within the graph: hooks run once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from packtrain.changes.spec import Change, Proposal, Situation
from packtrain.errors import CheckFailed, UserError
from packtrain.model.load import base_model
from packtrain.model.spread import language_layers
from packtrain.proof.comparison import difference, evaluating, model_refusals, tolerance_of
from packtrain.wording import counted

KEY = "trainer.tokens_per_mlp_tile"
_NAMES = ("mlp", "feed_forward", "ffn")
_ROUTED = ("expert", "router")


def mlps_of(model: nn.Module) -> list[nn.Module]:
    """Return the MLPs of the layers. They are separate modules, take only hidden states, and have no experts to choose from."""
    found = [getattr(layer, name) for layer in language_layers(model) for name in _NAMES if hasattr(layer, name)]
    return [mlp for mlp in found if _takes_tokens(mlp)]


def _takes_tokens(mlp: nn.Module) -> bool:
    routed = any(part in name for name, _ in mlp.named_modules() for part in _ROUTED)
    return not routed and len(inspect.signature(mlp.forward).parameters) == 1


@torch.no_grad()
def check_tiles(model: nn.Module) -> None:
    """Raise UserError if `model` has no such MLPs, CheckFailed if one mixes tokens. Call it before `model` is sharded."""
    base = base_model(model)
    name, kinds = type(base).__name__, {type(mlp): mlp for mlp in mlps_of(base)}
    if not kinds:
        what = f"no layer of {name} has an MLP that is a module of its own and no mixture of experts"
        raise UserError(what, where=KEY, fix=f"set {KEY}=null", code="no-mlps")
    with evaluating(base), model_refusals(f"the MLPs of {name} cannot run on tiles", fix=f"set {KEY}=null"):
        hidden = torch.randn(1, 7, base.config.get_text_config().hidden_size).to(base.device, base.dtype)
        for mlp in map(_with_whole_weights, kinds.values()):
            whole, tiled = mlp(hidden), _by_tiles(mlp.forward, 3, hidden)
            if not (off := difference(tiled[0], whole[0])) <= tolerance_of(base.dtype).outputs:
                what = f"tokens see each other in the MLPs of {name}: on tiles outputs are off by {off:.2g}"
                raise CheckFailed(what, where=KEY, fix=f"set {KEY}=null", code="mlps-mix-tokens")


def _with_whole_weights(mlp: nn.Module) -> nn.Module:
    """Return `mlp`; if this process has only its rows, a copy with random weights."""
    sharded = [weight for weight in mlp.parameters() if isinstance(weight, DTensor)]
    # deepcopy takes these in place of the sharded weights: a slice of a file cannot be copied
    made = {
        id(weight): nn.Parameter(0.02 * torch.randn(weight.shape, dtype=weight.dtype, device=weight.device))
        for weight in sharded
    }
    return copy.deepcopy(mlp, made) if sharded else mlp


def tile_mlps(model: nn.Module, tokens: int) -> Callable[[], None]:
    """Make the MLPs of `model` run on `tokens` at a time. Returns the undo function."""
    before = {mlp: mlp.forward for mlp in mlps_of(model)}
    for mlp, run in before.items():
        mlp.forward = partial(_by_tiles, run, tokens)

    def undo() -> None:
        for mlp, run in before.items():
            mlp.forward = run

    return undo


def _by_tiles(run: Callable[[torch.Tensor], torch.Tensor], tokens: int, hidden: torch.Tensor) -> torch.Tensor:
    """Return the outputs of an MLP for `hidden` [..., h]. An input no longer than a tile runs at once."""
    tiles = hidden.flatten(0, -2).split(tokens)
    if len(tiles) == 1:
        return run(hidden)
    return torch.cat([checkpoint(run, tile, use_reentrant=False) for tile in tiles]).view(hidden.shape)


def _check(situation: Situation) -> None:
    if situation.config.trainer.tokens_per_mlp_tile:
        check_tiles(situation.model)


def _propose(situation: Situation) -> Proposal | None:
    tokens = situation.config.trainer.tokens_per_mlp_tile
    if not tokens:
        return None
    return Proposal(
        what=f"{counted(len(mlps_of(situation.model)), 'MLPs')} on tiles of {tokens:,} tokens",
        make=lambda model: tile_mlps(model, tokens),
        # without tiles the first documents may exceed the device
        unproved="compared when the model was loaded",
    )


# the last, since others replace the code of the MLPs
CHANGE = Change(name="tiles", order=1000, kernel=False, propose=_propose, check=_check)
