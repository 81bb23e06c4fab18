"""A tensor on a stand-in GPU: it says `cuda:N`, holds a CPU tensor, and computes there what the dispatcher asks of it."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import return_and_correct_aliasing

from standin_gpus import nccl
from standin_gpus.device import check, current, index_of, limit, touch

waits: list[str] = []
"""What made the host wait for a device, in order."""
sync_debug_mode = 0
"""As `torch.cuda.set_sync_debug_mode` sets it: 0, or 1 to warn of each wait."""
_said = False
replaced: dict[Any, Any] = {}
"""Operators that the CPU has not, or not so: overload → function of the same arguments."""
_BETWEEN_DEVICES = ("_to_copy", "copy_", "_foreach_copy_")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_index_put_impl", "_unsafe_index")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "item", "is_nonzero", "equal")


def note_wait(name: str) -> None:
    """Notes that an operation makes the host wait for a device; where torch was asked to warn of it, whose operation."""
    waits.append(name)
    if sync_debug_mode:
        frame = sys._getframe(1)
        while Path(frame.f_code.co_filename).parent == _HERE and frame.f_back is not None:
            frame = frame.f_back
        place = frame.f_code.co_filename, frame.f_lineno
        warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, *place)


def set_sync_debug_mode(mode: int) -> None:
    global sync_debug_mode, _said
    if not _said:  # as torch does in every mode
        what = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
        warnings.warn(what, stacklevel=2)
    sync_debug_mode, _said = mode, True


_HERE = Path(__file__).parent


class Bytes:
    """Bytes of the storages that are on each device: `now`, and the `most` since the last reset; neither rounded nor fragmented."""

    now: ClassVar[Counter[int]] = Counter()
    most: ClassVar[Counter[int]] = Counter()
    _sizes: ClassVar[dict[int, int]] = {}

    @classmethod
    def add(cls, storage: torch.UntypedStorage, index: int) -> None:
        """Counts a storage from now until it is freed, once."""
        try:
            storage.data_ptr()
        except RuntimeError:  # of a tensor subclass inside, which is counted where its own part is made
            return
        if storage._cdata not in cls._sizes:
            cls._sizes[storage._cdata] = 0
            weakref.finalize(storage, cls._remove, storage._cdata, index)
            cls._count(storage._cdata, index, storage.nbytes())

    @classmethod
    def resize(cls, tensor: GpuTensor, size: int) -> None:
        """Gives the storage of a tensor another size in bytes; its values are lost where it becomes smaller."""
        storage = tensor.inner.untyped_storage()
        storage.resize_(size)
        cls._count(storage._cdata, tensor.index, size)

    @classmethod
    def reset(cls, index: int) -> None:
        cls.most[index] = cls.now[index]

    @classmethod
    def _count(cls, key: int, index: int, size: int) -> None:
        if cls.now[index] + size - cls._sizes[key] > limit():
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB.")
        cls.now[index] += size - cls._sizes[key]
        cls._sizes[key] = size
        cls.most[index] = max(cls.most[index], cls.now[index])

    @classmethod
    def _remove(cls, key: int, index: int) -> None:
        cls.now[index] -= cls._sizes.pop(key)


class GpuTensor(torch.Tensor):
    """`inner` is the CPU tensor with the values, `index` that of the device."""

    inner: torch.Tensor
    index: int

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int, requires_grad: bool = False):
        form: dict[str, Any] = {"dtype": inner.dtype, "layout": inner.layout, "requires_grad": requires_grad}
        form |= {
            "strides": inner.stride(),
            "storage_offset": inner.storage_offset(),
            "device": torch.device("cuda", index),
        }
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **form)

    def __init__(self, inner: torch.Tensor, index: int, requires_grad: bool = False) -> None:
        self.inner, self.index = inner, index
        touch(index)
        Bytes.add(inner.untyped_storage(), index)

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.inner}, cuda:{self.index})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return GpuTensor, (self.inner, self.index, self.requires_grad)

    def tolist(self) -> Any:
        note_wait("tolist")
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda device type tensor to numpy. Use Tensor.cpu() to copy the tensor first.")

    def __getitem__(self, key: Any) -> Any:
        return torch.Tensor.__getitem__(self, self._on_device(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        torch.Tensor.__setitem__(self, self._on_device(key), value)

    def _on_device(self, key: Any) -> Any:
        """Indices that torch moves to the device below the dispatcher: lists, ranges and arrays."""
        if isinstance(key, tuple):
            return tuple(self._on_device(one) for one in key)
        if isinstance(key, (list, range)):
            return torch.tensor(list(key)).to(self.device)
        if type(key).__module__ == "numpy" and getattr(key, "ndim", 0):
            return torch.as_tensor(key).to(self.device)
        return key

    @property
    def data(self) -> Any:
        return torch._C.TensorBase.data.__get__(self)

    @data.setter
    def data(self, other: Any) -> None:  # DeepSpeed points its parameters into flat buffers
        torch._C.TensorBase.data.__set__(self, other)
        self.inner, self.index = (other.inner, other.index) if isinstance(other, GpuTensor) else (other, self.index)

    def resize_(self, *size: Any, **form: Any) -> Any:  # torch sends objects of several lengths in it
        torch.utils.swap_tensors(self, GpuTensor(self.inner.resize_(*size, **form), self.index))
        return self

    def storage(self) -> Any:
        return self.inner.storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def pin_memory(self, *_: Any) -> Any:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def is_pinned(self, *_: Any) -> bool:
        return False

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Does on the CPU what was asked of a device; refuses what CUDA refuses."""
    check()
    name = func.overloadpacket.__name__
    tensors = list(_tensors((args, kwargs)))
    on_gpus = [one for one in tensors if isinstance(one, GpuTensor)]
    if on_gpus and name not in (*_BETWEEN_DEVICES, *_INDEXING):
        _check_devices(func, tensors, on_gpus)
    if func in replaced:
        return replaced[func](*args, **kwargs)
    index = _index_of_result(name, args, kwargs, on_gpus)
    masked = name in _INDEXING and any(one is not None and one.dtype == torch.bool for one in args[1])
    at_once = not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
    read = index is None and on_gpus and name in _BETWEEN_DEVICES and at_once
    if name in _READS or masked or read:
        note_wait(name)
    on_cpu, options = each_tensor(lambda one: one.inner if isinstance(one, GpuTensor) else one, (args, kwargs))
    on_cpu = nccl.on_cpu(func, on_cpu)
    if index is not None and options.get("device") is not None:
        options["device"] = torch.device("cpu")
    if options.get("pin_memory"):
        options["pin_memory"] = False
    result = _product(func, on_cpu, options) if name in _PRODUCTS else func(*on_cpu, **options)
    result = nccl.ended(func, result)
    if index is None:
        return result
    result = each_tensor(lambda one: GpuTensor(one, index), result)
    return return_and_correct_aliasing(func, args, kwargs, result) if _shares_memory(func) else result


