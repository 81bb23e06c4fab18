"""Terminal output (main process only), and the plain log file of each process.

Messages of libraries go to the log file or are turned off.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from peft.tuners.lora import LoraLayer
from rich.console import Console
from rich.markup import escape, render
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from packtrain.data.dataset import DataReport
from packtrain.model.adapters import joint_tensors
from packtrain.model.expert_adapters import expert_tensors
from packtrain.model.load import base_model
from packtrain.model.spread import elements, language_layers
from packtrain.plan.fit import Memory
from packtrain.plan.surroundings import INSTALL, lack_of_compiler
from packtrain.proof.choice import AttentionChoice
from packtrain.proof.comparison import has_routers
from packtrain.proof.isolation import Proof
from packtrain.system import kept
from packtrain.train.loader import Steps
from packtrain.train.optim.float32_step import loses_updates
from packtrain.wording import clean, count_dropped, counted, in_millions, say_example_slots, visible

if TYPE_CHECKING:
    from packtrain.train.preparation import Prepared


class Log:
    """Log of a process, on the terminal and in a file. `evaluates`: nothing is trained."""

    def __init__(self, path: Path, *, main: bool, evaluates: bool = False) -> None:
        self.evaluates = evaluates
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)  # kept open: the folder may be moved meanwhile
        self.console = Console(file=sys.stdout, highlight=False, quiet=not main, soft_wrap=True)
        self.started, self.facts = f"{datetime.now():%Y-%m-%d %H:%M}", dict[str, str]()

    def say(self, text: str, indent: int = 0) -> None:
        """Write `text` (rich markup) to the terminal and the file. Control characters of prompts and answers become visible.

        With `indent` the terminal wraps lines at words, and starts all lines but the first with `indent` spaces.
        """
        text = visible(text, whitespace=True)
        whole, width = render(text), self.console.width - indent
        self.note(whole.plain)
        if not (indent and self.console.is_terminal and width > indent):
            self.console.print(text)
            return
        head, rest = whole.divide([indent])
        for line in rest.wrap(self.console, width, no_wrap=False) or [rest]:
            self.console.print(head, line, sep="")
            head = " " * indent

    def fact(self, name: str, text: str) -> None:
        """Log a decision or setting, and keep it in `facts`. `text` is plain. An empty `name` continues the last fact."""
        before = next(reversed(self.facts), "")
        self.facts[name or before] = text if name else f"{self.facts.get(before, '')}; {text}"
        self.say(f"[bold]{name:<10}[/] {escape(text)}", indent=11)

    def warn(self, text: str) -> None:
        """Log a warning; `text` is plain."""
        self.say(f"[yellow]{escape(text)}[/]", indent=1)

    def note(self, text: str) -> None:
        """Write to the file only, after the kept words of libraries. Lines that do not fit on a full disk are lost."""
        said = kept[:]
        del kept[: len(said)]  # others may append meanwhile
        with suppress(OSError):
            for line in [*clean("".join(said)).splitlines(), *text.splitlines()]:
                self._file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n")


class _Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        kept.append(f"{self.format(record)}\n")


def quiet_libraries(*, on_cpu: bool) -> None:
    """Turn off progress bars, advice and deprecation warnings of libraries. Called once, before a process trains.

    Other warnings wait for the log: libraries warn from their first call on, and a process opens its log only after joining the others.
    """

    def keep(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        kept.append(f"{filename}:{lineno}: {category.__name__}: {message}\n")

    warnings.showwarning = keep
    warnings.simplefilter("ignore", FutureWarning)
    errors = logging.StreamHandler()
    errors.setLevel(logging.ERROR)
    logging.basicConfig(handlers=[_Kept(), errors], force=True)  # a library may have shown all on the terminal
    transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns at every 8-bit product
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if on_cpu:  # else DeepSpeed prints on stdout that it found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def warn_of_compiler(log: Log, device: torch.device) -> None:
    """Warn, once, if Triton cannot build its kernels on this GPU machine."""
    if device.type == "cuda" and (reason := lack_of_compiler()):
        log.warn(f"{reason}: full logits take the place of the fused output head, and far more memory. {INSTALL}")


def log_changes(log: Log, checkpoint: str, asked_for: list[str], others: list[str]) -> None:
    """Log settings that differ from the checkpoint's; they apply from here on."""
    if asked_for:
        log.warn(f"from here on, by trainer.resume_despite: {'; '.join(asked_for)}")
    if others:
        log.fact("changed", f"since {checkpoint}: {'; '.join(others)}")


