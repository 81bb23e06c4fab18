"""Where the Hugging Face libraries keep their things on this machine, by their own rules and without importing them."""

from __future__ import annotations

import os
from collections.abc import Mapping


def hub_home(env: Mapping[str, str]) -> str:
    """Their folder, which may begin with ~: HF_HOME, else one in the user's cache."""
    return env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")


def hub_cache(env: Mapping[str, str]) -> str:
    """The folder of what was loaded from the hub, which may begin with ~: HF_HUB_CACHE, else one in their folder."""
    return env.get("HF_HUB_CACHE") or os.path.join(hub_home(env), "hub")
