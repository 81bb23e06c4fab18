"""Preparation of a run: data, model, precision, attention and schedule, in that order.

Train, verify and bench prepare a run with these functions, which fill in a `Prepared`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from packtrain.attention.backends import own_attention
from packtrain.attention.over_ranks import KEY as SPLIT_KEY
from packtrain.attention.over_ranks import open_group
from packtrain.changes.spec import Situation, check_changes
from packtrain.config.schema import RunConfig
from packtrain.data.dataset import make_mixture
from packtrain.data.prepare import PreparedData, prepare
from packtrain.data.streaming import open_stream
from packtrain.data.tokens.chat_template import choose_template, give_template
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import CheckFailed, Json, UserError, boundary
from packtrain.model.forward import outputs_of_tokens
from packtrain.model.layers import check_offload, compile_layers
from packtrain.model.load import base_model, check_before_loading, load_model
from packtrain.model.precision import Precision, decide_precision
from packtrain.model.spread import Ranks, max_over_ranks, placement_of, reading_mesh, spread
from packtrain.monitor.heartbeat import own_heartbeat
from packtrain.objectives.spec import OBJECTIVES
from packtrain.packing.balance import choose_ranks_per_row
from packtrain.packing.pictures import Sight
from packtrain.packing.prefixes import index_prefixes
from packtrain.packing.schedule import make_schedule, stage
from packtrain.plan.fit import Memory
from packtrain.plan.memory import Found, estimate
from packtrain.proof.choice import AttentionChoice, prove_backend
from packtrain.proof.isolation import DOCUMENTS, TREE
from packtrain.train.loader import Steps, attention_cost
from packtrain.train.objectives.training_objective import TrainingObjective
from packtrain.train.optim.dither import Dither, exact_in_bfloat16, rounded_weights
from packtrain.train.optim.weight_groups import freeze
from packtrain.train.preflight import why_not_split
from packtrain.train.sync import Peers, agree_on_data, agree_on_model, on_all_or_none, preparing_s


@dataclass(slots=True)
class Prepared:
    """A run in preparation. `attention` is the model's original implementation, `backend` runs packed rows."""

    config: RunConfig
    ranks: Ranks
    peers: Peers | None
    objective: TrainingObjective
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData = field(init=False)
    model: PreTrainedModel = field(init=False)
    attention: str = ""
    precision: Precision = field(init=False)
    day: str = ""  # the date in the chat template
    origin: Json = field(default_factory=dict)
    """Values of precision, masters and reference that a resumed run must repeat."""
    backend: AttentionChoice | None = None
    """None: batches are padded, or nothing runs packed rows."""
    compiled: int = 0
    """Number of compiled layers."""
    memory: Memory | str = ""
    """Planned memory of the largest micro-batch, or why it is not known."""
    sight: Sight | None = None
    """Sight of the model; None if the data has no pictures."""
    close_proofs: Callable[[], None] = lambda: None
    """Call it when the proofs on the spread model are done."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        longest = max(self.objective.longest_document(part) for part in (self.data.train, self.data.eval) if part)
        return longest if self.data.stream is None else max(longest, self.config.data.max_length or 0)

    @property
    def several(self) -> bool:
        """Whether some examples have several documents."""
        return any(part is not None and part.examples is not None for part in (self.data.train, self.data.eval))

    @property
    def may_turn(self) -> bool:
        """Whether data.render may make several documents of a row."""
        data = self.config.data
        known = choose_template(data.chat_template, self.tokenizer) is not None
        return known and data.render != "conversation" and self.config.objective.spec.examples == "documents"

    @property
    def situation(self) -> Situation:
        """The run as changes of the model see it, once its precision is decided."""
        return Situation(self.config, base_model(self.model), self.ranks, self.precision)

    def steps(self, part: Any, *, evaluation: bool = False, **length: Any) -> Steps:
        """Return the steps over a data set. They are one pass in order, unless `length` (max_steps, epochs, shuffle) differs."""
        config, pad = self.config, cast(int, self.tokenizer.pad_token_id or 0)
        known = config.packing.attention_cost
        # an evaluation is in order, and needs to know equal beginnings only if rows share them
        compares = config.compares_prefixes and (config.packing.share_prefix or length.get("shuffle") == "by_prefix")
        shares = self.objective.layout == "shared"
        within = part.examples is not None and (shares or config.batch.examples_per_step is None)
        schedule = make_schedule(
            self.objective.slots(part),
            config.packing,
            config.batch,
            seed=config.trainer.seed,
            attention_cost=attention_cost(self.model) if known is None else known,
            ranks_per_row=self.objective.ranks_per_row,
            prefixes=index_prefixes(part) if compares else None,
            examples=part.examples,
            within=index_prefixes(part, part.examples) if within and not config.packing.share_prefix else None,
            shares_within=shares,
            **length,
        )
        if config.data.stages and not (evaluation or config.data.streaming):
            examples, names = config.batch.examples_per_step or 1, part.report.sources
            mixture = make_mixture(config.data.stages, dict.fromkeys(names, 1.0), examples, config.trainer.seed)
            schedule = stage(schedule, mixture, part.source_of, names)
        return replace(self.objective.steps(part, schedule, pad, self.ranks, evaluation=evaluation), sight=self.sight)


def begin(config: RunConfig, ranks: Ranks, peers: Peers | None) -> Prepared:
    """Make the objective and the tokenizer. Raises UserError for errors that show before anything large is loaded."""
    own_heartbeat().enter("prepare")
    if config.trainer.activation_offload:
        check_offload(ranks.device)
    tokenizer, scores = load_tokenizer(config.model), config.objective.spec.scores
    check_before_loading(config.model, config.peft, tokenizer, config.trainer.resume_despite, scores=scores)
    return Prepared(config, ranks, peers, objective_of(config), tokenizer)


def objective_of(config: RunConfig) -> TrainingObjective:
    """Make the objective of the config. The code of other objectives is not imported. Raises UserError if another package's cannot be."""
    kind, run = config.objective.kind, config.objective.spec.run
    objective = OBJECTIVES.imported(kind, run, "OBJECTIVE")
    if not (isinstance(objective, type) and issubclass(objective, TrainingObjective)):
        raise OBJECTIVES.refusal(kind, f"cannot be used: OBJECTIVE of {run} is no subclass of TrainingObjective")
    return objective(config)


