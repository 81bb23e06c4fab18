"""Trackers (tensorboard, wandb, mlflow, trackio, swanlab, comet) that cannot hold up or end a training.

metrics.jsonl has everything that they are sent. Each has its own thread, and a time limit for each event: without a network wandb tries for
minutes when it begins, and without end when the process ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks

from packtrain.boundary import boundary
from packtrain.exit_code import leave
from packtrain.run_folder import RunFolder
from packtrain.wording import first_line

BEGIN_S, EVENT_S = 30.0, 10.0
_INTEGRATIONS = {"comet": "comet_ml"}
"""Names of trackers in transformers, if they differ."""
_OFFLINE = {"wandb": " (or set WANDB_MODE=offline)", "comet": " (or set COMET_START_ONLINE=false)"}
_STUCK: list[str] = []
"""Names of this process's trackers that do not answer."""
_Call = tuple[Callable[[], Any], "Future[None]"]


class Tracker:
    """Tracker of transformers as a callback of its Trainer. `say` tells the user why a failed tracker is left out."""

    def __init__(self, name: str, tracker: Any, say: Callable[[str], None]) -> None:
        self._name, self._tracker, self._say, self._disabled = name, tracker, say, False
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        threading.Thread(target=self._work, name=f"tracker {name}", daemon=True).start()

    def __getattr__(self, event: str) -> Callable[..., None]:
        """Return the handler of a Trainer event."""
        if not event.startswith("on_"):
            raise AttributeError(event)
        if getattr(type(self._tracker), event) is getattr(TrainerCallback, event):  # most events, several in each step
            return lambda *given, **named: None
        return partial(self._pass_on, event)

    def close(self) -> None:
        """End the tracker before the process ends. wandb sends all remaining data and waits for it."""
        finish = getattr(getattr(self._tracker, "_wandb", None), "finish", None)
        if finish is not None:
            self._within(BEGIN_S, finish)

    def _pass_on(self, event: str, *given: Any, **named: Any) -> None:
        limit_s = BEGIN_S if event == "on_train_begin" else EVENT_S
        self._within(limit_s, partial(getattr(self._tracker, event), *given, **named))

    def _within(self, limit_s: float, call: Callable[[], Any]) -> None:
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


def trackers_of(names: Sequence[str], folder: RunFolder, say: Callable[[str], None]) -> list[Tracker]:
    """Make a Tracker for each name of tracking.report_to. Raises UserError for a package that cannot be imported."""
    if names:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # without a login they would ask for one
    made, integrations = [], [_INTEGRATIONS.get(name, name) for name in names]
    for name, kind in zip(names, get_reporting_integration_callbacks(integrations), strict=True):
        with boundary(f"{name} cannot be used", "tracking.report_to", f"Install it anew, or take {name} away."):
            tracker = kind()
        if isinstance(tracker, TensorBoardCallback):  # the default folder is named after the machine
            tracker.logging_dir = str(folder.tensorboard)
        made.append(Tracker(name, tracker, say))
    return made


def leave_stuck_ones(code: int) -> None:
    """End this process with `code` without waiting for stuck trackers. wandb would wait when a process ends."""
    if _STUCK:
        atexit.register(leave, code)  # runs before earlier registrations
