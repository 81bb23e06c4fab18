"""GPUs that are not there: tensors that say `cuda:N` and compute on the CPU, so that code for CUDA runs, with real values.

It shows a device without its index, tensors of two devices in one call, wrong arguments of a kernel, calls that only CUDA's side
has (streams, events, pinned memory), which thread touches which device (`device.touched`), where the host waits (`tensor.waits`)
and how many bytes of tensors are on the devices. It does not show speed, the rounding of real kernels, races, or NCCL.
"""

import os

import triton_interpreter

from standin_gpus import device  # before torch is imported


def install() -> None:
    """Puts the devices into torch, which has just been imported."""
    from standin_gpus import cuda_calls, flash, libraries, nccl, sdpa, tensor

    device.register()
    for part in (tensor, flash, sdpa, cuda_calls, nccl, libraries):
        part.install()
    if os.environ.get("TRITON_INTERPRET") == "1":
        triton_interpreter.install()
    device.touched.clear()
