"""Results of a run: final/, summary.json, answers of the model, and suggested next commands.

Saved adapters need a base model that can be loaded by name: a hub id or a folder. If the base is a .gguf file or was
initialised at random, final/ holds the merged model and final-adapters/ the adapters.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from rich.markup import escape
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from packtrain.config.schema import Model, Peft
from packtrain.data.pictures.encoded import thumbnail
from packtrain.data.prepare import PreparedData
from packtrain.errors import Json, UserError
from packtrain.model.adapters import untie_if_adapted
from packtrain.model.load import base_model, dequantized_in, load_model
from packtrain.model.save import complete, weights_at_least
from packtrain.model.spread import loading_whole
from packtrain.objectives.spec import RIGHT_ANSWERS, Figure, task_figures
from packtrain.plan.known_model import base_of
from packtrain.plan.surroundings import command_of, find_converter
from packtrain.proof.choice import AttentionChoice
from packtrain.run_folder import RunFolder, losses_of_sets
from packtrain.system import aside, publish
from packtrain.train.checkpoint.folder import tidy
from packtrain.train.log.console import Log
from packtrain.train.loop import StepTrainer
from packtrain.train.optim.dither import dithered
from packtrain.train.optim.float32_step import AVERAGE
from packtrain.train.questions import Question
from packtrain.wording import count_dropped, counted


def save_final(
    folder: RunFolder, trainer: StepTrainer, model: PreTrainedModel, settings: Model, peft: Peft
) -> list[str]:
    """Write final/ and the folders beside it, each whole or absent. Return a line about each folder. All processes call it."""
    own, tokenizer = base_model(model).dtype, trainer.loss.tokenizer
    formats = {"never": torch.float32, "undithered": torch.float32, "final": torch.bfloat16}
    dtype = formats.get(trainer.settings.optim.bf16_rounding, own)
    contents, adapters, merged = {folder.final: "the trained model"}, folder.final, []
    if peft.kind == "lora":
        contents = {folder.final: f"the adapters of {base_of(settings.path) or settings.path}"}
        if not settings.is_base_for_adapters:
            adapters = folder.adapters
            contents = {folder.final: "the merged model", adapters: "the adapters"}
            merged.append(folder.final)
        if peft.merge:
            merged.append(folder.merged)
            contents[folder.merged] = "the merged model"
    if trainer.engine.ema:
        averaged = f"with the average of its weights over the steps (decay {trainer.engine.ema:g})"
        contents[folder.average] = f"the same, {averaged}"
    main = trainer.accelerator.is_main_process
    with published([*contents] if main else [], partly=True):
        as_is = peft.kind == "none" and dtype == own and not trainer.engine.dither.moved
        trainer.checkpoints.save_model(staging(adapters), None if as_is else dtype)
        if trainer.engine.ema:
            trainer.checkpoints.save_model(staging(folder.average), dtype, AVERAGE)
        if not main:
            return []
        base = base_model(model)
        if merged:
            quantised = getattr(base_model(model), "is_quantized", False)
            # the trainer's model may have only this process's share of the weights, or quantised ones
            if trainer.settings.sharded or quantised:
                seed, scores = trainer.settings.trainer.seed, trainer.loss.objective.spec.scores
                with loading_whole():
                    model = load_model(settings, peft, tokenizer, seed=seed, scores=scores, dequantize=True)
            if quantised:
                contents |= {place: f"{contents[place]}, {dequantized_in(dtype)}" for place in merged}
            weights = load_file(staging(adapters) / "adapter_model.safetensors")
            with merged_in(model, weights, dtype) as whole:
                if whole.can_generate():
                    whole.generation_config = cast(Any, base_model(trainer.model)).generation_config  # as mended
                for place in map(staging, merged):
                    with weights_at_least(whole, place):
                        whole.save_pretrained(place)
                        tokenizer.save_pretrained(place)
        for place in contents if peft.kind == "none" else merged:
            contents[place] += complete(base, settings, staging(place))
    return [f"{place.name}/ holds {what}" for place, what in contents.items()]


@contextmanager
def merged_in(model: Any, trained: dict[str, torch.Tensor], dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """Merge the adapters `trained` (as saved) into `model`, with weights in `dtype` inside the block.

    If `dtype` is not the model's format, the weights are on the CPU, and merged in float32 for `dtype` float32. In bfloat16 sums are rounded by
    chance (dither.py), so that small ones are not lost. Afterwards the merged model is back in its format and on its device.
    """
    own, device = base_model(model).dtype, base_model(model).device
    if dtype == torch.float32 != own:
        _move(model, lambda name, weight: weight.cpu().float())
    set_peft_model_state_dict(model, trained)
    untie_if_adapted(model)
    if dtype == own == torch.bfloat16:
        _add_adapters(model)
    whole = model.merge_and_unload()
    if dtype == own:
        yield whole
        return
    by_chance = dtype == torch.bfloat16
    _move(whole, lambda name, weight: (dithered(weight, 0, name) if by_chance else weight).to(dtype).cpu())
    yield whole
    _move(whole, lambda name, weight: weight.to(device, own))


@torch.no_grad()
def _add_adapters(model: nn.Module) -> None:
    """Add the adapters to their bfloat16 layers in float32, then zero them."""
    layers: list[tuple[str, Any]] = [one for one in model.named_modules() if isinstance(one[1], LoraLayer)]
    for name, layer in layers:
        weight = layer.get_param() if hasattr(layer, "get_param") else layer.get_base_layer().weight
        for adapter in layer.active_adapters:
            weight.data = dithered(weight.float() + layer.get_delta_weight(adapter).float(), 0, name).to(weight.dtype)
            for second in (layer.lora_B, layer.lora_embedding_B):
                if adapter in second:
                    getattr(second[adapter], "weight", second[adapter]).zero_()


def _move(model: nn.Module, where: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    for name, weight in model.named_parameters():
        weight.data = where(name, weight.data)


def staging(place: Path) -> Path:
    """Return the folder to write `place` in before it is published. It lies beside the target of a link."""
    return aside(Path(os.path.realpath(place)))


@contextmanager
def published(places: Sequence[Path], *, partly: bool = False) -> Iterator[None]:
    """Publish the folders that the block writes as `staging`. `partly`: weights of a training even if a config could not be saved."""
    for place in places:
        shutil.rmtree(staging(place), ignore_errors=True)  # left by a killed run

    refusal: UserError | None = None
    try:
        yield
    except BaseException as error:
        if not partly:
            for place in places:
                shutil.rmtree(staging(place), ignore_errors=True)
        if not (partly and isinstance(error, UserError)):
            raise
        refusal = error
    for place in (place for place in places if staging(place).is_dir()):
        tidy(staging(place))
        target = Path(os.path.realpath(place))
        if target.exists() and any(target.iterdir()):  # somebody made it since this run began
            target.rename(target.with_name(f"{target.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
        publish(staging(place), target)
    if refusal is not None:
        raise refusal


def saves_whole_model(settings: Model, peft: Peft) -> bool:
    """Return whether `save_final` writes more than adapters."""
    return peft.kind == "none" or peft.merge or not settings.is_base_for_adapters


@dataclass(frozen=True, slots=True)
class Summary:
    """Sources of summary.json. `started` is a time.perf_counter() value.

    `early`: final/ has the weights of the best evaluation. `answers` are (question, answer before, answer after).
    """

    trainer: StepTrainer
    data: PreparedData
    decision: AttentionChoice | None
    started: float
    early: bool
    answers: Sequence[tuple[Question, str, str]] = ()

    def to_json(self, status: str) -> Json:
        """Return the content of summary.json."""
        state, report, feed = self.trainer.state, self.data.train.report, self.trainer.steps.feed
        report = report if feed is None else feed.report(state.tokens)
        losses = [line["loss"] for line in state.lines if "loss" in line]
        lines = [line for line in state.lines if "eval_loss" in line]
        evals = {int(line["step"]): line["eval_loss"] for line in lines}
        lowest = min((step for step in evals if step > 0), key=lambda step: evals[step], default=None)
        best = state.best_step if self.early else lowest
        schedule = self.trainer.steps.schedule
        stopping_early = status == "done" and self.early and best is not None
        of_final = (line for line in reversed(lines) if not stopping_early or line["step"] == best)
        kept = {"eval_loss": None, **next(of_final, {})}
        return {
            "status": status,
            "steps": state.step,
            "epoch": schedule.epoch_of(state.step),
            "train_loss": losses[-1] if losses else None,
            "first_loss": losses[0] if losses else None,
            **{key: value for key, value in kept.items() if key.startswith("eval_")},
            "first_eval_loss": next(iter(evals.values()), None),
            "best_eval_loss": None if lowest is None else evals[lowest],
            "best_by": self.trainer.settings.trainer.best_by,
            "best_value": state.best_value,
            "best_step": best,
            "tokens": state.tokens,
            "examples": schedule.examples_before(state.step) if feed is None else feed.examples,
            "data_ended": None if feed is None else feed.ended,
            "sources": self.trainer.source_counts.to_json(),
            "truncated": report.truncated,
            "dropped": dict(report.dropped),
            "data": asdict(report),
            "attention": f"{self.decision.backend.name} ({self.decision.why})" if self.decision else None,
            "changes": self.trainer.changes,
            "verify": self.decision.proof.to_json() if self.decision and self.decision.proof else None,
            "verify_pictures": self.decision.pictures.to_json() if self.decision and self.decision.pictures else None,
            "rank_seconds": self.trainer.times.means(),
            "checkpoints": self.trainer.writer.outcome.to_json(),
            "answers": [_describe_answer(*answer) for answer in self.answers],
            "seconds": round(time.perf_counter() - self.started, 1),
        }


def _describe_answer(question: Question, before: str, after: str) -> Json:
    """Return an entry of summary.json. Pictures are in it small, as data URLs: the report shows them."""
    made: Json = {"prompt": question.text, "before": before, "after": after}
    made |= {"expected": question.expected} if question.expected else {}
    return made | ({"pictures": [*map(thumbnail, question.document.pictures)]} if question.document.pictures else {})


def print_results(log: Log, summary: Summary, folder: RunFolder, contents: list[str], commands: list[str]) -> None:
    """Print the last lines of a run: answers, losses, folders (`contents`), next commands."""
    figures = summary.to_json("done")
    for question, old, new in summary.answers:
        before, after = escape(_short(old, 80)), escape(_short(new, 300))
        log.say(f"\n[bold]{escape(question.text)}[/]\n  [dim]before[/] {before}\n  [green]after[/]  {after}")
        if question.expected:
            log.say(f"  [dim]data[/]   {escape(_short(question.expected, 300))}")
    log.say("")
    log.say(f"[bold]done[/] in {figures['seconds']:.0f} s: {'; '.join(_losses(summary, figures))}", indent=5)
    if dropped := figures["dropped"]:
        log.say(f"of {counted(figures['data']['rows'], 'rows')} {count_dropped(dropped)}")
    log.say(f"run folder: [bold]{escape(str(folder.root.resolve()))}[/]")
    for line in (*(f"  {item}" for item in contents), "next:", *(f"  {item}" for item in commands)):
        log.say(escape(line))


def _losses(summary: Summary, figures: Json) -> list[str]:
    """Return clauses on training and held-out loss (first → last), and on ranked held-out pairs."""
    clauses, state, early = [], summary.trainer.state, summary.early
    if (last := figures["train_loss"]) is not None:
        clauses.append(f"train loss {figures['first_loss']:.4f} → {last:.4f} (first and last logged step)")
    if (last := figures["eval_loss"]) is not None:
        of_sets = ", ".join(f"{name} {loss:.4f}" for name, loss in losses_of_sets(figures).items())
        clauses.append(f"held-out loss {figures['first_eval_loss']:.4f} → {last:.4f}{of_sets and f' ({of_sets})'}")
        if early and state.best_step is not None:
            named = figures["best_by"].replace("eval_loss", "held-out loss")
            clauses.append(f"the weights are from step {figures['best_step']}, with the {named}")
    spec, first = summary.trainer.loss.objective.spec, next((line for line in state.lines if "eval_loss" in line), {})

    def moved(shown: Iterable[Figure]) -> list[str]:
        keys = {figure: f"eval_{figure.name}" for figure in shown if f"eval_{figure.name}" in figures}
        return [figure.moved(first.get(key, figures[key]), figures[key]) for figure, key in keys.items()]

    if said := moved(spec.headlines):
        unit = next(one for one in (spec.examples, "tokens") if f"eval_{one}" in figures)
        clauses.append(f"of {figures[f'eval_{unit}']:,} held-out {unit}: {', '.join(said)}")
    measured = [RIGHT_ANSWERS] if summary.trainer.settings.trainer.answers else []
    return [*clauses, *moved([*measured, *task_figures(figures, spec.figures)])]


def next_commands(folder: RunFolder, *, held_out: bool, scores: bool) -> list[str]:
    """Return commands to paste after the run. `scores`: for a reward model; `held_out`: data.eval is set."""
    program, run = shlex.join(command_of("packtrain")), shlex.quote(str(folder.root))
    try:
        to, why = "gguf", "or ollama, hub, merged"
        find_converter(None)
    except UserError:
        to, why = "hub --repo YOU/NAME", "gguf and ollama need llama.cpp"
    ways = {
        f"report {run}": "write report.html anew, for a browser",
        f"chat {run}": "talk to it",
        f"eval {run}{'' if held_out else ' data.eval=FILE'}": "held-out figures; --generate 20: answers, too",
        f"export {run} --to {'hub --repo YOU/NAME' if scores else to}": "upload it" if scores else why,
    }
    return [f"# {said}\n  {program} {way}" for way, said in ways.items() if not (scores and way.startswith("chat"))]


def _short(text: str, limit: int) -> str:
    flat = " ⏎ ".join(text.splitlines())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
