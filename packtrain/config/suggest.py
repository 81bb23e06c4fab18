"""From a key that does not exist to the one that was meant.

Three sources, in this order: the same name in another group, the names of other trainers (TRL, transformers, axolotl),
and close spelling.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from packtrain.config.keys import groups, keys

# The words of TRL, transformers, peft and axolotl for what we have under another name.
FOREIGN = {
    "base_model": "model.path",
    "batch_size": "batch.examples_per_step",
    "bf16": "trainer.mixed_precision",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.epsilon",
    "assistant_only_loss": "data.loss_on",
    "attn_implementation": "model.attention",
    "completion_only_loss": "data.loss_on",
    "cutoff_len": "data.max_length",
    "dataloader_num_workers": "trainer.loader_workers",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "dataset_num_proc": "data.workers",
    "dataset_path": "data.train",
    "datasets": "data.train",
    "ddp_timeout": "topology.step_timeout",
    "early_stopping_patience": "trainer.early_stop_patience",
    "eval_dataset": "data.eval",
    "eval_steps": "trainer.eval_every",
    "gpus": "topology.gpus_per_node",
    "global_batch_size": "batch.examples_per_step",
    "grad_clip": "optim.max_grad_norm",
    "gradient_clipping": "optim.max_grad_norm",
    "logging_steps": "trainer.log_every",
    "lora_alpha": "peft.alpha",
    "lora_dropout": "peft.dropout",
    "lora_r": "peft.r",
    "lora_target_modules": "peft.target_modules",
    "lr": "optim.learning_rate",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_kwargs": "optim.schedule_options",
    "lr_scheduler_type": "optim.schedule",
    "machine_rank": "topology.node_rank",
    "main_process_ip": "topology.main_address",
    "main_process_port": "topology.main_port",
    "master_addr": "topology.main_address",
    "master_port": "topology.main_port",
    "max_seq_length": "data.max_length",
    "micro_batch_size": "batch.examples_per_device",
    "model_id": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "model_type": "model.config.model_type",
    "neftune_noise_alpha": "objective.neftune_alpha",
    "router_aux_loss_coef": "objective.router_aux_coef",
    "nnodes": "topology.nodes",
    "nproc_per_node": "topology.gpus_per_node",
    "num_epochs": "trainer.epochs",
    "num_gpus": "topology.gpus_per_node",
    "num_machines": "topology.nodes",
    "num_nodes": "topology.nodes",
    "num_processes": "topology.gpus_per_node",
    "num_train_epochs": "trainer.epochs",
    "optimizer": "optim.name",
    "output": "trainer.output_dir",
    "packing_strategy": "packing.strategy",
    "padding_free": "packing.mode",
    "per_device_train_batch_size": "batch.examples_per_device",
    "precompute_ref_log_probs": "objective.reference",
    "pref_beta": "objective.beta",
    "pref_loss": "objective.loss_type",
    "ref_model": "objective.reference",
    "ref_model_adapters": "objective.reference",
    "ref_model_path": "objective.reference",
    "resume_from_checkpoint": "trainer.resume",
    "rl_beta": "objective.beta",
    "sample_packing": "packing.mode",
    "save_steps": "trainer.checkpoint_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "sequence_len": "data.max_length",
    "tokenizer_name_or_path": "model.tokenizer",
    "torch_dtype": "model.dtype",
    "train_batch_size": "batch.examples_per_step",
    "train_dataset": "data.train",
    "truncation_mode": "data.overlong",
    "use_cpu": "topology.kind",
    "val_set_size": "data.eval",
    "warmup_ratio": "optim.warmup_steps",
}
ADVICE = {
    "deepspeed": "The strategy is chosen by name: strategy=zero2, strategy=zero3 …",
    "fsdp": "The strategy is chosen by name: strategy=fsdp2.",
    "lora": "Choose peft=lora; r, alpha and the others are keys of peft.",
    "gradient_accumulation_steps": "Accumulation is derived: set batch.examples_per_step, and what fits a device "
    "with batch.examples_per_device or batch.tokens_per_device.",
    "per_device_eval_batch_size": "Evaluation uses the same limits: batch.examples_per_device, batch.tokens_per_device.",
    "warmup_ratio": "Set optim.warmup_steps; a value below 1 is a fraction of all steps.",
}


def near(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.6) -> list[str]:
    """The names of `known` that are spelt most like `name`, in whatever case."""
    spelt = {one.lower(): one for one in known}
    return [spelt[one] for one in difflib.get_close_matches(name.lower(), spelt, n=count, cutoff=cutoff)]


def advice_for(path: str) -> str:
    """What to write in place of the unknown key `path`."""
    group, _, rest = path.partition(".")
    leaf = path.rpartition(".")[2]
    if leaf in ADVICE:
        return ADVICE[leaf]
    if path in keys():  # a dotted name used as one key
        return f"Nest it: {group}: {{{rest}: …}}."
    same_name = [known for known in keys() if known.rpartition(".")[2] == leaf]
    meant = same_name or ([FOREIGN[leaf]] if leaf in FOREIGN else [])
    if not meant:
        inside = [f"{group}.{name}" for name in near(rest, _names(group))] if group in groups() and rest else []
        meant = inside or near(path, [*keys(), *groups()]) or _by_leaf(leaf)
    if meant:
        return f"Did you mean {' or '.join(meant)}?"
    if group in groups():
        return f"The keys of {group} are {', '.join(_names(group))}."
    return f"The groups are {', '.join(groups())}; `packtrain sft -h` lists all keys."


def _names(group: str) -> list[str]:
    return [path.partition(".")[2] for path in keys() if path.startswith(f"{group}.")]


def _by_leaf(leaf: str) -> list[str]:
    leaves = {path.rpartition(".")[2]: path for path in keys()}
    foreign = near(leaf, FOREIGN, 1, 0.8)
    return [leaves[name] for name in near(leaf, leaves)] or [FOREIGN[name] for name in foreign]
