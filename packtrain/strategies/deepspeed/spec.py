"""Declaration of the ZeRO stages: DeepSpeed shards optimizer states, then gradients, then weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from packtrain.config import Fault
from packtrain.errors import Json
from packtrain.strategies.spec import Launcher, Load, Overhead, Part, StrategySpec, check_dtype, check_optimizer

if TYPE_CHECKING:
    from packtrain.config.schema import RunConfig

BUCKET = 50_000_000
"""Numbers that are reduced or gathered at once: 200 MB in float32."""
_REDUCED = 5 * 10**8
"""Elements of bfloat16 gradients that ZeRO-1 reduces at once (DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE)."""
_LIVE = 10**9
"""Gathered weights that ZeRO-3 keeps for reuse (stage3_max_live_parameters)."""
_SHARDS: dict[int, tuple[Part, ...]] = {
    1: ("optimizer",),
    2: ("gradients", "optimizer"),
    3: ("weights", "gradients", "optimizer"),
}


def _settings(stage: int, offloads: bool, dtype: str, max_grad_norm: float) -> Json:
    """Return DeepSpeed's JSON.

    Batch sizes are 1: a loader item is a whole optimizer step, and the trainer tells the engine which of its micro-batches is the last.
    bf16 means that the WEIGHTS are bfloat16 (DeepSpeed then keeps float32 copies in its optimizer); `dtype` "auto" leaves that open
    until the model is loaded. Gradients are summed and reduced in float32: in bfloat16 their rounding would depend on the number of
    micro-batches and processes.
    """
    zero: Json = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET,
    }
    if stage < 3:
        zero["allgather_bucket_size"] = BUCKET
    else:
        zero |= {
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 10_000,  # numbers: norms and biases stay whole
            "stage3_gather_16bit_weights_on_model_save": True,  # despite its name, it keeps the weights' own format
        }
    if offloads:
        zero |= {name: {"device": "cpu", "pin_memory": True} for name in ("offload_optimizer", "offload_param")}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": "auto" if dtype == "auto" else dtype == "bfloat16", "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # DeepSpeed's list lacks transformers' fused AdamW
        "steps_per_print": 10**9,  # in effect never: silences DeepSpeed's own lines on the terminal
        "wall_clock_breakdown": False,
    }


def _launcher(settings_file: str) -> Launcher:
    """Return the settings of accelerate's launcher.

    Several machines need `standard`: without a hostfile DeepSpeed's own launcher (pdsh) starts independent trainings, with exit code 0,
    and writes the whole environment to ~/.deepspeed_env.
    """
    settings = {
        "deepspeed_config_file": settings_file,
        "deepspeed_multinode_launcher": "standard",
        "zero3_init_flag": False,  # proofs and adapters come before the weights are sharded
    }
    flags = ("--use_deepspeed", "--deepspeed_config_file", settings_file, "--deepspeed_multinode_launcher", "standard")
    return Launcher(
        settings={"distributed_type": "DEEPSPEED", "deepspeed_config": settings},
        flags=(*flags, "--zero3_init_flag", "false"),
    )


def _rules(stage: int, offloads: bool, config: RunConfig) -> Iterator[Fault]:
    name, optimizer = config.strategy.name, config.optim.name
    if offloads and not config.optim.spec.on_host:
        what = f"DeepSpeed's optimizer on the host is AdamW, and it would silently replace {optimizer}"
        fix = "Choose optim=adamw, or strategy=zero3."
        yield Fault(("optim.name", "strategy.name"), what, fix, code="offload-needs-adamw")
    else:
        yield from check_optimizer(config)
    yield from check_dtype(config)
    if stage == 3 and config.trainer.torch_compile:
        what = f"{name} gathers the weights of a module in hooks, and compiled modules run no hooks"
        fix = "Remove it, or choose strategy=fsdp2, zero2 or ddp."
        yield Fault(("trainer.torch_compile", "strategy.name"), what, fix, code="zero3-compiled")
    if stage == 3 and config.model.quantize != "no":
        what = f"{name} cuts weights into pieces that do not match their scales"
        fix = "Use strategy=ddp, zero2 or fsdp2."
        yield Fault(("model.quantize", "strategy.name"), what, fix, code="zero3-quantised")
    elif config.model.quantize == "fp8":
        what = f"{name} cannot send the weights of fp8"
        yield Fault(("model.quantize", "strategy.name"), what, "Use nf4, or strategy=ddp.", code="quantised-not-sent")
    if config.trainer.mixed_precision == "fp8":
        what = "DeepSpeed has not been tried with layers that multiply in 8 bits"
        fix = "Set trainer.mixed_precision=auto."
        yield Fault(("trainer.mixed_precision", "strategy.name"), what, fix, code="zero-multiplies-fp8")
    if config.trainer.ema:
        what = "DeepSpeed keeps flat parts of weights, which are not averaged yet"
        fix = "Choose strategy=ddp or fsdp2, or remove the key."
        yield Fault(("trainer.ema", "strategy.name"), what, fix, code="zero-averages-weights")


def _memory(stage: int, load: Load) -> Overhead:
    """Count the buckets. 16-bit weights have float32 gradients in them."""
    model, rounded = load.model, load.model.width == 2
    if stage == 1 and rounded:  # no buckets: gradients are reduced when the step is complete
        reduced = 4 * min(_REDUCED, model.trained) if load.processes > 1 else 0
        return Overhead(buffers=0, reduced=reduced, communicators=2)
    if stage < 3:  # one bucket is reduced, in float32, while the other fills (overlap_comm)
        buffers = 2 * load.trained_width * BUCKET + (4 * min(BUCKET, model.trained) if rounded else 0)
    else:
        buffers = 4 * BUCKET + min(model.all, _LIVE) * model.width
    # ZeRO-2 and 3 copy gradients to float32 to step; DeepSpeed clones the group of all processes
    return Overhead(buffers=buffers, widened=4 if rounded and stage > 1 else 0, communicators=2)


def _stage(stage: int, *, offloads: bool = False) -> StrategySpec:
    return StrategySpec(
        name=f"zero{stage}_offload" if offloads else f"zero{stage}",
        order=1,
        run=f"{__package__}.run",
        shards=_SHARDS[stage],
        memory=partial(_memory, stage),
        launcher=_launcher,
        engine="deepspeed",
        engine_settings=partial(_settings, stage, offloads),
        rules=partial(_rules, stage, offloads),
        package="deepspeed",
        steps_in_backward=True,
        keeps_masters=True,
        offloads=offloads,
    )


SPECS = (_stage(1), _stage(2), _stage(3), _stage(3, offloads=True))
