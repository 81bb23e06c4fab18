"""The table of keys that cannot be set together, and the functions that read it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, fields
from functools import cache

from packtrain.config import Fault, is_mapping
from packtrain.config.schema import RunConfig

TABLE = r"""
# model
[no-model] model.path=null (model.init=pretrained)
    there are no pretrained weights without a model → Set model.path, or model.init=random.
[no-model-type] model.path=null (model.init=random) (!model.config.model_type)
    neither a model nor a model type gives the shape of the new model → Set model.path, or model.config.model_type.
[no-tokenizer] (model.path=null) (model.init=random) (model.config.model_type) model.tokenizer=null
    a model made from model.config brings no tokenizer → Name a hub id, a folder, or quickstart.
[float16-weights] model.dtype=float16 (peft.kind=none) (!trainer.mixed_precision=bf16|fp8)
    weights in float16 cannot be trained: small updates become 0, and the loss soon becomes NaN
    → Set it to float32 or bfloat16, or train adapters on them: peft=lora.
[quantized-training] !model.quantize=no because peft.kind=none
    quantised weights cannot be trained: they have too few values for an update to show → Train adapters: peft=lora.
[not-quantizable] !model.quantize=no !model.is_base_for_adapters
    only a model's own files can be loaded in fewer bits, not new weights or a .gguf file
    → Name a hub id or a folder, or remove the key.
[fp8-over-quantized] !model.quantize=no trainer.mixed_precision=fp8
    matrix products in 8 bits need weights in 16 bits, not quantised ones → Set trainer.mixed_precision=auto.
[by-document-sharded] model.backend.by_document strategy.spec.shards_weights
    {model.attention} calls the model once per document, and under {strategy.name} all processes must call it together
    → Choose strategy=zero2, or packing.mode=padding with model.attention=auto.
[towers-beside-adapters] model.towers=trained because !peft.kind=none
    adapters are trained in place of weights → Name layers of the tower in peft.target_modules, or peft.modules_to_save.
[fused-experts-sum-in-any-order] model.experts=fused trainer.deterministic
    its kernel adds up gradients of the routers' weights in any order → Choose model.experts=auto.
[experts-with-dropout] (peft.kind=lora) peft.experts peft.dropout | PEFT drops nothing before experts → Set peft.dropout=0.
[experts-with-dora] (peft.kind=lora) peft.experts peft.options.use_dora | PEFT has no DoRA for experts → Leave one of them out.

# data
[no-data] data.train=null|[] | there is nothing to train on → Set it to a file, a folder, or a hub id.
[nothing-overlong] !data.overlong=auto|truncate because data.max_length=null
    no document is overlong, and {data.overlong!r} does nothing → Set data.max_length, or leave data.overlong out.
[split-answers] data.overlong=split (!objective.spec.examples=documents)
    the later parts of a split answer would have no prompt → Choose truncate, drop or error.
[text-has-no-part] data.loss_on:given !data.loss_on=all data.format=text
    plain text has no {data.loss_on} part to train on → Set data.loss_on to all or auto.
[no-turns] data.render=turns data.format=text|tokenised | these rows have no turns → Set data.render to auto.
[turns-train-answers] data.render=turns data.loss_on=all
    by turns, only answers are trained → Set data.loss_on to assistant or completion, or data.render to auto.
[turns-of-scores] data.render=turns (objective.spec.scores)
    packtrain {objective.kind} scores whole conversations → Set data.render to auto.
[loss-on-answers] data.loss_on:given (!objective.spec.examples=documents)
    packtrain {objective.kind} learns from the answers alone → Remove the key.
[families-of-answers] data.shuffle=by_prefix (!objective.spec.examples=documents)
    packtrain {objective.kind} draws its examples one by one → Set it to true.
[families-by-tokens] data.shuffle=by_prefix batch.examples_per_step=null (objective.spec.examples=documents)
    families of documents need steps of a fixed number of documents, not tokens → Set batch.examples_per_step.

# stages
[stages-by-tokens] batch.examples_per_step=null data.stages | stages share out a fixed number of examples per step
[stages-without-steps] trainer.max_steps=null data.stages | a run by stages has no epochs, only steps
[stages-and-families] data.shuffle=by_prefix data.stages | stages draw examples one by one
[stages-and-precomputed] objective.reference=precomputed data.stages | it is computed for epochs, and stages have none

