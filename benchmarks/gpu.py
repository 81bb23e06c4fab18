"""Measure on one GPU, in nine minutes, where the time of a training step goes.

    python benchmarks/gpu.py                       # all parts in the order of their worth, nine minutes
    python benchmarks/gpu.py --only "LoRA 8B" 8B   # some of them
    python benchmarks/gpu.py --list                # the parts, their limits in seconds, what each answers
    python tests/standin/gpus.py 1 python benchmarks/gpu.py --tiny    # a rehearsal on a GPU that is not there (or, without gpus.py, on the CPU)

Nothing is downloaded: weights are random, of the sizes of Qwen2.5-1.5B and Qwen3-0.6B and 8B, one with 64 experts, rows are full (16,384 random tokens).
Nor need packtrain be installed: it is taken from this checkout. Packages that the machine lacks are named, with the command that fetches
them where there is a network; bring them as a folder of wheels:

    python benchmarks/gpu.py --wheels wheels
    python benchmarks/gpu.py --wheels first --keep /tmp/laid --unpack-only && python benchmarks/gpu.py --wheels second --keep /tmp/laid

The second form is for wheels that do not fit into one transfer: the first call only lays its wheels into a folder. Wheels of
FlashAttention (flash-attn-4 and what it needs) may lie among them: kernels that are there are measured beside torch's own.

This process imports everything, and touches no GPU. Each part is a fork of it, one after the other, with a time limit. A part draws its
model on the device once and switches variants in place: two micro-batches to warm up, six timed by the GPU's events. Each variant is a
line of JSON, appended to the file (gpu.jsonl) at once: a run that is cut off keeps all that it has measured. The table at the end is
made of these lines; `--table FILE` makes it of an earlier file. Exit code 1: a part failed; 2: nothing could run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch then asks the driver how many GPUs there are, and opens none
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # FlashAttention 4 compiles once, not in each part
os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")  # 240 variants would compile for minutes; 1 tries them
sys.path.insert(0, str(Path(__file__).parent))

import gpu_wheels

WARM = (
    *("torch", "peft", "trl", "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3"),
    *("packtrain.cli", "packtrain.train.run", "packtrain.objectives.dpo.run", "packtrain.changes.liger"),
    *("packtrain.attention.flash", "attention", "gpu_ladder", "pytest"),
)
"""Modules that parts import, imported before the first fork."""
SLOWER = 6
"""Times that a part of --tiny may take longer: a CPU that others use."""
PARTS: dict[str, tuple[int, str]] = {
    "ceilings": (30, "versions; eight products and a copy: the most that this GPU gives"),
    "attention": (60, "every kernel on full rows; pads by nothing; cuDNN's plan for a new length; sinks"),
    "pieces": (30, "the head by its chunk; AdamW on masters and with stochastic rounding, plain and in one kernel"),
    "1.5B": (90, "the model as it comes, pads, Liger, head in chunks of 8,192, other kernels"),
    "LoRA 8B": (100, "checkpointing every_4 and none, PEFT's casts, adapters in one function, Liger, other kernels"),
    "8B": (80, "full training in bfloat16: checkpointing, Liger, other kernels, an update with stochastic rounding"),
    "0.6B": (50, "packed rows, and padded ones with cuDNN's sdpa on and off, new lengths and known ones"),
    "dpo 0.6B": (50, "shared and unshared prompts, and padding with cuDNN's sdpa on and off"),
    "experts 2B": (50, "experts in grouped products and in Liger's fused one, with its norms and without"),
    "profile": (40, "one micro-batch of 1.5B by kernels"),
    "tests": (80, "tests/gpu: sinks, compiled layers, waits; then the others"),
    "product": (80, "packtrain sft of 1.5B, ten steps: within 3 % of the ladder?"),
    "compiled": (90, "1.5B with its layers compiled"),
}
"""Name → limit in seconds, and the question; the most telling first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="no part begins later, and none runs longer (9)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts, in this order")
    parser.add_argument("--list", action="store_true", help="name the parts, and end")
    parser.add_argument("--json", type=Path, default=Path("gpu.jsonl"), help="where lines are appended (gpu.jsonl)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of such a file, and end")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what is not installed")
    parser.add_argument("--keep", type=Path, help="folder where wheels are unpacked, and were by an earlier call")
    parser.add_argument("--unpack-only", action="store_true", help="unpack --wheels into --keep, and end")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU too: a test of this script")
    options = parser.parse_args()
    if options.list or options.table:
        print("\n".join(table(lines_of(options.table)) if options.table else listed()))
        return 0
    if not options.minutes > 0:  # nor nan
        parser.error("--minutes: more than 0")
    if unknown := [name for name in options.only or () if name not in PARTS]:
        parser.error(f"--only: there is no part {unknown[0]!r}; there are {', '.join(map(repr, PARTS))}")
    if options.unpack_only and not (options.wheels and options.keep):
        parser.error("--unpack-only: needs --wheels and --keep")
    until = time.monotonic() + 60 * options.minutes
    ignored = gpu_wheels.put_on_path(options.wheels, options.keep)
    if options.unpack_only:
        print(f"unpacked into {options.keep}; now: --keep {options.keep}, with the other wheels")
        return 0
    if gpu_wheels.missing():
        parser.error(gpu_wheels.advice(ignored))
    try:
        options.json.open("a").close()
    except OSError as error:
        parser.error(f"--json: {error}")
    import torch

    if not torch.cuda.device_count() and not options.tiny:
        built = "" if torch.version.cuda else f" (torch {torch.__version__} is made without CUDA)"
        print(f"there is no GPU here{built}; --tiny runs everything on a CPU", file=sys.stderr)
        return 2
    os.environ["HF_HUB_OFFLINE"] = "1"
    import_everything()
    since = options.json.stat().st_size
    failed = [name for name in options.only or PARTS if not run(name, options.json, until, tiny=options.tiny)]
    with options.json.open() as file:
        file.seek(since)
        print("\n".join(table([json.loads(line) for line in file])))
    return 1 if failed else 0


