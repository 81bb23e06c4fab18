from collections.abc import Callable, Mapping

class Callback:
    def __init__(self, *, hooks: Mapping[str, Callable[..., None]]) -> None: ...
