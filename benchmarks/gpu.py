"""Everything of packtrain that needs a GPU, in one command: tests/gpu, training speed and memory, a profile, TRL beside it.

    python benchmarks/gpu.py [--minutes 8] [--only NAME NAME …] [--output FILE] [--logs FOLDER] [--wheels FOLDER]
    python benchmarks/gpu.py --tiny [--output FILE]    # every part of it with tiny models, on a CPU too: a test of this script
    python tests/standin/gpus.py 1 python benchmarks/gpu.py --tiny    # the same on a GPU that is not there

Needs no network: weights are random, with the sizes of Qwen2.5-1.5B and Qwen3-0.6B and 8B, and documents are random tokens, as
long as real conversations are (lengths.json), or of 2,048 to 8,192 tokens. Nor an installation: packtrain is taken from this
checkout, and packages that the machine lacks from the wheels in a folder; without them it says which, and the command that
fetches them (gpu_wheels.py). With several GPUs strategies are compared besides.

Parts run with the most telling first, each in processes of its own with a time limit (gpu_parts.py, gpu_training.py); one that
fails is listed, and the others go on. While one is measured, the next one imports. After each part the section "On GPUs" of the
output file (benchmarks/RESULTS.md; with --tiny only a file that is named) and results.json in the folder of the logs are
written anew, so that a run that is cut off leaves what it has measured. The exit code is 1 if anything failed other than for want of
a package, 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import gpu_parts
import gpu_training
import gpu_wheels
from gpu_parts import Part

HEADING = "## On GPUs"
MODES = ("packed", "padding_free", "padding")
MIN_S = 5
"""Less time than this is none."""
SLOWER = 4
"""Times that a part may take longer on a CPU, which others use as well."""
WARM = (
    "attention",
    "packtrain.cli",
    "packtrain.launch.execute",
    "packtrain.train.verify.measure",
    "deepspeed",
    "pytest",
)
"""What parts import."""
_STARTING = threading.Lock()


def parts_of(gpus: int, *, tiny: bool) -> list[Part]:
    """All parts, the most telling first: those that no time is left for are listed as such."""

    def trained(task: str, about: str, *changes: str, **given: Any) -> Part:
        needs = "liger_kernel" if "Liger" in about else ""
        limit = 240 if "profile" in about or "compiled" in about else 90
        given = {"task": task, "changes": [*changes], **given}
        return Part(f"{task}, {about}", gpu_training.train, given, limit, 1, task, needs)

    def by_trl(task: str, about: str, **given: Any) -> Part:
        return Part(f"{task}, TRL {about}", gpu_training.train_by_trl, {"task": task, **given}, group=task)

    packed, padding, main, small = "packing.mode=packed", "packing.mode=padding", "sft 1.5B", "sft 0.6B"
    masters = gpu_training.WEIGHTS["bf16 + masters"]
    parts = [
        Part("quickstart", gpu_parts.quickstart, limit_s=150),
        Part("tests/gpu, kernels", gpu_parts.gpu_tests, {"files": ["test_kernels.py"]}, limit_s=90),
    ]
    for layers, more in gpu_training.LAYERS.items():
        if layers == "compiled" and tiny and gpus:
            continue  # a stand-in GPU has nothing to compile for
        for weights, dtype in reversed(gpu_training.WEIGHTS.items()):
            parts.append(trained(main, f"packed, {weights}, {layers}", packed, *dtype, *more))
        if layers == "eager":
            parts.append(trained(main, "padding, bf16 + masters, eager", padding, *masters, *more))
            parts.append(trained(main, "profile, bf16 + masters, eager", packed, *masters, *more, profiled=True))
    parts += [trained("dpo 0.6B", "packed", packed), trained("dpo 0.6B", "padding", padding)]
    parts.append(Part("GRPO 0.6B, attach", gpu_training.attach_to_grpo))
    parts += [trained("LoRA 8B", "packed", packed), trained("LoRA 8B", "padding", padding)]
    offload, tiles = "trainer.activation_offload=true", f"trainer.tokens_per_mlp_tile={64 if tiny else 8192}"
    ways = {"alone": []} | ({"offload": [offload], "offload and tiles": [offload, tiles]} if gpus else {})
    for about, more in ways.items():
        checkpointing = ["trainer.gradient_checkpointing=full"]
        parts.append(trained("one document 0.6B", about, packed, *checkpointing, *more))
    for about, more in {"shared": ["packing.share_prefix=true"], "not shared": []}.items():
        parts.append(trained("groups 0.6B", about, packed, "data.shuffle=by_prefix", *more))
    parts += [trained("experts 2B", way, packed, f"model.experts={way}") for way in ("grouped", "loop")]
    parts.append(Part("bench", gpu_training.bench))
    parts.append(Part("kernels", gpu_parts.kernels))
    parts += [trained(small, mode, f"packing.mode={mode}") for mode in MODES]
    parts += [by_trl(small, "padding"), by_trl(small, "padding_free", padding_free=True)]
    parts.append(Part("tests/gpu, models", gpu_parts.gpu_tests, {"files": ["test_models.py", "test_waits.py"]}, 180))
    parts += [
        by_trl("dpo 0.6B", "padding"),
        by_trl("LoRA 8B", "padding"),
        by_trl("LoRA 8B", "padding_free", padding_free=True),
    ]
    ranks = gpus or (2 if tiny else 0)
    for strategy in ("ddp", "fsdp2", "zero3") if ranks > 1 else ():
        given = {"task": small, "changes": [packed, f"strategy={strategy}"]}
        needs = "deepspeed" if strategy.startswith("zero") else ""
        name = f"{small}, packed, {strategy} on {ranks}"
        parts.append(Part(name, gpu_training.train, given, processes=ranks, group="several GPUs", needs=needs))
    return parts


class Failed(Exception):
    """A part that has no result; the message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="parts whose names begin so")
    parser.add_argument("--output", type=Path, help="benchmarks/RESULTS.md if none")
    parser.add_argument("--logs", type=Path, help="folder for what the parts print; a temporary one if none")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what is not installed")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if not options.minutes > 0:  # nor nan
        parser.error("--minutes: more than 0")
    until = time.monotonic() + 60 * options.minutes
    ignored = gpu_wheels.put_on_path(options.wheels)
    if gpu_wheels.missing():
        parser.error(gpu_wheels.advice(ignored))
    output = options.output or (None if options.tiny else Path(__file__).with_name("RESULTS.md"))
    if output is not None and (output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK)):
        parser.error(f"--output: {output} cannot be written")
    import torch

    gpus = torch.cuda.device_count()  # asked of the driver: a context would take memory from the parts
    if not gpus:
        os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed looks for one, and says that it found none
    if not gpus and not options.tiny:
        built = "" if torch.version.cuda else f" (torch {torch.__version__} is made without CUDA)"
        print(f"there is no GPU here{built}; --tiny runs everything on a CPU", file=sys.stderr)
        return 2
    every = parts_of(gpus, tiny=options.tiny)
    parts = [part for part in every if part.name.startswith(tuple(options.only))]
    if not parts:
        parser.error(
            f"--only: no part begins with {' or '.join(options.only)}; there are\n  "
            + "\n  ".join(one.name for one in every)
        )
    try:
        logs = options.logs or Path(tempfile.mkdtemp(prefix="packtrain-gpu-"))
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--logs: {error}")
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def write() -> str:
        replace_file(logs / "results.json", json.dumps({"results": results, "failed": failed}, indent=1))
        text = section(results, failed, parts, shlex.join(sys.argv[1:]))
        if output is not None:
            replace_section(output, text)
        return text

    try:
        measure(parts, logs, until, results, failed, write, tiny=options.tiny)
    except KeyboardInterrupt:
        print(f"stopped: what was measured is in {logs / 'results.json'}", file=sys.stderr)
        return 130
    print(f"{write()}\n\nwhat the parts printed is in {logs}" + (f", this in {output}" if output else ""))
    failed = {name: why for name, why in failed.items() if not why.endswith("is not installed")}
    return 1 if failed or any(isinstance(one, dict) and one.get("failed") for one in results.values()) else 0


