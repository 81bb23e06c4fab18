"""Checks once whether the Hugging Face hub answers, before libraries retry it many times.

Without a network huggingface_hub tries each of its many requests six times, with waits of up to 8 s between them: half a
minute of warnings before an error. Here one request decides. If it is not answered, the libraries work offline, as with
HF_HUB_OFFLINE=1: their caches are still used, and anything not cached fails at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

ANSWER_S = 6.0
OFFLINE_ADVICE = (
    "There is no hub here (no answer, or HF_HUB_OFFLINE is set): give a local path, or fill the cache where there is one "
    "(hf download), copy it ($HF_HOME), and set HF_HUB_OFFLINE=1."
)


@lru_cache
def is_reachable() -> bool:
    """Whether the hub answers within ANSWER_S seconds, also False if HF_HUB_OFFLINE is set; asked once in a process."""
    from huggingface_hub import constants, get_session

    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # no route, no name, no certificate, a proxy's refusal: no answer
            get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
            answered.set()

    if not constants.HF_HUB_OFFLINE:
        threading.Thread(target=ask, daemon=True).start()  # a name look-up has no timeout
        answered.wait(ANSWER_S)
    return answered.is_set()


@contextmanager
def offline_unless_reachable() -> Iterator[bool]:
    """While the `with` lasts, huggingface_hub, transformers and datasets work offline if the hub does not answer.

    Yields whether it answers.
    """
    from huggingface_hub import constants

    online = is_reachable()
    modules: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = module.HF_HUB_OFFLINE or not online
        yield online
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
