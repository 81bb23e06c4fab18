"""What a run tells: its decisions and their reasons first, its results last, and summary.json."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from transformers import PreTrainedModel

from packtrain.config.schema import RunConfig
from packtrain.data.prepare import PreparedData
from packtrain.data.report import DataReport
from packtrain.model.forward import Head
from packtrain.model.load import base_model
from packtrain.model.spread import elements
from packtrain.proof.choice import Decision
from packtrain.run_folder import RunFolder
from packtrain.train.loader import PairSteps, Steps
from packtrain.train.rank_log import RankLog
from packtrain.train.whole_steps import WholeSteps
from packtrain.wording import counted

_SPREAD = {
    "zero1": "each process keeps a share of the optimizer",
    "zero2": "each process keeps a share of gradients and optimizer",
    "zero3": "each process keeps a share of weights, gradients and optimizer",
    "zero3_offload": "weights, gradients and optimizer are shared out and kept by the host",
    "fsdp2": "each process keeps a share of weights, gradients and optimizer",
}


def decisions(
    log: RankLog,
    config: RunConfig,
    model: PreTrainedModel,
    data: PreparedData,
    steps: Steps | PairSteps,
    evaluation: Steps | PairSteps | None,
    world_size: int,
) -> None:
    """The first lines of a run: what was decided, and why."""
    base = base_model(model)
    trainable = sum(elements(p) for p in model.parameters() if p.requires_grad)
    name = config.model.path or "new weights"
    if config.model.path and config.model.init == "random":
        name += ", new weights"
    log.say(
        f"[bold]model[/]      {escape(name)} ({type(base).__name__}, {_count(sum(map(elements, base.parameters())))} parameters,"
        f" {_count(trainable)} trained)"
    )
    if config.peft.kind == "lora":
        log.say(f"[bold]adapters[/]   {escape(_adapters(config))}")
    log.say(f"[bold]precision[/]  {_precision(config, base)}")
    log.say(f"[bold]optimizer[/]  {_optimizer(config, steps.schedule.total_steps)}")
    if config.strategy.name != "ddp":
        log.say(f"[bold]strategy[/]   {config.strategy.name}: {_SPREAD[config.strategy.name]}")
    for title, part in (("data", data.train), ("held out", data.eval)):
        if part is not None:
            log.say(f"[bold]{title:<10}[/] {escape(_documents(part.report))}")
    log.say(f"[bold]packing[/]    {config.packing.mode}: {_layout(steps, world_size)}")
    log.say(
        f"[bold]steps[/]      {steps.schedule.total_steps:,}, each of {_global_batch(config, _thing(steps))}, on {world_size} process"
        f"{'es' if world_size > 1 else ''}"
        + (
            f", {len(evaluation):,} evaluation step{'' if len(evaluation) == 1 else 's'}"
            if evaluation is not None
            else ""
        )
    )


def attention(log: RankLog, model: PreTrainedModel, decision: Decision | None) -> None:
    """Which attention serves the rows and why, and the isolation proof's figures; `decision` is None for padded batches."""
    if decision is None:
        log.say(f"[bold]attention[/]  {model.config._attn_implementation} on padded batches, as the model comes")
        return
    log.say(f"[bold]attention[/]  {decision.backend.name} ({escape(decision.backend.why)})")
    if (proof := decision.proof) is None:
        log.say(
            "[bold]isolation[/]  [yellow]not proved (verify.preflight=false): documents of a row may see each other[/]"
        )
    else:
        log.say(
            f"[bold]isolation[/]  {proof.verdict}: a changed document moves the others by"
            f" {max(proof.moved_before, proof.moved_after):.1g}, each equals itself alone within {proof.alone:.1g}"
            f" (tolerance {proof.tolerance:.0g}; without isolation {proof.control:.1g})"
        )


def head(log: RankLog, model: PreTrainedModel, head: Head, off: float) -> None:
    """Says so where the model's head needs its full logits, which take memory."""
    if not head.fused:
        log.say(
            f"[bold]head[/]       full logits: the fused one does not fit {type(model).__name__} (its loss is off by {off:.1g})"
        )


