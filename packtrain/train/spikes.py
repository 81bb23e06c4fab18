"""Spikes: a step whose loss or gradient norm is no number, or jumps over what is usual, is judged before its update is made.

`trainer.on_spike` says what follows: the run stops, the update is not made (`skip`), or the run goes back to its newest
checkpoint and leaves out the steps from there to the spike (`rollback`, as for PaLM: Chowdhery et al. 2022, arXiv 2204.02311,
section 5.1), and the documents of the spike for good. The figures are those of the global step, so all ranks decide alike. spikes.jsonl has each decision with the
documents of its step; a resumed run repeats it from there.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor

from packtrain.durable import write_text
from packtrain.errors import CheckFailed
from packtrain.model.spread import most_of_all
from packtrain.monitor.heartbeat import waiting
from packtrain.train.checkpoint.folder import folder_of
from packtrain.train.largest_row import LargestRowHooks
from packtrain.train.loader import MicroBatch
from packtrain.train.metrics import MetricsFile

STATE = "spikes.json"
"""In a checkpoint: the figures that are usual by then."""
_WINDOW, _FEWEST = 64, 8
"""Steps whose median is usual, and how many of them it takes to tell a jump."""
_BEFORE = "decided before"
IN_A_ROW = 10
"""Steps with spikes, one after the other, that end the run whatever `trainer.on_spike` says: the weights are ruined."""


@dataclass(frozen=True, slots=True)
class SpikeRules:
    """`action` is trainer.on_spike, `factor` trainer.spike_factor; `file` is spikes.jsonl, `places` gives each example's FILE:LINE."""

    action: str
    factor: float | None
    file: Path
    places: Callable[[list[int]], list[str]]

    @property
    def watches(self) -> bool:
        """Whether every step is judged before its update; else what is no number is found when it is logged."""
        return self.action != "stop" or self.factor is not None


