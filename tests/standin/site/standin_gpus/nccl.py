"""NCCL for the stand-in devices: gloo, which gets the tensors' CPU side. As with NCCL, groups take tensors of devices alone.

torch makes the groups itself, of backend `nccl` and for `cuda` only, with `ProcessGroupNCCL`, its options and time limits; a tensor
of the CPU is refused by torch. What is asked of such a group comes to the dispatcher, and goes on to a group for the CPU that has
the same connections.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.utils._pytree import tree_map_only

_backends: list[ProcessGroupNCCL] = []  # torch gives back the object that it was given for as long as that is there
_beside: dict[str, ProcessGroup] = {}
_NAME = "{} on the CPU"


class ProcessGroupNCCL(ProcessGroupGloo):
    """What torch makes for a group with the backend nccl."""

    class Options:
        _timeout = timedelta(minutes=10)
        is_high_priority_stream = False

    def __init__(self, store: Any, rank: int, size: int, options: Any, *device: torch.device | None) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        _backends.append(self)

    def split(self, store: Any, ranks: list[int], options: Any) -> ProcessGroupNCCL:
        """Make a smaller group of the group of all. torch asks for it since 2.15."""
        return ProcessGroupNCCL(store, ranks.index(self.rank()), len(ranks), options)


def on_cpu(func: Any, args: Any) -> Any:
    """The arguments of an operator, with groups that take the CPU side of tensors in place of those for devices."""
    if func.namespace == "c10d":
        return tree_map_only(torch.ScriptObject, _replaced, args)
    if func.namespace == "_c10d_functional":  # it knows groups by their names
        return tuple(_NAME.format(one) if one in _names() and _beside_it(one) else one for one in args)
    return args


def _replaced(argument: torch.ScriptObject) -> Any:
    if not argument._type().qualified_name().endswith("c10d.ProcessGroup"):  # e.g. what is to be done with the tensors
        return argument
    return _beside_it(ProcessGroup.unbox(argument).group_name).boxed()


def _names() -> list[str]:
    return list(dist.distributed_c10d._world.pg_names.values())


def _beside_it(name: str) -> ProcessGroup:
    """The group for the CPU that has the connections of the group for devices of that name."""
    if name not in _beside:
        group = dist.distributed_c10d._resolve_process_group(name)
        beside = ProcessGroup(group.get_group_store(), group.rank(), group.size())
        beside._set_default_backend(ProcessGroup.BackendType.GLOO)
        backend = group._get_backend(torch.device("cuda"))
        beside._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        torch._C._distributed_c10d._register_process_group(_NAME.format(name), beside)
        _beside[name] = beside
    return _beside[name]


def ended(func: Any, result: Any) -> Any:
    """The result of an operator that sends; gloo would drop what nobody waits for, NCCL's groups flush it as they are destroyed."""
    if func.namespace == "_c10d_functional":
        return tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor.default, result)
    return result


def install() -> None:
    core: Any = dist.distributed_c10d
    core._NCCL_AVAILABLE, core.default_pg_nccl_timeout = True, ProcessGroupNCCL.Options._timeout
    torch._C._distributed_c10d._hash_tensors = lambda tensors: 0  # for the log of TORCH_DISTRIBUTED_DEBUG=DETAIL
    for module in (dist, core):
        module.ProcessGroupNCCL = module.ProcessGroupNCCL2 = ProcessGroupNCCL  # the second one since torch 2.15
    destroy = core.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        destroy(group)
        for known in (_beside, _backends) if group is None else ():
            known.clear()

    for module in (dist, core):
        module.destroy_process_group = destroy_process_group
    logger: Any = torch._C._distributed_c10d.Logger
    logger.set_runtime_stats_and_log = lambda self: None  # it reads the clock of DDP's events, which are CUDA's
