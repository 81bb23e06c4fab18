"""Whether the machines of a run write to one output folder: machine 0 leaves a mark there, and the others look for it.

The type of a file system tells as little as its name: two exports look alike, and an ext4 may be a folder of the host that
containers share. The folder itself may not be there yet; then it is the nearest one above it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packtrain.config.schema import RunConfig
from packtrain.diagnose.checks.check import Check
from packtrain.diagnose.checks.host import EACH_ITS_OWN
from packtrain.diagnose.cluster.compare import Folded, named
from packtrain.diagnose.redact import Redactor

_MARK = ".packtrain-env-"


@dataclass(frozen=True, slots=True)
class Output:
    """A run's output folder; `needed` is whether it cannot do without one that all share: each process writes checkpoints."""

    folder: str
    needed: bool

    def leave_mark(self) -> Path:
        """A new, empty file in the folder. Raises OSError."""
        with tempfile.NamedTemporaryFile(prefix=_MARK, dir=self._nearest(), delete=False) as mark:
            return Path(mark.name)

    def sees(self, name: str) -> bool:
        """Whether a mark of this name is there."""
        return name.startswith(_MARK) and os.path.exists(self._nearest() / Path(name).name)

    def remark(self, seen: Mapping[int, bool], names: Mapping[int, str]) -> list[Folded]:
        """The check that machines which do not see the mark come to."""
        blind = [names[node] for node, sees in sorted(seen.items()) if not sees]
        if not blind:
            return []
        what = f"{named(blind)} cannot see what {names[0]} writes to {Redactor(os.environ).text(self.folder)}: each machine has its own"
        what += ", and checkpoints are written by all of them" if self.needed else ""
        fix = "trainer.output_dir on a file system that all machines share"
        return [Folded("output-folder", "fail" if self.needed else "warn", what, fix, tuple(blind))]

    def _nearest(self) -> Path:
        wanted = Path(self.folder).expanduser().absolute()
        return next(one for one in (wanted, *wanted.parents) if os.path.isdir(one))


def output_of(config: RunConfig) -> Output:
    """The output folder of a run."""
    return Output(config.trainer.output_dir, config.trainer.checkpoint_every is not None)


def without_guess(checks: Sequence[Check]) -> list[Check]:
    """The checks of one machine, which can only guess whether others see its disk, without that guess."""
    return [one for one in checks if not one.found.endswith(EACH_ITS_OWN)]
