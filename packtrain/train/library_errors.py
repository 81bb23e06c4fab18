"""Messages for library errors in training: lost processes, full disks, out of memory, broken GPUs."""

from __future__ import annotations

import errno
import math
import re
from typing import TYPE_CHECKING

import numpy as np
import torch

from packtrain.attention.backends import NEEDED
from packtrain.config.schema import Batch
from packtrain.errors import LostPeers, PacktrainError, PeerFailed, UserError, explain, raised_in
from packtrain.model.spread import Ranks
from packtrain.run_folder import RunFolder
from packtrain.wording import counted, first_line, size

if TYPE_CHECKING:
    from packtrain.train.loop import StepTrainer
    from packtrain.train.preparation import Prepared

# source locations of NCCL and gloo
_PLACES = re.compile(r"(?<=NCCL error) in: /\S+?:\d+(?=,)|\[\S+\.(?:cc|cpp|h|hpp|cu):\d+\] ?")
# torch's allocator for CPUs, and what CUDA and its libraries want beside torch's allocator
_NO_MEMORY = re.compile(r"DefaultCPUAllocator|CUDA error: (?:out of memory|CUBLAS_STATUS_ALLOC_FAILED)")
_ADVICE = re.compile(r"[.,;]? *(?:This is typically|Check the logs|GLHF)")
_GO_ON = "start the same command again: complete checkpoints are kept"
_RECOMPUTE = "trainer.gradient_checkpointing=full, or "
_LESS_MEMORY = (
    f"{_RECOMPUTE}strategy=fsdp2 or zero3 on several devices: each trains the same; or take peft=lora. "
    f"packtrain plan shows what takes how much. Then {_GO_ON}"
)
"""Last advice for a lack of memory."""
_NAMED = 3  # examples
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_ASSERT = "device-side assert"  # an index out of range: inputs cause this GPU error, so it may be a bug


def explained(error: BaseException, ranks: Ranks, folder: RunFolder, batch: Batch) -> PacktrainError | None:
    """Return the message for `error`; None if it may be a bug of packtrain.

    NCCL and the store have their own error types. Other errors are recognised by their text: gloo and torch.save name a source file,
    safetensors has fixed first words, and out of memory on CPUs names the allocator.
    """
    said = str(error).strip().partition("\n")[0]
    if ranks.world_size > 1 and (isinstance(error, torch.distributed.DistError) or "gloo/" in said):
        fix = f"the process that ended first says why: {folder.logs}/rank-*.log and launcher.log"
        return LostPeers(f"rank {ranks.rank} lost the other processes: {shortly(error)}", fix=fix, code="peers-lost")
    if isinstance(error, MemoryError):
        return explain(error)
    if out_of_memory(error):
        fix = f"set it lower, or {_LESS_MEMORY}"
        where = "batch.examples_per_device" if batch.tokens_per_device is None else "batch.tokens_per_device"
        return UserError(f"out of memory on {ranks.device}: {said}", where=where, fix=fix, code="out-of-memory")
    if NEEDED in str(error):
        what = f"{said.partition(NEEDED)[0].strip()} {NEEDED}"
        fix = "set it to false, or take another model"
        return UserError(what, where="trainer.deterministic", fix=fix, code="not-deterministic")
    if "CUDA error" in said and _ASSERT not in said:
        fix = f"packtrain env shows what its driver says (Xid, ECC), CUDA_LAUNCH_BLOCKING=1 where it happens; then {_GO_ON}"
        return PeerFailed(f"{ranks.device} of rank {ranks.rank} failed: {said}", fix=fix, code="device-failed")
    if "DataLoader worker (pid" in said:
        fix = f"the system kills for want of memory: give the job more of it, and {_GO_ON}"
        return PeerFailed(said, fix=fix, code="loader-killed")
    if is_of_storage(error) and (not isinstance(error, OSError) or error.errno in _FULL):
        named = error.filename if isinstance(error, OSError) else None
        where = named if isinstance(named, str) else f"trainer.output_dir ({folder.root})"
        what = f"cannot write: {first_line(error)}"
        return UserError(what, where=where, fix=f"free some space and {_GO_ON}", code="disk-full")
    if isinstance(error, FileNotFoundError) and not folder.root.exists():
        what = f"the run folder {folder.root} was removed while the run went on"
        fix = "leave it where it is until the run has ended"
        return UserError(what, where="trainer.output_dir", fix=fix, code="run-folder-removed")
    if isinstance(error, SystemExit) or "transformers_modules" in raised_in(error):
        what = f"the code that came with the model failed: {first_line(error)}"
        fix = "mend it, or take another model"
        return UserError(what, where=f"model.path, {raised_in(error)}", fix=fix, code="model-code-failed")
    return None


