"""Rules about combinations of keys that cannot work, checked before loading. Pure: no files, devices, environment.

Most rules are rows of table.py; the functions here compute something. They refuse only what can never work. Faults that depend on the data
(a document longer than a row) are found while the data is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict

from packtrain.config import Fault, Option, is_list, is_mapping, is_number
from packtrain.config.keys import check_resume_despite, keys, suggest
from packtrain.config.objective import Objective
from packtrain.config.rules.slurm import check_sbatch, check_secrets
from packtrain.config.rules.table import check_table
from packtrain.config.schema import Data, Optim, Peft, RunConfig, Topology, Trainer, name_sources, sources
from packtrain.objectives.spec import OBJECTIVES, names_of_figures
from packtrain.wording import shortened, speaks_of_secrets

# launchers set these for each process
_LAUNCH_VARIABLE = r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_ADDR|MASTER_PORT|PACKTRAIN_.*)"


def is_pattern(value: object) -> bool:
    """Return whether it is the text of a regular expression."""
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except re.error:
        return False


def _is_counts(value: object) -> bool:
    return is_mapping(value) and all(is_pattern(at) and type(to) is int and to > 0 for at, to in value.items())


_SWITCH = Option(False, "true or false", lambda value: isinstance(value, bool))
_COUNTS = Option({}, "mapping of regular expressions to whole numbers ≥ 1", _is_counts)
_NAMES = Option(
    None,
    "list of names, or a regular expression",
    lambda value: all(map(is_pattern, value)) if is_list(value) else is_pattern(value),
)
_STARTS = (
    "true|gaussian. pissa and olora change the base model's weights, but final/ and a reference need the original ones; "
    "corda, eva and lora_ga need data of their own"
)
_NUMBERS = Option(None, "list of numbers of layers", lambda value: is_list(value) and {*map(type, value)} == {int})
PEFT_OPTIONS = {
    **dict.fromkeys(("use_dora", "use_rslora"), _SWITCH),
    "init_lora_weights": Option(True, _STARTS, lambda value: value is True or value == "gaussian"),
    "layers_to_transform": _NUMBERS,
    **dict.fromkeys(("layers_pattern", "exclude_modules"), _NAMES),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), _COUNTS),
}
"""The entries of peft.options, with names and defaults of PEFT's LoraConfig."""


def _whole(least: int) -> Option:
    return Option(least, f"whole number ≥ {least}", lambda value: type(value) is int and value >= least)