# streaming
[buffer-without-stream] data.shuffle_buffer:given because !data.streaming
    only streaming data can use it → Set data.streaming=true, or remove it.
[stream-without-steps] trainer.max_steps=null data.streaming | the length of a stream is unknown, so it has no epochs
[stream-by-tokens] batch.examples_per_step=null data.streaming | only data that is read as a whole can fill rows
[stream-and-families] data.shuffle=by_prefix data.streaming
    only data that is read as a whole shows which documents begin alike
[stream-shares-prefix] packing.share_prefix data.streaming (objective.spec.examples=documents)
    only data that is read as a whole shows which documents begin alike
[stream-without-max-length] data.max_length=null data.streaming
    the lengths of documents are unknown before they are read
[stream-and-precomputed] objective.reference=precomputed data.streaming | it is computed for all data before step 1
[stream-cannot-go-back] trainer.on_spike=rollback data.streaming | a stream cannot go back; use skip or stop
[stream-not-split] !strategy.sequence_parallel=1 data.streaming
    it depends on the longest document, which a stream does not know

# packing and batch
[prefix-needs-packed] packing.share_prefix packing.mode=padding|padding_free (objective.spec.examples=documents)
    only packed rows can share a prefix → Choose packing.mode=packed.
[prefix-in-padding] packing.share_prefix because packing.mode=padding (objective.spec.examples=pairs)
    padded batches have a prompt for every answer → Choose packing.mode=packed or padding_free.
[prefix-of-answers] !packing.share_prefix=null (objective.spec.examples=answers)
    answers with labels do not share prompts → Remove the key.
[prefix-in-order] packing.share_prefix packing.strategy=in_order (objective.spec.examples=documents)
    documents that begin alike must be neighbours in a row, which changes the order of the data
    → Choose packing.strategy=best_fit.
[prefix-by-tokens] packing.share_prefix batch.examples_per_step=null (objective.spec.examples=documents)
    with batch.tokens_per_step, rows are filled before the common prefixes are known → Set batch.examples_per_step.
[no-step-size] batch.examples_per_step=null (batch.tokens_per_step=null)
    the size of an optimizer step is not set
    → Set batch.examples_per_step (e.g. 32: the same training in every packing mode) or batch.tokens_per_step.
[two-step-sizes] batch.examples_per_step because batch.tokens_per_step
    the size of a step is set in documents and in tokens → Keep one of them and set the other to null.
[no-row-length] batch.tokens_per_step batch.tokens_per_device=null (!packing.mode=packed)
    a step in tokens is made of rows, and their length is not set
    → Set batch.tokens_per_device (the length of a row), or use batch.examples_per_step.

# objective and optimizer
[reference-without-adapters] objective.reference=adapters_off (peft.kind=none) (objective.spec.reference)
    there are no adapters to switch off → Choose peft=lora, or objective.reference=model.
[constant-has-no-warmup] optim.warmup_steps because optim.schedule=constant
    the schedule constant has no warm-up → Choose optim.schedule=constant_with_warmup.

# trainer
[no-run-folder] trainer.output_dir~\s* | the run folder has no name → Name a folder, e.g. runs/sft.
[line-break] trainer.output_dir~[^\n]*\n[\s\S]* | it has a line break → Write it in one line.
[two-lengths] trainer.epochs:given because trainer.max_steps
    the length of the run is set twice, in steps and in epochs → Keep one of them.
[reward-writes-none] trainer.samples (objective.spec.scores)
    a reward model scores answers, and writes none → Remove the key.
[reward-writes-none] trainer.answers (objective.spec.scores) | a reward model writes none → Remove the key.
[reward-writes-none] trainer.tasks (objective.spec.scores) | a reward model cannot do them → Remove the key.
[nothing-to-evaluate] trainer.tasks because (data.eval=null) | tasks are measured with evaluations → Set data.eval.
[nothing-to-evaluate] trainer.answers because (data.eval=null) | its questions are held-out rows → Set data.eval.
[measured-without-evaluations] trainer.measure_every because (trainer.eval_every=null)
    tasks and answers are measured with evaluations → Set trainer.eval_every.
