"""The strategies of packtrain/strategies. A folder may bring several."""

from __future__ import annotations

from packtrain.registry import Registry
from packtrain.strategies.spec import StrategySpec

STRATEGIES = Registry(StrategySpec, "strategy", package="packtrain.strategies", module="spec", attribute="SPECS")
DEFAULT = "ddp"
"""The strategy of a config that names none. Each process keeps everything."""
