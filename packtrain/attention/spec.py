"""The declaration of an attention backend: what others need to know of it. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A backend for packed rows, from the table below or from another package."""

    name: str
    """The value of model.attention."""
    run: str
    """Module with the constant ATTENTION, an attention/backends.py::Attention."""
    order: int = 100
    """Backends with a lower number are listed, and tried by `auto`, first."""
    auto: bool = False
    """Whether model.attention=auto tries it."""
    by_document: bool = False
    """Whether it calls the model once for each length of documents, which is exact by construction. Else a row is one call."""
    why_not_shared: str = ""
    """Why documents of its rows cannot share a prefix, in words after its name. "" if they can."""
    why_not_split: str = ""
    """Why its rows cannot be split over ranks, in words after its name. "" if they can."""
    devices: tuple[str, ...] = ()
    """Devices that it runs on, by torch's types. () means all."""
    formats: tuple[str, ...] = ()
    """Number formats that it computes in, by torch's names. () means all."""
    kernels: str = ""
    """Module with `try_kernels(dtype)`, for `packtrain env`: each kernel tried, with its lack or its time, "" for the chosen one.

    "" if it needs no kernel. The module should import fast."""
    get_kernels: str = ""
    """Advice if no kernel is right."""
    dense_mask: bool = False
    """Whether it makes a mask of all tokens of a row by all tokens."""


BACKENDS = Registry(
    Backend,
    "backend",
    package="packtrain.attention",
    own=(
        Backend(
            name="flash",
            run="packtrain.attention.flash",
            order=0,
            auto=True,
            devices=("cuda",),
            formats=("bfloat16", "float16"),
            kernels="packtrain.attention.kernel_choice",
            get_kernels="pip install 'packtrain[flash]'; docs/modes.md names the flash kernels for each GPU",
        ),
        Backend(name="segmented", run="packtrain.attention.segmented", order=1, auto=True),
        Backend(
            name="mixers",
            run="packtrain.proof.mixer_search",
            order=2,
            auto=True,
            why_not_split="runs each document through a mixer in one process",
        ),
        Backend(
            name="per_document",
            run="packtrain.attention.per_document",
            order=3,
            auto=True,
            by_document=True,
            why_not_shared="runs every document by itself",
            why_not_split="runs each whole document in one process",
        ),
        Backend(name="sdpa_mask", run="packtrain.attention.sdpa_mask", order=4, dense_mask=True),
    ),
)
"""All backends, ours and other packages'."""


def tried_by_auto() -> list[Backend]:
    """Return the backends that model.attention=auto tries, the best first."""
    return [backend for backend in BACKENDS.all().values() if backend.auto]
