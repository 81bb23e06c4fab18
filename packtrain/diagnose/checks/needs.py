"""What a run asks of this machine, as far as its config says: the checks compare it with the facts. Pure.

Without a config there is no run, and only what would trouble any run is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packtrain.config.schema import RunConfig
from packtrain.diagnose.facts.torch_side import Layer
from packtrain.errors import PacktrainError, Problem
from packtrain.plan.interfaces import NetworkSetting
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.memory import ADAPTER_BYTES, BYTES, Memory, estimate
from packtrain.plan.shapes import weights_of
from packtrain.plan.surroundings import Surroundings


@dataclass(frozen=True, slots=True)
class Needs:
    """A run as this machine sees it: `per_node` of its processes on each of `nodes` machines.

    `memory` is its estimate, or a sentence on why there is none. `problems` keep it from starting here, `obstacles` only
    from being started in this way. `layer` is what flash kernels would serve, `network` what
    packtrain tells NCCL and gloo. `final` is the size of the trained model,
    `disk` that of all that the run keeps (0: not known). `configured` is False where no run was named.
    """

    configured: bool = False
    nodes: int = 1
    per_node: int = 1
    strategy: str = "ddp"
    attention: str = "auto"
    packed: bool = True
    layer: Layer = field(default_factory=Layer)
    workers: int = 0
    main_address: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    network: tuple[NetworkSetting, ...] = ()
    memory: Memory | str = "no config"
    final: int = 0
    disk: int = 0
    problems: tuple[Problem, ...] = ()
    obstacles: tuple[Problem, ...] = ()

    @property
    def processes(self) -> int:
        """All of them."""
        return self.nodes * self.per_node


def needs_of(config: RunConfig, surroundings: Surroundings) -> Needs:
    """The needs of a run on a machine with these surroundings."""
    problems, obstacles = (), ()
    nodes, per_node = config.topology.nodes or 1, config.topology.gpus_per_node or max(surroundings.gpus, 1)
    main_address, network = config.topology.main_address, ()
    try:
        launch = plan_launch(config, surroundings, config.objective.kind)
    except PacktrainError as error:
        problems = error.problems
    else:
        nodes, per_node, obstacles, network = launch.nodes, launch.gpus_per_node, launch.obstacles, launch.network
        main_address = launch.accelerate.get("main_process_ip") if nodes > 1 else None
    memory = estimate(config, nodes * per_node, surroundings.gpu_memory)
    final, disk = _on_disk(config, memory)
    return Needs(
        configured=True,
        nodes=nodes,
        per_node=per_node,
        strategy=config.strategy.name,
        attention=config.model.attention,
        packed=config.packing.mode != "padding",
        layer=layer_of(config),
        workers=config.trainer.loader_workers,
        main_address=main_address,
        environment=config.topology.variables,
        network=network,
        memory=memory,
        final=final,
        disk=disk,
        problems=problems,
        obstacles=obstacles,
    )


def _on_disk(config: RunConfig, memory: Memory | str) -> tuple[int, int]:
    """Bytes of the trained model, and of it with all checkpoints; a stopped run writes one that was not asked for."""
    if isinstance(memory, str):
        return 0, 0
    width = BYTES.get(config.model.dtype, 2)
    final = memory.trained * ADAPTER_BYTES if config.peft.kind == "lora" else memory.parameters * width
    states = 8 * memory.trained  # two numbers in float32 of AdamW, the largest that is common
    kept = 1 if config.trainer.checkpoint_every is None else (config.trainer.keep_checkpoints or 0) + 1
    return final, final + kept * (final + states)


def layer_of(config: RunConfig) -> Layer:
    """The attention layer of the model, as far as its config on this machine says."""
    dtype = "bfloat16" if config.trainer.mixed_precision == "bf16" else config.model.dtype
    weights = weights_of(config.model)
    sizes = {} if isinstance(weights, str) else weights.sizes
    usual = Layer()

    def size(name: str) -> int | None:
        value = sizes.get(name)
        return value if isinstance(value, int) and value > 0 else None

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    keys = size("num_key_value_heads") or heads
    return Layer(
        dtype=usual.dtype if dtype == "auto" else dtype,
        group=max(1, heads // keys) if heads and keys else usual.group,
        head_dim=size("head_dim") or (hidden // heads if heads and hidden else usual.head_dim),
    )
