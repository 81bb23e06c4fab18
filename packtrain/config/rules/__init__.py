"""Rules about combinations of keys that cannot work, checked before loading. Pure: no files, devices, environment.

Only certain faults are refused here. Faults that depend on the data (a document longer than a row) are found as the data is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from packtrain.config.fault import Fault, is_number
from packtrain.config.keys import check_resume_despite, suggest
from packtrain.config.rules.fitting import check_fitting
from packtrain.config.rules.objectives import check_objective
from packtrain.config.schema import Optim, RunConfig, Topology, name_sources, sources
from packtrain.objectives.spec import names_of_figures
from packtrain.redact import speaks_of_secrets
from packtrain.strategies.spec import STRATEGIES
from packtrain.wording import shortened

# launchers set these for each process
_LAUNCH_VARIABLE = r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_ADDR|MASTER_PORT|PACKTRAIN_.*)"
_COUNTS = {"num_decay_steps": 1, "num_stable_steps": 0, "timescale": 1}  # the smallest value of each
_POSITIVE = ("num_cycles", "power")
_RATES = ("min_lr", "lr_end")
_FORMS = ("warmup_type", "decay_type")
SCHEDULE_OPTIONS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "num_stable_steps", "num_cycles", *_FORMS, "min_lr_ratio"),
}
"""Arguments of transformers' schedules beside the step counts."""