def log_model(log: Log, run: Prepared) -> None:
    """Log the model and its number formats."""
    settings, peft, optim, strategy = run.config.model, run.config.peft, run.config.optim, run.ranks.spec
    model, base, precision = run.model, base_model(run.model), run.precision
    computed = _dtype(precision.autocast or precision.weights)
    trained = in_millions(sum(elements(weight) for weight in model.parameters() if weight.requires_grad))
    trained = "" if log.evaluates else f", {trained} trained"
    whole = in_millions(sum(map(elements, base.parameters())))
    name = " with ".join(filter(None, [settings.path, "new weights" if settings.init == "random" else ""]))
    log.fact("model", f"{name} ({type(base).__name__}, {whole} parameters{trained})")
    kept = "stay with the base" if peft.kind == "lora" and not peft.merge else "go along unchanged"
    if (source := getattr(base, "source", None)) and (remark := source.in_words(kept)):
        log.fact("files", remark)
    if peft.kind == "lora":
        shape = f"LoRA, rank {peft.r}, alpha {peft.alpha}, dropout {peft.dropout:g}"
        log.fact("adapters", f"{shape}, on {adapted_share(model)}")
    why = f" ({precision.why})" if precision.why != "asked for" else ""
    masters = ""
    if any(map(loses_updates, model.parameters())) and (optim.keeps_masters or strategy.keeps_masters):
        masters = ", float32 masters"
    products = ", layers multiplied in 8 bits" if precision.fp8 else ""
    log.fact("precision", f"{_dtype(precision.weights)} weights, computed in {computed}{products}{why}{masters}")


