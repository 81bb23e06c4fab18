"""Figures as people read them."""

from __future__ import annotations

import math

from packtrain import wording


def number(value: float | None) -> str:
    """Four digits that tell: 7.58, 0.1720, 15,568, 3.0e-05; "–" for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}"


def percent(share: float | None) -> str:
    """0.4167 as 41.7 %, 0.0000123 as 0.0012 %."""
    if share is None or not math.isfinite(share):
        return "–"
    return f"{100 * share:.1f} %" if share == 0 or abs(share) >= 0.0005 else f"{100 * share:.2g} %"


def duration(seconds: float | None) -> str:
    """1.8 ms, 0.82 s, 61 s, 4 min 05 s, 3 h 20 min, 2 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 10:
        return f"{seconds:.2g} s"
    if (whole := round(seconds)) < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02} s"
    if (minutes := round(seconds / 60)) < 2880:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def size(count: float | None) -> str:
    """Bytes as 3.2 MiB."""
    if count is None or not math.isfinite(count):
        return "–"
    return wording.size(count)
