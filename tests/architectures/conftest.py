"""Tests over all architectures, which also take the steps of routers that training's tests take."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "train"))  # test_routers
