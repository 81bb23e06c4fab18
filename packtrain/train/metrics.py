"""What watches the loop: when to log, metrics.jsonl, the terminal, and early stopping. Nothing here changes the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtrain.train.checkpoint import folder_of
from packtrain.train.console import Log

_OURS = {"learning_rate": "lr"}  # transformers' name: ours


class Intervals(TrainerCallback):
    """log_every, eval_every and checkpoint_every are this run's, and the last step is logged whatever log_every is.

    transformers goes by the intervals of the checkpoint that it resumes from, and logs multiples of log_every alone.
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Puts this run's intervals in place of those of the checkpoint."""
        state.compute_steps(args, state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ) -> TrainerControl:
        """Asks for the last line."""
        if state.global_step >= state.max_steps:
            control.should_log = True
        return control


class MetricsFile(TrainerCallback):
    """Appends a line to metrics.jsonl for every logged step and evaluation (main process only).

    When a run is resumed at an earlier step than the file ends with, the later lines, which are about to be made again,
    are removed first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Keeps the lines up to the step that the run starts from."""
        if not state.is_world_process_zero or not self._path.exists():
            return
        lines = self._path.read_text().splitlines() if state.global_step else []
        self._path.write_text("".join(f"{line}\n" for line in lines if _step_of(line) <= state.global_step))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs
    ) -> None:
        """Writes the line."""
        if not state.is_world_process_zero or not {"loss", "eval_loss"} & logs.keys():
            return
        line = {"step": state.global_step, "epoch": state.epoch}
        line |= {_OURS.get(name, name): value for name, value in logs.items() if name != "epoch"}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _step_of(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # a half line of a killed run
        return 1 << 62


class TerminalProgress(TrainerCallback):
    """A live bar on a terminal, plain lines elsewhere (main process only); every rank's log file gets the lines."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._bar: Progress | None = None
        self._task: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Shows the bar."""
        if not (state.is_world_process_zero and self._log.console.is_terminal):
            return
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._log.console,
        )
        self._task = self._bar.add_task("train", total=state.max_steps, completed=state.global_step, figures="")
        self._bar.start()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs
    ) -> None:
        """Shows the step's figures."""
        place = f"step {state.global_step}/{state.max_steps}"
        if "eval_loss" in logs:
            told = ""
            if logs.get("eval_rewards/margins"):  # at a zero margin no pair is ranked
                told = f"  pairs ranked right {logs['eval_rewards/accuracies']:.1%}"
            self._log.say(f"{place}  eval loss {logs['eval_loss']:.4f}{told}")
        elif "loss" in logs:
            figures = (
                f"loss {logs['loss']:.4f}  {logs['tokens_per_second']:,.0f} tokens/s"
                f"  padding {logs['padding_fraction']:.1%}  lr {logs['learning_rate']:.2e}"
            )
            if self._bar is None:
                self._log.say(f"{place}  {figures}")
            else:
                self._bar.update(self._task, completed=state.global_step, figures=figures)
                self._log.note(f"{place}  {figures}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Leaves the terminal in order."""
        self.close()

    def close(self) -> None:
        """Stops the live bar, also when training ended by an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class EarlyStop(TrainerCallback):
    """Stops after `patience` evaluations in a row without a lower eval loss; each new best is checkpointed.

    The evaluation before training is no candidate: final/ is to hold a trained model. That none came below it is said.
    """

    def __init__(self, patience: int, checkpoints: Path, log: Log) -> None:
        self._patience, self._checkpoints, self._log = patience, checkpoints, log

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Forgets a best evaluation whose checkpoint is not here: the run goes on from a checkpoint of another folder."""
        if state.best_global_step and not folder_of(self._checkpoints, state.best_global_step).is_dir():
            state.best_metric = state.best_global_step = None

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **kwargs,
    ) -> TrainerControl:
        """Compares with the best evaluation so far; the state that it is kept in is part of every checkpoint."""
        if state.global_step == 0:
            return control
        if state.best_metric is None or metrics["eval_loss"] < state.best_metric:
            state.best_metric, state.best_global_step = metrics["eval_loss"], state.global_step
            control.should_save = True
        elif (state.global_step - (state.best_global_step or 0)) // int(args.eval_steps or 1) >= self._patience:
            if not control.should_training_stop and state.global_step < state.max_steps:
                best = f"{state.best_metric:.4f} at step {state.best_global_step}"
                self._log.say(
                    f"[yellow]stopping early[/] after step {state.global_step}: the lowest eval loss was {best}"
                )
            control.should_training_stop = True
        return control
