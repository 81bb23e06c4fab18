"""Whether all processes see one run folder: each writes its part of a checkpoint, and reads all of it when a run goes on.

Machines with disks of their own train well and leave a whole final/ on the first one, but their checkpoints are in pieces,
which shows only when they are needed. So one process makes a file and the others look for it, before training.
"""

from __future__ import annotations

import socket
import time
import uuid
from pathlib import Path
from typing import cast

from accelerate.utils import broadcast_object_list, gather_object
from rich.markup import escape

from packtrain.errors import CheckFailed
from packtrain.train.setting import Setting
from packtrain.wording import listed

_LOOK_S = 5  # some network disks take a while to show a new file


def check_run_folder(setting: Setting, checkpoint: Path | None) -> None:
    """Called by all processes. Raises CheckFailed where some do not see the run folder and `checkpoint`s are to be in it.

    Without checkpoints there is only a remark.
    """
    if setting.process.world_size == 1:
        return
    probe = setting.folder.logs / f".seen-by-all-{uuid.uuid4().hex}"
    if setting.process.main:
        probe.touch()
    probe = setting.folder.logs / cast(list, broadcast_object_list([probe.name]))[0]
    seen = gather_object([(socket.gethostname(), _appears(probe))])
    if setting.process.main:
        probe.unlink(missing_ok=True)
    blind = sorted({host for host, sees in seen if not sees})
    if not blind:
        return
    what = f"{listed(blind)} and the first machine do not share the disk of this folder"
    if checkpoint is not None or setting.config.trainer.checkpoint_every is not None:
        raise CheckFailed(
            f"{what}, and each process has a part of a checkpoint",
            where=f"trainer.output_dir ({setting.folder.root})",
            fix="Name a folder on a disk that all machines share; without one, trainer.checkpoint_every=null with "
            "trainer.resume=never trains without checkpoints.",
        )
    setting.log.say(f"[yellow]{escape(what)}: the run cannot go on from where it is stopped[/]")


def _appears(file: Path) -> bool:
    end = time.monotonic() + _LOOK_S
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
