"""The declaration of a strategy: what others need to know of it. It needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from packtrain.config import Fault
from packtrain.errors import Json
from packtrain.registry import Registry

if TYPE_CHECKING:
    from packtrain.config.schema import RunConfig

Part = Literal["weights", "gradients", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model in numbers, computed once for all configs that are tried.

    `width` is the bytes of a weight. Numbers of weights: `all`, in the `linear` layers and experts of its blocks, in the largest
    `block`, outside of blocks (`rest`, with any untied `embedding`), in the `largest` tensor, and `trained`.
    `sizes` are the known values of its own config. `packed`: bytes of a number in the linear layers if they are quantised.
    """

    width: int
    packed: float | None
    all: int
    linear: int
    block: int
    rest: int
    embedding: int
    largest: int
    trained: int
    sizes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A `model` on processes, to count the own memory of a strategy.

    Bytes of a weight: `trained_width` if it is trained, `compute` in products, `block_width` in a gathered block.
    """

    model: ModelSize
    trained_width: int
    compute: int
    block_width: float
    whole: bool
    """Whether all weights are trained, not only adapters."""
    processes: int
    machines: int
    copy_on_each: bool
    """Whether each machine has a copy of the sharded model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Bytes on each device that a strategy itself takes."""

    buffers: int
    """During the backward pass."""
    widened: int = 0
    """For each number that this process steps, during the optimizer's step."""
    reduced: int = 0
    """At least, during the optimizer's step."""
    communicators: int = 1
    """Communicators of NCCL, if there are several processes."""
    accumulated: int | None = None
    leaving: int | None = None
    """See plan/fit.py::Memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The strategy in accelerate's words: a part of its YAML, and the same as `flags`."""

    settings: Json
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """A strategy.

    It is one of the constant SPECS of a module `spec` in a folder. The module `run` there carries it out.
    """

    name: str
    """The value of strategy.name."""
    run: str
    """Module with the constants PLACEMENT (model/spread.py::Placement) and ENGINE, a subclass of train/engine.py::Engine."""
    shards: tuple[Part, ...]
    """Parts that it splits over the processes."""
    memory: Callable[[Load], Overhead]
    """Count the bytes that the strategy itself takes."""
    launcher: Callable[[str], Launcher]
    """Return the settings of accelerate's launcher. It is given the later path of `engine_settings`."""
    engine_settings: Callable[[str, float], Json] | None = None
    """Return the JSON of the engine, from model.dtype and optim.max_grad_norm. None: there is none."""
    engine: str = ""
    """The section of plan.json with `engine_settings`, which is null for other strategies."""
    rules: Callable[[RunConfig], Iterable[Fault]] = lambda config: ()
    """Return combinations with other keys that cannot work."""
    package: str = ""
    """The package that it needs beside packtrain's own."""
    steps_in_backward: bool = False
    """Whether its engine clips and updates within the last backward pass of a step."""
    keeps_masters: bool = False
    """Whether its optimizer keeps float32 copies of all trained weights."""
    casts_weights: bool = False
    """Whether layers see all weights in the format of mixed precision."""
    offloads: bool = False
    """Whether weights and optimizer states are in the memory of the machine."""
    shards_within_machines: bool = False
    """Whether each machine can have a copy of the sharded model (strategy.shard_within)."""
    order: int = 100
    """Strategies with a lower number are listed first."""

    @property
    def shards_weights(self) -> bool:
        """Whether no process has the whole model. All processes must call it the same number of times."""
        return "weights" in self.shards

    @property
    def gathers_by_engine(self) -> bool:
        """Whether an engine gathers the weights. It has no backward pass without an optimizer."""
        return self.shards_weights and self.steps_in_backward


STRATEGIES = Registry(StrategySpec, "strategy", package="packtrain.strategies", module="spec", attribute="SPECS")
DEFAULT = "ddp"
"""The strategy of a config that names none. Each process keeps everything."""


def packages_of_strategies() -> list[str]:
    """Return the packages that strategies need beside packtrain's own."""
    return list(dict.fromkeys(spec.package for spec in STRATEGIES.all().values() if spec.package))


def engine_sections(spec: StrategySpec, dtype: str, max_grad_norm: float) -> dict[str, dict[str, Any] | None]:
    """Return the settings of all engines by their section of plan.json; None for unused ones."""
    sections = dict[str, dict[str, Any] | None]((one.engine, None) for one in STRATEGIES.all().values() if one.engine)
    if spec.engine_settings is not None:
        sections[spec.engine] = spec.engine_settings(dtype, max_grad_norm)
    return sections


def check_optimizer(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault of an optimizer that cannot step parts of weights."""
    name, optimizer = config.strategy.name, config.optim.name
    if why := config.optim.spec.whole:
        what = f"{optimizer} {why}, and {name} gives it parts of weights: the training would differ"
        fix = "Choose optim=adamw or optim=sgd, or strategy=ddp."
        yield Fault(("optim.name", "strategy.name"), what, fix, code="optimizer-needs-whole-weights")


def check_dtype(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault of weights that cannot be split."""
    if config.model.dtype == "float16":
        what = f"float16 weights cannot be spread by {config.strategy.name}"
        fix = "Set model.dtype to float32 or bfloat16, or strategy=ddp."
        yield Fault(("model.dtype", "strategy.name"), what, fix, code="float16-not-spread")