def measure(
    parts: Sequence[Part],
    logs: Path,
    until: float,
    results: dict[str, Any],
    failed: dict[str, str],
    write: Callable[[], Any],
    *,
    tiny: bool,
) -> None:
    """Fills in the results of the parts by name, and why others have none, and writes after each. Ctrl-C ends all of them."""
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # of processes that are ended while they hold something
    # forked from a process that has imported everything: not with CUDA, which does not survive a fork
    context = multiprocessing.get_context("forkserver" if tiny else "spawn")
    if tiny:
        context.set_forkserver_preload([*WARM])
    device = nullcontext() if tiny else threading.Lock()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as turns:
        folder = Path(temporary)
        gpu_training.write_inputs(folder, tiny=tiny)
        always = Part("versions", gpu_parts.versions)
        going = {
            part.name: turns.submit(run, part, folder, logs, context, until, device, tiny=tiny)
            for part in [always, *parts]
        }
        try:
            for name, part in going.items():
                try:
                    results[name] = part.result()
                except Exception as reason:  # whatever it is, the others go on
                    failed[name] = str(reason) or type(reason).__name__
                    print(f"{name}: FAILED: {reason}", flush=True)
                write()
        except KeyboardInterrupt:
            turns.shutdown(wait=False, cancel_futures=True)
            end(multiprocessing.active_children())
            raise


