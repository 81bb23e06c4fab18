"""Which variables, keys and options hold secrets, by their names: such values are neither written to a file nor shown.

A name that is suspected wrongly costs a word in a report, or a line in a config; one that is missed costs an account.
"""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"token|secret|passw|passphrase|credential|api[_-]?key|access[_-]?key|private[_-]?key|authorization|bearer"
    r"|(?:^|[_.\-])(?:key(?:$|[_.\-])|(?:pass|auth|jwt|pat|cookie|dsn|sig|sas|signature|pw)$)|[_.\-]pwd$",
    re.IGNORECASE,
)
_INNOCENT = re.compile(
    r"tokeni[sz]|tokens?_(?:per|type|id)|^tokens$|(?:max|min|num|new|sample|trained)_(?:\w*_)?tokens$", re.IGNORECASE
)


def speaks_of_secrets(name: str) -> bool:
    """Whether a variable, key or option of this name holds something to hide: HF_TOKEN does, MAX_TOKENS does not."""
    return _SECRET.search(_INNOCENT.sub("", name)) is not None
