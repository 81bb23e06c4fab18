"""Combinations of keys that cannot work, though each key alone is fine. Pure: no files, no devices, no environment.

Only what is certainly wrong is refused here; what depends on the data (a document longer than a row) is checked as it is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Set

from packtrain.config.keys import Fault, suggest
from packtrain.config.rules.objectives import check_objective
from packtrain.config.rules.resume_keys import resume_rules
from packtrain.config.rules.schedules import schedule_rules
from packtrain.config.schema import COLUMNS, SHARDED_WEIGHTS, DataSource, RunConfig, Topology, sources
from packtrain.redact import speaks_of_secrets
from packtrain.wording import shortened

_ADAMW = ("adamw_torch", "adamw_torch_fused")
_OF_LAUNCH = r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_ADDR|MASTER_PORT|PACKTRAIN_.*)"  # set for each process


def check(config: RunConfig, given: Set[str]) -> list[Fault]:
    """Everything that is impossible in `config`, for the keys `given` with a value that is not their default."""
    return [
        *_model(config),
        *_data(config, given),
        *_batch(config),
        *schedule_rules(config.optim),
        *_rounding(config),
        *_trainer(config, given),
        *resume_rules(config.trainer),
        *check_objective(config, given),
        *_peft(config, given),
        *_topology(config.topology),
        *check_strategy(config),
    ]


def notes(config: RunConfig) -> Iterator[str]:
    """What is possible, and mostly not meant."""
    trained = {_place(source) for source in sources(config.data.train)}
    for source in sources(config.data.eval, "eval"):
        if _place(source) in trained:
            yield f"data.eval: {source.path} is trained on too, so its loss says nothing about other documents"


def _place(source: DataSource) -> tuple[str, str, str | None]:
    return os.path.normpath(os.path.expanduser(source.path)), source.split, source.subset


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` on both sides of `value`, in words: "8192 or 16384"."""
    below = value // unit * unit
    return " or ".join(str(one) for one in (below, below + unit) if one > 0)


def _model(config: RunConfig) -> Iterator[Fault]:
    model = config.model
    made = "model_type" in model.config
    if model.path is None and model.init == "pretrained":
        what = "there are no pretrained weights without a model"
        fix = "Set model.path, or model.init=random" + ("." if made else " with model.config.model_type.")
        yield Fault(("model.path",), what, fix)
    elif model.path is None and not made:
        what = "there is neither a model to take the shape from nor a model type"
        yield Fault(("model.path",), what, "Set model.path, or model.config.model_type (e.g. llama).")
    if made and model.path is None and model.tokenizer is None:
        what = "a model made from model.config brings no tokenizer"
        yield Fault(("model.tokenizer",), what, "Name a hub id, a folder, or quickstart.")


