"""Triton's own interpreter for kernels on a CPU and on stand-in GPUs: with TRITON_INTERPRET=1 they run in numpy, as they are written."""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Make Triton's interpreter compute as compiled kernels do.

    It then takes numbers with a comma, the tensors of the stand-in, NVIDIA's functions, and bfloat16 in operations, products and atomic sums.
    It rounds to bfloat16 to the nearest, where it cuts off by itself, and rounds fma once.
    """
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as of_cuda
    from triton.runtime import interpreter

    own, run = interpreter._implicit_cvt, interpreter.GridExecutor.__call__
    builder = interpreter.InterpreterBuilder
    binary, cast, dot, atomic = builder.binary_op, builder.cast_impl, builder.create_dot, builder.create_atomic_rmw

    def convert(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return own(value)

    def on_cpu(value: Any) -> Any:
        return getattr(value, "__dict__", {}).get("inner", value)

    def call(self: Any, *values: Any, **named: Any) -> Any:
        return run(self, *map(on_cpu, values), **{name: on_cpu(value) for name, value in named.items()})

    def operate(self: Any, left: Any, right: Any, op: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return binary(self, left, right, op)
        output = binary(self, *(self.cast_impl(side, tl.float32) for side in (left, right)), op)
        return output if output.data.dtype == np.bool_ else self.cast_impl(output, tl.bfloat16)

    def cast_impl(self: Any, value: Any, kind: Any) -> Any:
        if (value.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, value, kind)
        bits = np.ascontiguousarray(value.data).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return interpreter.TensorHandle(np.where(np.isnan(value.data), np.uint16(0x7FC0), rounded), tl.bfloat16)

    def multiply(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        low = left.dtype.scalar == tl.bfloat16
        return dot(self, *(self.cast_impl(side, tl.float32) if low else side for side in (left, right)), *rest)

    def add_at(self: Any, op: Any, pointers: Any, values: Any, mask: Any, *how: Any) -> Any:
        if values.dtype.scalar != tl.bfloat16:
            return atomic(self, op, pointers, values, mask, *how)
        # no two of a call may be the same
        before = self.create_masked_load(pointers, mask, None, None, False)
        low, high = (self.cast_impl(side, tl.float32) for side in (before, values))
        total = self.cast_impl(interpreter.TensorHandle(low.data + high.data, tl.float32), tl.bfloat16)
        self.create_masked_store(pointers, total, mask, None)
        return before

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        product, added = x.data.astype(np.float64) * y.data, z.data.astype(np.float64)  # exact
        total = product + added
        part = total - product
        lost = (product - (total - part)) + (added - part)
        # to an odd last bit, so that rounding to float32 is the only one
        odd = np.nextafter(total, np.copysign(np.inf, lost))
        total = np.where((np.abs(lost) > 0) & (total.view(np.int64) % 2 == 0), odd, total)
        return interpreter.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)

    for library in (libdevice, of_cuda):
        # looked up in each call: the interpreter replaces it while a kernel runs
        library.rsqrt = lambda x: tl.math.rsqrt(x)
        library.tanh = lambda x: 2 / (1 + tl.math.exp(-2 * x)) - 1
    interpreter._implicit_cvt, interpreter.GridExecutor.__call__ = convert, call
    builder.binary_op, builder.cast_impl, builder.create_fma = operate, cast_impl, fma
    builder.create_dot, builder.create_atomic_rmw = multiply, add_at
