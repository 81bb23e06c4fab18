"""Declaration of `flash`."""

from packtrain.attention.spec import Backend

BACKEND = Backend(
    name="flash",
    run=f"{__package__}.run",
    order=0,
    auto=True,
    devices=("cuda",),
    formats=("bfloat16", "float16"),
    kernels=f"{__package__}.selection",
    get_kernels="pip install 'packtrain[flash]'; docs/modes.md names the flash kernels for each GPU",
)
