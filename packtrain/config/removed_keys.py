"""Keys that packtrain once had, with what to write in place of each: an old config is refused with the new spelling.

The config.yaml of a run lists every key: one that stands at its old default says nothing, and is passed over.
"""

from collections.abc import Mapping
from typing import Any

from packtrain.config.objective import OPTIONS

_OPTION = "It is now an entry of objective.options, by TRL's name: {}."
REMOVED = {
    "data.workers": "packtrain tokenises in one process per CPU core that it may use, 16 at most: taskset limits the cores.",
    "optim.epsilon": "AdamW's epsilon is transformers' default, 1e-8.",
    **{f"objective.{name}": _OPTION.format(name) for options in OPTIONS.values() for name in options},
    "objective.kto_loss": "It is now objective.loss.",
    "objective.loss_type": "It is now objective.loss.",
    "objective.neftune_alpha": "packtrain adds no noise to embeddings (NEFTune): remove the key.",
    "objective.router_aux_coef": "Set model.config.output_router_logits=true, and the model's own router_aux_loss_coef in model.config.",
    "optim.master_weights": "true is the default of optim.bf16_rounding; false is optim.bf16_rounding=nearest.",
    "optim.rounding": "It is now optim.bf16_rounding=stochastic.",
    "topology.account": "It is now a line of topology.sbatch: --account=NAME.",
    "topology.checkpoint_timeout": "A checkpoint may take three times topology.step_timeout, and the others wait so long.",
    "topology.constraint": "It is now a line of topology.sbatch: --constraint=FEATURES.",
    "topology.container": "Start it in topology.command, which ends with packtrain: docs/slurm.md has the lines.",
    "topology.container_mounts": "They are now options of the container that topology.command starts: docs/slurm.md.",
    "topology.container_runtime": "It is now named in topology.command: docs/slurm.md has the lines.",
    "topology.cpus_per_node": "It is now a line of topology.sbatch: --cpus-per-task=CORES.",
    "topology.gres": "It is now a line of topology.sbatch: --gres=gpu:TYPE:N, or --gres=none for a job without GPUs.",
    "topology.gpu_memory": "It is now an option: packtrain plan --gpu-memory 80.",
    "topology.job_name": "It is now a line of topology.sbatch: --job-name=NAME.",
    "topology.memory": "It is now a line of topology.sbatch: --mem=500G, or --mem=0 for all of a machine.",
    "topology.modules": "They are now lines of topology.setup: module load NAME.",
    "topology.partition": "It is now a line of topology.sbatch: --partition=NAME.",
    "topology.qos": "It is now a line of topology.sbatch: --qos=NAME.",
    "topology.venv": "Set topology.command=VENV/bin/packtrain, or activate it in topology.setup and set topology.command=packtrain.",
    "trainer.float32_matmul": "float32 products are IEEE's. Any GPU with TF32 has bfloat16, which is faster: trainer.mixed_precision.",
    "trainer.largest_first": "The largest micro-batch runs before step 1 on GPUs, except with trainer.torch_compile.",
    "trainer.loader_workers": "packtrain assembles batches in one process ahead of each GPU, and in the training process on a CPU.",
    "trainer.save_dtype": "It is now optim.bf16_rounding=never (final/ in float32) or final (in bfloat16).",
    "trainer.sample_tokens": "Answers to trainer.samples have up to 64 tokens.",
}
"""The path of a removed key → what to write in its place."""
_DEFAULTS: dict[str, Any] = {
    **{f"objective.{name}": item.default for options in OPTIONS.values() for name, item in options.items()},
    "objective.kto_loss": "kto",
    "objective.loss_type": "sigmoid",
    "optim.master_weights": "auto",
    "optim.rounding": "nearest",
    "optim.epsilon": 1e-8,
    "topology.checkpoint_timeout": 1800,
    "topology.container_mounts": [],
    "topology.container_runtime": "pyxis",
    "topology.modules": [],
    "trainer.float32_matmul": "highest",
    "trainer.largest_first": "auto",
    "trainer.sample_tokens": 64,
    "trainer.save_dtype": "auto",
}
"""Of those whose default was not null."""


def without_old_defaults(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` (key → value) of a group without the removed keys at their old defaults."""
    paths = {name: f"{group}.{name}" for name in values}
    passed_over = {name for name, path in paths.items() if path in REMOVED and values[name] == _DEFAULTS.get(path)}
    if (
        paths.keys() >= {"loss", "loss_type"} and values["loss"] == "nll"
    ):  # once for packtrain sft alone, whatever the kind
        passed_over.add("loss")
    return {name: value for name, value in values.items() if name not in passed_over}
