"""All objectives, ours and other packages'."""

from __future__ import annotations

from packtrain.objectives.spec import Examples, Spec
from packtrain.registry import Registry

OBJECTIVES = Registry(Spec, "objective", package="packtrain.objectives", module="spec", attribute="SPEC")


def objective_for(examples: Examples) -> Spec:
    """Return the first objective that trains on such examples."""
    return next(spec for spec in OBJECTIVES.all().values() if spec.examples == examples)


def losses() -> tuple[str, ...]:
    """Return the losses of all objectives."""
    return tuple(dict.fromkeys(name for spec in OBJECTIVES.all().values() for name in spec.losses))
