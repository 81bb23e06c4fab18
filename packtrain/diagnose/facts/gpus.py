"""NVIDIA GPUs by nvidia-smi's words, and what the kernel's log says of them. Parsers are pure, and take anything.

`nvidia-smi -q -x` has everything in one go and leaves out what a driver does not know, where a list of wanted fields is
refused as a whole for one that is new or gone. A short list of old fields stands in where it does not answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from xml.etree import ElementTree

from packtrain.diagnose.facts.ask import NoAnswer, first_line
from packtrain.diagnose.facts.facts import Gpu, Gpus, KernelEvent

DETAILS = ("nvidia-smi", "-q", "-x")
SHORT = (
    "nvidia-smi",
    "--query-gpu=index,name,uuid,driver_version,memory.total,memory.used,utilization.gpu,temperature.gpu",
    "--format=csv,noheader,nounits",
)
TOPOLOGY = ("nvidia-smi", "topo", "-m")
NVLINKS = ("nvidia-smi", "nvlink", "--status")
_MIB = 2**20
_SLOW = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "too hot (hardware)",
    "sw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "power brake of the machine",
}
_UNCORRECTED = ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable")
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)(?:, *(.*))?")
_OOM = re.compile(r"(?:Out of memory|Memory cgroup out of memory): (Killed process \d+ \([^)]*\))")
_SINCE_BOOT = re.compile(r"^(?:<\d+>)?\[\s*(\d+\.\d+)\]")


def parse_details(text: str) -> Gpus:
    """What `nvidia-smi -q -x` prints. Raises NoAnswer where it is not that."""
    try:
        root = ElementTree.fromstring(text[text.index("<?xml") :])
    except (ValueError, ElementTree.ParseError):
        raise NoAnswer(f"nvidia-smi prints no description of GPUs: {first_line(text) or 'nothing'}") from None
    return Gpus(
        present=True,
        driver=_text(root, "driver_version") or None,
        cuda=_text(root, "cuda_version") or None,
        gpus=tuple(_gpu(index, one) for index, one in enumerate(root.findall("gpu"))),
    )


def _gpu(index: int, one: ElementTree.Element) -> Gpu:
    """A GPU by its element; nvidia-smi counts in the order of their place on the bus, as CUDA does for equal ones."""
    ecc = _text(one, "ecc_mode/current_ecc")
    errors = [_number(one, f"ecc_errors/volatile/{name}") for name in _UNCORRECTED]
    errors.append(_number(one, "ecc_errors/volatile/double_bit/total"))
    known = [number for number in errors if number is not None]
    return Gpu(
        index=index,
        name=_text(one, "product_name") or "?",
        uuid=_text(one, "uuid"),
        bus=one.get("id", ""),
        memory=_mib(one, "fb_memory_usage/total"),
        memory_used=_mib(one, "fb_memory_usage/used"),
        utilization=_number(one, "utilization/gpu_util"),
        temperature=_number(one, "temperature/gpu_temp"),
        ecc=ecc == "Enabled" if ecc in ("Enabled", "Disabled") else None,
        uncorrected=sum(known) if known else None,
        repair=_repair(one),
        throttled=_throttled(one),
        width=_number(one, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        widest=_number(one, "pci/pci_gpu_link_info/link_widths/max_link_width"),
        clock=_clock(one),
        power=_first(one, "gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit"),
        mig=_text(one, "mig_mode/current_mig") == "Enabled",
        compute_mode=_text(one, "compute_mode") or "Default",
        fabric=_fabric(one),
        uses=tuple(
            f"{_text(process, 'pid')} {_text(process, 'process_name')}".strip()
            for process in one.findall("processes/process_info")
            if "C" in (_text(process, "type") or "C")  # not what only draws
        ),
    )


def _clock(one: ElementTree.Element) -> int | None:
    """What its administrator allows, where that is less than what it can do."""
    known = [_number(one, f"{kind}_clocks/{of}_clock") for kind, of in (("applications", "graphics"), ("max", "sm"))]
    return min((number for number in known if number), default=None)


def _repair(one: ElementTree.Element) -> str:
    """What of its memory waits for a repair, or cannot be repaired any more."""
    if _text(one, "remapped_rows/remapped_row_failure") == "Yes":
        return "memory rows could not be remapped"
    if _text(one, "ecc_errors/unrepairable_memory") == "Yes":
        return "memory cannot be repaired"
    pending = ("remapped_rows/remapped_row_pending", "retired_pages/pending_retirement")
    pending += ("ecc_errors/channel_repair_pending", "ecc_errors/tpc_repair_pending")
    return "a repair waits for a reset" if any(_text(one, path) == "Yes" for path in pending) else ""


def _throttled(one: ElementTree.Element) -> tuple[str, ...]:
    found = []
    for kind in ("event", "throttle"):
        for name, words in _SLOW.items():
            if _text(one, f"clocks_{kind}_reasons/clocks_{kind}_reason_{name}") == "Active":
                found.append(words)
    return tuple(dict.fromkeys(found))


def _fabric(one: ElementTree.Element) -> str:
    """What is wrong with its connection to NVSwitch; "" where all is well or it has none."""
    state, status = _text(one, "fabric/state"), _text(one, "fabric/status")
    if state in ("", "N/A", "Not Supported") or (state == "Completed" and status in ("Success", "N/A", "")):
        return ""
    return f"{state} ({status})" if status not in ("", "N/A") else state


def parse_short(text: str) -> Gpus:
    """What the command SHORT prints. Raises NoAnswer where it is not that."""
    found: list[Gpu] = []
    driver: str | None = None
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 8 or not parts[0].isdigit():
            continue
        index, name, uuid, version, total, used, busy, temperature = parts
        driver = driver or version
        size, taken, utilization, heat = (_whole(one) for one in (total, used, busy, temperature))
        found.append(
            Gpu(
                index=int(index),
                name=name,
                uuid=uuid,
                memory=None if size is None else size * _MIB,
                memory_used=None if taken is None else taken * _MIB,
                utilization=utilization,
                temperature=heat,
            )
        )
    if not found:
        raise NoAnswer(f"nvidia-smi lists no GPU: {first_line(text) or 'it prints nothing'}")
    return Gpus(present=True, driver=driver, gpus=tuple(found))


def parse_topology(text: str) -> str:
    """The matrix that `nvidia-smi topo -m` prints, without colours and legend, and which device each NIC in it is. Raises
    NoAnswer where it is none."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = []
    for line in plain.splitlines():
        if line.startswith("Legend"):
            break
        if line.strip():
            rows.append("  ".join(f"{cell.strip():<5}" for cell in line.split("\t")).rstrip())
    if not any(row.startswith("GPU0") for row in rows):
        raise NoAnswer(f"nvidia-smi topo -m prints no matrix: {first_line(plain) or 'nothing'}")
    return "\n".join(rows + re.findall(r"^\s*(NIC\d+: \S+)", plain, re.MULTILINE))


