"""The table of optimizers. It needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

_NEEDS_WHOLE = "keeps a state for a whole weight"
_EPS = {"eps": 1e-8}
STEPPED = 2**26
"""Numbers in float32 at a time while 16-bit weights take their step in float32 (train/optim/float32_step.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer: its class, arguments and needs. Names and arguments follow transformers."""

    made_by: str
    """Its class, as MODULE:NAME."""
    betas: int = 0
    """How many of these it takes: optim.beta1, optim.beta2 and 0.9999."""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """All other arguments except the learning rate."""
    states: int
    """Numbers that it keeps per weight. A row and a column per matrix (adafactor) count as 0."""
    state_bytes: float | None = None
    """Bytes of each of these numbers. None: as many as the stepped weight has."""
    package: str = ""
    """Optional package that it needs; "" for none."""
    by_matrices: bool = False
    """Whether each group of weights has either only matrices of layers (`muon`) or none."""
    whole: str = ""
    """Why it cannot step parts of weights, as some strategies require; "" if it can."""
    on_host: bool = False
    """Whether DeepSpeed can run it on the host."""
    lists_weights: bool = False
    """Whether its step makes a temporary list of tensors, as large as the weights."""

    @property
    def advice(self) -> str:
        """Advice for a package that is installed and does not work; "" without a package."""
        works = f"{self.package} is installed, but does not work here: see python -c 'import {self.package}'."
        return f"{works} optim=adamw needs no extra package." if self.package else ""

    def arguments(self, beta1: float, beta2: float) -> dict[str, object]:
        """Return all arguments of its class, except the weights and the learning rate."""
        betas = {"betas": (beta1, beta2, 0.9999)[: self.betas]} if self.betas else {}
        return {**betas, **self.options}

    def load(self) -> type[Optimizer]:
        """Import the optimizer's class."""
        module, _, name = self.made_by.partition(":")
        return getattr(import_module(module), name)


def _bitsandbytes(base: OptimizerSpec, bits: int, **options: object) -> OptimizerSpec:
    return replace(base, state_bytes=1 if bits == 8 else None, options={**base.options, "optim_bits": bits, **options})


def _torchao(bits: int) -> OptimizerSpec:
    options = {**_EPS, "block_size": 256, "bf16_stochastic_round": False}
    made_by = f"torchao.optim:AdamW{bits}bit"
    return replace(_TORCHAO, made_by=made_by, options=options, state_bytes=bits / 8)


_ADAMW = OptimizerSpec(made_by="torch.optim:AdamW", betas=2, options=_EPS, states=2, on_host=True)
_TORCHAO = OptimizerSpec(made_by="", betas=2, states=2, package="torchao", whole=_NEEDS_WHOLE)
_BNB = OptimizerSpec(made_by="", betas=2, states=1, package="bitsandbytes", whole=_NEEDS_WHOLE)
_BNB_ADAMW = replace(_BNB, made_by="bitsandbytes.optim:AdamW", options=_EPS, states=2)
_ADEMAMIX = replace(_BNB, made_by="bitsandbytes.optim:AdEMAMix", betas=3, options={"alpha": 5.0, **_EPS}, states=3)
_LION = replace(_BNB, made_by="bitsandbytes.optim:Lion")
_RMSPROP = replace(_BNB, made_by="bitsandbytes.optim:RMSprop", betas=0)

OPTIMIZERS = {
    "adamw_torch": replace(_ADAMW, lists_weights=True),
    "adamw_torch_fused": replace(_ADAMW, options={**_EPS, "fused": True}),
    "adafactor": OptimizerSpec(
        made_by="transformers.optimization:Adafactor",
        options={"scale_parameter": False, "relative_step": False},
        states=0,
        whole=_NEEDS_WHOLE,
    ),
    "sgd": OptimizerSpec(made_by="torch.optim:SGD", states=0),
    "adagrad": OptimizerSpec(
        made_by="torch.optim:Adagrad", states=1, whole="makes its states before the weights are spread"
    ),
    "rmsprop": OptimizerSpec(made_by="torch.optim:RMSprop", states=1),
    "muon": OptimizerSpec(
        made_by="packtrain.train.optim.weight_groups:MuonAndAdamW",
        betas=2,
        options=_EPS,
        states=1,
        by_matrices=True,
        whole="needs whole matrices, to make them orthogonal",
    ),
    "adamw_torch_8bit": _torchao(8),
    "adamw_torch_4bit": _torchao(4),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), _bitsandbytes(_BNB_ADAMW, 8, is_paged=False)),
    "paged_adamw_8bit": _bitsandbytes(_BNB_ADAMW, 8, is_paged=True),
    "paged_adamw_32bit": _bitsandbytes(_BNB_ADAMW, 32, is_paged=True),
    "ademamix": _bitsandbytes(_ADEMAMIX, 32, is_paged=False),
    "ademamix_8bit": _bitsandbytes(_ADEMAMIX, 8, is_paged=False),
    "paged_ademamix_32bit": _bitsandbytes(_ADEMAMIX, 32, is_paged=True),
    "lion_8bit": _bitsandbytes(_LION, 8, is_paged=False),
    "lion_32bit": _bitsandbytes(_LION, 32, is_paged=False),
    "paged_lion_8bit": _bitsandbytes(_LION, 8, is_paged=True),
    "paged_lion_32bit": _bitsandbytes(_LION, 32, is_paged=True),
    "rmsprop_bnb": _bitsandbytes(_RMSPROP, 32),
    "rmsprop_bnb_8bit": _bitsandbytes(_RMSPROP, 8),
    "rmsprop_bnb_32bit": _bitsandbytes(_RMSPROP, 32),
}
_REFUSED = {
    "galore_adamw galore_adafactor apollo_adamw": "Its states hold Python objects. A checkpoint cannot store them, because reading it never runs code.",
    "lomo adalomo": "It updates in the backward pass, before the gradients of a step are summed, clipped and judged.",
    "schedule_free_adamw schedule_free_sgd schedule_free_radam": "Its weights in training differ from the weights that it saves.",
    "stable_adamw": "It counts its steps in its settings, which a resumed run would reset.",
    "paged_ademamix_8bit": "bitsandbytes fails to make its states; take ademamix_8bit.",
}
REFUSED = {name: why for names, why in _REFUSED.items() for name in names.split()}
"""Other optimizers of transformers, each with the reason why packtrain refuses it."""
