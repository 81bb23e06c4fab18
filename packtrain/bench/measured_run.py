"""One process of a short run (`measure_in`): train normally, write figures instead of a model."""

from __future__ import annotations

import resource
from dataclasses import asdict
from typing import Any

import torch

from packtrain.bench.attention_cost import measure_attention_cost
from packtrain.config.schema import RunConfig
from packtrain.errors import UserError
from packtrain.model.spread import Ranks, max_over_ranks
from packtrain.run_folder import write_json
from packtrain.train.loop import StepTrainer
from packtrain.train.results import Summary
from packtrain.train.run import Run, train_in
from packtrain.train.sync import Peers


def measure_in(config: RunConfig, ranks: Ranks, peers: Peers | None = None) -> int:
    """Train, and write the figures into summary.json. The run logs its first step, and all others in one line."""
    if config.data.streaming:
        fix = "Set data.streaming=false, and data.train to a part of the data."
        raise UserError("modes are compared on data that is there as a whole", where="data.streaming", fix=fix)
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
    figures: dict[str, Any] = {
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
        "attention_cost": cost and asdict(cost),
        "step_seconds": seconds / len(measured),
        "documents": len(data),
        "mean_tokens": float(data.lengths.mean()),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"the CPU, {torch.get_num_threads()} threads",
        "precision": f"{weights} computed in {computed}" if precision.autocast else weights,
        "attention": summary.to_json("done")["attention"],
    }
    write_json(run.folder.summary, report)