def adapted_share(model: PreTrainedModel) -> str:
    """Say how much of the layers is adapted, and name joint tensors without adapters."""
    several = language_layers(model) or [one for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    inside = {id(weight) for layer in several for weight in layer.parameters()}
    own = {name: one for name, one in model.named_parameters() if id(one) in inside and ".lora_" not in name}
    layers: list[Any] = [one for one in model.modules() if isinstance(one, LoraLayer)]
    layers = [one for one in layers if any(weight.requires_grad for weight in one.parameters())]
    covered = {id(one.get_param() if hasattr(one, "get_param") else one.get_base_layer().weight) for one in layers}
    share = sum(elements(one) for one in own.values() if id(one) in covered) / sum(map(elements, own.values()))
    left = ", ".join(joint_tensors((name, one) for name, one in own.items() if id(one) not in covered))
    kind = "experts: " if has_routers(base_model(model)) else ""
    left += " (peft.experts=true adapts them)" if {*map(id, expert_tensors(model).values())} - covered else ""
    return f"{share:.0%} of the weights in layers{f', not on {kind}{left}' if left else ''}"


def log_steps(log: Log, run: Prepared, steps: Steps, evaluation: Mapping[str, Steps]) -> None:
    """Log the size and number of steps, data, packing and optimizer."""
    config, data, ranks, thing = run.config, run.data, run.ranks, run.config.objective.spec.examples
    total, evaluated = steps.schedule.total_steps, counted(sum(map(len, evaluation.values())), "steps")
    if log.evaluates:
        log.fact("held out", _documents(data.eval.report) if data.eval else "none")
        log.fact("evaluation", f"in {evaluated}, on {counted(ranks.world_size, 'processes')}, {ranks.strategy}")
        return
    log.fact("optimizer", f"{config.optim.name}, learning rate {config.optim.learning_rate:g}, {config.optim.schedule}")
    log.fact("strategy", ranks.strategy)
    said = set[str]()
    for title, part in (("data", data.train), ("held out", data.eval)):
        if part is not None:
            log.fact(title, _documents(part.report))
            for remark in part.report.decisions():
                if remark not in said:
                    log.fact("", remark)
                said.add(remark)
    figures = steps.schedule.summary(ranks.world_size)
    shared = f" {figures.shared_fraction:.1%} computed with another document," if steps.schedule.prefixes else ""
    low, high = figures.micro_batches_min, figures.micro_batches_max
    log.fact(
        "packing",
        f"{config.packing.mode}: {figures.documents / figures.steps:,.1f} {thing} and {figures.tokens / figures.steps:,.0f} tokens a step,"
        f" {low if low == high else f'{low} to {high}'} micro-batch{'' if high == 1 else 'es'} a process,"
        f" {figures.padding_fraction:.1%} padding,{shared} {figures.imbalance:.1%} imbalance over processes",
    )
    why = run.objective.why_not_shared or f"packing.mode={config.packing.mode}"
    if found := steps.schedule.example_slots():
        log.fact("examples", say_example_slots(found, why))
        thing = "examples"
    elif data.stream is not None and run.may_turn and run.objective.layout != "shared":
        log.fact("examples", f"documents of a row repeat the beginnings that they have in common ({why})")
    examples, every = config.batch.examples_per_step or 0, steps.schedule.examples_per_epoch
    each = f"up to {counted(examples, thing)}" if examples else f"{config.batch.tokens_per_step:,} tokens"
    evaluated = f", evaluated in {evaluated}" if evaluation else ""
    log.fact("steps", f"{total:,}, each of {each}, on {counted(ranks.world_size, 'processes')}{evaluated}")
    if examples > every and data.stream is None:
        log.warn(f"a step of {examples:,} is more than the {counted(every, thing)} of an epoch")


def log_attention(log: Log, model: PreTrainedModel, decision: AttentionChoice | None) -> None:
    """Log the attention backend with its reason, and the isolation proof's figures. `decision` is None for padded batches."""
    if decision is None:
        log.fact("attention", f"{model.config._attn_implementation} on padded batches, as the model comes")
        return
    log.fact("attention", f"{decision.backend.name} ({decision.why})")
    if decision.detail:
        log.fact(decision.backend.name, decision.detail)
    if decision.proof is None:
        log.warn("isolation  not proved (verify.preflight=false): documents of a row may see each other")
    else:
        log.fact("isolation", _proved(decision.proof, "documents in a row"))


def log_memory(log: Log, run: Prepared, recompute: str) -> None:
    """Log the recomputed layers and why, the planned memory, and when gradients are exchanged."""
    on_gpu, memory = run.ranks.device.type == "cuda", run.memory
    moved = ", from inputs of layers in the host's memory" if run.config.trainer.activation_offload else ""
    if on_gpu or not recompute.startswith("none"):
        log.fact("recompute", f"{recompute}{moved}")
    if on_gpu and isinstance(memory, Memory):
        log.fact("memory", f"planned: {memory.sentence()}; the largest micro-batch has {memory.slots:,} token slots")
        if exchange := memory.exchange():
            log.fact("gradients", exchange)


def log_pictures(log: Log, run: Prepared) -> None:
    """Log the data's pictures, the towers' training, and the proof; nothing without pictures."""
    if run.sight is None:
        return
    report, towers = run.data.train.report, run.config.model.towers
    words = (
        report.pictures.in_words(report.tokens)
        if report.pictures
        else "only held out, or beyond the first rows of a stream"
    )
    log.fact("pictures", f"{words}; towers {towers}")
    if run.backend and run.backend.pictures:
        log.fact("", _proved(run.backend.pictures, "documents with pictures in a row"))


def _proved(proof: Proof, what: str) -> str:
    limits = f"tolerance {proof.tolerance:.0g}; with isolation off {proof.control:.1g}"
    return f"{proof.verdict}: outputs of {what} are off by {proof.max_difference:.1g} ({limits})"


def log_ways(log: Log, frozen: str, split: str, compiled: int) -> None:
    """Log frozen weights, split rows and compiled layers, if there are any."""
    for name, text in (("frozen", frozen), ("split", split)):
        if text:
            log.fact(name, text)
    if compiled:
        log.fact("compiled", f"{counted(compiled, 'layers')} by torch.compile, attention apart")


def log_prompts(log: Log, layout: str, why_not_shared: str) -> None:
    """Log how the prompts of pairs run in a row."""
    runs = {"shared": "computed once for both answers", "flat": f"computed for each answer ({why_not_shared})"}
    if layout in runs:
        log.fact("prompts", runs[layout])


def _documents(report: DataReport) -> str:
    cut = f" ({report.cut_tokens:,} tokens cut)" if report.cut_tokens else ""
    made, pairs, labels = counted(report.documents, "documents"), report.pairs, report.labels
    remarks = [f"split {report.split:,}{cut}" if report.split else f"truncated {report.truncated:,}{cut}"]
    if pairs is not None:
        made = counted(pairs.pairs, "pairs")
        remarks.append(f"prompts are {pairs.prompt_share:.0%} of the tokens")
    elif labels is not None:
        made = f"{counted(report.documents, 'answers')}, {labels.desirable:,} of them desirable and {labels.undesirable:,} not"
    return (
        f"{made} of {counted(report.rows, 'rows')} ({report.format}), {report.tokens:,} tokens,"
        f" {report.trained_tokens:,} trained; {'; '.join(remarks)}; {count_dropped(report.dropped)}"
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