[nothing-to-evaluate] trainer.eval_every because (data.eval=null)
    there is nothing to evaluate on → Set data.eval to a source, or to a fraction such as 0.05.
[early-stop-without-eval] trainer.early_stop_patience because (data.eval=null)
    stopping early needs evaluations during training → Set data.eval and trainer.eval_every.
[early-stop-without-eval] trainer.early_stop_patience because (trainer.eval_every=null) (!data.eval=null)
    stopping early needs evaluations during training → Set trainer.eval_every.
[no-best] trainer.best_by:given because (trainer.early_stop_patience=null)
    no weights are kept as the best → Set trainer.early_stop_patience, in evaluations: a large number stops no run.
[no-order] !trainer.best_by~(lowest|highest)\s\S+ | found {trainer.best_by!r} → Write lowest or highest, then a figure.
[restarts-without-checkpoints] trainer.restarts trainer.checkpoint_every=null
    without checkpoints a run could only restart from its beginning → Set trainer.checkpoint_every.
[rollback-without-checkpoints] trainer.on_spike=rollback because (trainer.checkpoint_every=null)
    there is no checkpoint to go back to → Set trainer.checkpoint_every, or trainer.on_spike=skip.
[mixed-over-float16] trainer.mixed_precision=bf16|fp8 model.dtype=float16
    {trainer.mixed_precision} computation over float16 weights is not supported → Set model.dtype to float32 or bfloat16.
[fp8-with-adapters] trainer.mixed_precision=fp8 !peft.kind=none
    torchao's layers also compute gradients of frozen weights, which nothing uses → Set trainer.mixed_precision=auto.
[fp8-with-reference] trainer.mixed_precision=fp8 objective.spec.reference
    losses that compare with a reference have not been tried in 8 bits → Set trainer.mixed_precision=auto.
[offload-without-recomputation] trainer.activation_offload !trainer.gradient_checkpointing=full
    without full recomputation, layers keep weights beside their activations, and these would move to the host too
    → Set trainer.gradient_checkpointing=full.
[selective-compiled] trainer.gradient_checkpointing=selective trainer.torch_compile
    compiled parts hide their matrix products, so none can be kept
    → Set trainer.gradient_checkpointing=full or every_2, or trainer.torch_compile=false.
[selective-with-tiles] trainer.gradient_checkpointing=selective trainer.tokens_per_mlp_tile
    selective keeps a product of the MLP for all tokens, and tiles must not keep it
    → Set trainer.gradient_checkpointing=full or every_2, or leave the tiles out.
[tiles-compiled] trainer.tokens_per_mlp_tile trainer.torch_compile
    a compiled MLP runs all tokens in one program, so it has no tiles → Keep one of them.

# strategy
[not-within-machine] strategy.shard_within=machine !strategy.spec.shards_within_machines
    {strategy.name} cannot spread the model within a machine → Remove it, or choose strategy=fsdp2.
[padding-not-split] !strategy.sequence_parallel=1 packing.mode=padding
    padded batches are not split over processes → Choose packing.mode=packed.
[backend-cannot-split] !strategy.sequence_parallel=1 model.backend.why_not_split
    {model.attention} {model.backend.why_not_split} → Choose model.attention=auto.
[no-row-to-split] !strategy.sequence_parallel=1 batch.tokens_per_device=null (packing.mode=padding_free)
    without a row length, no document is long enough to be split → Set batch.tokens_per_device.
[tokens-not-split] !strategy.sequence_parallel=1 batch.tokens_per_step
    a step in tokens consists of rows of one process, and has no place for split documents
    → Set batch.examples_per_step in place of batch.tokens_per_step.
[split-in-order] !strategy.sequence_parallel=1 packing.strategy=in_order
    a step begins with its split documents, so it cannot keep the order of the data → Choose packing.strategy=best_fit.
[split-with-expert-loop] !strategy.sequence_parallel=1 model.experts=loop
    a part of a row may be empty, and a loop over experts without tokens gives their weights no gradient
    → Choose model.experts=auto.

# topology
[not-a-host] !topology.main_address=null !topology.main_address~[\w.%-]+|[\w.%-]*:[\w.%-]*:[\w.:%-]*
    {topology.main_address!r} is neither a host name nor an address → Write only the host; its port is topology.main_port.
