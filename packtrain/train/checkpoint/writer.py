"""Checkpoints written in the background: a thread writes copies while training goes on.

Each rank's thread writes its own part. The ranks then agree, over a separate gloo group, that every part is written, and rank 0 seals the
checkpoint (folder.py). If the machine's memory has no room for the copies, the step waits for the write. A full or failing disk costs the
checkpoint, never the run.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from packtrain.monitor.heartbeat import free_memory, own_heartbeat, waiting
from packtrain.train.library_errors import is_of_storage, out_of_memory, shortly
from packtrain.train.sync import BACKGROUND

_SHARE = 0.8
"""Share of the machine's free memory that copies may fill."""
_LONGEST = timedelta(days=1)
"""Time limit of the threads' group: practically none, because the watchdog sees a step that waits for a write."""
_Jobs = list[Callable[[], object]]
_S = TypeVar("_S")
_NO_MEMORY = "the memory of this machine has no room for a copy of weights and optimizer: steps wait for checkpoints"


@dataclass(slots=True)
class WriteOutcome:
    """Outcome of this process's checkpoints: number `written`, step of the `newest`, (step, why) per failure."""

    written: int = 0
    newest: int | None = None
    seconds: float = 0.0
    """Time that the newest one took, from the first copy to the seal."""
    failed: list[tuple[int, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Return the outcome for summary.json."""
        return {
            "written": self.written,
            "newest": self.newest,
            "failed": [{"step": step, "why": why} for step, why in self.failed],
        }


class CheckpointWriter:
    """Writer of one checkpoint at a time. `write_later` and `write_now` collect this process's part, `begin` starts, `wait` ends it.

    All ranks make the same calls. Used as a context manager, it waits for the last write, except when an interrupt ends the block.
    """

    def __init__(self, say: Callable[[str], None], newest: int | None = None) -> None:
        self.outcome = WriteOutcome(newest=newest)
        self._say, self._jobs = say, _Jobs()
        self._early = ""  # the first fault of `write_now`
        self._stager: DefaultStager | None = None
        self._pins = torch.cuda.is_available()
        self._fits_in_memory, self._kept = True, False
        self.group: dist.ProcessGroup | None = None
        """Group of all ranks, only for collectives of the thread. None if this process is alone."""
        self._thread: Thread | None = None
        self._waits: SimpleQueue[str | None] = SimpleQueue()
        self._error: Exception | None = None
        self._warned = 0

    def copied(self, state: _S, *, alone: bool = False) -> _S:
        """Return a copy of `state` with its tensors on the CPU. If memory has no room, return `state` itself; then `begin` waits.

        Every rank of the machine makes its own copy, unless only rank 0 does (`alone`).
        """
        try:
            copies = 1 if alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            if self._fits_in_memory and (self._kept or _fits(state, copies)):
                return self._staged(state)
        except NotImplementedError:  # torchao's 8-bit and 4-bit states, which the stager cannot copy
            return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        if self._fits_in_memory:
            self._fits_in_memory = False
            self._say(_NO_MEMORY)
        return state

    def _staged(self, state: _S) -> _S:
        """Copy `state` into the same memory each time. The memory is not pinned if the machine refuses to pin."""
        if self._stager is None:
            options = StagingOptions(self._pins, False, False, self._pins)  # pinned, shared, asynchronous, non-blocking
            self._stager = DefaultStager(options)
        try:
            return cast(_S, self._stager.stage(cast(dict[str, object], state)))
        except RuntimeError as error:
            if not self._pins or out_of_memory(error):
                raise
            self._pins, self._stager = False, None
            # the refusal stays CUDA's last error in this thread, and the next kernel would raise it
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda").add_(1)
            copied = self._staged(state)
            self._say(f"checkpoints are copied through memory that is not pinned, which takes longer: {shortly(error)}")
            return copied

    def write_later(self, work: Callable[[], object]) -> None:
        """Queue `work`, which writes a part of the checkpoint from copies, for the thread."""
        self._jobs.append(work)

    def write_now(self, work: Callable[[], object]) -> None:
        """Do `work` now, which writes something small. If it fails, the checkpoint fails, and this rank stays in step."""
        self._early = self._early or self._first_fault([work])

    def begin(self, step: int, staging: Path, seal: Callable[[], object] | None, since: float) -> None:
        """Start to write the collected parts as the checkpoint of `step`. Rank 0's `seal` runs when all ranks have written.

        If a rank fails, `staging` is removed. `since` is when collecting began (time.monotonic).
        """
        if self.group is None and dist.is_initialized():
            with waiting("the other ranks to begin a checkpoint"):
                group = dist.new_group(backend="gloo", timeout=_LONGEST, group_desc=BACKGROUND)
                self.group = cast(dist.ProcessGroup, group)
        self._kept = self._fits_in_memory
        parts = self._early, self._jobs, [seal] if seal else []
        self._jobs, self._early = [], ""
        self._thread = _thread(lambda: self._write(step, staging, *parts, since))
        if not self._fits_in_memory:
            self.wait()

    def wait(self) -> None:
        """Wait until the current write, if any, is complete or has failed. Raises errors that are not a disk's."""
        if self._thread is not None:
            others = self._waits.get()
            while others is not None:  # tells the watchdog who writes, and who waits for others
                with waiting(others) if others else nullcontext():
                    others = self._waits.get()
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def warn_of_failures(self, then: str = "") -> None:
        """Warn of checkpoints that failed since the last call; `then` ends the message."""
        failed = self.outcome.failed
        for step, why in failed[self._warned :]:
            newest = self.outcome.newest
            kept = "there is none yet" if newest is None else f"the newest is that of step {newest}"
            self._say(f"the checkpoint of step {step} was not written: {why}; {kept}{then}")
        self._warned = len(failed)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None or issubclass(kind, Exception):
            own_heartbeat().enter("checkpoint")  # the wait may exceed the limit of the phase before
            self.wait()
            self.warn_of_failures()
        self._stager = None  # frees the copies

    def _write(self, step: int, staging: Path, early: str, jobs: _Jobs, seal: _Jobs, since: float) -> None:
        """Run the thread: this rank's part, then the others', then the seal. Every rank learns the outcome."""
        try:
            # all ranks or none: the jobs of FSDP2 wait for other ranks' jobs
            why = self._agree(early)
            if not why:
                why = self._first_fault(jobs)
                self._note_wait("the other ranks to write their parts of the checkpoint")
                why = self._agree(why)
            if not why:
                self._note_wait("" if seal else "rank 0 to complete the checkpoint")
                why = self._agree(self._first_fault(seal))
        except Exception as error:  # the other ranks are lost: training ends for the same reason
            why = shortly(error)
        if why:
            shutil.rmtree(staging, ignore_errors=True)
            self.outcome.failed.append((step, why))
        else:
            self.outcome.written, self.outcome.newest = self.outcome.written + 1, step
            self.outcome.seconds = time.monotonic() - since
        self._waits.put(None)

    def _first_fault(self, jobs: _Jobs) -> str:
        """Run `jobs`; return the error of the first one that fails, "" if none does."""
        try:
            for job in jobs:
                job()
        except Exception as error:
            self._error = None if is_of_storage(error) else error
            return shortly(error)
        return ""

    def _note_wait(self, others: str) -> None:
        if self.group is not None:
            self._waits.put(others)

    def _agree(self, why: str) -> str:
        """Return the first `why` by rank that is not empty."""
        if self.group is None:
            return why
        answers: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(answers, why, group=self.group)
        return next(filter(None, answers), "")


def _thread(work: Callable[[], object]) -> Thread:
    """Start a thread for `work` on this thread's GPU. Without a named GPU it would open a context on GPU 0."""
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

    def begin() -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        work()

    thread = Thread(target=begin, name="checkpoint", daemon=True)
    thread.start()
    return thread


def _fits(state: object, copies: int) -> bool:
    """Return whether the machine's memory has room for this many copies of `state`."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    size = sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)
    return copies * size <= _SHARE * free_memory()
