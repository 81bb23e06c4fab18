"""Trackers (tensorboard, wandb, mlflow, trackio, swanlab, comet) that cannot hold up or end a training.

metrics.jsonl has everything that they are sent. Each has its own thread, and a time limit for each event: without a network wandb tries for
minutes when it begins, and without end when the process ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from importlib import import_module
from queue import SimpleQueue

from accelerate.tracking import (
    CometMLTracker,
    GeneralTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)

from packtrain.config.schema import RunConfig
from packtrain.errors import Json, boundary
from packtrain.run_folder import RunFolder
from packtrain.system import kept_from_terminal, leave
from packtrain.train.run_state import Listener, RunState
from packtrain.wording import first_line

BEGIN_S, EVENT_S = 30.0, 10.0
_PACKAGES = {"comet": "comet_ml", "tensorboard": "torch.utils.tensorboard"}
_PROJECTS = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "trackio": "TRACKIO_PROJECT"}
_PROJECTS |= {"comet": "COMET_PROJECT_NAME", "swanlab": "SWANLAB_PROJECT"}
_OFFLINE = {"wandb": " (or set WANDB_MODE=offline)", "comet": " (or set COMET_START_ONLINE=false)"}
_STUCK: list[str] = []
"""Names of this process's trackers that do not answer."""
Settings = dict[str, str | int | float]
_Call = tuple[Callable[[], object], "Future[None]"]


class Tracker(Listener):
    """A tracker of accelerate that is told the figures of a run. `say` tells the user why a failed tracker is left out."""

    def __init__(self, name: str, tracker: GeneralTracker, settings: Settings, say: Callable[[str], None]) -> None:
        """`settings` are the run's settings by name, for the tracker to keep."""
        self._name, self._tracker, self._settings, self._say = name, tracker, settings, say
        self._disabled = False
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        threading.Thread(target=self._work, name=f"tracker {name}", daemon=True).start()

    def train_begin(self, state: RunState) -> None:
        """Begin the run there."""
        self._within(BEGIN_S, self._tracker.start)
        if self._name != "tensorboard":  # its table of settings is a second run
            self._within(EVENT_S, partial(self._tracker.store_init_configuration, self._settings))

    def log(self, state: RunState, line: Json) -> None:
        """Pass on the numbers of the line, under transformers' names: train/loss, eval/loss."""
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        named = {f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": numbers[name] for name in numbers}
        self._within(EVENT_S, partial(self._tracker.log, {**named, "train/global_step": state.step}, step=state.step))

    def close(self) -> None:
        """End the run there before the process ends. wandb sends all remaining data and waits for it."""
        self._within(BEGIN_S, self._tracker.finish)

    def _within(self, limit_s: float, call: Callable[[], object]) -> None:
        if self._disabled:
            return
        answer: Future[None] = Future()
        self._calls.put((call, answer))
        try:
            answer.result(limit_s)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._disabled, why = True, first_line(error)
            if not answer.done():
                why = f"no answer within {limit_s:g} s"
                _STUCK.append(self._name)
            then = "the training goes on, and metrics.jsonl has its figures"
            offline = _OFFLINE.get(self._name, "") if "API key" in why else ""
            self._say(f"{self._name} is left out from here on: {why}{offline}; {then}")

    def _work(self) -> None:
        while True:
            call, answer = self._calls.get()
            try:
                call()
                answer.set_result(None)
            except BaseException as error:
                answer.set_exception(error)


def trackers_of(config: RunConfig, folder: RunFolder, say: Callable[[str], None]) -> list[Tracker]:
    """Make a Tracker for each name of tracking.report_to. Raises UserError for a package that cannot be imported."""
    names, made = config.tracking.report_to, list[Tracker]()
    if names:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # without a login they would ask for one
    run = config.tracking.run_name or folder.root.name
    settings = {f"{group}.{key}": value for group, values in asdict(config).items() for key, value in values.items()}
    plain = {name: value for name, value in settings.items() if isinstance(value, str | int | float)}
    for name in names:
        fix = f"Install it anew, or take {name} away."
        with boundary(f"{name} cannot be used", "tracking.report_to", fix, code="tracker-unusable"):
            with kept_from_terminal():
                import_module(_PACKAGES.get(name, name))
            made.append(Tracker(name, _make(name, run, folder), plain, say))
    return made


def _make(name: str, run: str, folder: RunFolder) -> GeneralTracker:
    """Return accelerate's tracker. Projects come from the trackers' own variables, such as WANDB_PROJECT."""
    project = os.environ.get(_PROJECTS.get(name, ""), "packtrain")
    if name == "tensorboard":  # the default folder is named after the machine
        return TensorBoardTracker(folder.tensorboard.name, str(folder.tensorboard.parent))
    if name == "mlflow":
        return MLflowTracker(experiment_name=project, run_name=run)
    if name == "comet":
        os.environ.setdefault("COMET_DISPLAY_SUMMARY_LEVEL", "0")  # else it prints all settings and figures
        logging.getLogger("comet_ml.comet_start").setLevel(logging.CRITICAL)  # `Tracker` says why it is left out
        logging.getLogger("comet_ml.experiment").addFilter(lambda record: record.levelno != logging.WARNING)
        return CometMLTracker(project, experiment_config=import_module("comet_ml").ExperimentConfig(name=run))
    if name == "swanlab":
        return SwanLabTracker(project, experiment_name=run)
    return (WandBTracker if name == "wandb" else TrackioTracker)(project, name=run)


def leave_stuck_ones(code: int) -> None:
    """End this process with `code` without waiting for stuck trackers. wandb would wait when a process ends."""
    if _STUCK:
        atexit.register(leave, code)  # runs before earlier registrations
