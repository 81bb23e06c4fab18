"""Cost of each packing mode for a config: rows, slots and micro-batches of planned steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from transformers import AutoConfig

from packtrain.config.schema import DEFAULT_ROW_TOKENS, Packing, PackingMode
from packtrain.errors import UserError
from packtrain.inspect.corpus import Corpus
from packtrain.packing.balance import cost_of_attention
from packtrain.packing.schedule import Schedule, make_schedule
from packtrain.packing.split_rows import choose_ranks_per_row
from packtrain.plan.known_model import adapter_shapes, weights_of

SAMPLED_STEPS = 48
"""Steps of an epoch that are laid out. In a longer epoch they are spread evenly."""


def estimate_attention_cost(corpus: Corpus) -> float | None:
    """Compute training's attention cost (packing/balance.py) from the shapes of the model's weights. None if unknown."""
    config, model = corpus.config, corpus.config.model
    if config.packing.attention_cost is not None:
        return config.packing.attention_cost
    if model.init == "random":
        model = replace(model, config={"vocab_size": corpus.tokenizer.vocabulary, **model.config})
    try:
        weights = weights_of(model, scores=config.objective.spec.scores)
        known = AutoConfig.for_model(**weights.sizes)
    except Exception:  # no files here, or a model with unknown layers: libraries raise errors of every kind
        return None
    shapes = dict(weights.shapes)
    if getattr(known, "tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    extra = adapter_shapes(shapes, config.peft) if config.peft.kind == "lora" else []
    return cost_of_attention(known.get_text_config(), sum(map(math.prod, [*shapes.values(), *extra])))


def schedule_of(corpus: Corpus, packing: Packing, processes: int, cost: float) -> Schedule:
    """Make the run's steps in a packing mode, as training on `processes` does.

    Prompts count as shared unless sharing is off. Raises UserError if an example is longer than a micro-batch.
    """
    config, pairs = corpus.config, corpus.pairs
    batch, trainer = config.batch, config.trainer
    if batch.tokens_per_step is not None and batch.tokens_per_device is None:
        batch = replace(batch, tokens_per_device=DEFAULT_ROW_TOKENS)
    if pairs is None:
        slots = corpus.train.lengths
    elif packing.mode == "padding":
        slots = (2 * pairs.documents.lengths.reshape(-1, 2).max(axis=1)).astype(np.int32)
    else:
        slots = pairs.lengths if packing.share_prefix is False else pairs.shared_lengths.astype(np.int32)
    asked, limit = config.strategy.sequence_parallel, batch.limits(packing.mode)[1]
    together = (
        1
        if packing.mode == "padding" or limit is None
        else choose_ranks_per_row(asked, int(slots.max()), limit, processes)
    )
    return make_schedule(
        slots,
        packing,
        batch,
        max_steps=trainer.max_steps,
        epochs=trainer.epochs,
        seed=trainer.seed,
        shuffle=config.data.shuffle,
        attention_cost=cost,
        ranks_per_row=together,
        prefixes=corpus.prefixes,
    )


def mode_costs(corpus: Corpus, processes: int, cost: float) -> dict[str, dict[str, Any]]:
    """Return each mode's costs: rows and slots of an epoch, `efficiency`, figures of a step.

    `efficiency` is tokens / slots. A mode that is not possible has the reason. A packed row is as long as its documents: `fill` is its
    share of batch.tokens_per_device.
    """
    costs: dict[str, dict[str, Any]] = {}
    for mode in get_args(PackingMode):
        packing = replace(corpus.config.packing, mode=mode)
        try:
            costs[mode] = _count_costs(schedule_of(corpus, packing, processes, cost), corpus, packing, processes, cost)
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
            own = schedule.slots(part)
            slots += own
            used += int(tokens[part].sum(dtype=np.int64))
            rows += (
                1 if mode != "packed" else math.ceil(own / schedule.limits.tokens)
            )  # a row that ranks split counts as several
        batches.append(len(layout[0]))
        uneven.append(schedule.imbalance(layout))
    whole = int(tokens.sum(dtype=np.int64))
    figures: dict[str, Any] = {
        "rows": len(lengths) * corpus.spec.documents if mode == "padding" else round(rows * whole / used),
        "slots": round(slots * whole / used),
        "efficiency": round(min(used / slots, 1.0), 4),
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
    if schedule.prefixes is not None:
        figures["saved_by_sharing"] = round(1 - slots / used, 4)
    return figures