def import_everything() -> None:
    """Imports what parts need: a fork then begins at once."""
    started = time.monotonic()
    for module in WARM:
        with suppress(ImportError):  # the part that needs it says so
            importlib.import_module(module)
    print(f"imported in {time.monotonic() - started:.1f} s", flush=True)


def run(name: str, file: Path, until: float, *, tiny: bool) -> bool:
    """Run one part in a fork of this process; return whether it went well.

    It is ended at its limit. A failure is a line as well.
    """
    most = PARTS[name][0] * (SLOWER if tiny else 1)
    left, started = until - time.monotonic(), time.monotonic()
    if left < 5:
        note(file, name, "", failed="not run: no time was left")
        return False
    child = multiprocessing.get_context(way_to_start()).Process(target=work, args=(name, file, tiny))
    child.start()
    try:
        child.join(min(most, left))
        late = child.exitcode is None
    finally:  # also of Ctrl-C, which ends all
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
    if late:
        note(file, name, "", failed=f"stopped at its limit of {min(most, left):.0f} s")
    elif child.exitcode not in (0, 1):
        note(file, name, "", failed=f"its process ended with {child.exitcode}")
    print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    return not late and child.exitcode == 0


def way_to_start() -> str:
    """Return "fork", or "spawn", which imports anew, where an import has opened the GPU: no fork could use it."""
    torch = sys.modules.get("torch")
    opened = torch is not None and getattr(torch.cuda, "_initialized", False) and "STANDIN_GPUS" not in os.environ
    return "spawn" if opened else "fork"


def work(name: str, file: Path, tiny: bool) -> None:
    """The part, in its own process."""
    os.setsid()
    failed: list[str] = []

    def told(variant: str, **figures: Any) -> None:
        failed.extend([variant] if "failed" in figures else [])
        note(file, name, variant, **figures)

    try:
        import gpu_ladder

        gpu_ladder.PARTS[name](told, tiny)
    except BaseException as error:
        traceback.print_exc()
        told("", failed=f"{type(error).__name__}: {error}"[:300])
    os._exit(1 if failed else 0)  # threads of libraries may not end


def note(file: Path, part: str, variant: str, **figures: Any) -> None:
    """Appends a line, on the disk when this returns, and prints it."""
    line = json.dumps({"part": part, "variant": variant, **figures})
    print(line, flush=True)
    with file.open("a") as out:
        out.write(f"{line}\n")
        out.flush()
        os.fsync(out.fileno())


def listed() -> list[str]:
    """The parts for people."""
    return [f"{name:<10} {limit:>4} s  {what}" for name, (limit, what) in PARTS.items()]


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the lines of such a file, without half a line at its end."""
    found = []
    for line in file.read_text().splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Return a table in Markdown for each part, with a column for each figure."""
    shown = []
    for part in dict.fromkeys(line["part"] for line in lines):
        own = [line for line in lines if line["part"] == part]
        names = list(dict.fromkeys(name for line in own for name in line if name not in ("part", "failed")))
        if rows := [line for line in own if "failed" not in line]:
            shown += ["", f"### {part}", "", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
            shown += [f"| {' | '.join(_shown(line.get(name, '')) for name in names)} |" for line in rows]
        shown += ["", *(f"- {part} {line['variant']}: {line['failed']}" for line in own if "failed" in line)]
    return shown


def _shown(value: Any) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1e4
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    sys.exit(main())