def pairs(log: RankLog, config: RunConfig, layout: str, unshared: str, reference: str) -> None:
    """How pairs run, the losses, and what they are held to: `reference` by its kind (train/reference.py)."""
    objective = config.objective
    runs = {"shared": "computed once for both answers", "flat": f"computed for each answer ({unshared})"}
    if layout in runs:
        log.say(f"[bold]prompts[/]    {escape(runs[layout])}")
    said = {
        "model": "a second copy of the model",
        "adapters_off": "the model with its adapters off",
        "adapters": f"the model with the adapters of {config.model.path if objective.reference == 'auto' else objective.reference}",
        "precomputed": "log-probabilities of the model before training, computed once",
        "path": objective.reference,
    }
    weights = objective.loss_weights or [1.0] * len(objective.losses)
    losses = [
        name if weight == 1 else f"{weight:g} × {name}" for name, weight in zip(objective.losses, weights, strict=True)
    ]
    log.say(
        f"[bold]loss[/]       {escape(' + '.join(losses))}, beta {objective.beta:g}, against {escape(said[reference])}"
    )
    if config.peft.dropout:  # TRL turns it off
        log.say(
            f"[bold]dropout[/]    off, peft.dropout={config.peft.dropout:g} too: a preference is not to be a draw of it"
        )


def first_step(log: RankLog, seconds: float, checkpoint: Path | None) -> None:
    """Where training starts, and how long it took to get there."""
    start = f"resuming from {checkpoint.name}" if checkpoint else "training"
    log.say(f"[bold]ready[/]      {start} after {seconds:.1f} s")


@dataclass(frozen=True, slots=True)
class Summary:
    """What summary.json is made of; `started` is the run's start by time.perf_counter."""

    config: RunConfig
    trainer: WholeSteps
    data: PreparedData
    decision: Decision | None
    started: float

    def to_json(self, status: str) -> dict[str, Any]:
        """DESIGN's summary.json: `status, steps, train_loss, tokens, examples, truncated, dropped, verify …`."""
        state, report = self.trainer.state, self.data.train.report
        losses = [line["loss"] for line in state.log_history if "loss" in line]
        evals = {int(line["step"]): line["eval_loss"] for line in state.log_history if "eval_loss" in line}
        best = min((step for step in evals if step > 0), key=lambda step: evals[step], default=None)
        schedule = self.trainer.steps.schedule
        stopping_early = status == "done" and self.config.trainer.early_stop_patience and state.best_metric is not None
        kept = state.best_metric if stopping_early else next(reversed(evals.values()), None)  # of the weights in final/
        return {
            "status": status,
            "steps": state.global_step,
            "epoch": schedule.epoch_of(state.global_step),
            "train_loss": losses[-1] if losses else None,
            "first_loss": losses[0] if losses else None,
            "eval_loss": kept,
            "first_eval_loss": next(iter(evals.values()), None),
            "best_eval_loss": None if best is None else evals[best],
            "best_step": best,
            "tokens": state.num_input_tokens_seen,
            "examples": schedule.documents_before(state.global_step),
            "truncated": report.truncated,
            "dropped": dict(report.dropped),
            "data": report.to_json(),
            "verify": self.decision.proof.to_json() if self.decision and self.decision.proof else None,
            "seconds": round(time.perf_counter() - self.started, 1),
        }


def last_evaluated(trainer: WholeSteps) -> int | None:
    """The step of the last evaluation."""
    return next((int(line["step"]) for line in reversed(trainer.state.log_history) if "eval_loss" in line), None)


def stopped(log: RankLog, signal: int, step: int) -> None:
    """The last line of a run that a signal ended."""
    log.say(f"stopped by signal {signal} after step {step}; the same command goes on from there")


