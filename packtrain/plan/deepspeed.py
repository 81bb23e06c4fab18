"""The DeepSpeed JSON of a run: one source for what `packtrain plan` shows, what the launcher is given and what trains.

Batches are left at one, as for transformers (train/arguments.py): a loader item is a whole optimizer step, and the trainer
tells the engine which of its micro-batches is the last. The optimizer and the schedule are transformers', so they are not
here. bf16 says that the WEIGHTS are bfloat16 (DeepSpeed then keeps float32 copies of them in its optimizer);
trainer.mixed_precision is autocast over the weights as they are, the same under every strategy, and not DeepSpeed's.
"""

from __future__ import annotations

from typing import Any

from packtrain.config.schema import RunConfig

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}
_BUCKET = 50_000_000  # numbers that are reduced or gathered at once: 200 MB in float32


def deepspeed_config(config: RunConfig, *, bf16_weights: bool | None = None) -> dict[str, Any] | None:
    """The JSON as a dict; None where the strategy is not DeepSpeed's.

    `bf16_weights` is whether the loaded model is bfloat16, for model.dtype=auto, of which nobody knows before ("auto" then).
    """
    stage = STAGES.get(config.strategy.name)
    if stage is None:
        return None
    known = config.model.dtype == "bfloat16" if config.model.dtype != "auto" else "auto"
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optim.max_grad_norm,
        "bf16": {"enabled": known if bf16_weights is None else bf16_weights},
        "zero_optimization": {"stage": stage, **_zero(stage, offload=config.strategy.name == "zero3_offload")},
        "zero_allow_untested_optimizer": True,  # transformers' fused AdamW is not on its list
        "steps_per_print": 10**9,  # its own lines on the terminal
        "wall_clock_breakdown": False,
    }


def _zero(stage: int, *, offload: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": _BUCKET}
    if stage < 3:
        return {**settings, "allgather_bucket_size": _BUCKET}
    settings |= {
        "stage3_prefetch_bucket_size": _BUCKET,
        "stage3_param_persistence_threshold": 10_000,  # numbers: norms and biases stay whole
        "stage3_gather_16bit_weights_on_model_save": True,  # in the weights' own format, whatever its name says
    }
    if offload:
        host = {"device": "cpu", "pin_memory": True}
        settings |= {"offload_optimizer": dict(host), "offload_param": dict(host)}
    return settings