class RecentFigures:
    """Loss and gradient norm of the last steps whose updates were made."""

    def __init__(self, figures: list[list[float]] | None = None) -> None:
        self.figures: deque[list[float]] = deque(figures or [], maxlen=_WINDOW)

    def fault(self, loss: float, norm: float, factor: float | None) -> str:
        """What is wrong with the figures of a step, "" if nothing is."""
        for at, (name, value) in enumerate((("loss", loss), ("gradient norm", norm))):
            if not math.isfinite(value):
                return f"the {name} is {value:g}"
            if factor is not None and len(self.figures) >= _FEWEST:
                usual = statistics.median(one[at] for one in self.figures)
                if value > factor * usual > 0:
                    return f"the {name} is {value:.4g}, usual is {usual:.4g}"
        return ""

    def last(self) -> list[float]:
        """Those of the last such step."""
        return self.figures[-1] if self.figures else [0.0, 0.0]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is logged of a step: this rank's part of its `loss` and the gradient `norm`; `back`: step and folder of the checkpoint that
    the run goes back to in place of its update."""

    loss: torch.Tensor
    norm: Any
    back: tuple[int, Path] | None = None


class SpikeHooks(LargestRowHooks):
    """The hooks of a step that judge it before its update."""

    spikes: SpikeRules | None

    def open_spikes(self, rules: SpikeRules | None) -> None:
        """Judges steps by these rules from now on."""
        self.spikes, self.usual = rules, RecentFigures()
        self.decided: dict[int, dict[str, Any]] = {}
        self._given_up = 0
        self._fault, self._guarded = "", False
        self._begun: Path | None = None

    def read_spikes(self, checkpoint: str | Path | None) -> None:
        """Takes up what is usual from the checkpoint that the run goes on from, and what was decided after it, on all ranks."""
        if self.is_deepspeed_enabled and not self._guarded:
            self._guarded = True
            _guard(cast(Any, self.model_wrapped).optimizer, self._judged_by_engine)
        if self.spikes is None or not self.spikes.watches:
            return
        self._begun = None if checkpoint is None else Path(checkpoint)
        found: list[Any] = [[]]
        if self._begun is not None and self.accelerator.is_main_process:
            found = [_taken_up(self.spikes.file, self._begun)]
        with waiting("rank 0 to read spikes.jsonl"):
            lines = cast(list, broadcast_object_list(found))[0]
        self.decided = {one["step"]: one for one in lines if one["action"] != "stop"}
        self.usual = RecentFigures()
        if checkpoint is not None and (state := Path(checkpoint, STATE)).is_file():
            self.usual = RecentFigures(json.loads(state.read_text()))
        self._leave_out()

    def judge(self, model: torch.nn.Module, loss: torch.Tensor, norm: Any, counts: torch.Tensor) -> Judgement:
        """Called before the update with this rank's part of the step's loss and the norm of its gradients.

        Raises CheckFailed for `stop`.
        """
        if self.spikes is None or not self.spikes.watches:
            return Judgement(loss, norm)
        if not self.is_deepspeed_enabled and self._judged(
            norm, loss, counts
        ):  # whose engine has asked within the backward pass
            model.zero_grad()  # an optimizer passes over weights without gradients
            self.lost.leave_out()
        if not self._fault:
            return Judgement(loss, norm)
        usual_loss, usual_norm = self.usual.last()
        back = self._after_spike(model)
        return Judgement(torch.full((), usual_loss, device=self.args.device), torch.tensor(usual_norm), back)

    def open_judgement(self, loss: torch.Tensor, counts: torch.Tensor) -> None:
        """Tells the engine's optimizer, which steps within the last backward pass, the loss of the step."""
        self._of_step = loss, counts

    def _judged_by_engine(self, norm: Callable[[], torch.Tensor]) -> bool | None:
        """As `_judged`, of gradients in DeepSpeed's hands; None where they are not judged."""
        if self.trying:
            return True
        watches = self.spikes is not None and self.spikes.watches
        return self._judged(norm(), *self._of_step) if watches else None

    def _judged(self, norm: Any, part: torch.Tensor, counts: torch.Tensor) -> bool:
        """Whether the update of the step is not to be made; the same on all ranks."""
        norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
        figures = torch.stack([part.double(), norm.to(part.device).double()])
        with waiting("the loss of all ranks"):
            figures = cast(torch.Tensor, self.accelerator.reduce(figures, reduction="mean"))
        (total, norm), trained = figures.tolist(), int(counts[3])
        assert self.spikes is not None
        given_up = self.state.global_step + 1 in self.decided or not trained
        self._fault = _BEFORE if given_up else self.usual.fault(total, norm, self.spikes.factor)
        if self._fault:
            self._figures = (total, norm)
            return True
        self.usual.figures.append([total, norm])
        return False

    def _after_spike(self, model: torch.nn.Module) -> tuple[int, Path] | None:
        """What follows the spike of this step; returns step and folder of the checkpoint to go back to, if there is one."""
        assert self.spikes is not None
        rules, step, newest = self.spikes, self.state.global_step + 1, None
        back: Path | None = None
        fault, self._fault = self._fault, ""
        self._given_up += 1
        if hasattr(self, "noted") and not math.isfinite(self._figures[0]):
            cast(Any, self).noted = cast(Any, self).new_figures()  # no number either
        if fault != _BEFORE:
            hopeless = all(step - back in self.decided for back in range(1, IN_A_ROW))
            action = "stop" if hopeless else rules.action
            if action == "rollback":
                newest, back = self._newest()
                action = "rollback" if back else "skip"
            line = {"step": step, "action": action, "from": newest, "why": fault}
            line |= dict(zip(("loss", "grad_norm"), map(_number, self._figures), strict=True))
            self._note(line, self._losses_of_documents(model, step - 1))
            if action == "stop":
                lower = "lower it, or raise trainer.spike_factor" if rules.factor else "lower it"
                fix = f"{lower}, or set trainer.on_spike=skip; the checkpoints before this step are kept"
                fault += f", the {IN_A_ROW}th step in a row that is given up," if hopeless else ""
                fix = f"{lower}, and go on from a checkpoint before these steps" if hopeless else fix
                raise CheckFailed(f"{fault} at step {step} (spikes.jsonl)", where="optim.learning_rate", fix=fix)
            self.decided[step] = line
            then = f"its update is not made{' (there is no checkpoint yet)' if action != rules.action else ''}"
            if action == "rollback":
                then = f"the run goes back to the checkpoint of step {newest} and leaves the steps since then out"
            self.settings.say(f"step {step}: {fault}; {then}. spikes.jsonl has its documents")
            if newest is not None and back is not None:
                self._leave_out()
                return newest, back
        return None

    def _newest(self) -> tuple[int | None, Path | None]:
        """Step and folder of the checkpoint to go back to, as rank 0 finds it; None if there is none, or someone has removed it."""
        self.clock.enter("checkpoint")
        self.writer.wait()
        step, found = self.writer.outcome.newest, None
        if step is not None and self.accelerator.is_main_process:
            begun = self._begun if step == self.settings.first_step else None  # maybe in another run folder
            kept = (folder_of(self.settings.checkpoints, step), begun)
            found = next((one for one in kept if one is not None and one.is_dir()), None)
        with waiting("rank 0 to find the checkpoint"):
            found = cast(list, broadcast_object_list([found]))[0]
        return (None, None) if found is None else (step, found)

    def refuse_nan(self, loss: float) -> None:
        """As of LoggingHooks, after a line in spikes.jsonl with the documents of the step, without their losses: the weights are ruined."""
        if not math.isfinite(loss) and self.spikes is not None:
            step = self.state.global_step
            line = {"step": step, "action": "stop", "from": None, "why": f"the loss is {loss:g}", "loss": _number(loss)}
            documents = self.steps.schedule.documents(step - 1).tolist()
            self._note({**line, "grad_norm": None}, [(number, None) for number in documents])
        super().refuse_nan(loss)

    def spike_figures(self) -> dict[str, int]:
        """`skipped`: how many updates were not made since the last logged line, if any."""
        number, self._given_up = self._given_up, 0
        return {"skipped": number} if number else {}

    def go_back(self, model: torch.nn.Module, step: int, folder: Path) -> Iterator[list[MicroBatch]]:
        """Puts everything back to the checkpoint of `step`; returns the micro-batches of the steps from there on."""
        self.clock.enter("checkpoint", step=step)
        self.step_figures.forget()
        self.figures()
        model.zero_grad()
        self.restore(folder)
        self.open_state(folder)
        self.usual, self._given_up = RecentFigures(json.loads((folder / STATE).read_text())), 0
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, MetricsFile):  # lines of later steps are made again
                callback.on_train_begin(self.args, self.state, self.control)
        return self.batches(folder)

    def _leave_out(self) -> None:
        """Excludes from the run the steps that each rollback gave up, and from then on the documents of the step with the spike."""
        out, given_up = dict[int, int](), set[int]()
        for line in self.decided.values():
            if line["action"] == "rollback":
                given_up.update(range(line["from"], line["step"]))
                for number in self.steps.schedule.documents(line["step"] - 1).tolist():
                    out[number] = min(line["from"], out.get(number, line["from"]))
        if out:
            self.steps = replace(self.steps, left_out=out, given_up=frozenset(given_up))

    def _losses_of_documents(self, model: torch.nn.Module, step: int) -> list[tuple[int, float]]:
        """Number and loss, by the model as it is, of each example of `step`, from 0, on all ranks together."""
        steps, losses = self.steps, list[tuple[int, float]]()
        parts = steps.schedule.micro_batches(step, steps.rank, steps.world_size)
        mine = [number for number in np.concatenate(parts).tolist() if steps.trains_on(number, step)]
        ranks = self.accelerator.num_processes
        self.model.eval()
        with torch.no_grad(), self.figures_apart():
            for at in range(most_of_all(len(mine), self.args.device)):  # sharded weights are called equally often
                batch = steps.collate(np.array(mine[at : at + 1], np.int64))
                counts = torch.tensor(batch.counts, device=self.args.device)
                loss = cast(Any, self).loss_of(self.model, batch, counts).item() / ranks
                losses += [(number, loss) for number in mine[at : at + 1]]
        self.model.train()
        with waiting("the documents of all ranks"):
            return gather_object(losses)

    @contextmanager
    def figures_apart(self) -> Iterator[None]:
        """Inside the block no figure of the step is changed."""
        trainer: Any = self
        kept = {name: getattr(self, name) for name in ("noted", "routers") if hasattr(self, name)}
        if "noted" in kept:
            trainer.noted = trainer.new_figures()
        if "routers" in kept:
            trainer.routers = None
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(trainer, name, value)

    def _note(self, line: dict[str, Any], losses: Sequence[tuple[int, float | None]]) -> None:
        """Adds a line to spikes.jsonl, on the main process."""
        if self.spikes is None or not self.accelerator.is_main_process:
            return
        places = self.spikes.places([number for number, _ in losses])
        found = [{"place": place, "loss": _number(loss)} for place, (_, loss) in zip(places, losses, strict=True)]
        try:
            with self.spikes.file.open("a") as file:
                file.write(json.dumps({**line, "documents": found}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self.settings.say(f"{self.spikes.file.name} cannot be written: {error}")


def _taken_up(file: Path, checkpoint: Path) -> list[dict[str, Any]]:
    """The lines of spikes.jsonl that the run goes on with, of the run folder of `checkpoint` if its own has none.

    `file` has them whole afterwards: a kill may have left half of the last one, and a loss of power anything.
    """
    text, lines = "", list[dict[str, Any]]()
    for one in (checkpoint.parent.parent / file.name, file):
        with suppress(OSError):
            text = one.read_text(errors="replace")
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict) and _decides(found):
                lines.append(found)
    if lines:
        with suppress(OSError):  # what is decided holds
            write_text(file, "".join(f"{json.dumps(line)}\n" for line in lines))
    return lines


def _decides(line: dict[str, Any]) -> bool:
    """Whether a line is a decision as it is written; anyone may have changed the file."""
    step, action, back = (line.get(name) for name in ("step", "action", "from"))
    return type(step) is int and (
        action in ("stop", "skip") or (action == "rollback" and type(back) is int and 0 <= back < step)
    )


def _number(value: float | None) -> float | str | None:
    """A figure as JSON has it, which knows no NaN."""
    return value if value is None or math.isfinite(value) else f"{value:g}"


def _guard(optimizer: Any, judged: Callable[[Callable[[], torch.Tensor]], bool | None]) -> None:
    """Has DeepSpeed's `optimizer` ask before an update; one that is a spike is given up as if it were an overflow."""
    if not hasattr(optimizer, "_update_scale"):  # ZeRO-1 of bfloat16 weights
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        step = optimizer.step

        def norm_of_all() -> torch.Tensor:
            gradients, _ = optimizer.get_grads_for_norm()
            return _valid(get_global_norm_of_tensors(gradients, mpu=optimizer.mpu, norm_type=optimizer.norm_type))

        def step_or_not(*given: Any, **named: Any) -> None:
            if judged(norm_of_all):
                optimizer.clear_hp_grads()
                optimizer.clear_lp_grads()
                return
            step(*given, **named)

        optimizer.step = step_or_not
        return

    def norm_of_parts() -> torch.Tensor:
        if hasattr(optimizer, "scaled_global_norm"):
            return _valid(optimizer.scaled_global_norm())
        groups = torch.stack([torch.as_tensor(one, dtype=torch.float32) for one in optimizer._get_norm_groups()])
        return torch.full((), torch.nan) if (groups < 0).any() else torch.linalg.vector_norm(groups)

    update_scale = optimizer._update_scale

    def ask(overflow: bool) -> None:
        """Between the overflow check and the update; the scale of bfloat16 and float32 gradients never changes."""
        verdict = judged(norm_of_parts)
        if verdict is None:
            return update_scale(overflow)
        optimizer.overflow = verdict

    optimizer._update_scale = ask


def _valid(norm: Any) -> torch.Tensor:
    """DeepSpeed's norm, which is -1 for what is no number."""
    found = torch.as_tensor(norm)
    return torch.where(found >= 0, found, torch.nan)
