"""What each packing mode costs at this config: rows, slots and micro-batches of the steps that training would lay out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from transformers import AutoConfig

from packtrain.config.schema import DEFAULT_ROW_TOKENS, Batch, Data, Model, Packing, PackingMode, Peft, Trainer
from packtrain.data.tokens.pretrained import location
from packtrain.errors import UserError
from packtrain.inspect.corpus import Corpus
from packtrain.packing.balance import cost_of_attention, imbalance
from packtrain.packing.schedule import Schedule, make_schedule
from packtrain.plan.known_model import adapter_shapes, weights_of
from packtrain.plan.reference_choice import base_of

SAMPLED_STEPS = 48
"""Steps of an epoch that are laid out; of more, that many spread evenly over it."""


def attention_cost(model: Model, peft: Peft, vocabulary: int, *, scores: bool = False) -> float | None:
    """As training has it (packing/balance.py), from the model's config and the shapes of its weights; None if they are not known.

    `scores`: of a reward model.
    """
    try:
        base = base_of(model.path) if model.init == "pretrained" else None
        model = replace(model, path=base or model.path)
        config: Any
        if model.path is None:
            sizes = {"vocab_size": vocabulary, **model.config}
            config = AutoConfig.for_model(**sizes)
        else:
            config = AutoConfig.from_pretrained(**location(model.path, model))
            for name, value in model.config.items():
                setattr(config, name, value)
            sizes = config.get_text_config().to_dict()
        try:
            weights = weights_of(model, scores=scores)
        except UserError:  # no safetensors here: a .gguf file, or layers that its sizes tell
            weights = weights_of(Model(init="random", config=sizes), scores=scores)
    except Exception:  # nothing here, or a model whose layers are not known: libraries raise errors of every kind
        return None
    shapes = dict(weights.shapes)
    if getattr(config, "tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    extra = adapter_shapes(shapes, peft) if peft.kind == "lora" else []
    return cost_of_attention(config.get_text_config(), sum(map(math.prod, [*shapes.values(), *extra])))


def slots_of(corpus: Corpus, packing: Packing) -> np.ndarray:
    """int[examples]: token slots of each document, or pair, in a row; prompts are taken to be shared unless that is off."""
    pairs = corpus.pairs
    if pairs is None:
        return corpus.train.lengths
    if packing.mode == "padding":
        return (2 * pairs.documents.lengths.reshape(-1, 2).max(axis=1)).astype(np.int32)
    return pairs.lengths if packing.share_prefix is False else pairs.shared_lengths.astype(np.int32)


def schedule_of(corpus: Corpus, packing: Packing, batch: Batch, trainer: Trainer, data: Data, cost: float) -> Schedule:
    """The steps of the run, as training makes them. Raises UserError if an example is longer than a micro-batch."""
    if batch.tokens_per_step is not None and batch.tokens_per_device is None:
        batch = replace(batch, tokens_per_device=DEFAULT_ROW_TOKENS)
    return make_schedule(
        slots_of(corpus, packing),
        packing,
        batch,
        max_steps=trainer.max_steps,
        epochs=trainer.epochs,
        seed=trainer.seed,
        shuffle=data.shuffle,
        attention_cost=cost,
    )


def mode_costs(
    corpus: Corpus, packing: Packing, batch: Batch, trainer: Trainer, processes: int, cost: float
) -> dict[str, dict[str, Any]]:
    """For each mode the rows and slots of an epoch, `efficiency` (tokens / slots), and what a step is, or why it cannot be.

    A packed row is as long as its documents: `fill` is how much of batch.tokens_per_device that is.
    """
    costs: dict[str, dict[str, Any]] = {}
    for mode in get_args(PackingMode):
        in_mode = replace(packing, mode=mode)
        try:
            schedule = schedule_of(corpus, in_mode, batch, trainer, corpus.data, cost)
            costs[mode] = _count_costs(schedule, corpus, in_mode, processes, cost)
        except UserError as error:
            costs[mode] = {"rows": None, "slots": None, "efficiency": None, "why": str(error).replace("\n    → ", ": ")}
    return costs


def _count_costs(schedule: Schedule, corpus: Corpus, packing: Packing, processes: int, cost: float) -> dict[str, Any]:
    lengths, mode, pairs = schedule.lengths, packing.mode, corpus.pairs
    tokens = pairs.lengths if pairs is not None and mode == "padding" else lengths
    epoch = schedule.steps_per_epoch(0)
    steps = min(schedule.total_steps, epoch)
    sample = np.unique(np.linspace(0, steps - 1, min(SAMPLED_STEPS, steps)).round().astype(int)).tolist()
    rows = slots = used = 0
    batches, uneven = [], []
    for step in sample:
        layout = schedule.layout(step, processes)
        for part in (part for parts in layout for part in parts if len(part)):
            padded = len(part) * int(lengths[part].max())
            slots += padded if mode == "padding" else int(lengths[part].sum(dtype=np.int64))
            used += int(tokens[part].sum(dtype=np.int64))
            rows += 1
        batches.append(len(layout[0]))
        uneven.append(imbalance(layout, lengths, cost, mode))
    whole = int(tokens.sum(dtype=np.int64))
    figures: dict[str, Any] = {
        "rows": len(lengths) * corpus.together if mode == "padding" else round(rows * whole / used),
        "slots": round(slots * whole / used),
        "efficiency": round(used / slots, 4),
        "steps": epoch,
        "micro_batches": [min(batches), max(batches)],
        "imbalance": round(float(np.mean(uneven)), 4),
        "sampled": len(sample) < epoch,
    }
    if mode == "packed":
        figures["fill"] = round(slots / (rows * schedule.limits.tokens), 4)
    if pairs is not None and mode != "padding" and packing.share_prefix is not False:
        both = int(pairs.lengths.sum(dtype=np.int64))
        figures["saved_by_sharing"] = round(1 - int(pairs.shared_lengths.sum(dtype=np.int64)) / both, 4)
    return figures