def each_tensor(change: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """The arguments or results `values` with their tensors changed (torch's own for trees takes most of a tiny run's time)."""
    if isinstance(values, torch.Tensor):
        return change(values)
    if isinstance(values, (tuple, list)):
        return type(values)([each_tensor(change, one) for one in values])
    if isinstance(values, dict):
        return {name: each_tensor(change, one) for name, one in values.items()}
    return values


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list, dict)):
        for one in values.values() if isinstance(values, dict) else values:
            yield from _tensors(one)


@cache
def _shares_memory(func: Any) -> bool:
    """Whether results are views of arguments, or arguments that it has changed."""
    return any(one.alias_info is not None for one in (*func._schema.arguments, *func._schema.returns))


def _product(func: Any, factors: Any, options: dict[str, Any]) -> Any:
    """Summed in float32, as tensor cores do; a CPU without instructions for 16 bits is 40 times as fast in it, too."""
    dtype = factors[0].dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return func(*factors, **options)
    out = options.pop("out", None)
    result = func.overloadpacket(*(one.float() for one in factors), **options).to(dtype)
    return result if out is None else out.copy_(result)


def _index_of_result(name: str, args: Any, kwargs: dict[str, Any], on_gpus: list[GpuTensor]) -> int | None:
    """The device on which the result is; None for the CPU."""
    if name == "copy_" and not isinstance(args[0], GpuTensor):
        return None
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        return index_of(device) if device.type == "cuda" else None
    return on_gpus[0].index if on_gpus else None


def _check_devices(func: Any, tensors: list[torch.Tensor], on_gpus: list[GpuTensor]) -> None:
    """Raises as CUDA does: numbers of the CPU may take part, tensors of it and of another device may not."""
    elsewhere = any(not isinstance(one, GpuTensor) and one.dim() > 0 for one in tensors)
    if elsewhere or len({one.index for one in on_gpus}) > 1:
        shapes = [(tuple(one.shape), str(one.device)) for one in tensors]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices ({func}: {shapes})"
        )


_library: Any = None  # what is registered lasts as long as this does


