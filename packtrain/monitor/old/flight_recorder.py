"""torch's flight recorders: a rank whose collective runs out of time over NCCL writes what it recorded into logs/.

That is the limit behind the watchdog's, and the only one where nobody watches. packtrain doctor reads the files afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_PREFIX = "flight-recorder-rank-"
_DUMP = re.compile(rf"(?:{_PREFIX}|\w*trace_rank_)(\d+)")  # the other is torch's own name


def recorded_into(logs: Path) -> Mapping[str, str]:
    """Environment variables of the ranks for that. The recorder itself is on unless it is switched off."""
    return {"TORCH_FR_DUMP_TEMP_FILE": str(logs.absolute() / _PREFIX), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def dumps_in(logs: Path) -> dict[int, Path]:
    """What is there, by rank."""
    found = {file: _DUMP.fullmatch(file.name) for file in logs.glob("*") if file.is_file()}
    return {int(name[1]): file for file, name in sorted(found.items()) if name}
