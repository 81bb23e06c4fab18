"""The table of optimizers. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

_KEEPS = "keeps a state for a whole weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer. Most are transformers', under the same name."""

    states: int
    """Numbers that it keeps for each weight. A row and a column for each matrix count as nothing."""
    state_bytes: float | None = None
    """Bytes of such a number; None: as of the weight that it steps."""
    package: str = ""
    """The package that it needs beside torch."""
    own: str = ""
    """Module with packtrain's class OPTIMIZER, in place of transformers'. It takes AdamW's arguments, and groups with only matrices of layers
    (`muon`) or none."""
    whole: str = ""
    """Why it cannot step parts of weights, which strategies may give it; "" if it can."""
    on_host: bool = False
    """Whether DeepSpeed steps weights on the host by it."""
    lists_weights: bool = False
    """Whether its step makes a temporary list of tensors, as large as the weights."""

    @property
    def advice(self) -> str:
        """Advice for a package that is installed and does not work; "" without a package."""
        works = f"{self.package} is installed, but does not work here: see python -c 'import {self.package}'."
        return f"{works} optim=adamw needs no extra package." if self.package else ""


_ADAMW = OptimizerSpec(states=2, on_host=True)
_TORCHAO = OptimizerSpec(states=2, package="torchao", whole=_KEEPS)
_TWO = OptimizerSpec(states=2, package="bitsandbytes", whole=_KEEPS)
_ONE, _ONE_8BIT, _THREE = replace(_TWO, states=1), replace(_TWO, states=1, state_bytes=1), replace(_TWO, states=3)

OPTIMIZERS = {
    "adamw_torch": replace(_ADAMW, lists_weights=True),
    "adamw_torch_fused": _ADAMW,
    "adafactor": OptimizerSpec(states=0, whole=_KEEPS),
    "sgd": OptimizerSpec(states=0),
    "adagrad": OptimizerSpec(states=1, whole="makes its states before the weights are spread"),
    "rmsprop": OptimizerSpec(states=1),
    "muon": OptimizerSpec(
        states=1, own="packtrain.optimizers.muon", whole="needs whole matrices, to make them orthogonal"
    ),
    "adamw_torch_8bit": replace(_TORCHAO, state_bytes=1),
    "adamw_torch_4bit": replace(_TORCHAO, state_bytes=0.5),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), replace(_TWO, state_bytes=1)),
    "paged_adamw_32bit": _TWO,
    "ademamix": _THREE,
    "ademamix_8bit": replace(_THREE, state_bytes=1),
    "paged_ademamix_32bit": _THREE,
    "lion_8bit": _ONE_8BIT,
    "lion_32bit": _ONE,
    "paged_lion_8bit": _ONE_8BIT,
    "paged_lion_32bit": _ONE,
    "rmsprop_bnb": _ONE,
    "rmsprop_bnb_8bit": _ONE_8BIT,
    "rmsprop_bnb_32bit": _ONE,
}
_REFUSED = {
    "galore_adamw galore_adafactor apollo_adamw": "Its states hold Python objects, which a checkpoint cannot store: reading one never runs code.",
    "lomo adalomo": "It updates in the backward pass, before the gradients of a step are summed, clipped and judged.",
    "schedule_free_adamw schedule_free_sgd schedule_free_radam": "Its weights in training differ from the weights that it saves.",
    "stable_adamw": "It counts its steps in its settings, which a resumed run would reset.",
    "paged_ademamix_8bit": "bitsandbytes fails to make its states; take ademamix_8bit.",
}
REFUSED = {name: why for names, why in _REFUSED.items() for name in names.split()}
"""Other optimizers of transformers, and why a run cannot have them."""