def install() -> None:
    """Has torch make tensors of `cuda` devices."""
    global _library
    torch.__future__.set_swap_module_params_on_conversion(True)
    _library = torch.library.Library("aten", "IMPL", "CUDA")

    def on_device(device: Any) -> int:
        return current() if device is None else index_of(device)

    def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
        form = {} if memory_format is None else {"memory_format": memory_format}
        return GpuTensor(torch.empty(size, dtype=dtype, device="cpu", **form), on_device(device))

    def empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
        return GpuTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), on_device(device))

    _library.impl("empty.memory_format", empty)
    _library.impl("empty_strided", empty_strided)
    _device_constructors()  # `with torch.device(...)` looks for the functions that there were when this was first called
    for name in ("tensor", "as_tensor", "arange", "linspace", "eye", "randperm"):
        setattr(torch, name, _from_cpu(getattr(torch, name)))
    for name in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided", "rand", "randn"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self
    torch.Tensor.record_stream = lambda self, stream: None
    _let_data_change_device()
    _add_types()
    torch._C._cuda_set_sync_debug_mode = set_sync_debug_mode


def _from_cpu(make: Any) -> Any:
    """`make`, which goes past the dispatcher, or below it resizes what it has made: values become a CPU tensor first."""

    def made(
        *args: Any, device: Any = None, requires_grad: bool = False, pin_memory: bool = False, **kwargs: Any
    ) -> Any:
        if device is None and not any(isinstance(one, torch.Tensor) for one in args):
            device = _device_of_context()
        if device is None or torch.device(device).type != "cuda":
            tensor = make(*args, device=device, **kwargs)
        else:
            tensor = make(*args, device="cpu", **kwargs).to(device)
        return tensor.requires_grad_() if requires_grad else tensor

    return made


def _device_of_context() -> Any:
    """The device of the `with torch.device(...)` that this is in, which torch gives to its own functions alone."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def _unpinned(make: Any) -> Any:
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def _let_data_change_device() -> None:
    """`parameter.data = tensor_on_a_gpu`: the parameter remains the same object, its inside is exchanged."""
    data = torch._C.TensorBase.data

    def set_data(self: torch.Tensor, other: Any) -> None:
        if not isinstance(other, GpuTensor) or isinstance(self, GpuTensor):
            data.__set__(self, other)
            return
        moved: Any = GpuTensor(other.inner, other.index)
        attributes = dict(self.__dict__)
        if isinstance(self, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, self.requires_grad)
        torch.utils.swap_tensors(self, moved)
        self.__dict__.update(attributes)

    torch.Tensor.data = property(data.__get__, set_data)


def _add_types() -> None:
    """Products whose result has another dtype than their factors and histograms of integers, which only CUDA has."""
    aten = torch.ops.aten

    def histc(of, bins=100, min=0, max=0):
        return GpuTensor(torch.histc(of.inner.float(), bins, min, max).to(of.dtype), of.index)

    def mm(a, b, dtype):
        return GpuTensor((a.inner.float() @ b.inner.float()).to(dtype), a.index)

    def mm_out(a, b, dtype, *, out):
        out.inner.copy_(a.inner.float() @ b.inner.float())
        return out

    def added(acc, a, b, beta, alpha):
        return torch.addmm(acc.inner.float(), a.inner.float(), b.inner.float(), beta=beta, alpha=alpha)

    def addmm(acc, a, b, dtype, *, beta=1, alpha=1):
        return GpuTensor(added(acc, a, b, beta, alpha).to(dtype), acc.index)

    def addmm_out(acc, a, b, dtype, *, beta=1, alpha=1, out):
        out.inner.copy_(added(acc, a, b, beta, alpha))
        return out

    def scaled_mm(
        a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False
    ):  # of 8-bit factors, whose inner sizes and layouts CUDA prescribes
        if a.shape[1] % 16 or b.shape[0] % 16 or b.shape[1] % 16:
            raise RuntimeError(f"Expected sizes divisible by 16, got {tuple(a.shape)} and {tuple(b.shape)}")
        if a.stride(1) != 1 or b.stride(0) != 1 or len({a.index, b.index, scale_a.index, scale_b.index}) > 1:
            raise RuntimeError("mat1 must be row-major, mat2 column-major, all on one device")
        if scale_a.dim() and out_dtype != torch.bfloat16:
            raise RuntimeError("Only bf16 high precision output types are supported for row-wise scaling.")
        product = (a.inner.float() * scale_a.inner) @ (b.inner.float() * scale_b.inner)
        return GpuTensor((product if bias is None else product + bias.inner).to(out_dtype), a.index)

    products = {aten.mm.dtype: mm, aten.mm.dtype_out: mm_out, aten.addmm.dtype: addmm, aten.addmm.dtype_out: addmm_out}
    replaced.update({aten._scaled_mm.default: scaled_mm, aten.histc.default: histc, **products})
