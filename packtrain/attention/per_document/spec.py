"""Declaration of `per_document`."""

from packtrain.attention.spec import Backend

BACKEND = Backend(
    name="per_document",
    run=f"{__package__}.run",
    order=2,
    auto=True,
    by_document=True,
    why_not_shared="runs every document by itself",
    why_not_split="runs each whole document in one process",
)