def check_combinations(config: RunConfig, given: Set[str]) -> list[Fault]:
    """Return all impossible combinations in `config`. The user gave the keys `given` values other than their defaults."""
    return [
        *_model(config),
        *_data(config, given),
        *_stages(config, given),
        *_streaming(config, given),
        *_batch(config),
        *_schedule(config.optim),
        *_rounding(config),
        *_trainer(config, given),
        *check_resume_despite(config.trainer.resume_despite),
        *check_objective(config, given),
        *check_fitting(config, given),
        *_quantized(config),
        *_topology(config.topology),
        *check_strategy(config),
        *check_checkpointing(config),
    ]


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` on both sides of `value`, in words: "8192 or 16384"."""
    below = value // unit * unit
    return " or ".join(str(item) for item in (below, below + unit) if item > 0)


def _model(config: RunConfig) -> Iterator[Fault]:
    model = config.model
    if model.path is not None:
        return
    if model.init == "pretrained":
        what, fix = "there are no pretrained weights without a model", "Set model.path, or model.init=random."
        yield Fault(("model.path",), what, fix)
    elif "model_type" not in model.config:
        what = "neither a model nor a model type gives the shape of the new model"
        yield Fault(("model.path",), what, "Set model.path, or model.config.model_type (e.g. llama).")
    elif model.tokenizer is None:
        what = "a model made from model.config brings no tokenizer"
        yield Fault(("model.tokenizer",), what, "Name a hub id, a folder, or quickstart.")


def _data(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    data = config.data
    if data.train is None or data.train == []:
        yield Fault(("data.train",), "there is nothing to train on", "Set it to a file, a folder, or a hub id.")
    for key, value in (("data.train", data.train), ("data.eval", data.eval)):
        if any(not source.path for source in sources(value)):
            yield Fault((key,), "a source has no path", "Give it a file, a folder, or a hub id.")
    held_out = data.eval
    for name in held_out if isinstance(held_out, dict) else ():
        if name in names_of_figures() or not re.fullmatch(r"[\w-]+", name, re.ASCII):
            what = f"a set cannot be called {name!r}"
            fix = "Use letters, digits, _ and -, and not the name of a figure, such as loss."
            yield Fault((f"data.eval.{name}",), what, fix)
    none = [] in held_out.values() if isinstance(held_out, dict) else False
    if (
        held_out in ([], {})
        or none
        or (isinstance(held_out, float) and not 0 < held_out < 1)
        or str(held_out).endswith("%")
    ):
        fix = "A fraction of data.train lies between 0 and 1, as in 0.05; null holds nothing out."
        yield Fault(("data.eval",), f"{held_out!r} is neither a source nor a fraction", fix)
    if data.max_length is None and data.overlong not in ("auto", "truncate"):
        what = f"data.max_length is null, so no document is overlong, and {data.overlong!r} does nothing"
        fix = "Set data.max_length, or leave data.overlong out."
        yield Fault(("data.overlong", "data.max_length"), what, fix, because="data.max_length")
    if data.format == "text" and data.loss_on != "all" and "data.loss_on" in given:
        what = f"plain text has no {data.loss_on} part to train on"
        yield Fault(("data.loss_on", "data.format"), what, "Set data.loss_on to all or auto.")
    row, each = config.batch.limits(config.packing.mode)[1], config.objective.spec.documents
    together = config.strategy.sequence_parallel
    row = row if row is None or together == "auto" else row * together
    if row is not None and together != "auto" and data.max_length is not None and data.max_length * each > row:
        origin = "" if config.batch.tokens_per_device else " (its default for packed rows)"
        thing = "documents" if each == 1 else "pairs of documents"
        what = f"{thing} of {data.max_length} tokens do not fit in rows of {row}{origin}"
        least = -(-data.max_length * each // together)
        fix = f"Set batch.tokens_per_device to at least {least}, or data.max_length to at most {row // each}."
        yield Fault(("data.max_length", "batch.tokens_per_device"), what, fix)


def _stages(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Yield faults of source names, of the order of stages, and of keys beside them."""
    stages, key, train = config.data.stages, "data.stages", sources(config.data.train)
    names = name_sources(train)
    own = [source.name for source in train if source.name]
    if twice := next((name for name in own if own.count(name) > 1), None):
        yield Fault(("data.train",), f"two sources are called {twice!r}", "Give each a name of its own.")
    if not stages:
        return
    ends = [stage.until for stage in stages]
    if ends[-1] is not None or None in ends[:-1] or ends[:-1] != sorted({end for end in ends[:-1] if end}):
        fix = "Write {until: 1000, weights: {a: 1}}, {until: 2000, …}, and at last {weights: {a: 1, b: 2}}."
        yield Fault((key,), "each stage but the last needs its last step (until), later than the stage before", fix)
    for at, stage in enumerate(stages):
        for name, weight in stage.weights.items():
            path = (f"{key}[{at}].weights.{name}",)
            if name not in names:
                yield Fault(path, "no source has this name", suggest(name, names, f"Sources are {', '.join(names)}."))
            elif not is_number(weight) or weight < 0:
                yield Fault(path, f"found {shortened(weight)}", "Allowed: number ≥ 0.")
        if not any(is_number(weight) and weight > 0 for weight in stage.weights.values()):
            yield Fault((f"{key}[{at}].weights",), "it takes from no source", "Give one a weight above 0.")
    weighed = any(source.weight != 1 or source.samples for source in train)
    against = (
        ("data.train", weighed, "stages replace the weights and samples of sources"),
        ("data.temperature", config.data.temperature != 1, "stages already set the shares of the sources"),
        (
            "batch.examples_per_step",
            config.batch.examples_per_step is None,
            "stages share out a fixed number of examples per step",
        ),
        ("trainer.max_steps", config.trainer.max_steps is None, "a run by stages has no epochs, only steps"),
        ("data.shuffle", config.data.shuffle == "by_prefix", "stages draw examples one by one"),
        (
            "objective.reference",
            config.objective.reference == "precomputed",
            "it is computed for epochs, and stages have none",
        ),
    )
    for other, is_set, what in against:
        if is_set:
            yield Fault((other, key), what, f"Set {other}, or leave it out, or leave {key} out.")


def _streaming(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Yield keys that need the whole data, if it is a stream. Without a stream, yield the keys of streams."""
    data, key, train = config.data, "data.streaming", sources(config.data.train)
    if not data.streaming:
        if "data.shuffle_buffer" in given:
            fix = f"Set {key}=true, or remove it."
            yield Fault(("data.shuffle_buffer", key), "only streaming data can use it", fix, because=key)
        if any(source.repeat for source in train):
            yield Fault(
                ("data.train", key), "only streaming data can use repeat", f"Set {key}=true, or write a weight."
            )
        return
    trainer, alike = config.trainer, "only data that is read as a whole shows which documents begin alike"
    shares = config.objective.spec.examples == "documents" and bool(config.packing.share_prefix)
    against = (
        ("trainer.max_steps", trainer.max_steps is None, "the length of a stream is unknown, so it has no epochs"),
        ("data.eval", isinstance(data.eval, float | int) and data.eval, "a fraction of a stream cannot be held out"),
        (
            "batch.examples_per_step",
            config.batch.examples_per_step is None,
            "only data that is read as a whole can fill rows",
        ),
        ("data.shuffle", data.shuffle == "by_prefix", alike),
        ("packing.share_prefix", shares, alike),
        (
            "data.temperature",
            data.temperature != 1,
            "it uses the sizes of sources, which a stream does not know: weights are its shares",
        ),
        (
            "data.train",
            any(item.samples for item in train),
            "samples count an epoch, which a stream does not have: weights are its shares",
        ),
        ("data.max_length", data.max_length is None, "the lengths of documents are unknown before they are read"),
        (
            "objective.reference",
            config.objective.reference == "precomputed",
            "it is computed for all data before step 1",
        ),
        ("trainer.on_spike", trainer.on_spike == "rollback", "a stream cannot go back; use skip or stop"),
        (
            "strategy.sequence_parallel",
            config.strategy.sequence_parallel != 1,
            "the longest document decides it, which a stream does not know",
        ),
    )
    for other, is_set, what in against:
        if is_set:
            yield Fault((other, key), what, f"Change {other}, or leave {key} out.")


def _batch(config: RunConfig) -> Iterator[Fault]:
    batch, row = config.batch, config.batch.limits(config.packing.mode)[1]
    both = ("batch.examples_per_step", "batch.tokens_per_step")
    limits = ("batch.tokens_per_step", "batch.tokens_per_device")
    if batch.examples_per_step is None and batch.tokens_per_step is None:
        fix = "Set batch.examples_per_step (e.g. 32: the same training in every packing mode) or batch.tokens_per_step."
        yield Fault(both[:1], "the size of an optimizer step is not set", fix)
    elif batch.examples_per_step is not None and batch.tokens_per_step is not None:
        what = "the size of a step is set in documents and in tokens"
        yield Fault(both, what, "Keep one of them and set the other to null.")
    if batch.tokens_per_step is not None and row is None:
        what = "a step in tokens is made of rows, and the length of a row is not set"
        yield Fault(limits, what, "Set batch.tokens_per_device (the length of a row), or use batch.examples_per_step.")
    elif batch.tokens_per_step is not None and row and batch.tokens_per_step % row:
        what = f"{batch.tokens_per_step} tokens are not a whole number of rows of {row} (batch.tokens_per_device)"
        yield Fault(limits, what, f"The nearest sizes that are: {nearest_multiples(batch.tokens_per_step, row)}.")


def _schedule(optim: Optim) -> Iterator[Fault]:
    known, where = SCHEDULE_OPTIONS.get(optim.schedule, ()), ("optim.schedule_options", "optim.schedule")
    for name, value in optim.schedule_options.items():
        path = (f"optim.schedule_options.{name}",)
        # without this limit, an absurd rate would be used
        most = optim.learning_rate if name in _RATES else 1
        if name not in known:
            fix = suggest(name, known, f"It takes {', '.join(known) or 'no options'}.")
            yield Fault(path, f"the schedule {optim.schedule} has no such option", fix)
        elif name in _FORMS:
            if value not in ("linear", "cosine", "1-sqrt"):
                yield Fault(path, f"found {shortened(value)}", "Allowed: linear|cosine|1-sqrt.")
        elif name in _COUNTS:
            if type(value) is not int or value < _COUNTS[name]:
                yield Fault(path, f"found {shortened(value)}", f"Allowed: whole number ≥ {_COUNTS[name]}.")
        elif name in _POSITIVE:
            if not is_number(value) or value <= 0:
                yield Fault(path, f"found {shortened(value)}", "Allowed: number > 0.")
        elif not is_number(value) or not 0 <= value <= most:
            yield Fault(path, f"found {shortened(value)}", f"Allowed: number from 0 to {most:g}.")
    if optim.schedule == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & set(optim.schedule_options)) != 1:
        what = "the schedule cosine_with_min_lr needs its lowest learning rate, set once"
        yield Fault(where, what, "Set {min_lr_rate: 0.1} (of the peak) or {min_lr: 2e-6}.")
    if optim.schedule == "warmup_stable_decay" and "num_decay_steps" not in optim.schedule_options:
        what = "the schedule warmup_stable_decay needs the length of its decay"
        yield Fault(where, what, "Set {num_decay_steps: 100}.")
    if optim.schedule == "constant" and optim.warmup_steps:
        what, fix = "the schedule constant has no warm-up", "Choose optim.schedule=constant_with_warmup."
        yield Fault(("optim.warmup_steps", "optim.schedule"), what, fix)


def _rounding(config: RunConfig) -> Iterator[Fault]:
    """Yield faults of optim.bf16_rounding. It has nothing to do, or would not do what it says."""
    rounding, lora, strategy = config.optim.bf16_rounding, config.peft.kind == "lora", config.strategy.spec
    if rounding in ("auto", "undithered"):
        return
    # a reward model's head is trained beside adapters
    trained = bool(config.peft.modules_to_save) or config.objective.spec.scores
    whole = config.peft.merge or not config.model.is_base_for_adapters
    key, at_updates = "optim.bf16_rounding", rounding == "stochastic"
    if lora and not trained and (at_updates or not whole):
        what = "adapters are float32, in training and in final/"
        yield Fault((key, "peft.kind"), what, "Remove it.", because="peft.kind")
    elif config.model.dtype == "float32" and rounding != "final" and not (lora and whole):
        what = "the weights are float32, so nothing is rounded"
        yield Fault((key, "model.dtype"), what, "Remove it.", because="model.dtype")
    elif at_updates and strategy.keeps_masters:
        what = f"{strategy.name} keeps float32 copies of the weights, which take the updates"
        yield Fault((key, "strategy.name"), what, "Remove it, or use strategy=fsdp2.")


def _trainer(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    trainer, held_out = config.trainer, config.data.eval
    if trainer.max_steps is not None and "trainer.epochs" in given:
        what = "the length of the run is set twice, in steps and in epochs"
        yield Fault(("trainer.epochs", "trainer.max_steps"), what, "Keep one of them.", because="trainer.max_steps")
    if held_out is None and trainer.eval_every is not None:
        fix = "Set data.eval to a source, or to a fraction such as 0.05."
        yield Fault(("trainer.eval_every",), "there is nothing to evaluate on", fix, because="data.eval")
    if trainer.early_stop_patience is not None and (held_out is None or trainer.eval_every is None):
        what, fix = "stopping early needs evaluations during training", "Set data.eval and trainer.eval_every."
        lacking = "data.eval" if held_out is None else "trainer.eval_every"
        yield Fault(("trainer.early_stop_patience",), what, fix, because=lacking)
    if trainer.restarts and trainer.checkpoint_every is None:
        what = "without checkpoints a run could only restart from its beginning"
        yield Fault(("trainer.restarts", "trainer.checkpoint_every"), what, "Set trainer.checkpoint_every.")
    if config.topology.min_nodes is not None and not trainer.restarts:
        what = "it does nothing without trainer.restarts"
        yield Fault(("topology.min_nodes", "trainer.restarts"), what, "Set trainer.restarts, or remove the key.")
    if trainer.mixed_precision in ("bf16", "fp8") and config.model.dtype == "float16":
        what = f"{trainer.mixed_precision} computation over float16 weights is not supported"
        yield Fault(("trainer.mixed_precision", "model.dtype"), what, "Set model.dtype to float32 or bfloat16.")
    elif config.model.dtype == "float16" and config.peft.kind == "none":
        what = "weights in float16 cannot be trained: small updates become 0, and the loss soon becomes NaN"
        yield Fault(("model.dtype",), what, "Set it to float32 or bfloat16, or train adapters on them: peft=lora.")
    against_fp8 = dict[str, str]()
    if config.peft.kind != "none":
        against_fp8["peft.kind"] = "torchao's layers make gradients of frozen weights too, for nothing"
    if config.objective.spec.reference:
        against_fp8["objective.kind"] = "losses that compare with a reference have not been tried in 8 bits"
    for key, what in against_fp8.items() if trainer.mixed_precision == "fp8" else ():
        yield Fault(("trainer.mixed_precision", key), what, "Set trainer.mixed_precision=auto.")
    if trainer.activation_offload and trainer.gradient_checkpointing != "full":
        what = "without full recomputation, layers keep weights beside their activations, and these would move to the host too"
        keys = ("trainer.activation_offload", "trainer.gradient_checkpointing")
        yield Fault(keys, what, "Set trainer.gradient_checkpointing=full.")
    if trainer.torch_compile and trainer.tokens_per_mlp_tile:
        what = "a compiled MLP runs all tokens in one program, so it has no tiles"
        yield Fault(("trainer.tokens_per_mlp_tile", "trainer.torch_compile"), what, "Keep one of them.")
    if trainer.on_spike == "rollback" and trainer.checkpoint_every is None:
        what, fix = "there is no checkpoint to go back to", "Set trainer.checkpoint_every, or trainer.on_spike=skip."
        yield Fault(("trainer.on_spike",), what, fix, because="trainer.checkpoint_every")
    if not trainer.output_dir.strip() or "\n" in trainer.output_dir:
        what = "it has a line break" if "\n" in trainer.output_dir else "the run folder has no name"
        yield Fault(("trainer.output_dir",), what, "Name a folder, e.g. runs/sft.")


def _quantized(config: RunConfig) -> Iterator[Fault]:
    """Yield faults of model.quantize: it is impossible, or would not train what it says."""
    if config.model.quantize == "no":
        return
    if config.peft.kind == "none":
        what = "quantised weights cannot be trained: they have too few values for an update to show"
        yield Fault(("model.quantize", "peft.kind"), what, "Train adapters on them: peft=lora.", because="peft.kind")
    if not config.model.is_base_for_adapters:
        what = "only a model's own files can be loaded in fewer bits, not new weights or a .gguf file"
        yield Fault(("model.quantize", "model.path"), what, "Name a hub id or a folder, or remove the key.")
    if config.trainer.mixed_precision == "fp8":
        what = "products in 8 bits need weights in 16 bits, not quantised ones"
        yield Fault(("model.quantize", "trainer.mixed_precision"), what, "Set trainer.mixed_precision=auto.")


def check_strategy(config: RunConfig) -> Iterator[Fault]:
    """Yield impossible combinations of strategy.name with other keys."""
    spec = config.strategy.spec
    yield from spec.rules(config)
    if config.strategy.shard_within == "machine" and not spec.shards_within_machines:
        able = " or ".join(one.name for one in STRATEGIES.all().values() if one.shards_within_machines)
        what = f"only {able} can spread the model within a machine, not {spec.name}"
        yield Fault(("strategy.shard_within", "strategy.name"), what, f"Remove it, or choose strategy={able}.")
    if config.strategy.sequence_parallel != 1:
        yield from _split_rows(config)
    backend = config.model.backend
    if spec.shards_weights and backend and backend.by_document:
        what = f"{backend.name} calls the model once per document, and under {spec.name} all processes must call it together"
        fix = "Choose strategy=zero2, or packing.mode=padding with model.attention=auto."
        yield Fault(("model.attention", "strategy.name"), what, fix)


def _split_rows(config: RunConfig) -> Iterator[Fault]:
    key, mode, backend = "strategy.sequence_parallel", config.packing.mode, config.model.backend
    if mode == "padding":
        yield Fault((key, "packing.mode"), "padded batches are not split over processes", "Choose packing.mode=packed.")
    elif backend and backend.why_not_split:
        what = f"{backend.name} {backend.why_not_split}"
        yield Fault((key, "model.attention"), what, "Choose model.attention=auto.")
    elif config.batch.limits(mode)[1] is None:
        what = "without a row length, no document is long enough to be split"
        yield Fault((key, "batch.tokens_per_device"), what, "Set batch.tokens_per_device.")
    elif config.batch.tokens_per_step is not None:
        what = "a step in tokens consists of rows of one process, and has no place for split documents"
        yield Fault(
            (key, "batch.tokens_per_step"), what, "Set batch.examples_per_step in place of batch.tokens_per_step."
        )
    elif config.packing.strategy == "in_order":
        what = "a step begins with its split documents, so it cannot keep the order of the data"
        yield Fault((key, "packing.strategy"), what, "Choose packing.strategy=best_fit.")
    elif config.model.experts == "loop":
        what = "a part of a row may be empty, and a loop over experts without tokens gives their weights no gradient"
        yield Fault((key, "model.experts"), what, "Choose model.experts=auto.")


def check_checkpointing(config: RunConfig) -> Iterator[Fault]:
    """Yield impossible combinations of trainer.gradient_checkpointing with other keys."""
    trainer, key = config.trainer, "trainer.gradient_checkpointing"
    if trainer.gradient_checkpointing == "selective" and trainer.torch_compile:
        what = "compiled parts hide their products, so no result could be kept"
        fix = f"Set {key}=full or every_2, or trainer.torch_compile=false."
        yield Fault((key, "trainer.torch_compile"), what, fix)
    if trainer.gradient_checkpointing == "selective" and trainer.tokens_per_mlp_tile:
        what = "selective keeps a product of the MLP for all tokens, and tiles must not keep it"
        yield Fault((key, "trainer.tokens_per_mlp_tile"), what, f"Set {key}=full or every_2, or leave the tiles out.")


def _topology(topology: Topology) -> Iterator[Fault]:
    kind = topology.kind
    if kind in ("single", "local") and (topology.nodes or 1) > 1:
        what = f"topology={kind} is one machine, not {topology.nodes}"
        yield Fault(("topology.nodes", "topology.kind"), what, "Choose topology=auto, slurm or manual.")
    for name in ("main_address", "node_rank") if kind in ("single", "local") else ():
        if getattr(topology, name) is not None:
            what = f"topology={kind} runs on one machine and does not use this key"
            yield Fault((f"topology.{name}", "topology.kind"), what, "Remove the key, or use topology=manual.")
    if kind == "single" and (topology.gpus_per_node or 1) > 1:
        fix = "Choose topology=local, or take topology.gpus_per_node away."
        what = f"one process cannot use {topology.gpus_per_node} GPUs"
        yield Fault(("topology.gpus_per_node", "topology.kind"), what, fix)
    address = topology.main_address
    # IPv6 addresses have two colons or more
    if address is not None and (address.count(":") == 1 or not re.fullmatch(r"[\w.:%-]+", address)):
        what = f"{address!r} is neither a host name nor an address"
        yield Fault(("topology.main_address",), what, "Write only the host; its port is topology.main_port.")
    for name, value in topology.environment.items():
        path = (f"topology.environment.{name}",)
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield Fault(path, f"{name!r} is no name of a variable", "Use letters, digits and _.")
        elif re.fullmatch(_LAUNCH_VARIABLE, name):
            yield Fault(path, "packtrain sets it itself, for each process", "Remove it; use topology's own keys.")
        elif speaks_of_secrets(name):
            what = "its name says that it is a secret, and it would be written to config.yaml"
            yield Fault(path, what, f"Remove it, and export {name} in the shell or your job's environment.")
        elif not (is_number(value) or (isinstance(value, str) and "\0" not in value)):
            yield Fault(path, f"found {shortened(value)}", "Allowed: text or number.")
