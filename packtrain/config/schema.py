"""Every config key: a dataclass per group, a sentence (with the unit) per field.

`packtrain sft -h` and docs/config.md are generated from this file (the group objective from objective.py), validation reads it,
and nothing else defines a default. Fields are declared with `key(default, "sentence")`; rules/ refuses impossible combinations.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from packtrain.attention.spec import BACKENDS, Backend
from packtrain.config import is_list, is_mapping
from packtrain.config.objective import Objective, advanced, key
from packtrain.config.trainer import Trainer
from packtrain.optimizers import OPTIMIZERS, OptimizerSpec
from packtrain.registry import names_of_others
from packtrain.strategies.spec import DEFAULT, STRATEGIES, StrategySpec

PackingMode = Literal["padding", "padding_free", "packed"]
Split = Literal["train", "eval"]
Format = Literal["messages", "prompt_completion", "text", "preference", "sharegpt", "alpaca", "xlam", "tokenised"]
Rounding = Literal["auto", "never", "final", "stochastic", "undithered"]
Quantize = Literal["no", "nf4", "int8", "fp8"]
Shuffle = bool | Literal["by_prefix"]
SplitText = Literal["document", "line", "paragraph"]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab", "comet"]
LISTED = "lf:"
BUILT_IN = ("quickstart", "quickstart-pictures")
"""Names of data and of tokenizers that packtrain makes itself."""
"""Prefix of a data set's name in LLaMA-Factory's dataset_info.json."""
_ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:@([\w\[\]:%+-]+))?")
_IS_FILE = re.compile(r".*\.(jsonl|ndjson|json|csv|tsv|txt|parquet|arrow|gz|zst)", re.I)
DEFAULT_EXAMPLES = 8
DEFAULT_ROW_TOKENS = 8192


@dataclass(kw_only=True, slots=True, frozen=True)
class Model:
    """The model and its tokenizer."""

    path: str | None = key(
        None,
        "Hub id, folder, or .gguf file of the model; none for one made from model.config. A folder of adapters means their base "
        "model with the adapters: peft=lora trains them further, else they are merged.",
    )
    init: Literal["pretrained", "random"] = advanced("pretrained", "Load the weights, or start from random ones.")
    config: dict[str, Any] = advanced({}, "Values for the model's config; with model_type, no model.path is needed.")
    tokenizer: str | None = advanced(
        None, "Hub id or folder of the tokenizer (none: of the model), or quickstart, or quickstart-pictures."
    )
    revision: str | None = advanced(None, "Branch, tag or commit of a hub model.")
    trust_remote_code: bool = advanced(False, "Run model code that comes with the model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "float32", "Number format of the weights; auto keeps the file's format.", resume="decisive"
    )
    quantize: Quantize = key(
        "no", "Load layers in 4 bits (nf4) or 8 (int8, fp8), to train adapters on them (docs/precision.md)."
    )
    attention: str = key(
        "auto",
        "Attention of packed rows; auto takes the fastest that proves exact on the loaded model.",
        among=lambda: ("auto", *BACKENDS.all()),
    )
    kernels: str = advanced(
        "auto",
        "Fused norms, rotation and activations (liger-kernel), and adapted layers as one function (lora); auto takes both on a GPU where they "
        "prove exact on the loaded model; none: no gradients added in products either (docs/speed.md).",
        among=lambda: ("auto", "liger", "lora", "none", *names_of_others("packtrain.changes")),
    )
    experts: Literal["auto", "grouped", "fused", "loop"] = advanced(
        "auto",
        "Compute the experts of a layer one after the other (loop), all in one product (grouped), or in Liger's, which gathers tokens itself "
        "(fused); auto: grouped if a proof finds that it trains the same (docs/speed.md).",
    )

    towers: Literal["frozen", "trained"] = advanced(
        "frozen",
        "Towers of a multimodal model (vision, audio) and their projector: kept as they came, or trained on pictures of the data.",
        resume="decisive",
    )

    @property
    def backend(self) -> Backend | None:
        """The declaration of the attention backend, None for auto."""
        return None if self.attention == "auto" else BACKENDS[self.attention]

    @property
    def is_base_for_adapters(self) -> bool:
        """Whether saved adapters can name it by `path` as their base. Others cannot load a .gguf file or new weights by it."""
        return self.init != "random" and not str(self.path).endswith(".gguf")


@dataclass(kw_only=True, slots=True, frozen=True)
class DataSource:
    """One source of documents."""

    name: str | None = advanced(None, "Name in data.stages and in the figures; none for its path.")
    path: str = key(
        "",
        "Hub id (owner/name:subset@split), or a .jsonl/.json/.parquet/.arrow/.csv/.tsv/.txt file (text also .gz or .zst), a glob or a "
        "folder of these, a saved data set; lf:NAME of LLaMA-Factory's dataset_info.json; or quickstart, or quickstart-pictures.",
    )
    split: str = key("train", "Split of a hub data set, of a saved DatasetDict, or in file names of a folder.")
    subset: str | None = advanced(None, "Configuration name of a hub data set.")
    weight: float = key(1.0, "Times that a document appears in an epoch; 0.5: a random half.", above=0, maximum=10**4)
    samples: int | None = advanced(
        None, "In place of weight: exact number of its documents (pairs) in an epoch; they may repeat.", minimum=1
    )
    columns: dict[str, str] = advanced({}, "Its own column names, in place of data.columns.")


Sources = str | DataSource | list[str | DataSource]


@dataclass(kw_only=True, slots=True, frozen=True)
class Stage:
    """The shares of sources in some of the steps."""

    until: int | None = advanced(None, "Its last step; none for the last stage, which lasts to the end.", minimum=1)
    weights: dict[str, Any] = advanced({}, "Name of a source: its share, in any unit; 0 if not named.")


@dataclass(kw_only=True, slots=True, frozen=True)
class Data:
    """The documents, and how they become tokens."""

    train: Sources | None = key(None, "Training documents: a path or a list of sources.", resume="decisive")
    eval: float | dict[str, Sources] | Sources | None = key(
        None,
        "Held-out documents, or their fraction of data.train (0 to 1): sources, or sets by name, each with figures of its own "
        "({math: a.jsonl, chat: b.jsonl}; docs/data.md).",
    )
    format: Literal["auto", Format] = key("auto", "Shape of a row; auto recognises it from the columns.")
    columns: dict[str, str] = key({}, "Our column name: the file's, where they differ (e.g. {prompt: question}).")
    chat_template: str | None = key(
        None, "Jinja file, or a name from chatml, llama3, qwen3 …; the tokenizer's own if none. Saved with the model."
    )
    system: str | None = advanced(None, "System prompt of conversations that have none of their own.")
    loss_on: Literal["auto", "assistant", "completion", "all"] = key(
        "auto",
        "Tokens that are trained: every assistant turn, only the last answer, or all; auto is assistant for "
        "conversations, completion for prompt_completion, all for text.",
    )
    render: Literal["auto", "conversation", "turns"] = advanced(
        "auto",
        "Rendering of conversations: once, or by turns, where each trained answer follows the very prompt that asks for it; auto takes turns "
        "for rows that the chat template shows differently then (docs/data.md).",
        resume="decisive",
    )
    max_length: int | None = key(2048, "Most tokens of a document; none for no limit.", minimum=2)
    overlong: Literal["auto", "truncate", "drop", "split", "error"] = key(
        "auto",
        "Treatment of a document longer than data.max_length; auto splits running text, and truncates all else. "
        "Preference pairs are never split.",
    )
    max_picture_tokens: int | None = advanced(
        None,
        "Most tokens of a picture; larger ones are scaled down (docs/pictures.md). None for the model's own limit.",
        minimum=1,
    )
    split_text: SplitText = advanced(
        "document",
        "unit that becomes a row of a .txt file: the whole file, each line, or each part between blank lines.",
        of=lambda spec: spec.examples == "documents",
    )
    bad_rows: Literal["error", "skip"] = advanced("error", "Stop at the first unreadable row, or count and skip them.")
    leave_out: str | None = advanced(
        None,
        "Text file with a FILE:LINE on each line: rows of data.train that are left out (docs/inspect.md). packtrain inspect --ledger RUN "
        "--write FILE writes one.",
        resume="decisive",
    )
    shuffle: Shuffle = key(
        True,
        "New order of the documents in every epoch, from trainer.seed. by_prefix: a new order of families, whose documents begin alike and "
        "are then in the same step (sft; docs/modes.md).",
        resume="decisive",
    )
    streaming: bool = advanced(
        False,
        "Read and tokenise data.train while the run trains on it, in order, for data larger than memory and disk; files may be in a "
        "bucket (docs/data.md).",
        resume="decisive",
    )
    shuffle_buffer: int = advanced(
        10_000, "With data.streaming: rows that are shuffled together.", resume=None, minimum=1, maximum=10**7
    )
    stages: list[Stage] = advanced(
        [],
        "Weights of the sources by step, as shares ([{until: 1000, weights: {a: 1}}, …]; docs/data.md).",
        resume="decisive",
    )
    cache_dir: str | None = advanced(None, "Folder of tokenised data; none: ~/.cache/packtrain (or $PACKTRAIN_CACHE).")


def sources(value: object, role: Split = "train") -> list[DataSource]:
    """Return a value of data.train or data.eval as a list of sources. Named sets follow one another.

    [] for none and for a fraction. The text of BUILT_IN stands for its split of that `role`; owner/name:subset@split names a hub data set.
    """
    if is_mapping(value):
        return [source for item in value.values() for source in sources(item, role)]
    splits: dict[str, str] = dict.fromkeys(BUILT_IN, role)
    named = [
        DataSource(path=item, split=splits.get(item, "train")) if isinstance(item, str) else item
        for item in (value if is_list(value) else [value])
    ]
    return [_read_name(item) for item in named if isinstance(item, DataSource)]


def name_sources(sources: Sequence[DataSource]) -> tuple[str, ...]:
    """Return a distinct name for each source: its own, or its path. A name already taken gets a number."""
    names: list[str] = []
    for source in sources:
        name, number = source.name or source.path, 1
        while (named := name if number == 1 else f"{name} {number}") in names:
            number += 1
        names.append(named)
    return tuple(names)


def _read_name(source: DataSource) -> DataSource:
    """Return the source with the subset and split from its hub name."""
    named = None if _IS_FILE.fullmatch(source.path) else _ON_HUB.fullmatch(source.path)
    if named is None or not (named[2] or named[3]):
        return source
    return replace(source, path=named[1], subset=named[2] or source.subset, split=named[3] or source.split)


@dataclass(kw_only=True, slots=True, frozen=True)
class Packing:
    """How documents are laid out in rows; never what is trained."""

    mode: PackingMode = key(
        "packed", "Layout of a batch: padded, flattened into one row, or packed into rows of batch.tokens_per_device."
    )
    strategy: Literal["best_fit", "in_order"] = advanced(
        "best_fit", "Fill rows with the longest documents first (fuller rows), or in order.", resume="decisive"
    )
    share_prefix: bool | None = key(
        None,
        "Compute a beginning that documents of a micro-batch have in common, or the prompt of a preference pair, only once. none: for pairs, "
        "if a proof finds it exact, and for other documents only within a conversation by turns (docs/modes.md).",
    )
    attention_cost: float | None = advanced(
        None,
        "Work is spread over devices as if a document of l tokens took l + attention_cost · l²; none: by counting operations "
        "(packtrain bench measures it).",
        minimum=0,
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightGroup:
    """Weights with a learning rate or weight decay of their own."""

    match: str = advanced("", "Regular expression, searched in the names of the trained weights.")
    lr_scale: float = advanced(1.0, "Their learning rate, as a multiple of the run's; 0: they are frozen.", minimum=0)
    weight_decay: float | None = advanced(None, "Their weight decay; none for the run's.", minimum=0)


@dataclass(kw_only=True, slots=True, frozen=True)
class Optim:
    """Optimizer and learning rate."""

    name: str = key(
        "adamw_torch_fused",
        "Optimizer, by its transformers name, or muon (docs/fitting.md).",
        resume="fixed",
        among=lambda: OPTIMIZERS,
    )
    groups: list[WeightGroup] = advanced(
        [],
        "Weights by name with a learning rate of their own, or frozen; the first that matches decides (docs/fitting.md). LoRA+ is "
        "[{match: lora_B, lr_scale: 16}].",
        resume="fixed",
    )
    learning_rate: float = key(2e-5, "Peak learning rate.", minimum=0, resume="decisive")
    schedule: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = key("cosine", "Learning-rate schedule, by its transformers name.", resume="decisive")
    schedule_options: dict[str, Any] = advanced({}, "Schedule's arguments ({min_lr_rate: 0.1}).", resume="decisive")
    warmup_steps: float = key(
        0, "Steps of linear warm-up, or below 1 their share of all steps.", minimum=0, resume="decisive"
    )
    weight_decay: float = key(0.0, "Decoupled weight decay, not on biases and norms.", minimum=0, resume="decisive")
    beta1: float = advanced(0.9, "AdamW's first decay rate.", minimum=0, below=1, resume="decisive")
    beta2: float = advanced(0.999, "AdamW's second decay rate.", minimum=0, below=1, resume="decisive")
    max_grad_norm: float = key(1.0, "Clip gradients to this global norm; 0: do not.", minimum=0, resume="decisive")
    bf16_rounding: Rounding = advanced(
        "auto",
        "Where numbers are rounded to bfloat16 (docs/precision.md). auto: bfloat16 weights have float32 masters that take the "
        "updates, and final/ is in the format of the model; never: final/ is float32; final: final/ is bfloat16; stochastic: there are no "
        "masters, and each update is rounded up or down by chance, so that it is right on average; undithered: as never, and masters do "
        "not start at random places of their rounding cells, so small updates are not seen at once.",
        resume="decisive",
    )

    @property
    def spec(self) -> OptimizerSpec:
        """The declaration of the optimizer."""
        return OPTIMIZERS[self.name]

    @property
    def keeps_masters(self) -> bool:
        """Whether trained bfloat16 weights have float32 masters. DeepSpeed keeps its own in any case."""
        return self.bf16_rounding != "stochastic"

    @property
    def dithers(self) -> bool:
        """Whether masters start at random places of their rounding cells."""
        return self.bf16_rounding not in ("stochastic", "undithered")


@dataclass(kw_only=True, slots=True, frozen=True)
class Batch:
    """Size of an optimizer step over all devices, and of a micro-batch on one device."""

    examples_per_step: int | None = key(
        None,
        "Examples of an optimizer step over all devices: documents, pairs, or conversations by turns.",
        minimum=1,
        maximum=10**7,
        resume="decisive",
    )
    tokens_per_step: int | None = key(
        None, "Tokens of a step over all devices, in rows packed over an epoch.", minimum=2, resume="decisive"
    )
    examples_per_device: int | None = key(
        None, "Most documents of a micro-batch (8 if none); packed rows are limited by tokens alone.", minimum=1
    )
    tokens_per_device: int | None = key(
        None, "Most token slots of a micro-batch, padding included (packed: length of a row; 8192 if none).", minimum=2
    )

    def limits(self, mode: str) -> tuple[int | None, int | None]:
        """Return the most documents and token slots of a micro-batch in this packing.mode.

        None means no limit. Only tokens limit packed rows. The other modes always limit documents, and tokens too if tokens_per_device is set.
        """
        if mode == "packed":
            return None, self.tokens_per_device or DEFAULT_ROW_TOKENS
        return self.examples_per_device or DEFAULT_EXAMPLES, self.tokens_per_device


@dataclass(kw_only=True, slots=True, frozen=True)
class Peft:
    """Train adapters in place of all weights."""

    kind: Literal["none", "lora"] = key("none", "Full fine-tuning, or LoRA adapters.", resume="fixed")
    r: int = key(16, "Rank of the adapters.", minimum=1, resume="fixed")
    alpha: int = key(32, "Scale of the adapters (alpha / r).", minimum=1, resume="decisive")
    dropout: float = advanced(0.0, "Dropout in front of the adapters.", minimum=0, below=1, resume="decisive")
    target_modules: str | list[str] = key(
        "all-linear", "List of layers that get adapters; a text is a pattern for whole names.", resume="fixed"
    )
    experts: bool = advanced(
        False, "Also adapt experts that a layer keeps in one tensor (docs/fitting.md).", resume="fixed"
    )
    modules_to_save: list[str] = advanced([], "Layers trained in full beside the adapters.", resume="fixed")
    options: dict[str, Any] = advanced(
        {}, "Further arguments of PEFT's LoraConfig, such as {use_dora: true} (docs/fitting.md).", resume="fixed"
    )
    merge: bool = key(False, "Also write final-merged/, with the adapters merged into the model.")


@dataclass(kw_only=True, slots=True, frozen=True)
class Strategy:
    """How model and optimizer are spread over processes."""

    name: str = key(
        DEFAULT,
        "How much each process keeps of weights, gradients and optimizer states: ddp everything, zero1 to zero3 and fsdp2 less and less "
        "(docs/strategies.md).",
        among=STRATEGIES.all,
    )
    shard_within: Literal["all", "machine"] = advanced(
        "all",
        "fsdp2: spread one copy of the model over all processes, or (machine) over the processes of each machine: every machine then has a "
        "whole copy, which takes more memory, and only gradients travel between machines (docs/strategies.md).",
    )
    sequence_parallel: int | Literal["auto"] = advanced(
        1,
        "Number of neighbouring processes that split a document, if it exceeds batch.tokens_per_device or is more work than a process's "
        "share of the step; auto: as few as the longest document needs (docs/long-documents.md).",
        minimum=1,
        maximum=1024,
    )

    @property
    def spec(self) -> StrategySpec:
        """The declaration of this strategy."""
        return STRATEGIES[self.name]


@dataclass(kw_only=True, slots=True, frozen=True)
class Topology:
    """Processes and machines of the run, and options of its Slurm job."""

    kind: Literal["auto", "single", "local", "slurm", "env", "manual", "ray"] = key(
        "auto",
        "auto: join a running launch, else all machines of a Slurm job, else all GPUs of this machine, else one CPU process; "
        "manual: the same command once on every machine, each with its topology.node_rank; ray: the machines of a Ray cluster.",
    )
    nodes: int | None = key(None, "Machines; none for all of the Slurm job, else 1.", minimum=1, maximum=20_000)
    min_nodes: int | None = advanced(None, "Fewest machines that a restart may use; none waits for all.", minimum=1)
    gpus_per_node: int | None = key(None, "Processes per machine; none for one per GPU.", minimum=1, maximum=1024)
    main_address: str | None = key(None, "Host name or address of the first machine.")
    main_port: int | None = advanced(
        None, "TCP port on the first machine; none: a free one (29500 with topology=manual).", minimum=1, maximum=65535
    )
    node_rank: int | None = key(None, "manual: number of this machine, from 0.", minimum=0)
    join_timeout: int = advanced(300, "Seconds to wait for all processes at start.", minimum=1)
    step_timeout: int = advanced(
        600,
        "Most seconds that a collective operation may take. If the other processes wait for one without progress, the run "
        "ends with a diagnosis after nine tenths of this time; a checkpoint may take three times as long.",
        minimum=10,
    )
    grace: int | None = advanced(
        None,
        "Seconds from SIGTERM to the end of the processes, on machines that can be taken away (Kubernetes: 30, spot machines of AWS: 120). No "
        "checkpoint begins then if the last one took longer (docs/resume.md); none for no limit.",
        minimum=1,
    )
    environment: dict[str, Any] = advanced(
        {}, "Environment variables of every process; they win over the ones that packtrain sets."
    )
    time: str | None = key(
        None, 'Slurm: time limit, in quotes in a YAML (e.g. "12:00:00" or "2-00:00:00"); none for the partition\'s.'
    )
    signal_before: int = advanced(
        120, "Slurm: write a checkpoint and stop this many seconds before the time limit.", minimum=1, maximum=65535
    )
    requeue: bool = advanced(False, "Slurm: put a job back into the queue after its time limit, or a lost machine.")
    command: str | None = advanced(
        None,
        "Slurm, deploy: bash command (after srun) that starts packtrain on a machine: VENV/bin/packtrain, or a container; none for the "
        "packtrain that writes the script, or the one in the image.",
    )
    setup: list[str] = advanced(
        [], "Slurm, deploy: shell lines before the run (e.g. module load cuda); Slurm's on the first machine."
    )
    sbatch: list[str] = key([], "Slurm: options of sbatch (e.g. --account=lab, --mem=0); --gres=none for no GPUs.")

    @property
    def variables(self) -> dict[str, str]:
        """`environment` for processes: numbers become text."""
        return {name: str(value) for name, value in self.environment.items()}


@dataclass(kw_only=True, slots=True, frozen=True)
class Tracking:
    """Where metrics go beside metrics.jsonl."""

    report_to: list[Tracker] = key([], "Trackers, through transformers' integrations.")
    run_name: str | None = key(None, "Name of the run in the trackers; the run folder's name if none.")


@dataclass(kw_only=True, slots=True, frozen=True)
class Verify:
    """Proofs on the loaded model."""

    preflight: bool = key(
        True,
        "Prove before step 1 that documents in a row cannot see each other, and compare the first losses with losses of "
        "padded batches; model.attention=auto is always proved.",
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class RunConfig:
    """A whole run; group names are the folders of configs/."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    packing: Packing = field(default_factory=Packing)
    objective: Objective = field(default_factory=Objective)
    optim: Optim = field(default_factory=Optim)
    batch: Batch = field(default_factory=Batch)
    trainer: Trainer = field(default_factory=Trainer)
    peft: Peft = field(default_factory=Peft)
    strategy: Strategy = field(default_factory=Strategy)
    topology: Topology = field(default_factory=Topology)
    tracking: Tracking = field(default_factory=Tracking)
    verify: Verify = field(default_factory=Verify)

    @property
    def compares_prefixes(self) -> bool:
        """Whether it matters which documents begin alike."""
        shares = bool(self.packing.share_prefix) or self.data.shuffle == "by_prefix"
        return self.objective.spec.examples == "documents" and shares


PLACE = ("topology", "tracking", "verify")
"""Groups that no checkpoint records. They say where a run takes place and who watches it."""


@cache
def groups() -> dict[str, type]:
    """Return every group's dataclass by the group's name."""
    return dict(typing.get_type_hints(RunConfig))
