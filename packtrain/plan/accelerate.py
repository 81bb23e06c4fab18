"""How a strategy is said to accelerate's launcher: a part of its YAML and of its command line. Pure.

The launcher only starts processes; what is active in them is taken from the run's config by train/strategy.py, which drops
what the launcher leaves in their environment. Both say the same, since both come from here and from launch/deepspeed.py.
"""

from __future__ import annotations

from typing import Any

from packtrain.config.schema import RunConfig
from packtrain.plan.deepspeed import STAGES

FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": False,  # with it only the first process would load weights
    "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,  # trainer.gradient_checkpointing is the model's own
}


def accelerate_part(config: RunConfig, *, deepspeed_file: str) -> tuple[dict[str, Any], list[str]]:
    """What the strategy adds to accelerate's YAML, and its flags; `deepspeed_file` is where the DeepSpeed JSON will be.

    `standard` is a must on several machines: DeepSpeed's own launcher (pdsh) starts independent trainings where there is
    no hostfile, with exit code 0, and writes the whole environment to ~/.deepspeed_env.
    """
    name = config.strategy.name
    if name in STAGES:
        settings = {
            "deepspeed_config_file": deepspeed_file,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": False,  # proofs and adapters come before the weights are spread
        }
        flags = ["--use_deepspeed", "--deepspeed_config_file", deepspeed_file]
        flags += ["--deepspeed_multinode_launcher", "standard", "--zero3_init_flag", "false"]
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": settings}, flags
    if name == "fsdp2":
        flags = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_cpu_ram_efficient_loading", "false"]
        return {"distributed_type": "FSDP", "fsdp_config": dict(FSDP2)}, flags
    return {"distributed_type": "MULTI_GPU"}, ["--multi_gpu"]