def run(
    part: Part, folder: Path, logs: Path, context: Any, until: float, device: AbstractContextManager[Any], *, tiny: bool
) -> Any:
    """The result of a part, which has the `device` to itself. Raises Failed with the reason if there is none."""
    if until - time.monotonic() < MIN_S:  # also looked at when it is its turn
        raise Failed("not run: no time was left")
    if part.needs and gpu_parts.lacks(part.needs):
        raise Failed(f"not run: {part.needs} is not installed")
    log = logs / f"{part.name.replace('/', '-').replace(' ', '_')}.log"
    log.unlink(missing_ok=True)
    result, ranks = log.with_suffix(".json"), environments(part.processes)
    result.unlink(missing_ok=True)
    go = context.Event()
    processes = [context.Process(target=work, args=(part, folder, log, result, own, go, tiny)) for own in ranks]
    with _STARTING:  # else a fork of the other thread inherits the pipe that tells of this one's end, and holds it open
        for process in processes:
            process.start()
    with device:
        started = time.monotonic()
        most = part.limit_s * (SLOWER if tiny else 1)
        limit = min(most, until - started)
        try:
            if limit < MIN_S and limit < most:
                raise Failed("not run: no time was left")
            go.set()
            for process in processes:
                process.join(max(0.0, started + limit - time.monotonic()))
            late = [process for process in processes if process.exitcode is None]
        finally:
            end(processes)
    if late:
        raise Failed(f"not done after {limit:.0f} s")
    if any(process.exitcode for process in processes) or not result.exists():
        raise Failed(gpu_parts.reason_in(log))
    print(f"{part.name}: {time.monotonic() - started:.1f} s", flush=True)
    return json.loads(result.read_text())


def end(processes: Sequence[Any]) -> None:
    """Ends processes of parts, and what they have started."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def environments(processes: int) -> list[dict[str, str]]:
    """The variables of each process of a part: one sees the first GPU alone, several are told what torchrun would tell them."""
    if processes == 1:
        return [{"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_RANK": 0}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, **common} for rank in range(processes)]
    return [{name: str(value) for name, value in one.items()} for one in ranks]


def work(part: Part, folder: Path, log: Path, result: Path, environment: dict[str, str], go: Any, tiny: bool) -> None:
    """A process of a part: it imports, waits for its turn to `go`, and works."""
    os.setsid()
    os.environ.update(environment, HF_HUB_OFFLINE="1")
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    sys.stdout = sys.stderr = log.open("a", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    for module in WARM:
        with suppress(ImportError):  # the part will say what it lacks
            importlib.import_module(module)
    go.wait()
    try:
        measured = part.work(folder, tiny=tiny, **part.given)
    except BaseException as error:
        if not isinstance(error, SystemExit):  # packtrain has said why
            traceback.print_exc()
        os._exit(1)
    if environment.get("RANK", "0") == "0":
        result.write_text(json.dumps(measured))
    os._exit(0)  # threads of libraries may not end


def section(results: dict[str, Any], failed: dict[str, str], parts: Sequence[Part], arguments: str) -> str:
    """The section of the results in Markdown."""
    found = dict(results.get("versions", {}))
    devices = found.pop("devices", ["?"])
    lines = [HEADING, "", f"    python benchmarks/gpu.py {arguments}".rstrip(), ""]
    memory = found.pop("memory", None)
    has = f"{len(devices)} × {devices[0]}" + (f" of {memory:.0f} GiB" if memory else "")
    installed = ", ".join(f"{name} {version or 'none'}" for name, version in found.items())
    lines += [f"{datetime.date.today():%d %B %Y}; {has}; {installed}.", ""]
    if one := results.get("quickstart"):
        first, last = one["losses"]
        kernel = " (".join(one["attention"].split(" (")[:2])  # without the kernels that are not there
        lines += [
            f"Quickstart: {one['steps']} steps, loss {first:.3f} → {last:.3f}, attention {kernel}: {one['verify']}.",
            "",
        ]
    lines += training_table([part for part in parts if part.group and part.name in results], results)
    for part in parts:
        lines += profile_table(part.name, (results.get(part.name) or {}).get("profile"))
    lines += grpo_lines(results.get("GRPO 0.6B, attach"))
    lines += bench_lines(results.get("bench"))
    lines += kernel_tables(results.get("kernels"))
    for name, tests in results.items():
        if name.startswith("tests/gpu"):
            skipped = sum(tests["skipped"].values())
            lines += [f"{name}: {tests['passed']} passed, {len(tests['failed'])} failed, {skipped} skipped.", ""]
            lines += [f"- skipped: {count} × {why}" for why, count in tests["skipped"].items()] + [""]
            failed = failed | dict(tests["failed"])
    lines += ["What failed, or could not run:" if failed else "Nothing failed.", ""]
    lines += [f"- {name}: {why}" for name, why in failed.items()]
    if open_ := [part.name for part in parts if part.name not in results and part.name not in failed]:
        lines += ["", f"Not reached: {'; '.join(open_)}."]
    return "\n".join(lines).rstrip()


def training_table(parts: Sequence[Part], results: dict[str, Any]) -> list[str]:
    """One row a run. TRL's MFU is made of that of packtrain's `padding`, which shares no prompts, by the ratio of the speeds."""
    if not parts:
        return []
    lines = [
        "Random weights; real tokens a second, padding not counted, after the steps that warm up; the peak of what torch has",
        "allocated, and what `packtrain plan` reckons with.",
        "",
        "| run | tokens/s | MFU | s a step | peak GiB | planned | checkpointing | first loss | last loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for part in parts:
        one = results[part.name]
        planned = one.get("planned")
        known = [results[p.name] for p in parts if p.group == part.group and results[p.name]["mfu"]]
        mfu = one["mfu"] or (known and known[-1]["mfu"] / known[-1]["tokens_per_second"] * one["tokens_per_second"])
        lines.append(
            f"| {part.name} | {one['tokens_per_second']:,.0f} | {f'{mfu:.1%}' if mfu else ''} | {one['seconds_per_step']:.3f} "
            f"| {one['peak']:.1f} | {f'{planned:.1f}' if planned else ''} | {one.get('checkpointing', '')} | {one['losses'][0]:.5f} | {one['losses'][1]:.5f} |"
        )
    return [*lines, ""]


def profile_table(name: str, profile: dict[str, Any] | None) -> list[str]:
    """The shares of a step by kind of work, and the kernels that take most."""
    if not profile:
        return []
    lines = [f"A step of `{name}` by its {profile['of']}:", "", "| work | share |", "|---|---|"]
    lines += [f"| {kind} | {share:.1%} |" for kind, share in profile["shares"].items()]
    return [*lines, "", *(f"- {share:.1%} {kind}: `{kernel}`" for kernel, kind, share in profile["longest"]), ""]


def grpo_lines(measured: dict[str, Any] | None) -> list[str]:
    """TRL's GRPOTrainer with `attach` and without."""
    if not measured:
        return []
    lines = [f"`attach` on TRL's GRPOTrainer, one group of {measured['tokens']:,} tokens, {measured['attention']}:", ""]
    for way in ("padded", "attached"):
        one = measured[way]
        peak = f", {one['peak']:.1f} GiB" if one["peak"] else ""
        lines.append(
            f"- {way}: {one['seconds']:.3f} s{peak}, loss {one['loss']:.6f}, norm of the gradient {one['norm']:.5f}"
        )
    return [*lines, ""]


