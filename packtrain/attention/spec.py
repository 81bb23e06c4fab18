"""The declaration of an attention backend: what others need to know of it. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A backend for packed rows.

    It is the constant BACKEND of a module `spec` in a folder of its own. The module `run` there attends.
    """

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
    """Module with `try_kernels(dtype)`, for `packtrain env`: each kernel with its lack, down to the right one, whose lack is "".

    "" if it needs no kernel. The module should import fast."""
    get_kernels: str = ""
    """Advice if no kernel is right."""
    dense_mask: bool = False
    """Whether it makes a mask of all tokens of a row by all tokens."""
