"""Declaration of `sdpa_mask`."""

from packtrain.attention.spec import Backend

BACKEND = Backend(name="sdpa_mask", run=f"{__package__}.run", order=3, dense_mask=True)
