"""The names that data.chat_template understands, found without importing anything that takes a while.

They are chatml and the templates that TRL brings as files; data/templates.py reads their text.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path


@cache
def template_names() -> tuple[str, ...]:
    """All names, sorted; only chatml where TRL is not installed."""
    found = importlib.util.find_spec("trl")
    folders = [Path(place, "chat_templates") for place in (found.submodule_search_locations or ())] if found else []
    return tuple(sorted({"chatml", *(file.stem for folder in folders for file in folder.glob("*.jinja"))}))


def as_name(text: str) -> str:
    """How the user's spelling of a name is looked up: "Llama-3.2" is llama_3_2."""
    return re.sub(r"[-.\s]", "_", text.lower())
