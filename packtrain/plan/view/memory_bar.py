"""The memory of a device as bars: each part where the one before it ends, so that the last row shows the sum."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from packtrain.plan.memory import GIB, OUTSIDE, Memory

_NAMES = {
    "weights": "cyan",
    "gradients": "blue",
    "optimizer": "magenta",
    "reference": "green",
    "buffers": "yellow",
    "activations": "bright_cyan",
}
_AT_MOST = " at most"
_LABEL, _FIGURE = 11, 8


def memory_head(memory: Memory) -> str:
    """What it comes to, in one sentence; where it does not fit, what to try."""
    unit, amount = _unit(memory)
    said, on_gpu = amount(memory.total), memory.device is not None
    if memory.device is not None:
        said = f"{amount(memory.total + memory.outside)} of the {amount(memory.device)}"
    said += f" {unit} of each {'GPU' if on_gpu else 'device'}"
    if memory.activations is None:
        said += f" before activations ({memory.unknown})"
    if memory.fits is not None:
        said += ": fits" if memory.fits else f": DOES NOT FIT, {memory.advice}"
    elif not on_gpu:
        said += "; no GPU to compare with (packtrain plan --gpu-memory 80 names one)"
    if memory.host:
        said += f"; and {amount(memory.host)} {unit} of the machine's own memory per process"
    return said


def memory_bars(memory: Memory, width: int, *, plain: bool) -> Iterator[Text]:
    """A row for each part and one for the sum, each at most `width` cells; `plain`: of ASCII characters."""
    full, free = ("#", ".") if plain else ("█", "░")
    _, amount = _unit(memory)
    parts = {name: getattr(memory, name) or 0 for name in _NAMES}
    if memory.device is not None:
        parts["CUDA, NCCL" if memory.outside > OUTSIDE else "CUDA"] = memory.outside
    whole = sum(parts.values())
    scale = max(whole, memory.device or 0, 1)
    cells = max(width - _LABEL - _FIGURE - 2, 8)
    done = 0
    for name, size in parts.items():
        if not size:
            continue
        first, last = cells * done // scale, cells * (done + size) // scale
        first = min(first, cells - 1)
        row = _row(name, amount(size))
        row.append(" " * first).append(full * max(last - first, 1), _NAMES.get(name, "bright_black"))
        if name == "activations" and cells - max(last, first + 1) >= len(_AT_MOST):
            row.append(_AT_MOST, "dim")
        done += size
        yield row
    row = _row("sum", amount(whole))
    limit = cells if memory.device is None else min(cells * memory.device // scale, cells)
    used = cells * whole // scale
    row.append(full * min(used, limit), "bold green" if memory.fits is not False else "bold")
    if used > limit:
        row.append(("!" if plain else "▒") * (used - limit), "bold red")
    elif memory.device is not None:
        row.append(free * (limit - used), "dim")
    yield row


def _row(name: str, figure: str) -> Text:
    return Text(f"{name:<{_LABEL}}{figure:>{_FIGURE}} ")


def _unit(memory: Memory):
    """The unit that its figures are best read in, and the function that writes bytes in it."""
    small = max(memory.total, memory.device or 0) < GIB
    size = 2**20 if small else GIB

    def amount(number: int) -> str:
        value = number / size
        return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 10**6 else f"{value:.1e}"

    return ("MiB" if small else "GiB"), amount