def prepare_data(run: Prepared, *, progress: bool = False) -> None:
    """Tokenise the data, the same on all ranks. Raises UserError for data that cannot be used."""
    own_heartbeat().enter("prepare")
    config, day = run.config, run.day
    with boundary("the data cannot be used", "data.train", code="data-unusable"):
        kind, progress = config.objective.kind, progress and run.ranks.main
        if config.data.streaming:
            examples = config.batch.examples_per_step or 1
            run.data = open_stream(
                config.data, run.tokenizer, kind, examples, seed=config.trainer.seed, day=day, model=config.model
            )
        else:
            run.data = prepare(
                config.data,
                run.tokenizer,
                kind,
                seed=config.trainer.seed,
                progress=progress,
                day=day,
                model=config.model,
            )
        if config.data.chat_template:
            give_template(run.tokenizer, config.data.chat_template)
    agree_on_data(run.peers, run.data, timeout_s=preparing_s(config.topology.step_timeout))


def load(run: Prepared) -> None:
    """Load the model, the same on all ranks."""
    own_heartbeat().enter("load")
    config, scores = run.config, run.config.objective.spec.scores
    limit_s, mesh = preparing_s(config.topology.step_timeout), reading_mesh(run.ranks)

    def read() -> PreTrainedModel:
        return load_model(config.model, config.peft, run.tokenizer, seed=config.trainer.seed, scores=scores, mesh=mesh)

    run.model = on_all_or_none(run.peers if mesh else None, "loaded", read, timeout_s=limit_s)
    freeze(run.model, config.optim.groups)
    agree_on_model(run.peers, run.model, timeout_s=limit_s)
    run.attention = own_attention(base_model(run.model))


def settle_precision(run: Prepared, recorded: Json) -> None:
    """Decide the number formats, the reference in them, and the dither of masters. `recorded` is a resumed checkpoint's origin."""
    own_heartbeat().enter("proof")
    asked, seed, optim = run.config.trainer.mixed_precision, run.config.trainer.seed, run.config.optim
    run.precision = decide_precision(run.model, asked, run.ranks, recorded.get("trainer.mixed_precision"))
    check_changes(run.situation)
    reference = run.objective.take_reference(run)
    # seed and strategy as the run began: the checkpoint's masters were moved with them
    dither = [seed, run.ranks.spec.casts_weights] if optim.dithers else None
    run.origin = {"trainer.mixed_precision": run.precision.mixed, "dither": recorded.get("dither", dither)}
    run.origin |= {"data.day": run.day, **reference}


def spread_model(run: Prepared) -> None:
    """Spread the model by the strategy, and compile its layers if asked to."""
    spread(run.model, run.ranks, run.precision.autocast)
    run.close_proofs = placement_of(run.ranks.spec).open_proofs(run.model, run.ranks)
    run.compiled = compile_layers(base_model(run.model)) if run.config.trainer.torch_compile else 0


