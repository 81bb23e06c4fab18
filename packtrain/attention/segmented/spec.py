"""Declaration of `segmented`."""

from packtrain.attention.spec import Backend

BACKEND = Backend(name="segmented", run=f"{__package__}.run", order=1, auto=True)
