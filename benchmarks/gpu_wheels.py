"""Packages for a machine with torch and no network: what it lacks, how to fetch that, and wheels put on Python's path.

gpu_wheels.txt lists every package that packtrain's training imports beside those of torch, with the size of its wheel. A folder
of wheels needs no pip there, and no installation: they are unpacked into a folder named site-packages, since dill, with which
datasets tells functions apart, pickles modules of other folders by value.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIST = Path(__file__).with_name("gpu_wheels.txt")
ROOT = LIST.resolve().parents[1]
FETCH = (
    "python -m pip download --no-deps --only-binary=:all: --python-version {python} --implementation cp "
    "--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "
    "--platform manylinux_2_12_x86_64 -d wheels"
)
SHRUNK_ABOVE = 2**16
"""Bytes of a file from which on it is packed anew: all of a wheel in LZMA would take minutes more."""
NOT_NEEDED = {
    "plotly": "report.html alone, without which a run ends all the same",
    "gguf": "models in .gguf files alone",
    "hf-xet": "downloads from the hub alone",
    "click": "typer and huggingface-hub bring or import their own",
    "markdown-it-py": "rich's Markdown alone, which nothing here prints",
    "mdurl": "markdown-it-py alone",
    "pillow": "pictures alone",
    "requests": "gguf, and fsspec's http alone",
    "charset-normalizer": "requests alone",
    "urllib3": "requests alone",
    "narwhals": "plotly alone",
    "tzdata": "time zones of pandas on Windows alone",
}
"""Packages that packtrain's dependencies ask for, and that nothing imports which benchmarks/gpu.py runs: why."""


def listed() -> dict[str, tuple[str, float, str]]:
    """Name → version, MB of the wheel, and the remark of each package that is needed."""
    lines = [line.split("#") for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    found = {}
    for pinned, about in lines:
        size, _, remark = about.strip().partition(" MB")
        name, _, number = pinned.strip().partition("==")
        found[name] = (number, float(size), remark.strip("; "))
    return found


def missing(*, optional: bool = False) -> list[str]:
    """The packages of the list that are not installed, or are older than packtrain's own pyproject.toml asks for."""
    oldest = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    wanted = [name for name, (_, _, remark) in listed().items() if optional or not remark.startswith("optional")]
    return [name for name in wanted if _is_older(name, oldest.get(name, "0"))]


def _is_older(name: str, least: str) -> bool:
    try:
        own = version(name)
    except PackageNotFoundError:
        return True
    return _numbers(own) < _numbers(least)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


def advice(ignored: list[str]) -> str:
    """What is missing, and the commands that make the folder of wheels, where there is a network."""
    known, names = listed(), missing(optional=True)
    size = sum(known[name][1] for name in names)
    said = [f"this machine lacks {', '.join(names)} ({size:.0f} MB of wheels)."]
    said += [f"Wheels for another Python or machine: {', '.join(ignored)}."] if ignored else []
    pinned = {name: f"{name}=={known[name][0]}" for name in names}
    built = [name for name in names if "source" in known[name][2]]
    fetch = FETCH.format(python=f"{sys.version_info.major}.{sys.version_info.minor}")
    said += ["Where there is a network:", f"  {fetch} {' '.join(pinned[name] for name in names if name not in built)}"]
    said += [f"  python -m pip wheel --no-deps -w wheels {pinned[name]}" for name in built]
    said += ["  python benchmarks/gpu_wheels.py wheels    # makes them smaller, and says how large they are together"]
    return "\n".join([*said, "then here: --wheels wheels"])


def shrink(folder: Path) -> float:
    """Leaves out of the wheels what the list names, and packs large files by LZMA; returns the MiB of the folder."""
    known = listed()
    for wheel in sorted(folder.glob("*.whl")):
        name = wheel.name.split("-")[0].replace("_", "-").lower()
        _, _, without = known.get(name, ("", 0.0, ""))[2].partition("without ")
        smaller = wheel.with_suffix(".part")
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
            for file in old.infolist():
                if not any(fnmatch(file.filename, pattern) for pattern in without.split()):
                    method = zipfile.ZIP_LZMA if file.file_size > SHRUNK_ABOVE else zipfile.ZIP_DEFLATED
                    new.writestr(file.filename, old.read(file), method)
        smaller.replace(wheel)
    return sum(wheel.stat().st_size for wheel in folder.glob("*.whl")) / 2**20


def put_on_path(folder: Path | None, keep: Path | None = None) -> list[str]:
    """Has this process and those that it starts import packtrain from this checkout, and packages from the wheels of `folder`.

    They are unpacked into a temporary folder, or into `keep`, where an earlier call may have put others. Returns the names of wheels for
    another Python or machine, which are ignored.
    """
    paths, ignored = [str(ROOT), str(LIST.parent)], []
    if folder is not None or keep is not None:
        unpacked = Path(keep.absolute() if keep else tempfile.mkdtemp(prefix="packtrain-wheels-"), "site-packages")
        for wheel in sorted(folder.glob("*.whl")) if folder else ():
            if not _fits(wheel):
                ignored.append(wheel.name)
                continue
            with zipfile.ZipFile(wheel) as file:
                file.extractall(unpacked)
        paths.insert(0, str(unpacked))
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = ":".join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return ignored


def _fits(wheel: Path) -> bool:
    """Whether a wheel is for this Python on Linux with x86-64, by its tags."""
    python, abi, platform = wheel.stem.split("-")[-3:]
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    limited = abi == "abi3" and python.startswith("cp3") and int(python[3:]) <= sys.version_info.minor
    pure = any(one in (f"py{own[2:]}", "py3") for one in python.split("."))
    return (own in python.split(".") or limited or pure) and (platform == "any" or "x86_64" in platform)


if __name__ == "__main__":
    print(f"{shrink(Path(sys.argv[1])):.1f} MiB")