def settle_attention(run: Prepared) -> None:
    """Choose the attention of packed rows by proof. Raises UserError or CheckFailed if none is exact."""
    if run.config.packing.mode != "padding":
        with outputs_of_tokens(base_model(run.model)):
            run.backend = run.objective.decide_attention(run)


def settle_split(run: Prepared) -> str:
    """Decide how many neighbouring ranks split a document longer than batch.tokens_per_device. Prove the split on the spread model. Return
    words for the log, "" without a split. Raises UserError if its attention does not allow it, CheckFailed if it is not exact.
    """
    config, world = run.config, run.ranks.world_size
    asked, limit = config.strategy.sequence_parallel, config.batch.limits(config.packing.mode)[1]
    if asked == 1 or limit is None:
        return ""
    run.objective.ranks_per_row = world if asked == "auto" else asked
    longest = max(
        [run.longest, *(int(run.objective.slots(part).max()) for part in (run.data.train, run.data.eval) if part)]
    )
    parts = run.objective.ranks_per_row = choose_ranks_per_row(asked, longest, limit, world)
    base = base_model(run.model)
    if parts == 1:
        return ""
    if run.sight is not None:  # a tower would need a part of a picture's tokens
        what = "documents are split over processes, and the data has pictures"
        fix = f"Set it to 1, and data.max_length to at most {limit}."
        raise UserError(what, where=SPLIT_KEY, fix=fix, code="split-pictures")
    backend = run.backend.backend.name if run.backend else ""
    models = (base, backend), *run.objective.others
    if why := next(filter(None, (why_not_split(*one) for one in models)), ""):
        fix = f"set data.max_length to at most {limit}, and {SPLIT_KEY}=1"
        what = f"documents cannot be split over processes: {why}"
        raise UserError(what, where=SPLIT_KEY, fix=fix, code="cannot-split")
    open_group(parts)
    segments = TREE if run.objective.layout == "shared" else DOCUMENTS
    reason, proof = "", None
    for model, name in models:
        with outputs_of_tokens(model):
            why, made = prove_backend(
                name, model, run.precision.autocast, segments, part=run.ranks.rank % parts, parts=parts
            )
        reason, proof = reason or why, proof or made
    if reason:
        what = f"a row split over {parts} processes is not exact: {reason}"
        raise CheckFailed(what, where=SPLIT_KEY, fix="set it to 1", code="split-inexact")
    off = "" if proof is None else f"; proved, within {proof.max_difference:.1g}"
    longer = f"documents above {limit:,} tokens (the longest has {longest:,}), and those that are more than a process' share of a step,"
    return f"{longer} over {parts} processes each{off}"


def masters_of(run: Prepared) -> Dither:
    """Return the trained weights computed in bfloat16, and those whose masters optim.bf16_rounding moves."""
    autocast = run.precision.autocast
    rounded = rounded_weights(run.model, autocast, sharded=run.ranks.spec.casts_weights)
    if run.origin["dither"] is None:
        return Dither(rounded)
    seed, sharded = run.origin["dither"]
    return Dither(rounded, exact_in_bfloat16(rounded_weights(run.model, autocast, sharded=sharded)), seed)


def plan_memory(run: Prepared, found: Found) -> Memory | str:
    """Estimate memory for the smallest GPU of any rank, so that all decide alike. Return a reason if it is not known."""
    ranks, model, total = run.ranks, run.config.model, None
    if ranks.device.type == "cuda":
        total = -max_over_ranks(-torch.cuda.get_device_properties(ranks.device).total_memory, ranks.device)
    if model.init == "random" or str(model.path).endswith(".gguf"):  # their sizes are known only after loading
        weights: Any = str(run.precision.weights).removeprefix("torch.")
        model = replace(model, init="random", config=base_model(run.model).config.to_dict(), dtype=weights)
    trainer = replace(run.config.trainer, mixed_precision=cast(Any, run.precision.mixed))
    config = replace(run.config, model=model, trainer=trainer)
    planned = estimate(config, ranks.world_size, total, ranks.copies, found)
    run.memory = planned if isinstance(planned, Memory) else planned.replace(" before loading", "")
    return run.memory


def choose_checkpointing(asked: str, memory: Memory | str) -> tuple[str, str]:
    """Return (trainer.gradient_checkpointing after `asked` and the planned `memory`, reason)."""
    if isinstance(memory, Memory):
        return memory.checkpointing, memory.chosen
    return ("none", f"auto: memory is {memory}") if asked == "auto" else (asked, "asked for")
