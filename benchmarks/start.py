"""From the command to the end of the first optimizer step: where the seconds go, and which imports are dearest.

    python benchmarks/start.py [--runs 5] [CONFIG …]          # default: both quickstarts

Each run is a process of its own, `packtrain sft|dpo CONFIG`, with clocks between its phases, ended after the first step; a
first one fills the caches and is not counted. Wall seconds, of the fastest run and the median; `cpu` is what the process computed
(user and system, all threads). Then the time to the line "ready", which precedes step 1, without clocks, in one process and in two;
what `python -X importtime` says, by package and by module; and `plan` and `sbatch` of every recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
SLURM = ("topology=slurm", "topology.nodes=1", "topology.gpus_per_node=1")


def watch(out: str, began: float) -> None:
    """In the child: runs packtrain's command line, writes when each phase ended, and ends at the end of step 1."""
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks.setdefault(name, round(time.time() - began, 3))

    def marked(holder: Any, attribute: str, *, begins: str = "", ends: str = "") -> None:
        """Marks the end of phase `begins` where the function is called, and of `ends` where it returns."""
        function = getattr(holder, attribute)

        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            if begins:
                mark(begins)
            result = function(*arguments, **keywords)
            if ends:
                mark(ends)
            return result

        setattr(holder, attribute, wrapper)

    mark("interpreter")
    from packtrain import cli
    from packtrain.monitor.heartbeat import Heartbeat

    enter = Heartbeat.enter

    def entered(self: Heartbeat, phase: str, **place: Any) -> float:
        if "config, plan" in marks and "imports" not in marks:  # `train` of packtrain.train.run has begun
            mark("imports")
            from packtrain.train import preparation, run

            marked(preparation, "load_tokenizer", begins="join", ends="tokenizer")
            marked(preparation, "agree_on_data", ends="data")
            marked(run, "check_positions", ends="model")
            objective_of = preparation.objective_of

            def objective(config: Any) -> Any:
                made = objective_of(config)
                marked(type(made), "loss", begins="steps and proof", ends="loss")
                marked(type(made), "prove", ends="proofs on it")
                return made

            preparation.objective_of = objective
        if phase == "step end" or place.get("step") == 2:
            mark("first step")
            usage = os.times()
            Path(out).write_text(json.dumps({**marks, "cpu": usage.user + usage.system}))
            os._exit(0)
        if phase == "data":
            mark("answers, evaluation")
        elif phase == "forward":
            mark("first batch")
        return enter(self, phase, **place)

    marked(cli, "_train", begins="config, plan")
    Heartbeat.enter = entered  # type: ignore[method-assign]
    cli.main()


def run_of(config: Path, out: Path) -> list[str]:
    """The arguments that train by `config` into a new folder below `out`."""
    return [verb_of(config), str(config), f"trainer.output_dir={tempfile.mkdtemp(dir=out)}"]


def verb_of(config: Path) -> str:
    """The verb, which the names of our recipes tell."""
    return "dpo" if "dpo" in config.name else "sft"


def first_step(config: Path, out: Path, *options: str) -> tuple[dict[str, float], str]:
    """Seconds at which each phase ended, and what the process wrote to stderr. `options` are Python's."""
    marks = out / "marks.json"
    marks.unlink(missing_ok=True)
    code = f"import sys; from start import watch; sys.argv[0] = 'packtrain'; watch({str(marks)!r}, {time.time()})"
    command = [sys.executable, *options, "-c", code, *run_of(config, out)]
    ran = subprocess.run(command, cwd=REPO / "benchmarks", capture_output=True, text=True, check=True)
    return json.loads(marks.read_text()), ran.stderr


def until_ready(config: Path, out: Path, *overrides: str) -> float:
    """Seconds from the command to the line "ready", which precedes step 1, without clocks; the run is then ended."""
    command = [sys.executable, "-m", "packtrain", *run_of(config, out), *overrides]
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout
        next((line for line in run.stdout if line.startswith("ready")), None)
        took = time.perf_counter() - began
        run.terminate()
        run.stdout.read()
    return took


def seconds_of(*arguments: str) -> float:
    """Wall seconds of `packtrain ARGUMENTS`."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "packtrain", *arguments], cwd=REPO, capture_output=True, check=True)
    return time.perf_counter() - began


def show_phases(config: Path, runs: int, out: Path) -> None:
    """The table of one config: best and median of each phase."""
    first_step(config, out)
    found = sorted((first_step(config, out)[0] for _ in range(runs)), key=lambda marks: marks["first step"])
    cpu = [marks.pop("cpu") for marks in found]
    parts = [
        {name: end - before for (name, end), before in zip(run.items(), [0.0, *run.values()], strict=False)}
        for run in found
    ]
    print(f"\n{config.name}, {runs} runs\n{'phase':<24}{'best':>8}{'median':>8}")
    for name in parts[0]:
        print(f"{name:<24}{parts[0][name]:>8.2f}{statistics.median(part[name] for part in parts):>8.2f}")
    ends = [run["first step"] for run in found]
    print(f"{'first step is done after':<24}{ends[0]:>8.2f}{statistics.median(ends):>8.2f}")
    print(f"{'cpu':<24}{min(cpu):>8.2f}{statistics.median(cpu):>8.2f}")


def show_imports(config: Path, out: Path) -> None:
    """The dearest imports until the end of step 1. Timing each of them slows all: shares, not seconds to add up."""
    said = first_step(config, out, "-X", "importtime")[1]
    lines = re.findall(r"import time:\s+(\d+) \|\s+(\d+) \| (\s*)(\S+)", said)
    packages, modules = Counter[str](), Counter[str]()
    largest: dict[int, int] = {}  # of the modules that the next one at a lesser depth has imported, by depth
    for own, everything, indent, name in lines:
        depth, took = len(indent), int(everything)
        packages[name.partition(".")[0]] += int(own)
        if largest.pop(depth + 2, 0) < 0.8 * took:  # else it is dear for that one import alone
            modules[name] = took
        largest[depth] = max(largest.get(depth, 0), took)
    print(f"\nimports of {config.name}: {sum(packages.values()) / 1e6:.2f} s, {len(lines)} modules")
    for title, counted in (("package: its own modules", packages), ("module: with all that it imports first", modules)):
        print(f"{title:<56}{'ms':>6}")
        for name, took in counted.most_common(25):
            print(f"  {name:<54}{took / 1000:>6.0f}")


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    runs, recipes = range(given.runs), REPO / "recipes"
    configs = [path.resolve() for path in given.configs] or sorted(recipes.glob("quickstart-*.yaml"), reverse=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for config in configs:
            show_phases(config, given.runs, out)
            for processes in (1, 2):
                took = [until_ready(config, out, f"topology.gpus_per_node={processes}") for _ in runs]
                print(f"{f'ready, {processes} processes':<24}{min(took):>8.2f}{statistics.median(took):>8.2f}")
        show_imports(configs[0], out)
    print(f"\n{f'best of {given.runs}':<24}{'plan':>8}{'sbatch':>8}")
    for recipe in sorted(recipes.glob("*.yaml")):
        try:
            plan = min(seconds_of("plan", str(recipe)) for _ in runs)
            job = min(seconds_of("sbatch", verb_of(recipe), str(recipe), *SLURM) for _ in runs)
        except subprocess.CalledProcessError:
            print(f"{recipe.name:<24} names a model or data that are not here")
            continue
        print(f"{recipe.name:<24}{plan:>8.2f}{job:>8.2f}")


if __name__ == "__main__":
    main()