def bench_lines(report: dict[str, Any] | None) -> list[str]:
    """What `packtrain bench` measured of the 0.6B model."""
    if not report:
        return []
    lines = [
        f"`packtrain bench`, sft 0.6B, a step of {report['step']['tokens']:,.0f} tokens, {report['attention']}:",
        "",
    ]
    for one in report["trials"]:
        speed = (
            f"{one['tokens_per_second']:,.0f} tokens/s, {one['peak_memory'] / 2**30:.1f} GiB"
            if one["tokens_per_second"]
            else one["why"]
        )
        lines.append(f"- {one['mode']}, {one['tokens_per_device']:,} tokens a device: {speed}")
    return [*lines, "", f"Its cost of attention: {json.dumps(report['attention_cost'])}.", ""]


def kernel_tables(measured: dict[str, Any] | None) -> list[str]:
    """How far kernels are off, and a row for each attention of each row of documents, forward and backward."""
    if not measured:
        return []
    lines = ["Kernels against the definition in float64:", "", *(f"- {one}" for one in measured["kernels"]), ""]
    lines += ["| row | documents | attention | ms | tokens/s | GiB | of peak |", "|---|---|---|---|---|---|---|"]
    for one in measured["rows"]:
        share = f"{one['share']:.1%}" if one["share"] else ""
        lines.append(
            f"| {one['row']:,} | {one['documents']} | {one['attention']} | {one['ms']:.2f} "
            f"| {one['tokens_per_second']:,.0f} | {one['gib']:.2f} | {share} |"
        )
    return [*lines, ""]


def replace_section(file: Path, text: str) -> None:
    """Puts the section in place of an earlier one, else at the end."""
    old = file.read_text() if file.exists() else ""
    before, heading, rest = old.partition(f"{HEADING}\n")
    _, following, after = rest.partition("\n## ")
    replace_file(
        file,
        f"{before.rstrip()}\n\n{text}\n{following}{after}".lstrip() if heading else f"{old.rstrip()}\n\n{text}\n",
    )


def replace_file(file: Path, text: str) -> None:
    """Writes a file whole, or leaves the one that was there: a run may be cut off at any time."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(file)


if __name__ == "__main__":
    sys.exit(main())
