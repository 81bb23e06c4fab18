"""How a config key is declared: its default, a sentence, its bounds, and the objectives that it is for."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

ObjectiveKind = Literal["sft", "dpo", "kto", "reward"]


def key(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    maximum: float = 10**9,
    objective: ObjectiveKind | tuple[ObjectiveKind, ...] = (),
) -> Any:
    """A config field: default, one-sentence description, bounds (`>= minimum`, `> above`, `< below`), the `objective` or several that
    it is for (all of them if none is named).

    A number above `maximum` does not fit some counter, or would never end.
    """
    bounds = {"minimum": minimum, "above": above, "below": below, "maximum": maximum}
    objectives = (objective,) if isinstance(objective, str) else objective
    metadata = {"doc": f"{', '.join(objectives)}: {doc}" if objectives else doc, **bounds, "objectives": objectives}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
