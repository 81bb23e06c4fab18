"""What torch's backends and stores say, without what is of use to their authors only: source files, advice, jokes."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

_OF_NCCL = re.compile(r" in: /\S+?:\d+,")  # NCCL error in: /…/NCCLUtils.cpp:77, remote process exited
_OF_GLOO = re.compile(r"\[\S+\.(?:cc|cpp|h|hpp|cu):\d+\] ?")
_ADVICE = re.compile(r"[.,;]? *(?:This is typically|Check the logs|GLHF)")


def shortly(error: BaseException) -> str:
    """What has happened, in a line."""
    first, _, _ = str(error).strip().partition("\n")
    words = _ADVICE.split(_OF_GLOO.sub("", _OF_NCCL.sub(":", first)))[0].strip()
    return words or first or type(error).__name__


def keep_in_full(log: Path, error: BaseException) -> None:
    """Appends all that was said to a rank's log."""
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write("".join(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n" for line in str(error).splitlines()))
    except OSError:  # its disk may be why
        pass
