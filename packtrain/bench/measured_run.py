"""One process of a short run (`measure_in`): train normally, write figures instead of a model.

Among them is the measured cost of attention: a document of l tokens takes `token_seconds · (l + attention_cost · l²)`. The planner
counts operations (packing/balance.py), but a device runs attention at another speed than matrix products.
"""

from __future__ import annotations

import resource
import time

import numpy as np
import torch

from packtrain.config.schema import RunConfig
from packtrain.data.dataset import Document
from packtrain.errors import Json, UserError
from packtrain.model.load import base_model
from packtrain.model.spread import Ranks, max_over_ranks
from packtrain.packing.collate import collate_flat, label_positions
from packtrain.proof.isolation import max_positions, vocabulary_size
from packtrain.run_folder import write_json
from packtrain.train.loader import MicroBatch
from packtrain.train.loop import StepTrainer
from packtrain.train.results import Summary
from packtrain.train.run import Run, train_in
from packtrain.train.sync import Peers

_CUTS = (1, 4, 16)  # documents of equal length in a row
_ROUNDS = 3  # the first one warms up
_FEWEST = 256  # tokens; shorter rows show nothing


def measure_attention_cost(trainer: StepTrainer) -> dict[str, float] | None:
    """Measure forward and backward passes of flat rows of 1, 4 and 16 documents. All ranks call it together.

    Return `token_seconds` and `attention_cost` as measured, and the `planned` attention_cost. The rows are as long as the fullest micro-batch of the run. The gradients are dropped. None if rows are too short, if times do not fit
    the formula (a busy machine), and under DeepSpeed: its engine counts passes.
    """
    schedule, model, engine = trainer.steps.schedule, base_model(trainer.loss.model), trainer.engine
    layouts = [schedule.layout(step, trainer.steps.world_size) for step in range(trainer.state.step)]
    tokens = max(
        schedule.slots(part) for layout in layouts for parts in layout for part in parts
    )  # memory has sufficed for these
    tokens = min(tokens, schedule.limits.tokens, max_positions(model) or tokens)  # a row that ranks split is longer
    tokens = int(tokens) // _CUTS[-1] * _CUTS[-1]
    if tokens < _FEWEST or engine.spec.steps_in_backward or trainer.steps.layout == "padding":
        return None
    ids = np.random.default_rng(0).integers(0, vocabulary_size(model), tokens, dtype=np.int32)
    taken = np.full(len(_CUTS), np.inf)
    for warm in range(_ROUNDS):
        for number, cut in enumerate(_CUTS):
            documents = [Document(part, np.ones(len(part), bool)) for part in np.split(ids, cut)]
            inputs = collate_flat(documents)
            places = label_positions(inputs["shift_labels"])
            batch = MicroBatch({**inputs, "label_places": places}, len(places), tokens, tokens, cut)
            counts = torch.tensor(batch.counts, device=trainer.loss.device)
            _wait(trainer.loss.device)
            started = time.perf_counter()
            with trainer.loss.keeping_metrics(), engine.exchanging_gradients(last=False):
                engine.accelerator.backward(trainer.loss.compute(engine.wrapped, batch, counts))
            _wait(trainer.loss.device)
            if warm:
                taken[number] = min(taken[number], time.perf_counter() - started)
    engine.wrapped.zero_grad()
    squares = [tokens**2 / cut for cut in _CUTS]
    slope, rest = np.polyfit(squares, taken, 1)
    if rest <= 0:
        return None
    measured = {"token_seconds": float(rest / tokens), "attention_cost": max(float(slope * tokens / rest), 0.0)}
    return {**measured, "planned": schedule.attention_cost}


def _wait(device: torch.device) -> None:
    """Wait until a GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_in(config: RunConfig, ranks: Ranks, peers: Peers | None = None) -> int:
    """Train, and write the figures into summary.json. The run logs its first step, and all others in one line."""
    if config.data.streaming:
        fix = "Set data.streaming=false, and data.train to a part of the data."
        what = "modes are compared on data that is there as a whole"
        raise UserError(what, where="data.streaming", fix=fix, code="streaming-not-measured")
    return train_in(config, ranks, peers, finish=_write_figures)


def _write_figures(run: Run, trainer: StepTrainer, summary: Summary) -> None:
    """Write summary.json. `figures` are search.py's RunFigures; the rest describes all runs of a bench."""
    device, steps, data = run.ranks.device, trainer.steps, summary.data.train
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # of the process; KiB on Linux
    own = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident
    peak = max_over_ranks(own, device)
    cost = measure_attention_cost(trainer) if run.config.objective.spec.examples == "documents" else None
    if not run.ranks.main:
        return
    first, rest = (line for line in trainer.state.lines if "loss" in line)
    seconds = (rest["tokens"] - first["tokens"]) / rest["tokens_per_second"]
    measured = range(1, trainer.state.step)
    # tokens of whole documents, even if a prompt was computed once for two of them
    tokens = sum(int(steps.documents_of(step)[0].sum()) for step in measured)
    micro_batches = [len(steps.schedule.micro_batches(step, steps.rank, steps.world_size)) for step in measured]
    may_share = run.config.objective.spec.pairs or run.config.packing.share_prefix
    figures: Json = {
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "first_step_seconds": first["tokens"] / first["tokens_per_second"],
        "peak_memory": peak,
        "padding": rest["padding_fraction"],
        "micro_batches": sum(micro_batches) / len(micro_batches),
        "mfu": rest["mfu"],
        "shared": steps.layout == "shared" if may_share and steps.layout != "padding" else None,
    }
    precision, on_gpu = run.prepared.precision, device.type == "cuda"
    weights, computed = (str(dtype).removeprefix("torch.") for dtype in (precision.weights, precision.autocast))
    report = {
        "figures": figures,
        "attention_cost": cost,
        "step_seconds": seconds / len(measured),
        "documents": len(data),
        "mean_tokens": float(data.lengths.mean()),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"the CPU, {torch.get_num_threads()} threads",
        "precision": f"{weights} computed in {computed}" if precision.autocast else weights,
        "attention": summary.to_json("done")["attention"],
    }
    write_json(run.folder.summary, report)
