"""The parts of benchmarks/gpu.py that are not training: each is a function that runs in a process and returns plain values."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """`work(folder, tiny=…, **given)` in `processes`, within `limit_s`; `group` are those that train on the same rows."""

    name: str
    work: Callable[..., Any]
    given: dict[str, Any] = field(default_factory=dict)
    limit_s: int = 100
    processes: int = 1
    group: str = ""
    needs: str = ""


def versions(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """The devices, and what is installed."""
    import torch

    from packtrain.run_folder import installed_version

    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else ["CPU"]
    packages = (
        "torch",
        "transformers",
        "trl",
        "accelerate",
        "triton",
        "flash-attn",
        "flash-attn-3",
        "flash-attn-4",
        "kernels",
        "deepspeed",
        "peft",
    )
    found = {name: installed_version(name) for name in packages}
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else None
    return {"devices": names, "memory": memory, "cuda": torch.version.cuda, "python": sys.version.split()[0], **found}


def quickstart(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """recipes/quickstart-sft.yaml through packtrain's command, to its final/ and its answers; fewer steps than a user's."""
    from packtrain import cli

    steps, output = 3 if tiny else 100, folder / "quickstart"
    changes = [f"trainer.max_steps={steps}", f"trainer.eval_every={steps}", f"trainer.output_dir={output}"]
    changes += ["optim.warmup_steps=2", f"data.cache_dir={folder / 'cache'}", "topology=single"]
    sys.argv = ["packtrain", "sft", str(ROOT / "recipes/quickstart-sft.yaml"), *changes]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise
    summary = json.loads((output / "summary.json").read_text())
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    verdict = (summary.get("verify") or {}).get("verdict")
    return {"steps": steps, "attention": summary["attention"], "verify": verdict, "losses": [losses[0], losses[-1]]}


def gpu_tests(folder: Path, *, tiny: bool, files: list[str]) -> dict[str, Any]:
    """Files of tests/gpu, by pytest; of a tiny run one test of each, since tests/standin runs all of them."""
    import pytest

    class Results:
        """What became of each test."""

        def __init__(self) -> None:
            self.passed, self.failed, self.skipped = 0, [], Counter()

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                self.failed.append([report.nodeid, first_line(crash.message if crash else str(report.longrepr))])
                print(report.nodeid, report.longrepr, flush=True)  # now: the part may end at its limit
            elif report.skipped:
                self.skipped[str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")] += 1
            elif report.when == "call":
                self.passed += 1

    os.chdir(ROOT)
    results = Results()
    asked = [f"tests/gpu/{name}" for name in files]
    if tiny:
        asked += ["-k", "waits_for_nothing and sft and packed or grouped or llama"]
    # pyproject.toml's own options are for pytest-xdist, too, which need not be there
    options = ["-q", "-o", "addopts=-m 'not exhaustive'", "-p", "no:cacheprovider", "-p", "no:randomly"]
    code = pytest.main([*options, *asked], plugins=[results])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}")
    return {"passed": results.passed, "failed": results.failed, "skipped": dict(results.skipped)}


def kernels(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """Every attention of packed rows: how far it is off the definition, and how fast (benchmarks/attention.py)."""
    import attention
    import torch

    from packtrain.attention.kernels.selection import LayerFeatures, dense_attention
    from packtrain.attention.kernels.varlen import Kernel
    from packtrain.packing.segments import Segments

    def definition(q, k, v, borders, scoring, sinks):
        outputs, lengths = [], (borders.queries.diff().tolist(), *[borders.keys.diff().tolist()] * 2)
        for one, key, value in zip(
            *(tensor.split(by) for tensor, by in zip((q, k, v), lengths, strict=True)), strict=True
        ):
            before = one.new_zeros(len(key) - len(one), *one.shape[1:])  # queries of the tokens before
            whole = dense_attention(torch.cat([before, one]), key, value, sinks, Segments((len(key),)), scoring)
            outputs.append(whole[len(before) :])
        return torch.cat(outputs)

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    heads, kv_heads, width = (4, 2, 16) if tiny else (32, 8, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    usable, found = attention.usable_kernels(LayerFeatures(dtype, heads // kv_heads, width, width), device)
    if device.type == "cpu":  # in place of kernels that it has not
        usable.append(Kernel("the definition", definition))
    rows, documents = ([128], ["32", "groups"]) if tiny else ([8192, 32_768], ["512", "2048", "mixed", "groups"])
    measured = [
        {"row": row, "documents": kind, **one}
        for row in rows
        for kind in documents
        for one in attention.compare_row(row, kind, usable, 1 if tiny else 5, device, (heads, kv_heads, width), dtype)
    ]
    return {"kernels": found, "rows": measured}


def first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]


def reason_in(log: Path) -> str:
    """The lines of a process' output that say why it ended: packtrain's error, else the exception."""
    lines = (
        [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    )
    for number in reversed(range(len(lines))):
        if lines[number] == "error:":
            return " ".join(lines[number + 1 : number + 3])[:300]
    said = [line for line in lines if "Error" in line and not line.startswith("File ")]
    return ([*lines[-1:], *said] or ["it ended without a word"])[-1][:300]


def lacks(package: str) -> bool:
    """Whether a package is not installed."""
    from importlib.util import find_spec

    return find_spec(package) is None