def memory_error(error: Exception, trainer: StepTrainer, run: Prepared) -> UserError | None:
    """Return the message for `error`; None if memory sufficed or no micro-batch ran.

    It suggests half of the micro-batch's size, which trains the same, or data.max_length if a single example fills it.
    """
    work, steps, spikes, config, ranks = trainer.work, trainer.steps, trainer.settings.spikes, run.config, run.ranks
    if (batch := work.batch) is None or not out_of_memory(error):
        return None
    schedule, used = steps.schedule, ""
    if (tried := work.tried) is not None:
        numbers, when = tried.tolist(), "before step 1, where the largest micro-batch of the first pass is tried"
    else:
        own, at = steps.at(work.step)
        numbers = own.schedule.micro_batches(at, steps.rank, steps.world_size)[work.micro - 1][0].tolist()
        when = f"in step {work.step + 1} (micro-batch {work.micro})"
    names = ", ".join(spikes.places(numbers[:_NAMED]) if spikes else [])
    names += f" and {len(numbers) - _NAMED} more" if numbers[_NAMED:] else ""
    if ranks.device.type == "cuda":
        total = torch.cuda.get_device_properties(ranks.device).total_memory
        peak = torch.cuda.max_memory_allocated(ranks.device)
        used = f". {size(work.held)} were in use before it, {size(peak)} at the peak, of {size(total)}"
    if not isinstance(run.memory, str):
        used += f". Planned were {run.memory.sentence().partition(': ')[0]}"
    key, now, least = "batch.examples_per_device", len(numbers), 1
    if config.batch.limits(config.packing.mode)[1] is not None:
        longest = math.ceil(int(schedule.lengths.max()) / schedule.ranks_per_row)
        key, now, least = "batch.tokens_per_device", schedule.slots(np.array(numbers)) // batch.parts, longest
    half = max(now // 2, least)
    less = _LESS_MEMORY.removeprefix(_RECOMPUTE if trainer.engine.checkpointing == "full" else "")
    fix = f"set {key}={half}, or {less}"
    if half >= now:
        key, fix = "data.max_length", f"set it lower, which cuts documents, or {less}"
    row = f"{counted(len(numbers), 'documents')} in {batch.slots:,} token slots ({names})"
    what = f"out of memory on {ranks.device} {when}: {row}{used}. {shortly(error)}"
    return UserError(what, where=key, fix=fix, code="out-of-memory")


def is_of_storage(error: BaseException) -> bool:
    """Return whether writing failed, in the words of the system, torch.save or safetensors."""
    said = str(error).strip().partition("\n")[0]
    return isinstance(error, OSError) or "inline_container.cc" in said or "Error while serializing" in said


def out_of_memory(error: BaseException) -> bool:
    """Return whether a device lacked memory for a tensor. A CPU's memory is the machine's."""
    return isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(str(error).partition("\n")[0]) is not None


def shortly(error: BaseException) -> str:
    """Return the first line of the error, without source locations and advice."""
    first, _, _ = str(error).strip().partition("\n")
    return _ADVICE.split(_PLACES.sub("", first))[0].strip() or first or type(error).__name__