def results(
    log: RankLog, summary: Summary, before: list[str], after: list[str], saved: list[str], folder: RunFolder
) -> None:
    """The last lines of a run: answers before and after, losses, what is where (`saved`), and what to do with it."""
    config, figures = summary.config, summary.to_json("done")
    for prompt, old, new in zip(config.trainer.samples, before, after, strict=False):
        log.say(
            f"\n[bold]{escape(prompt)}[/]\n  [dim]before[/] {escape(_short(old, 80))}\n"
            f"  [green]after[/]  {escape(_short(new, 300))}"
        )
    log.say(f"\n[bold]done[/] in {figures['seconds']:.0f} s: {'; '.join(_losses(summary, figures))}")
    log.say(f"run folder: [bold]{escape(str(folder.root.resolve()))}[/]")
    for line in saved:
        log.say(f"  {escape(line)}")
    log.say("next:")
    for command in following(
        config, folder, chat=bool(getattr(summary.trainer.processing_class, "chat_template", None))
    ):
        log.say(f"  {escape(command)}")


def _losses(summary: Summary, figures: dict[str, Any]) -> list[str]:
    """Training and held-out loss, from and to, in words."""
    said = []
    lines = [line["loss"] for line in summary.trainer.state.log_history if "loss" in line]
    if lines:
        share = max(len(lines) // 10, 1)  # single steps hold other documents: their losses do not compare
        first, last = sum(lines[:share]) / share, sum(lines[-share:]) / share
        over = f"means of the first and last {share} logged lines" if share > 1 else "first and last logged step"
        said.append(f"train loss {first:.4f} → {last:.4f} ({over})")
    if figures["eval_loss"] is not None:
        said.append(f"held-out loss {figures['first_eval_loss']:.4f} → {figures['eval_loss']:.4f}")
        said += _rewards(summary)
        if figures["best_step"] is not None and summary.config.trainer.early_stop_patience:
            said.append(f"the weights are those of step {figures['best_step']}, with the lowest held-out loss")
        if figures["eval_loss"] > figures["first_eval_loss"]:
            said.append("it is higher than before training")
    return said


def _rewards(summary: Summary) -> list[str]:
    """Of held-out pairs: how many have the higher reward for the chosen answer, and by how much, in words; [] for sft.

    No accuracy from before training: where all rewards are 0, TRL counts no pair as right.
    """
    state = summary.trainer.state
    lines = [line for line in state.log_history if "eval_rewards/margins" in line]
    if not lines:
        return []
    kept = lines[-1]
    if summary.config.trainer.early_stop_patience:
        kept = next((line for line in lines if line["step"] == state.best_global_step), kept)
    first, last = (line["eval_rewards/margins"] for line in (lines[0], kept))
    accuracy = kept["eval_rewards/accuracies"]
    return [
        f"of {kept['eval_pairs']:,} held-out pairs {accuracy:.1%} rank right (chance: 50%), margin {first:.2f} → {last:.2f}"
    ]


def following(config: RunConfig, folder: RunFolder, *, chat: bool) -> list[str]:
    """Commands to go on with, which run as they are printed: the model's use, its curves or the proof, another mode.

    `chat` says whether the tokenizer has a chat template.
    """
    prompt = config.trainer.samples[0] if config.trainer.samples else "Hello"
    asked = json.dumps([{"role": "user", "content": prompt}] if chat else prompt, ensure_ascii=False)
    final = json.dumps(str(folder.final), ensure_ascii=False)
    answer = '["generated_text"][-1]["content"]' if chat else '["generated_text"]'
    code = (
        f'from transformers import pipeline; generate = pipeline("text-generation", {final});'
        f" print(generate({asked}, do_sample=False)[0]{answer})"
    )
    commands = [f"{_program('python')} -c {shlex.quote(code)}"]
    if "tensorboard" in config.tracking.report_to:
        commands.append(f"{_program('tensorboard')} --logdir {shlex.quote(str(folder.root))}")
    else:
        proof = shlex.join(["verify", str(folder.config)])
        commands.append(f"{_program('packtrain')} {proof}  # proves on the model that the modes train the same")
    mode = "padding_free" if config.packing.mode == "padding" else "padding"
    words = [
        config.objective.kind,
        str(folder.config),
        f"packing.mode={mode}",
        f"trainer.output_dir={folder.root}-{mode}",
    ]
    if config.trainer.resume != "auto":
        words.append("trainer.resume=auto")
    commands.append(f"{_program('packtrain')} {shlex.join(words)}  # the same losses, at another speed")
    return commands


def _program(name: str) -> str:
    """`name`, or its path where the shell would not find this environment's."""
    here = Path(sys.executable) if name == "python" else Path(sys.executable).with_name(name)
    found = shutil.which(name)
    return name if (found and Path(found).parent == here.parent) or not here.exists() else shlex.quote(str(here))


def _documents(report: DataReport) -> str:
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in report.dropped.items()) or "none"
    cut = f" ({report.cut_tokens:,} tokens cut)" if report.cut_tokens else ""
    shortened = f"split {report.split:,}{cut}" if report.split else f"truncated {report.truncated:,}{cut}"
    made = counted(report.documents, "documents")
    if (pairs := report.pairs) is not None:
        made = counted(pairs.pairs, "pairs")
        if "ranked" in report.format:
            made += " (of ranked lists, the best answer with the worst)"
        shortened += f"; prompts are {pairs.prompt_share:.0%} of the tokens"
        if apart := pairs.pairs - pairs.shareable:
            shortened += f", {apart:,} {_are(apart)} of fewer than two tokens and not shared"
        if report.pairs_apart:
            have = "has" if report.pairs_apart == 1 else "have"
            shortened += f", {report.pairs_apart:,} {have} other tokens before an answer than alone"
    return (
        f"{made} of {counted(report.rows, 'rows')} ({report.format}), {report.tokens:,} tokens,"
        f" {report.trained_tokens:,} trained; {shortened}; dropped: {dropped}"
    )


