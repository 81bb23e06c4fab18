"""Stopping on a signal: finish the step, write a checkpoint, leave with 128 + the signal's number.

Signals reach the processes of a launch at different moments. Each rank therefore only notes its own; the number travels
with the token counts of the next step, and all ranks stop after the same one.
"""

from __future__ import annotations

import signal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StopRequest:
    """The signal that this process was sent (0: none), and the one that all ranks have agreed to stop for."""

    def __init__(self) -> None:
        self.signal = 0
        self.agreed = 0

    def counts(self) -> list[int]:
        """[1 if this process was sent SIGINT, 1 if it was sent SIGTERM], for the reduction over ranks."""
        return [int(self.signal == signal.SIGINT), int(self.signal == signal.SIGTERM)]

    def listen(self) -> None:
        """Notes SIGTERM and SIGINT; a second SIGINT ends the process at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def agree(self, interrupts: int, terminations: int) -> None:
        """Called with the number of ranks that were sent SIGINT and SIGTERM by the time of a step."""
        if not self.agreed and (interrupts or terminations):
            self.agreed = signal.SIGTERM if terminations else signal.SIGINT


class StopCallback(TrainerCallback):
    """Ends the loop after the step in which the ranks agreed, with a checkpoint."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ) -> TrainerControl:
        """Asks for the checkpoint and the end."""
        if self._stop.agreed:
            control.should_log = control.should_save = control.should_training_stop = True
        return control
