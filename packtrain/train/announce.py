"""What a run tells: its decisions and their reasons first, its results last, and summary.json."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from transformers import PreTrainedModel

from packtrain.attention.choice import Decision
from packtrain.config.schema import RunConfig
from packtrain.data.prepare import PreparedData
from packtrain.run_folder import RunFolder
from packtrain.train.loader import Steps
from packtrain.train.model import base_model
from packtrain.train.rank_log import RankLog
from packtrain.train.sft import PackedSFTTrainer


def decisions(
    log: RankLog,
    config: RunConfig,
    model: PreTrainedModel,
    data: PreparedData,
    steps: Steps,
    evaluation: Steps | None,
    world_size: int,
) -> None:
    """The first lines of a run: what was decided, and why."""
    base = base_model(model)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    name = config.model.path or "new weights"
    log.say(
        f"[bold]model[/]      {escape(str(name))} ({type(base).__name__}, {base.num_parameters() / 1e6:.1f} M parameters,"
        f" {trainable / 1e6:.1f} M trained, {str(base.dtype).removeprefix('torch.')})"
    )
    for title, part in (("data", data.train), ("held out", data.eval)):
        if part is not None:
            log.say(f"[bold]{title:<10}[/] {escape(_documents(part.report))}")
    log.say(f"[bold]packing[/]    {config.packing.mode}: {_layout(steps, world_size)}")
    log.say(
        f"[bold]steps[/]      {steps.schedule.total_steps:,}, each of {_global_batch(config)}, on {world_size} process"
        f"{'es' if world_size > 1 else ''}"
        + (f", {len(evaluation):,} evaluation steps" if evaluation is not None else "")
    )


def attention(log: RankLog, model: PreTrainedModel, decision: Decision | None) -> None:
    """Which attention serves the rows and why, and the isolation proof's figures; `decision` is None for padded batches."""
    if decision is None:
        log.say(f"[bold]attention[/]  {model.config._attn_implementation} on padded batches, as the model comes")
        return
    log.say(f"[bold]attention[/]  {decision.backend.name} ({escape(decision.backend.why)})")
    if (proof := decision.proof) is not None:
        log.say(
            f"[bold]isolation[/]  {proof.verdict}: a changed document moves the others by"
            f" {max(proof.moved_before, proof.moved_after):.1g}, each equals itself alone within {proof.alone:.1g}"
            f" (tolerance {proof.tolerance:.0g}; without isolation {proof.control:.1g})"
        )


def first_step(log: RankLog, seconds: float, checkpoint: Path | None) -> None:
    """Where training starts, and how long it took to get there."""
    start = f"resuming from {checkpoint.name}" if checkpoint else "training"
    log.say(f"[bold]ready[/]      {start} after {seconds:.1f} s")


@dataclass(frozen=True, slots=True)
class Summary:
    """What summary.json is made of; `started` is the run's start by time.perf_counter."""

    config: RunConfig
    trainer: PackedSFTTrainer
    data: PreparedData
    decision: Decision | None
    started: float

    def to_json(self, status: str) -> dict[str, Any]:
        """DESIGN's summary.json: `status, steps, train_loss, tokens, examples, truncated, dropped, verify …`."""
        state, report = self.trainer.state, self.data.train.report
        losses = [line["loss"] for line in state.log_history if "loss" in line]
        evals = [line["eval_loss"] for line in state.log_history if "eval_loss" in line]
        schedule = self.trainer.steps.schedule
        stopping_early = status == "done" and self.config.trainer.early_stop_patience and state.best_metric is not None
        kept = state.best_metric if stopping_early else evals[-1] if evals else None  # of the weights in final/
        return {
            "status": status,
            "steps": state.global_step,
            "epoch": schedule.epoch_of(state.global_step),
            "train_loss": losses[-1] if losses else None,
            "first_loss": losses[0] if losses else None,
            "eval_loss": kept,
            "first_eval_loss": evals[0] if evals else None,
            "best_eval_loss": min(evals) if evals else None,
            "tokens": state.num_input_tokens_seen,
            "examples": schedule.documents_before(state.global_step),
            "truncated": report.truncated,
            "dropped": dict(report.dropped),
            "data": report.to_json(),
            "verify": self.decision.proof.to_json() if self.decision and self.decision.proof else None,
            "seconds": round(time.perf_counter() - self.started, 1),
        }


def last_evaluated(trainer: PackedSFTTrainer) -> int | None:
    """The step of the last evaluation."""
    return next((int(line["step"]) for line in reversed(trainer.state.log_history) if "eval_loss" in line), None)


def stopped(log: RankLog, signal: int, step: int) -> None:
    """The last line of a run that a signal ended."""
    log.say(f"stopped by signal {signal} after step {step}; the same command goes on from there")


def results(
    log: RankLog, config: RunConfig, summary: Summary, before: list[str], after: list[str], folder: RunFolder
) -> None:
    """The last lines of a run: losses, answers before and after, where everything is, and what to try next."""
    figures = summary.to_json("done")
    for prompt, old, new in zip(config.trainer.samples, before, after, strict=False):
        log.say(
            f"\n[bold]{escape(prompt)}[/]\n  [dim]before[/] {escape(_short(old))}\n  [green]after[/]  {escape(_short(new))}"
        )
    loss = f"train loss {figures['first_loss']:.4f} → {figures['train_loss']:.4f}" if figures["first_loss"] else ""
    held = (
        f", held-out loss {figures['first_eval_loss']:.4f} → {figures['eval_loss']:.4f}"
        if figures["eval_loss"] is not None
        else ""
    )
    log.say(f"\n[bold]done[/] in {figures['seconds']:.0f} s: {loss}{held}")
    root = shlex.quote(str(folder.root))
    log.say(f"run folder: [bold]{escape(str(folder.root.resolve()))}[/]\nnext:")
    for command in (
        f"head {root}/metrics.jsonl",
        f"packtrain plan {root}/config.yaml",
        f"packtrain sft {root}/config.yaml packing.mode=padding trainer.output_dir={root}-padding  # same losses",
    ):
        log.say(f"  {escape(command)}")


def _documents(report: Any) -> str:
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in report.dropped.items()) or "none"
    cut = f" ({report.cut_tokens:,} tokens cut)" if report.cut_tokens else ""
    shortened = f"split {report.split:,}{cut}" if report.split else f"truncated {report.truncated:,}{cut}"
    return (
        f"{report.documents:,} documents of {report.rows:,} rows ({report.format}), {report.tokens:,} tokens,"
        f" {report.trained_tokens:,} trained; {shortened}; dropped: {dropped}"
    )


def _layout(steps: Steps, world_size: int) -> str:
    figures = steps.schedule.summary(world_size)
    low, high = figures.micro_batches_min, figures.micro_batches_max
    return (
        f"{figures.documents_per_step:,.1f} documents and {figures.tokens_per_step:,.0f} tokens a step,"
        f" {low if low == high else f'{low} to {high}'} micro-batch{'' if high == 1 else 'es'} a process,"
        f" {figures.padding_fraction:.1%} padding, {figures.imbalance:.1%} imbalance over processes"
    )


def _global_batch(config: RunConfig) -> str:
    if config.batch.examples_per_step is not None:
        return f"{config.batch.examples_per_step:,} documents"
    return f"{config.batch.tokens_per_step:,} tokens"


def _short(text: str, limit: int = 300) -> str:
    flat = " ⏎ ".join(text.splitlines())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