def _layout(steps: Steps | PairSteps, world_size: int) -> str:
    figures = steps.schedule.summary(world_size)
    low, high = figures.micro_batches_min, figures.micro_batches_max
    return (
        f"{figures.documents_per_step:,.1f} {_thing(steps)} and {figures.tokens_per_step:,.0f} tokens a step,"
        f" {low if low == high else f'{low} to {high}'} micro-batch{'' if high == 1 else 'es'} a process,"
        f" {figures.padding_fraction:.1%} padding, {figures.imbalance:.1%} imbalance over processes"
    )


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _thing(steps: Steps | PairSteps) -> str:
    """What a step is made of."""
    return "pairs" if isinstance(steps, PairSteps) else "documents"


def _global_batch(config: RunConfig, thing: str) -> str:
    if config.batch.examples_per_step is not None:
        return counted(config.batch.examples_per_step, thing)
    return f"{config.batch.tokens_per_step:,} tokens"


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number:,}"


def _adapters(config: RunConfig) -> str:
    peft = config.peft
    targets = peft.target_modules if isinstance(peft.target_modules, str) else ", ".join(peft.target_modules)
    also = f"; in full: {', '.join(peft.modules_to_save)}" if peft.modules_to_save else ""
    return f"LoRA, rank {peft.r}, alpha {peft.alpha}, dropout {peft.dropout:g}, on {targets}{also}"


def _precision(config: RunConfig, model: PreTrainedModel) -> str:
    weights = str(model.dtype).removeprefix("torch.")
    computed = ", computed in bfloat16" if config.trainer.mixed_precision == "bf16" else ""
    return f"{weights} weights{computed}"


def _optimizer(config: RunConfig, steps: int) -> str:
    optim = config.optim
    warmup = optim.warmup_steps if optim.warmup_steps >= 1 else math.ceil(optim.warmup_steps * steps)
    decay = f", weight decay {optim.weight_decay:g}" if optim.weight_decay else ""
    return (
        f"{optim.name}, learning rate {optim.learning_rate:g}, {optim.schedule}"
        f"{f' after {warmup:g} warm-up steps' if warmup else ''}{decay}"
    )


def _short(text: str, limit: int) -> str:
    flat = " ⏎ ".join(text.splitlines())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