def parse_nvlinks(text: str) -> dict[str, int]:
    """UUID → number of links that are up, by `nvidia-smi nvlink --status`."""
    found: dict[str, int] = {}
    uuid = None
    for line in text.splitlines():
        if head := re.match(r"GPU \d+:.*\(UUID: ([^)]+)\)", line):
            uuid = head[1]
            found[uuid] = 0
        elif uuid and (speed := re.match(r"\s*Link \d+: (\d+(?:\.\d+)?) GB/s", line)) and float(speed[1]) > 0:
            found[uuid] += 1
    return found


def parse_kernel_log(text: str, uptime_s: float | None) -> tuple[KernelEvent, ...]:
    """Xids and processes that the OOM killer ended, by `dmesg`."""
    found = []
    for line in text.splitlines():
        stamp = _SINCE_BOOT.match(line)
        age = max(0.0, uptime_s - float(stamp[1])) if stamp and uptime_s is not None else None
        if xid := _XID.search(line):
            found.append(KernelEvent(int(xid[2]), xid[1].removeprefix("PCI:"), (xid[3] or "").strip()[:160], age))
        elif oom := _OOM.search(line):
            found.append(KernelEvent(0, "", oom[1], age))
    return tuple(found)


def with_nvlinks(gpus: Sequence[Gpu], links: dict[str, int]) -> tuple[Gpu, ...]:
    """The GPUs with their links that are up."""
    return tuple(replace(gpu, nvlinks=links.get(gpu.uuid)) for gpu in gpus)


def _text(one: ElementTree.Element, path: str) -> str:
    return (one.findtext(path) or "").strip()


def _number(one: ElementTree.Element, path: str) -> int | None:
    return _whole(_text(one, path))


def _first(one: ElementTree.Element, *paths: str) -> int | None:
    """By the first path that this driver knows."""
    return next((number for path in paths if (number := _number(one, path)) is not None), None)


def _mib(one: ElementTree.Element, path: str) -> int | None:
    number = _number(one, path)
    return None if number is None else number * _MIB


def _whole(text: str) -> int | None:
    """The whole number that a text begins with: "81559 MiB", "16x", "0 %"; None for N/A."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None