def _data(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    data = config.data
    if data.train is None or data.train == []:
        yield Fault(("data.train",), "there is nothing to train on", "Set it to a file, a folder, or a hub id.")
    for key, value in (("data.train", data.train), ("data.eval", data.eval)):
        if any(not source.path for source in sources(value)):
            yield Fault((key,), "a source has no path", "Give it a file, a folder, or a hub id.")
    if data.eval in ([], "None", "none"):
        yield Fault(("data.eval",), f"found {data.eval!r}, which is no source", "null holds nothing out.")
    if isinstance(data.eval, float) and not 0 < data.eval < 1:
        what = f"found the number {data.eval:g}"
        yield Fault(("data.eval",), what, "A fraction of data.train lies between 0 and 1; null holds nothing out.")
    if isinstance(data.eval, str) and re.fullmatch(r"[0-9.]+ ?%?", data.eval):
        what = f"found the text {data.eval!r}"
        yield Fault(("data.eval",), what, "A fraction is a number without quotes, e.g. 0.05.")
    kind, pairs = config.objective.kind, config.objective.traits.pairs
    if data.format in ("preference", "ranked") and kind == "sft":
        what = "packtrain sft has no use for preference pairs"
        yield Fault(("data.format",), what, "Choose messages or prompt_completion; pairs are for packtrain dpo.")
    if data.overlong in ("keep_start", "keep_end") and not pairs:
        what = f"{data.overlong} is for preference pairs"
        fix = "Choose truncate, split, drop or error, or use packtrain dpo (objective.kind=dpo)."
        yield Fault(("data.overlong",), what, fix)
    elif data.max_length is None and data.overlong not in ("auto", "truncate"):
        what = f"without a longest length nothing is overlong, so {data.overlong!r} does nothing"
        fix = "Set data.max_length, or leave data.overlong out."
        yield Fault(("data.overlong", "data.max_length"), what, fix, because="data.max_length")
    if data.format == "text" and data.loss_on != "all" and "data.loss_on" in given:
        what = f"plain text has no {data.loss_on} part to train on"
        yield Fault(("data.loss_on", "data.format"), what, "Set data.loss_on to all or auto.")
    for ours, theirs in data.columns.items():
        if ours not in COLUMNS:
            fix = suggest(ours, COLUMNS, f"Ours are {', '.join(COLUMNS)}.")
            fix = f"Ours comes first: {{{theirs}: {ours}}}." if theirs in COLUMNS else fix
            yield Fault((f"data.columns.{ours}",), f"packtrain has no column {ours!r}", fix)
    row, each = config.batch.limits(config.packing.mode)[1], config.objective.traits.documents
    if row is not None and data.max_length is not None and data.max_length * each > row:
        origin = "" if config.batch.tokens_per_device else " (its default for packed rows)"
        thing = "documents" if each == 1 else "pairs of documents"
        what = f"{thing} of {data.max_length} tokens do not fit in rows of {row}{origin}"
        fix = f"Set batch.tokens_per_device to at least {data.max_length * each}, or data.max_length to at most {row // each}."
        yield Fault(("data.max_length", "batch.tokens_per_device"), what, fix)


def _batch(config: RunConfig) -> Iterator[Fault]:
    batch = config.batch
    both = ("batch.examples_per_step", "batch.tokens_per_step")
    if batch.examples_per_step is None and batch.tokens_per_step is None:
        what = "the size of an optimizer step is not set"
        fix = "Set batch.examples_per_step (e.g. 32: the same training in every packing mode) or batch.tokens_per_step."
        yield Fault(("batch.examples_per_step",), what, fix)
    elif batch.examples_per_step is not None and batch.tokens_per_step is not None:
        what = "a step is measured in documents or in tokens, not in both"
        yield Fault(both, what, "Keep one of them and set the other to null.")
    row = config.batch.limits(config.packing.mode)[1]
    if batch.tokens_per_step is None:
        return
    if row is None:
        what = "a step of a number of tokens is made of rows whose length is not set"
        fix = "Set batch.tokens_per_device (the length of a row), or use batch.examples_per_step."
        yield Fault(("batch.tokens_per_step", "batch.tokens_per_device"), what, fix)
    elif batch.tokens_per_step % row:
        what = f"{batch.tokens_per_step} tokens are not a whole number of rows of {row} (batch.tokens_per_device)"
        fix = f"Nearest that are: {nearest_multiples(batch.tokens_per_step, row)}."
        yield Fault(("batch.tokens_per_step", "batch.tokens_per_device"), what, fix)


def _rounding(config: RunConfig) -> Iterator[Fault]:
    """optim.bf16_rounding where it has nothing to do, or would do something else than it says."""
    rounding, lora, name = config.optim.bf16_rounding, config.peft.kind == "lora", config.strategy.name
    if rounding == "auto":
        return
    trained = (
        bool(config.peft.modules_to_save) or config.objective.traits.scores
    )  # beside adapters: a reward model's head
    whole = config.peft.merge or not config.model.is_base_for_adapters
    where, at_updates = "optim.bf16_rounding", rounding in ("stochastic", "nearest")
    fix = "Take it away."
    if lora and not trained and (at_updates or not whole):
        what = "adapters are float32, in training and in final/"
        yield Fault((where, "peft.kind"), what, fix, because="peft.kind")
    elif config.model.dtype == "float32" and rounding != "final" and not (lora and whole):
        what = "the weights are float32, so none is rounded"
        yield Fault((where, "model.dtype"), what, fix, because="model.dtype")
    elif at_updates and name.startswith("zero"):
        what = f"DeepSpeed, and so {name}, keeps float32 copies of the weights, which take the updates"
        yield Fault((where, "strategy.name"), what, "Take it away, or use strategy=fsdp2.")


def _trainer(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    trainer = config.trainer
    if trainer.max_steps is not None and "trainer.epochs" in given:
        what = "the length of the run is set twice, in steps and in epochs"
        fix = "Keep one of them."
        yield Fault(("trainer.epochs", "trainer.max_steps"), what, fix, because="trainer.max_steps")
    if config.data.eval is None and trainer.eval_every is not None:
        what = "there is nothing to evaluate on"
        fix = "Set data.eval to a source, or to a fraction such as 0.05."
        yield Fault(("trainer.eval_every",), what, fix, because="data.eval")
    if trainer.early_stop_patience is not None and (config.data.eval is None or trainer.eval_every is None):
        what, fix = "stopping early needs evaluations during training", "Set data.eval and trainer.eval_every."
        lacking = "data.eval" if config.data.eval is None else "trainer.eval_every"
        yield Fault(("trainer.early_stop_patience",), what, fix, because=lacking)
    if trainer.restarts and trainer.checkpoint_every is None:
        what = "without checkpoints a run could only be started again from its beginning"
        yield Fault(("trainer.restarts", "trainer.checkpoint_every"), what, "Set trainer.checkpoint_every.")
    nodes, least = config.topology.nodes, config.topology.min_nodes
    if least is not None and not trainer.restarts:
        what = "it does nothing without trainer.restarts"
        yield Fault(("topology.min_nodes", "trainer.restarts"), what, "Set trainer.restarts, or take the key away.")
    elif least is not None and nodes is not None and least > nodes:
        what = f"{least} machines at least, of {nodes}"
        yield Fault(("topology.min_nodes", "topology.nodes"), what, f"Set it to at most {nodes}.")
    if trainer.mixed_precision == "bf16" and config.model.dtype == "float16":
        what = "bf16 computation over float16 weights is not supported"
        yield Fault(("trainer.mixed_precision", "model.dtype"), what, "Set model.dtype to float32 or bfloat16.")
    elif config.model.dtype == "float16" and config.peft.kind == "none":
        what = "weights in float16 cannot be trained: small updates are 0 there, and the loss soon is NaN"
        yield Fault(("model.dtype",), what, "Set it to float32 or bfloat16, or train adapters on them: peft=lora.")
    if trainer.on_spike == "rollback" and trainer.checkpoint_every is None:
        what, fix = "there is no checkpoint to go back to", "Set trainer.checkpoint_every, or trainer.on_spike=skip."
        yield Fault(("trainer.on_spike",), what, fix, because="trainer.checkpoint_every")
    if not trainer.output_dir.strip():
        yield Fault(("trainer.output_dir",), "the run folder has no name", "Set it, e.g. to runs/sft.")
    elif "\n" in trainer.output_dir:
        yield Fault(("trainer.output_dir",), "it has a line break", "Write it in one line.")
    elif len(path := os.fsencode(trainer.output_dir)) > 3000 or max(map(len, path.split(b"/"))) > 240:
        yield Fault(("trainer.output_dir",), "the name is too long for a file system", "Name a shorter one.")


def _peft(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Keys that do nothing without adapters, and names of layers that can match none."""
    for key in sorted(given) if config.peft.kind == "none" else ():
        if key.startswith("peft."):
            what = "it does nothing without adapters (peft.kind is none)"
            yield Fault((key,), what, "Choose peft=lora, or take the key away.", because="peft.kind")
    targets = config.peft.target_modules
    if not targets:
        yield Fault(("peft.target_modules",), "it names no layer", "all-linear means every linear layer.")
    try:
        re.compile(targets if isinstance(targets, str) else "")
    except re.error as error:
        what = f"{shortened(targets)} is no regular expression: {error}"
        yield Fault(("peft.target_modules",), what, "A text is a pattern for whole names; of names write a list.")
    for key in ("target_modules", "modules_to_save"):
        value = getattr(config.peft, key)
        if isinstance(value, list) and any(not name.strip() for name in value):
            yield Fault((f"peft.{key}",), "a layer without a name", "Write the names of layers, e.g. q_proj.")


def check_strategy(config: RunConfig) -> Iterator[Fault]:
    """The impossible combinations of strategy.name with other keys."""
    name, optimizer = config.strategy.name, config.optim.name
    if name == "zero3_offload" and optimizer not in _ADAMW:
        what = f"DeepSpeed's optimizer on the host is AdamW, and would take the place of {optimizer} without a word"
        yield Fault(("optim.name", "strategy.name"), what, "Choose optim=adamw, or strategy=zero3.")
    elif name != "ddp" and optimizer not in (*_ADAMW, "sgd"):
        what = f"{optimizer} keeps a state for a whole weight, and {name} gives it parts of weights: the training would be another"
        yield Fault(("optim.name", "strategy.name"), what, "Choose optim=adamw or optim=sgd, or strategy=ddp.")
    if name != "ddp" and config.model.dtype == "float16":
        what = f"float16 weights cannot be spread by {name}"
        fix = "Set model.dtype to float32 or bfloat16, or strategy=ddp."
        yield Fault(("model.dtype", "strategy.name"), what, fix)
    if name in SHARDED_WEIGHTS and config.trainer.torch_compile:
        what = f"{name} gathers the weights of a layer by hooks, which compiled layers do not run"
        fix = "Take it away, or choose strategy=ddp or zero2."
        yield Fault(("trainer.torch_compile", "strategy.name"), what, fix)
    if name in SHARDED_WEIGHTS and config.model.attention == "per_document":
        what = f"per_document calls the model once per document, and under {name} all processes must call it together"
        fix = "Choose strategy=zero2, or packing.mode=padding with model.attention=auto."
        yield Fault(("model.attention", "strategy.name"), what, fix)


def _topology(topology: Topology) -> Iterator[Fault]:
    if topology.kind in ("single", "local") and (topology.nodes or 1) > 1:
        what = f"topology={topology.kind} is one machine, not {topology.nodes}"
        yield Fault(("topology.nodes", "topology.kind"), what, "Choose topology=auto, slurm or manual.")
    for name in ("main_address", "node_rank"):
        if getattr(topology, name) is not None and topology.kind in ("single", "local"):
            what = f"topology={topology.kind} is one machine, which has no use for it"
            yield Fault((f"topology.{name}", "topology.kind"), what, "Take the key away, or use topology=manual.")
    if topology.kind == "single" and (topology.gpus_per_node or 1) > 1:
        what = f"one process cannot use {topology.gpus_per_node} GPUs"
        fix = "Choose topology=local, or take topology.gpus_per_node away."
        yield Fault(("topology.gpus_per_node", "topology.kind"), what, fix)
    if (address := topology.main_address) is not None and (
        address.count(":") == 1 or not re.fullmatch(r"[\w.:%-]+", address)  # two colons at least: IPv6
    ):
        what = f"{address!r} is neither a host name nor an address"
        yield Fault(("topology.main_address",), what, "Write the machine alone; its port is topology.main_port.")
    for name, value in topology.environment.items():
        path = f"topology.environment.{name}"
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield Fault((path,), f"{name!r} is no name of a variable", "It has letters, digits and _ only.")
        elif re.fullmatch(_OF_LAUNCH, name):
            yield Fault((path,), "packtrain sets it itself, for each process", "Take it away; use topology's own keys.")
        elif (
            not isinstance(value, (str, int, float)) or isinstance(value, bool) or value != value or "\0" in str(value)
        ):
            found = "a value not shown" if speaks_of_secrets(name) else shortened(value)
            yield Fault((path,), f"found {found}", "Allowed: text or number.")
        if speaks_of_secrets(name):
            what = "by its name it is a secret, which would be written to config.yaml"
            fix = f"Take it away, and export {name} in the shell or your job's environment."
            yield Fault((path,), what, fix)