_POSITIVE = Option(1, "number > 0", lambda value: is_number(value) and value > 0)
_SHARE = Option(0, "number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
_FORM = Option("linear", "linear|cosine|1-sqrt", lambda value: value in ("linear", "cosine", "1-sqrt"))
SCHEDULE_OPTIONS: dict[str, dict[str, Option]] = {
    "cosine": {"num_cycles": _POSITIVE},
    "cosine_with_restarts": {"num_cycles": _POSITIVE},
    "cosine_with_min_lr": {"num_cycles": _POSITIVE, "min_lr": _SHARE, "min_lr_rate": _SHARE},
    "polynomial": {"lr_end": _SHARE, "power": _POSITIVE},
    "inverse_sqrt": {"timescale": _whole(1)},
    "warmup_stable_decay": {
        "num_decay_steps": _whole(1),
        "num_stable_steps": _whole(0),
        "num_cycles": _POSITIVE,
        **dict.fromkeys(("warmup_type", "decay_type"), _FORM),
        "min_lr_ratio": _SHARE,
    },
}
"""The entries of optim.schedule_options by schedule: arguments of transformers' schedules beside the step counts."""


def check_options(
    where: str,
    given: Mapping[str, object],
    known: Mapping[str, Option],
    unknown: str,
    elsewhere: Mapping[str, str] = {},
) -> Iterator[Fault]:
    """Yield faults of the arguments `given` at the key `where`. `unknown` says that there is none of a name.

    `elsewhere`: name of an argument that has another place → advice.
    """
    for name, value in given.items():
        if name not in known:
            fix = elsewhere.get(name) or suggest(name, known, f"It has {', '.join(known)}." if known else "Remove it.")
            yield Fault((f"{where}.{name}",), unknown, fix, code="no-such-option")
            continue
        default = known[name].default  # which need not be an allowed value, as null; true is not 1
        if (type(value), value) != (type(default), default) and not known[name].accepts(value):
            what = f"found {shortened(value)}"
            yield Fault((f"{where}.{name}",), what, f"Allowed: {known[name].allowed}.", code="bad-value")


def check_combinations(config: RunConfig, given: Set[str]) -> list[Fault]:
    """Return all impossible combinations in `config`. The user gave the keys `given` values other than their defaults."""
    return [
        *check_table(config, given),
        *_unused(config, given),
        *_sources(config),
        *_held_out(config.data),
        *_samples(config),
        *_best(config),
        *_measured(config.trainer, given),
        *_stages(config.data),
        *_rows(config),
        *_schedule(config.optim),
        *_rounding(config),
        *_patterns(config.optim, config.peft),
        *_losses(config.objective),
        *_options(config.objective),
        *check_resume_despite(config.trainer.resume_despite),
        *_environment(config.topology),
        *check_sbatch(config.topology),
        *check_secrets(asdict(config)),
        *config.objective.spec.rules(config, given),
        *config.strategy.spec.rules(config),
    ]


def check_strategy(config: RunConfig) -> list[Fault]:
    """Return impossible combinations of strategy.name with other keys."""
    return [fault for fault in check_combinations(config, set()) if "strategy.name" in fault.keys]


def check_checkpointing(config: RunConfig) -> list[Fault]:
    """Return impossible combinations of trainer.gradient_checkpointing with other keys."""
    key = "trainer.gradient_checkpointing"
    return [fault for fault in check_table(config, set()) if fault.keys[0] == key]


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` on both sides of `value`, in words: "8192 or 16384"."""
    below = value // unit * unit
    return " or ".join(str(item) for item in (below, below + unit) if item > 0)


def _unused(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Yield keys of other objectives, and keys of adapters without adapters."""
    for path in sorted(given):
        users = keys()[path].objectives
        if users and config.objective.kind not in users:
            fix = f"Remove it, or use packtrain {users[0]} (objective.kind={users[0]})."
            yield Fault((path,), f"it is a key of packtrain {' and '.join(users)}", fix, code="key-of-other-verb")
        if path.startswith("peft.") and config.peft.kind == "none":
            what = "it does nothing without adapters (peft.kind is none)"
            yield Fault((path,), what, "Choose peft=lora, or remove the key.", because="peft.kind", code="no-adapters")


def _sources(config: RunConfig) -> Iterator[Fault]:
    data, train = config.data, sources(config.data.train)
    for key, value in (("data.train", data.train), ("data.eval", data.eval)):
        if any(not source.path for source in sources(value)):
            yield Fault((key,), "a source has no path", "Give it a file, a folder, or a hub id.", code="no-source-path")
    names = [source.name for source in train if source.name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        what = f"two sources are called {twice!r}"
        yield Fault(("data.train",), what, "Give each a name of its own.", code="two-sources-alike")
    if data.stages and any(source.weight != 1 or source.samples for source in train):
        what, fix = "stages replace the weights and samples of sources", "Remove them, or data.stages."
        yield Fault(("data.train", "data.stages"), what, fix, code="stages-and-weights")
    if data.streaming and any(source.samples for source in train):
        what = "samples are the examples of an epoch, and a stream has none: use weights"
        yield Fault(("data.train", "data.streaming"), what, "Remove them, or data.streaming.", code="samples-of-stream")


def _samples(config: RunConfig) -> Iterator[Fault]:
    numbers = [sample for sample in config.trainer.samples if isinstance(sample, int)]
    if any(number < 0 for number in numbers):
        what = f"{min(numbers)} is no number of an example"
        yield Fault(("trainer.samples",), what, "The first example of data.eval is 0.", code="no-such-example")
    elif numbers and config.data.eval is None:
        what, fix = f"there is no example {numbers[0]}: data.eval is null", "Set data.eval, or write the question."
        yield Fault(("trainer.samples",), what, fix, because="data.eval", code="sample-without-eval")


def _best(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault if no evaluation has the figure in trainer.best_by. Figures of tasks are known at the first one."""
    trainer, named = config.trainer, config.trainer.best_by.partition(" ")[2]
    names = [
        "loss",
        *(figure.name for figure in config.objective.spec.figures),
        *(["right"] if trainer.answers else []),
    ]
    sets = ["", *(f"{name}_" for name in config.data.eval)] if is_mapping(config.data.eval) else [""]
    known = [f"eval_{part}{name}" for part in sets for name in names]
    if named and named not in known and not (trainer.tasks and re.match("eval_.+/.", named)):
        what, fix = f"evaluations have no figure {named!r}", suggest(named, known, f"They have {', '.join(known)}.")
        yield Fault(("trainer.best_by",), what, fix, code="no-such-figure")


def _measured(trainer: Trainer, given: Set[str]) -> Iterator[Fault]:
    every, evaluated = trainer.measure_every, trainer.eval_every
    if every and evaluated and every % evaluated:
        what = f"tasks and answers are measured with evaluations, and {every} is no multiple of {evaluated}"
        fix = f"Set it to {nearest_multiples(every, evaluated)}."
        yield Fault(("trainer.measure_every", "trainer.eval_every"), what, fix, code="measured-between-evaluations")
    idle = given & {
        f"trainer.{name}" for name in ("answer_tokens", "measured_rows", "measure_every", "measure_timeout")
    }
    for key in sorted(idle) if not (trainer.answers or trainer.tasks) else ():
        what, fix = "it does nothing without trainer.answers or trainer.tasks", "Set one of them, or remove the key."
        yield Fault((key,), what, fix, code="no-measures")


def _held_out(data: Data) -> Iterator[Fault]:
    held_out, key = data.eval, "data.eval"
    sets = held_out if isinstance(held_out, dict) else {}
    for name in sets:
        if name in names_of_figures() or not re.fullmatch(r"[\w-]+", name, re.ASCII):
            fix = "Use letters, digits, _ and -, and not the name of a figure, such as loss."
            yield Fault((f"{key}.{name}",), f"a set cannot be called {name!r}", fix, code="bad-set-name")
    fraction = isinstance(held_out, float) and not 0 < held_out < 1
    if fraction or held_out in ([], {}) or [] in sets.values() or str(held_out).endswith("%"):
        fix = "A fraction of data.train lies between 0 and 1, as in 0.05; null holds nothing out."
        yield Fault((key,), f"{held_out!r} is neither a source nor a fraction", fix, code="bad-held-out")
    elif isinstance(held_out, float) and data.streaming:
        fix = "Change data.eval, or leave data.streaming out."
        yield Fault(
            (key, "data.streaming"), "a fraction of a stream cannot be held out", fix, code="fraction-of-stream"
        )


def _stages(data: Data) -> Iterator[Fault]:
    """Yield faults of data.stages: their order, and the names and weights of sources."""
    names, key = name_sources(sources(data.train)), "data.stages"
    ends = [stage.until for stage in data.stages]
    if ends and (ends[-1] is not None or None in ends[:-1] or ends[:-1] != sorted({end for end in ends[:-1] if end})):
        fix = "Write {until: 1000, weights: {a: 1}}, {until: 2000, …}, and at last {weights: {a: 1, b: 2}}."
        what = "each stage but the last needs its last step (until), later than the stage before"
        yield Fault((key,), what, fix, code="stages-out-of-order")
    for at, stage in enumerate(data.stages):
        for name, weight in stage.weights.items():
            path = (f"{key}[{at}].weights.{name}",)
            if name not in names:
                what = "no source has this name"
                yield Fault(path, what, suggest(name, names, f"Sources are {', '.join(names)}."), code="no-such-source")
            elif not is_number(weight) or weight < 0:
                yield Fault(path, f"found {shortened(weight)}", "Allowed: number ≥ 0.", code="bad-value")
        if not any(is_number(weight) and weight > 0 for weight in stage.weights.values()):
            what = "it takes from no source"
            yield Fault((f"{key}[{at}].weights",), what, "Give one a weight above 0.", code="empty-stage")


def _rows(config: RunConfig) -> Iterator[Fault]:
    """Yield faults of rows: too short for a document, or no divisor of a step."""
    batch, row, ranks = config.batch, config.batch.limits(config.packing.mode)[1], config.strategy.sequence_parallel
    if batch.tokens_per_step is not None and row and batch.tokens_per_step % row:
        what = f"{batch.tokens_per_step} tokens are not a whole number of rows of {row} (batch.tokens_per_device)"
        fix = f"The nearest sizes that are: {nearest_multiples(batch.tokens_per_step, row)}."
        yield Fault(("batch.tokens_per_step", "batch.tokens_per_device"), what, fix, code="step-not-whole-rows")
    if row is None or ranks == "auto" or config.data.max_length is None:
        return
    documents = config.objective.spec.documents
    row, longest = row * ranks, config.data.max_length * documents
    if longest > row:
        origin = "" if batch.tokens_per_device else " (its default for packed rows)"
        thing = "documents" if documents == 1 else "pairs of documents"
        what = f"{thing} of {config.data.max_length} tokens do not fit in rows of {row}{origin}"
        fix = f"Set batch.tokens_per_device to at least {-(-longest // ranks)}, or data.max_length to at most {row // documents}."
        yield Fault(("data.max_length", "batch.tokens_per_device"), what, fix, code="row-too-short")


def _schedule(optim: Optim) -> Iterator[Fault]:
    options, key = optim.schedule_options, "optim.schedule_options"
    known = SCHEDULE_OPTIONS.get(optim.schedule, {})
    yield from check_options(key, options, known, f"the schedule {optim.schedule} has no such option")
    for name in ("min_lr", "lr_end"):
        lowest = options.get(name)
        # transformers would use it
        if name in known and isinstance(lowest, int | float) and optim.learning_rate < lowest <= 1:
            fix = f"Allowed: number from 0 to {optim.learning_rate:g}."
            yield Fault((f"{key}.{name}",), f"found {lowest}", fix, code="bad-value")
    if optim.schedule == "cosine_with_min_lr" and ("min_lr" in options) == ("min_lr_rate" in options):
        what = "the schedule cosine_with_min_lr needs its lowest learning rate, set once"
        fix = "Set {min_lr_rate: 0.1} (of the peak) or {min_lr: 2e-6}."
        yield Fault((key, "optim.schedule"), what, fix, code="no-lowest-rate")
    if optim.schedule == "warmup_stable_decay" and "num_decay_steps" not in options:
        what = "the schedule warmup_stable_decay needs the length of its decay"
        yield Fault((key, "optim.schedule"), what, "Set {num_decay_steps: 100}.", code="no-decay-length")


def _rounding(config: RunConfig) -> Iterator[Fault]:
    """Yield faults of optim.bf16_rounding: it would have no effect, or not the promised one."""
    rounding, lora, strategy = config.optim.bf16_rounding, config.peft.kind == "lora", config.strategy.spec
    if rounding in ("auto", "undithered"):
        return
    # a reward model's head is trained beside adapters
    trained = bool(config.peft.modules_to_save) or config.objective.spec.scores
    whole = config.peft.merge or not config.model.is_base_for_adapters
    key, at_updates = "optim.bf16_rounding", rounding == "stochastic"
    if lora and not trained and (at_updates or not whole):
        what = "adapters are float32, in training and in final/"
        yield Fault((key, "peft.kind"), what, "Remove it.", because="peft.kind", code="nothing-to-round")
    elif config.model.dtype == "float32" and rounding != "final" and not (lora and whole):
        what = "the weights are float32, so nothing is rounded"
        yield Fault((key, "model.dtype"), what, "Remove it.", because="model.dtype", code="nothing-to-round")
    elif at_updates and strategy.keeps_masters:
        what = f"{strategy.name} keeps float32 copies of the weights, which take the updates"
        yield Fault((key, "strategy.name"), what, "Remove it, or use strategy=fsdp2.", code="masters-kept-anyway")


def _patterns(optim: Optim, peft: Peft) -> Iterator[Fault]:
    """Yield faults of peft.target_modules, peft.options and optim.groups."""
    is_text = isinstance(peft.target_modules, str)
    if is_text and not is_pattern(peft.target_modules):
        what, fix = "it is no regular expression", "A text is a pattern for whole names; write several names as a list."
        yield Fault(("peft.target_modules",), what, fix, code="not-a-pattern")
    unknown = "adapters have no such option, or packtrain has not tried it"
    yield from check_options("peft.options", peft.options, PEFT_OPTIONS, unknown)
    if is_text and "layers_to_transform" in peft.options:
        what = "PEFT counts layers only where target_modules is a list of names"
        fix = "Set peft.target_modules to a list, such as [q_proj, v_proj], or name the layers in the pattern."
        yield Fault(("peft.options.layers_to_transform", "peft.target_modules"), what, fix, code="layers-need-names")
    for at, group in enumerate(optim.groups):
        if not group.match or not is_pattern(group.match):
            what, fix = f"{group.match!r} is no regular expression", r"Write a part of names, as in layers\.0\."
            yield Fault((f"optim.groups[{at}].match",), what, fix, code="not-a-pattern")


def _losses(objective: Objective) -> Iterator[Fault]:
    known, where = objective.spec.losses, ("objective.loss",)
    if objective.loss is None:
        return
    unknown = [loss for loss in objective.losses if loss not in known]
    for loss in unknown:
        others = [kind for kind, spec in OBJECTIVES.all().items() if loss in spec.losses]
        allowed = f"Allowed: {', '.join(known)}" if known else "Remove the key"
        fix = f"{allowed}; or use packtrain {others[0]} (objective.kind={others[0]})."
        yield Fault(where, f"{loss} is no loss of packtrain {objective.kind}", fix, code="no-such-loss")
    if not objective.losses:
        yield Fault(where, "there is no loss", "Name at least one.", code="no-loss")
    elif not unknown and isinstance(objective.loss, list) and not objective.spec.adds_losses:
        what = f"packtrain {objective.kind} has one loss, not a list"
        yield Fault(where, what, f"Write {objective.loss[0]}.", code="one-loss-only")


def _options(objective: Objective) -> Iterator[Fault]:
    elsewhere = {
        name: f"Use packtrain {kind} (objective.kind={kind})."
        for kind, spec in reversed(OBJECTIVES.all().items())
        for name in spec.options
    }
    unknown = f"packtrain {objective.kind} has no such option"
    yield from check_options("objective.options", objective.options, objective.spec.options, unknown, elsewhere)


def _environment(topology: Topology) -> Iterator[Fault]:
    for name, value in topology.environment.items():
        path = (f"topology.environment.{name}",)
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            yield Fault(path, f"{name!r} is no name of a variable", "Use letters, digits and _.", code="not-a-variable")
        elif re.fullmatch(_LAUNCH_VARIABLE, name):
            what = "packtrain sets it itself, for each process"
            yield Fault(path, what, "Remove it; use topology's own keys.", code="variable-of-launcher")
        elif speaks_of_secrets(name):
            what = "its name says that it is a secret, and it would be written to config.yaml"
            fix = f"Remove it, and export {name} in the shell or your job's environment."
            yield Fault(path, what, fix, code="has-secret")
        elif not (is_number(value) or (isinstance(value, str) and "\0" not in value)):
            yield Fault(path, f"found {shortened(value)}", "Allowed: text or number.", code="bad-value")
