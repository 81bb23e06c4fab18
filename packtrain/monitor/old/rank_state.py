"""What is known of one rank, by its heartbeat, by the system, and by what it answered when it was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from packtrain.monitor.old.heartbeat import BEFORE_TRAINING, Beat
from packtrain.monitor.old.stacks import Collective, Frame

BUSY_CORES = 0.05
_ALONE = (*BEFORE_TRAINING, "final")
_DATA_LOCK = "packtrain/data/tokens/cache.py"
_MEETS = ("torch/distributed/", "packtrain/train/sync/store.py", "packtrain/train/sync/checks.py")
_WRITES = "torch/distributed/checkpoint/"
_LOCKS = ("/filelock/", "torch/utils/file_baton.py")
_ON_THE_DEVICE = ("torch/cuda/", "torch/autograd/")
_INNERMOST = 4


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of a rank. `still_s` is since its heartbeat changed; `state` as in processes.Sight; `exit` its exit code,
    negative for a signal, None where it has not said any. `cores` it uses, with its children: 0 where it has not been at work
    for a while, 1 where it was seen running, for a loaded machine gives it little, or moves many bytes. `moves`: something
    still does for it, if not itself (launch/effort.py).

    `stack` (innermost first), `pending`, the last collectives that it has `passed` and `loaders` (stacks of its loader
    processes) are what it answered when asked, `told` whether it could say if a collective is pending. `gpu_error` is what
    the kernel of its machine says of a GPU, `died` when it crashed (seconds, as its machine counts them). `unsaid`: not itself has
    said how it ended, only the system, which has `exit`.
    """

    rank: int
    host: str
    beat: Beat | None = None
    still_s: float = 0.0
    state: str = "S"
    exit: int | None = None
    oom: bool = False
    cores: float = 0.0
    moves: bool = False
    stack: tuple[Frame, ...] = ()
    pending: Collective | None = None
    passed: tuple[Collective, ...] = ()
    told: bool = False
    loaders: tuple[tuple[Frame, ...], ...] = ()
    gpu_error: str = ""
    died: float | None = None
    unsaid: bool = False

    @property
    def dead(self) -> bool:
        """Gone without having said how: who is through may have left no exit code yet, or nobody who looks knows it."""
        said = self.exit is not None and self.exit >= 0 and not self.unsaid
        through = self.exit is None and self.at_its_end
        return self.state in ("", "Z", "X") and not (said or through)

    @property
    def at_its_end(self) -> bool:
        """Through with everything."""
        return (self.exit == 0 and not self.unsaid) or (self.beat is not None and self.beat.phase == "done")

    @property
    def alone(self) -> bool:
        """Whether it is where no collective operation waits for a rank, or none that has begun before."""
        return self.beat is None or self.beat.phase in _ALONE

    @property
    def in_a_step(self) -> bool:
        """Whether it is in a step like others before, of which it is known what they usually take."""
        return (
            self.beat is not None and self.beat.usual_s > 0 and self.beat.phase not in (*_ALONE, "checkpoint", "eval")
        )

    @property
    def waits(self) -> bool:
        """Whether it waits for the others, for all that is known: in a collective operation, or where the ranks meet."""
        if self.pending:
            return True
        if self.stack:  # what connects the ranks, as NCCL does in the first operation, is no operation yet
            return any(name in frame.file and _WRITES not in frame.file for name in _MEETS for frame in self._innermost)
        return not self.told and self.beat is not None and self.beat.phase in ("join", "counts", "optimizer")

    @property
    def locked(self) -> bool:
        """Whether it waits for a lock that another process holds, who knows where."""
        return any(name in frame.file for name in _LOCKS for frame in self._innermost)

    @property
    def at_work(self) -> bool:
        """Whether it computes, or moves bytes, for all that can be seen: who waits may do so by asking again and again."""
        return self.cores >= BUSY_CORES

    @property
    def does_nothing(self) -> bool:
        """Whether it neither is at work nor waits for anything that may be: other ranks, a lock, the GPU, its storage."""
        on_the_device = any(name in frame.file for name in _ON_THE_DEVICE for frame in self.stack[:2])
        return not (self.at_work or self.moves or self.waits or self.locked or on_the_device)

    @property
    def data_lock(self) -> bool:
        """Whether the lock is that of the tokenised data, which says itself for whom it waits, and for how long at most."""
        return self.locked and any(_DATA_LOCK in frame.file for frame in self._innermost)

    @property
    def _innermost(self) -> tuple[Frame, ...]:
        return self.stack[:_INNERMOST]

    def to_json(self) -> dict[str, Any]:
        """Plain containers, for the line between the launchers."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankState:
        """What `to_json` wrote. Raises TypeError, KeyError or ValueError for anything else."""
        beat, pending = values["beat"], values["pending"]
        return cls(
            **{
                **values,
                "beat": None if beat is None else Beat(**beat),
                "pending": None if pending is None else Collective(**pending),
                "passed": tuple(Collective(**one) for one in values["passed"]),
                "stack": tuple(Frame(**one) for one in values["stack"]),
                "loaders": tuple(tuple(Frame(**one) for one in stack) for stack in values["loaders"]),
            }
        )
