"""Memory of a plan: bytes by part, whether they fit, and sentences about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

GIB = 2**30
OUTSIDE = int(1.5 * GIB)
"""Bytes outside torch's allocator on each GPU: CUDA's context, kernels and libraries."""
SPARE = 0.1
"""Share of a device left free for fragmentation when the plan chooses to use memory.
It chooses trainer.gradient_checkpointing=auto and gradients that are exchanged once a step."""
PARTS = ("weights", "gradients", "optimizer", "reference", "buffers", "activations")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device, by part. `parameters` and `trained` count weights; `trained` includes adapters.

    `reference` is taken to be as large as the trained model. `buffers` belong to strategies and autocast, at the peak. `activations` is
    None if not known, for the reason `unknown`. `host` is memory of the machine per process. `device` is the memory of a GPU, if known;
    `outside` is allowed for on it beside torch's allocator. `checkpointing` is the resolved trainer.gradient_checkpointing, `chosen` the
    reason. FSDP2: `accumulated` are the whole float32 gradients that stay on each GPU between a step's micro-batches if only the last
    one exchanges them. A micro-batch that exchanges gradients sends `leaving` bytes out of each machine. `pictures` are the bytes of `activations`
    for pixels and towers, if all `slots` of the fullest micro-batch are tokens of pictures. `fused`: whether Liger's kernels are counted with.
    `fallbacks`: policies that recompute more than `checkpointing`, if it is a choice of `auto`.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int | None
    reference: int = 0
    host: int = 0
    unknown: str = ""
    device: int | None = None
    advice: str = ""
    outside: int = OUTSIDE
    checkpointing: str = "none"
    chosen: str = ""
    accumulated: int | None = None
    leaving: int | None = None
    processes: int = 1
    pictures: int = 0
    slots: int = 0
    fused: bool = False
    fallbacks: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """The sum of all known parts."""
        return sum(getattr(self, name) or 0 for name in PARTS)

    @property
    def fits(self) -> bool | None:
        """Whether the run fits the device. None: the device is unknown, or only some parts are known and they fit."""
        if self.device is None:
            return None
        fits = self.total + self.outside <= self.device
        return None if fits and self.activations is None else fits

    @property
    def exchanges_once(self) -> bool:
        """Whether FSDP2 exchanges gradients once a step: the accumulated ones must fit too. Else after each micro-batch."""
        if not self.fits or self.accumulated is None or self.device is None:
            return False
        return self.total + self.outside + self.accumulated <= (1 - SPARE) * self.device

    def exchange(self) -> str:
        """Say when FSDP2 exchanges gradients; "" for other strategies."""
        if self.accumulated is None:
            return ""
        if self.exchanges_once:
            most = in_gib(self.total + self.accumulated)
            return f"exchanged once a step; {most} GiB in all between its micro-batches"
        why = "which is not known to fit" if self.fits is None else "which is too much"
        return f"exchanged after each micro-batch; once a step would take {in_gib(self.accumulated)} GiB more, {why}"

    def sentence(self) -> str:
        """Return the total in words and, if it does not fit, what to try."""
        if self.device is None:
            text = f"{in_gib(self.total)} GiB of each device"
            if self.processes > 1:
                text += f" ({in_gib(self.total * self.processes)} GiB for all {self.processes} processes, if they are on one CPU)"
        else:
            text = f"{in_gib(self.total + self.outside)} of the {in_gib(self.device)} GiB of each GPU"
            text += ", with Liger's kernels" if self.fused else ""
        if self.activations is None:
            text += f" before activations ({self.unknown})"
        if self.device is None:
            text += "; no GPU to compare with (packtrain plan --gpu-memory 80 names one)"
        elif self.fits is not None:
            text += ": fits" if self.fits else f": DOES NOT FIT, {self.advice}"
        if self.pictures:
            text += f"; up to {in_gib(self.pictures)} GiB of it for pixels and towers, if all {self.slots:,} tokens of a micro-batch are of pictures"
        text += f"; and {in_gib(self.host)} GiB of the machine's own memory per process" if self.host else ""
        return text + (f"; {in_gib(self.leaving)} GiB leave each machine with a micro-batch" if self.leaving else "")

    def to_json(self) -> dict[str, object]:
        """Return the figures, `total`, whether it `fits`, and the sentence as `summary`."""
        derived = {"total": self.total, "fits": self.fits, "exchanges_once": self.exchanges_once}
        return {**asdict(self), **derived, "summary": self.sentence()}


def in_gib(size: int) -> str:
    """Return bytes in GiB, as plans show them."""
    value = size / GIB
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 10**6 else f"{value:.1e}"
