"""Who may speak: roles that every template's author knows, and those that the chat template at hand names.

Most templates print any role there is, so a misspelt one would be rendered, never trained, and nobody would notice.
The quoted words of a template's source are taken for names of roles; some of them are not, which does no harm.
"""

from __future__ import annotations

import difflib
import re

from packtrain.data.sources.rows import BadRow

KNOWN = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SPEAKERS = {  # ShareGPT's and others' words for the roles
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "bot", "chatbot", "ai"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
REASON = "unknown role"


def words_of(template: str) -> frozenset[str]:
    """The quoted words in a template's source."""
    return frozenset(re.findall(r"""['"](\w+)['"]""", template))


def check(role: str, named: frozenset[str], where: str) -> None:
    """Raise BadRow unless `role` is KNOWN or `named` by the template.

    Another word for the assistant is refused even so: only `assistant` is ever trained.
    """
    meant = SPEAKERS.get(role.lower())
    if role in KNOWN or (role in named and meant != "assistant"):
        return
    what = f"unknown role {role!r}; known: {', '.join(KNOWN)}, and what the chat template names"
    raise BadRow(REASON, what, where, _advice(role, [*KNOWN, *SPEAKERS], meant))


def of_speaker(speaker: object, where: str) -> str:
    """The role of a ShareGPT speaker; raises BadRow for one that is not known."""
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        what = f"unknown speaker {speaker!r}; known: {', '.join(SPEAKERS)}"
        raise BadRow(REASON, what, where, _advice(str(speaker), list(SPEAKERS), None))
    return role


def _advice(found: str, allowed: list[str], meant: str | None) -> str:
    near = difflib.get_close_matches(found.lower(), allowed, 1, cutoff=0.6)
    if meant is None and near:
        meant = near[0] if near[0] in KNOWN else SPEAKERS[near[0]]
    return f"Did you mean {meant!r}?" if meant else "Name the role in the chat template, or write it as one of these."
