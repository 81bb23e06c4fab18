"""Launcher settings of accelerate and DeepSpeed: one source for the plan, the launch and training.

Every launcher setting is on the command line AND in the YAML: without --config_file, accelerate mixes in the user's answers to
`accelerate config`. The launcher only starts processes; model/spread.py makes the strategy active in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packtrain.plan.topology import Processes

WORKER = ("packtrain", "worker")  # python -m …
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}
"""DeepSpeed's strategies and their ZeRO stages."""
_NOT_KNOWN_YET = "MAIN_ADDRESS"  # in plans for machines whose names are not known yet
BUCKET = 50_000_000  # numbers that are reduced or gathered at once: 200 MB in float32
_FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": False,  # True would load weights only in the first process
    "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,  # the model itself does trainer.gradient_checkpointing
}


def deepspeed_config(strategy: str, *, dtype: str, max_grad_norm: float) -> dict[str, Any] | None:
    """Return the DeepSpeed JSON as a dict; None if `strategy` is not DeepSpeed's.

    Batch sizes are 1: a loader item is a whole optimizer step, and the trainer tells the engine which of its micro-batches is the last.
    bf16 means that the WEIGHTS are bfloat16 (DeepSpeed then keeps float32 copies in its optimizer); `dtype` "auto" leaves that open
    until the model is loaded. Gradients are summed and reduced in float32: in bfloat16 their rounding would depend on the number of
    micro-batches and processes.
    """
    stage = STAGES.get(strategy)
    if stage is None:
        return None
    zero: dict[str, Any] = {
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
    if strategy == "zero3_offload":
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


def launch_config(
    processes: Processes, node: int, strategy: str, *, deepspeed_file: str, port: int, gpus: bool
) -> dict[str, Any]:
    """Return accelerate's YAML for machine `node`; `deepspeed_file` is the later path of the DeepSpeed JSON.

    CPUs use MULTI_GPU too: accelerate's `cpu` path ignores the number of processes. Several machines need `standard`: without a hostfile
    DeepSpeed's own launcher (pdsh) starts independent trainings, with exit code 0, and writes the whole environment to
    ~/.deepspeed_env.
    """
    alone = processes.num_processes == 1 or processes.joins
    if alone:
        kind_settings: dict[str, Any] = {"distributed_type": "NO"}
    elif strategy in STAGES:
        settings = {
            "deepspeed_config_file": deepspeed_file,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": False,  # proofs and adapters come before the weights are sharded
        }
        kind_settings = {"distributed_type": "DEEPSPEED", "deepspeed_config": settings}
    elif strategy == "fsdp2":
        kind_settings = {"distributed_type": "FSDP", "fsdp_config": dict(_FSDP2)}
    else:
        kind_settings = {"distributed_type": "MULTI_GPU"}
    config = {
        "compute_environment": "LOCAL_MACHINE",
        **kind_settings,
        "num_machines": 1 if alone else processes.nodes,
        "num_processes": 1 if alone else processes.num_processes,  # accelerate counts them over all machines
        "machine_rank": node,
        "mixed_precision": "no",  # trainer.mixed_precision is set when the model is made
        "use_cpu": not gpus and alone,
        "debug": False,
    }
    if not alone:
        address = "127.0.0.1" if processes.nodes == 1 else processes.main_address or _NOT_KNOWN_YET
        config |= {"main_process_ip": address, "main_process_port": port, "same_network": True, "gpu_ids": "all"}
    return config


def launch_argv(
    accelerate: str, config_file: str, config: dict[str, Any], worker: Sequence[str], *, join_timeout_s: int
) -> list[str]:
    """Return the `accelerate launch` command that runs `python -m WORKER worker…` in every process of `config`.

    Processes that have not found each other after `join_timeout_s` seconds give up.
    """
    kind = config["distributed_type"]
    flags = ["--config_file", config_file]
    if kind == "DEEPSPEED":
        flags += ["--use_deepspeed", "--deepspeed_config_file", config["deepspeed_config"]["deepspeed_config_file"]]
        flags += ["--deepspeed_multinode_launcher", "standard", "--zero3_init_flag", "false"]
    elif kind == "FSDP":
        flags += ["--use_fsdp", "--fsdp_version", "2", "--fsdp_cpu_ram_efficient_loading", "false"]
    else:
        flags.append("--multi_gpu")
    flags.append("--same_network")
    for name in ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port"):
        flags += [f"--{name}", str(config[name])]
    flags += ["--rdzv_conf", f"timeout={join_timeout_s}", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [accelerate, "launch", *flags, "-m", *WORKER, *worker]
