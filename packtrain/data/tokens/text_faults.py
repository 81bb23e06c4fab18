"""What is odd about a row and can be seen only in its text: told in its fate, so that `packtrain inspect` need not read it again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from packtrain.data.formats.conversations import Conversation, Example, PromptCompletion, Text

_GARBLED = re.compile("\ufffd|Ã[\x80-\xbf]|Â[\xa0-\xbf]|â€[\x80-\x9d™˜œ“”¢¦]").search
"""A replacement character, or the letters that UTF-8 becomes when it is read as latin-1 or Windows-1252."""
_FEWEST = 4
"""Characters of an answer that may repeat its question: "yes" does."""


@dataclass(frozen=True)
class TextFaults:
    """Finds the faults of a text. `markers` are texts of control tokens, `end` that of EOS; `drops_system`: the template leaves out system prompts."""

    markers: frozenset[str]
    end: str = ""
    drops_system: bool = False

    def of(self, *examples: Example) -> dict[str, bool]:
        """Fields of the row's Fate (row_counts.py) that are true for any of its `examples`."""
        found: dict[str, bool] = {}
        for turns in map(_turns, examples):
            texts = [text for _, text in turns]
            if turns and turns[-1][0] in ("completion", "text"):
                texts[-1] = texts[-1].rstrip().removesuffix(self.end)  # an end that the file writes itself
            if self.markers and any(map(self._has_marker, texts)):
                found["marker"] = True
            if any(not text.isascii() and _GARBLED(text) for text in texts):
                found["garbled"] = True
            if self.drops_system and turns and turns[0][0] == "system" and texts[0].strip():
                found["unsaid"] = True
            if _repeats(turns):
                found["echo"] = True
        return found

    def _has_marker(self, text: str) -> bool:
        return any(start in text for start in self._starts) and self._pattern.search(text) is not None

    @cached_property
    def _starts(self) -> list[str]:
        """Two characters of each marker: few and fast to look for."""
        return sorted({marker[:2] for marker in self.markers})

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.markers, key=len, reverse=True))))


def _turns(example: Example) -> list[tuple[str, str]]:
    """Who says what."""
    if isinstance(example, Conversation):
        return [(message["role"], message["content"]) for message in example.messages]
    if isinstance(example, PromptCompletion):
        return [("prompt", example.prompt), ("completion", example.completion)]
    return [("text", example.text)] if isinstance(example, Text) else []


def _repeats(turns: Iterable[tuple[str, str]]) -> bool:
    """Whether an answer is the very text that it answers."""
    asked = ""
    for role, text in turns:
        if role in ("assistant", "completion") and len(text) >= _FEWEST and text.strip() == asked:
            return True
        asked = text.strip()
    return False