[line-break] topology.command~[^\n]*\n[\s\S]* | it has a line break → Write it in one line.
[one-machine] topology.nodes !topology.nodes=1 topology.kind=single|local
    topology={topology.kind} is one machine, not {topology.nodes} → Choose topology=auto, slurm or manual.
[one-machine] !topology.main_address=null topology.kind=single|local
    topology={topology.kind} runs on one machine and does not use this key → Remove the key, or use topology=manual.
[one-machine] !topology.node_rank=null topology.kind=single|local
    topology={topology.kind} runs on one machine and does not use this key → Remove the key, or use topology=manual.
[one-process] topology.gpus_per_node !topology.gpus_per_node=1 topology.kind=single
    one process cannot use {topology.gpus_per_node} GPUs → Choose topology=local, or take topology.gpus_per_node away.
[min-nodes-without-restarts] topology.min_nodes !trainer.restarts
    it does nothing without trainer.restarts → Set trainer.restarts, or remove the key.
[requeue-without-resume] topology.requeue !trainer.resume=auto
    with trainer.resume={trainer.resume} a requeued job would not resume from its newest checkpoint
    → Use trainer.resume=auto.
"""
"""Rules: [code] condition | what is wrong → how to mend it. A rule holds if all words of its condition hold.

`key=a|b`: the key has one of these values. `key~regex`: its whole text matches. `key`: it is neither null, false, 0 nor empty. `!word`: the
word does not hold. `key:given`: the key is not at its default. Messages name the keys in this order, without those in brackets. `because`:
the next key leaves the first one with nothing to act on. A rule without a remedy advises to change the first key, or to leave the second out.
"""
_KEYS = {
    "model.backend": "model.attention",
    "model.is_base_for_adapters": "model.path",
    "objective.spec": "objective.kind",
    "peft.options": "peft.options",
    "strategy.spec": "strategy.name",
}
"""Computed values in conditions, each with the key that decides it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table: `words` is its condition, the rest makes a Fault."""

    code: str
    words: tuple[str, ...]
    keys: tuple[str, ...]
    what: str
    fix: str
    because: str


def check_table(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Yield a fault for every rule that holds. The user gave the keys `given` values other than their defaults."""
    groups = {group.name: getattr(config, group.name) for group in fields(config)}
    for rule in rules():
        if all(holds(word, config, given) for word in rule.words):
            yield Fault(rule.keys, rule.what.format(**groups), rule.fix.format(**groups), rule.because, rule.code)


@cache
def rules() -> tuple[Rule, ...]:
    """Return the rows of the table."""
    rows = re.findall(r"^([^#\s].*?)(?: \||\n)((?: +.*\n)+)", TABLE, re.MULTILINE)
    return tuple(_parse_rule(condition.split(), " ".join(text.split())) for condition, text in rows)


def _parse_rule(words: list[str], text: str) -> Rule:
    code = words.pop(0).strip("[]") if words[0].startswith("[") else ""
    because = key_of(words[words.index("because") + 1]) if "because" in words else ""
    words = [word for word in words if word != "because"]
    keys = tuple(dict.fromkeys(key_of(word) for word in words if not word.startswith("(")))
    what, _, fix = text.partition(" → ")
    return Rule(code, tuple(words), keys, what, fix or f"Change {keys[0]}, or leave {keys[1]} out.", because)


def key_of(word: str) -> str:
    """Return the config key in a word of a condition."""
    path = re.split("[:=~]", word.strip("()!"))[0]
    return next((key for start, key in _KEYS.items() if path.startswith(start)), path)


def holds(word: str, config: RunConfig, given: Set[str] = frozenset()) -> bool:
    """Return whether a word of a condition holds for `config`. A value below one that is None counts as None."""
    path, sign, wanted = re.split("([=~]|$)", word.strip("()!"), maxsplit=1)
    if path.endswith(":given"):
        return path.removesuffix(":given") in given
    value: object = config
    for name in path.split("."):
        value = value.get(name) if is_mapping(value) else getattr(value, name, None)
    fits = (re.fullmatch(wanted, _text(value)) if sign == "~" else _text(value) in wanted.split("|")) if sign else value
    return bool(fits) != ("!" in word)


def _text(value: object) -> str:
    """Return a value in the words of the command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
