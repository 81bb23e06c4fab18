"""Kill runs at every kind of moment, start them again, and compare the weights.

    python benchmarks/crash.py                          # the table of RESULTS.md; half an hour on two idle cores
    python benchmarks/crash.py --short                  # a fixed sample of all kinds, as tests/train/test_resume.py has it
    python benchmarks/crash.py --setups "sft full 1" --kinds checkpoint --points 40

Each setup (objective, full or LoRA, processes, strategy) is first run undisturbed, and resumed once, while crash_points.c, which is
compiled with `cc` and preloaded, notes every system call that changes a file of the run folder or the token cache, and this
file the phases of each step. These are the points. A fixed seed draws some of each kind. At each point one run gets SIGKILL: all its
processes, only one of two, or the run once more while it resumes. A write is cut in half. Then the same
command is run until it ends, and must leave

- every file of final/ as the undisturbed run has it, bit for bit;
- the same lines in metrics.jsonl, none missing, none twice (but for times and memory);
- whole checkpoints, of the same steps, and no file or folder that the undisturbed run does not leave.

One setup has a step without a number for its loss, which is skipped; in one another number of processes goes on, and losses are to be
within 1e-5, weights within 1e-4.

Processes are forked from one that has imported torch and packtrain (tests/train/forked.py), as torchrun would start them.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO)]

from tests.train import forked, running  # noqa: E402

STEPS, CHECKPOINT_EVERY, EVAL_EVERY = 6, 2, 4
ATTEMPTS, LIMIT_S = 4, 300
LIBRARY = "CRASH_POINTS"
"""The variable that names the compiled crash_points.c."""
TIMES = re.compile(r"seconds|tokens_per_second|mfu|memory_bytes|slowest_rank|.+/(min|median|max)")
"""Keys of a line of metrics.jsonl that no two runs share."""
MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
MODEL = {**running.LLAMA, **MODEL, "max_position_embeddings": 256, "attention_dropout": 0.1}
RESUMED_AT = f"mkdir\trun/checkpoints/.step-{STEPS:06d}.partial\t"
"""Where the run is killed that is killed once more as it resumes: the checkpoint before is complete then, always."""


@dataclass(frozen=True)
class Setup:
    """A kind of run. With a `spike` step 3 has no number for its loss, and is skipped; `then`: as many processes go on after a kill."""

    verb: str
    peft: str
    processes: int
    strategy: str = "ddp"
    spike: bool = False
    then: int = 0

    @property
    def name(self) -> str:
        spread = f" {self.strategy}" if self.processes > 1 else ""
        own = " spike" * self.spike + f" then {self.then}" * bool(self.then)
        return f"{self.verb} {self.peft} {self.processes}{spread}{own}"

    @property
    def again(self) -> Setup:
        """By which the run goes on."""
        return replace(self, processes=self.then or self.processes)

    def config(self, folder: Path) -> dict[str, Any]:
        """The config of a run in `folder`, of the data and model in inputs/."""
        inputs = next(one for one in folder.parents if (one / "inputs").is_dir()) / "inputs"
        scored = self.verb == "reward"
        model: dict[str, Any] = {"path": str(inputs / "start"), "dtype": "float32"}
        if self.verb == "sft" and self.peft == "full":
            shape = MODEL | ({"attention_dropout": 0.0} if self.then else {})  # which another world draws otherwise
            model = {"init": "random", "config": shape, "tokenizer": "quickstart"}
        return {
            "model": model,
            "data": {
                "train": str(inputs / f"{self.verb}.jsonl"),
                "eval": str(inputs / f"{self.verb}-eval.jsonl"),
                "cache_dir": str(folder / "cache"),
                "max_length": 120,
            },
            "batch": {"examples_per_step": 4, "tokens_per_device": 256},
            "optim": {"learning_rate": 1e-3, "schedule": "linear", "warmup_steps": 2},
            "peft": {"kind": "none" if self.peft == "full" else "lora", "r": 2} if self.peft == "lora" else {},
            "strategy": {"name": self.strategy},
            "verify": {"preflight": False},
            "topology": {"join_timeout": 60},  # of a rank whose other one is killed at its start
            "objective": {"reference": "precomputed"} if self.verb == "dpo" and self.peft == "full" else {},
            "trainer": {
                "output_dir": str(folder / "run"),
                "max_steps": STEPS,
                "log_every": 1,
                "checkpoint_every": CHECKPOINT_EVERY,
                "eval_every": EVAL_EVERY,
                **({"on_spike": "skip"} if self.spike else {}),
                **({} if scored else {"samples": ["river stone"]}),
            },
        }


SETUPS = [
    Setup(verb, peft, processes, strategy)
    for verb in ("sft", "dpo")
    for peft in ("full", "lora")
    for processes, strategy in ((1, "ddp"), (2, "ddp"), (2, "zero2"), (2, "fsdp2"))
] + [Setup("kto", "full", 1), Setup("reward", "lora", 1)]
SETUPS += [Setup("sft", "full", 1, spike=True), Setup("sft", "full", 2, "zero2", then=1)]
SHORT = {"sft full 1": 10, "dpo lora 2 ddp": 1}
"""How many points the short table has, of which setups: one of each row, but those LEFT_OUT."""
LEFT_OUT = {
    "start, tokenizer, model, proof",
    "forward",
    "backward",
    "eval",
    "checkpoints: mkdir",
    "checkpoints: write",
    "checkpoint begins",
    "checkpoints: create",
    "checkpoints: resize",
    "checkpoints: rmdir",
    "config.yaml, logs and so on",
}


@dataclass(frozen=True)
class Point:
    """The `nth` time that a rank comes to `what` (a line of crash_points.c) in an attempt (0: the first; 1: the resumed one).

    With `alone` the other rank is not killed.
    """

    what: str
    nth: int
    rank: int = 0
    attempt: int = 0
    alone: bool = False

    @property
    def kind(self) -> str:
        """What is going on there, in a few words: a row of the table."""
        call, path, other = self.what.split("\t")
        if call == "at":
            kind = path.split(" step ")[0]
        elif path.startswith("cache/"):
            kind = f"token cache: {call}"
        else:
            place = re.sub(r"^run(\.\d+)?/?", "", other or path).lstrip(".").split("/")[0].split(".")[0]
            place = "final" if place.startswith("final") else place
            known = ("checkpoints", "metrics", "final", "summary", "data", "report", "logs")
            kind = f"{place if place in known else 'run folder'}: {call}"
        return ("resumed, " if self.attempt else "") + ("one rank, " if self.alone else "") + kind

    @property
    def sort(self) -> str:
        """Points of the same are alike: the file without its step, rank and name of a moment."""
        return re.sub(r"\d+", "#", self.what) + str((self.attempt, self.rank, self.alone))

    @property
    def words(self) -> str:
        named = self.what.replace("\t", " ").strip() + (f", time {self.nth}" if self.nth > 1 else "")
        return f"{'as it resumes, ' if self.attempt else ''}rank {self.rank}{' alone' if self.alone else ''}: {named}"


@dataclass
class Outcome:
    """What became of a run that was killed at a point; `wrong` says nothing if all is as it must be."""

    setup: str
    point: Point
    killed: bool
    attempts: int
    wrong: list[str]
    moved: int
    """Earlier attempts that were moved aside: there was no checkpoint to go on from, or final/ was there."""
    seconds: float


# In the processes that are killed


def rank_of_a_run(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    folder: Path,
    outputs: list[Path],
    leader: int | None,
    point: Point | None,
    log: Path,
    with_bytes: bool,
) -> None:
    """packtrain's command as one rank, in the process group of rank 0 (`leader`); dies at the point, if it is of this rank."""
    while True:
        try:
            os.setpgid(0, leader or 0)
            break
        except PermissionError:  # the leader does not lead yet
            time.sleep(0.005)
    library, descriptor = ctypes.CDLL(os.environ[LIBRARY]), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    what, nth, alone = (point.what, point.nth, point.alone) if point else ("", 0, False)
    begin = library.crash_begin
    begin(str(folder).encode(), descriptor, int(with_bytes), what.encode(), nth, int(alone))
    mark_phases(lambda name: library.crash_point(name.encode()))
    if "on_spike" in Path(arguments[1]).read_text():
        break_step(3)
    forked.run(arguments, environment, folder, outputs)


def mark_phases(passed: Any) -> None:
    """Calls `passed` with its name as a phase of a run begins, and in the middle of a forward, backward and optimizer."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from packtrain.monitor.heartbeat import Heartbeat

    enter, now = Heartbeat.enter, [""]

    def entered(self: Any, phase: str, *, step: int | None = None, micro: int = 0) -> Any:
        found = enter(self, phase, step=step, micro=micro)
        now[0] = f"{phase} step {self._state.step}"
        passed(now[0] + (f" micro {micro}" if micro else ""))
        return found

    def in_forward(module: Any, given: Any, output: Any) -> None:
        passed(f"in a layer, {now[0]}")
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(module, LlamaDecoderLayer) and first.requires_grad:
            first.register_hook(lambda _: (passed(f"in a layer, {now[0]}"), None)[1])

    Heartbeat.enter = entered
    layers = LlamaDecoderLayer.__init__

    def made(self: Any, *given: Any, **named: Any) -> None:
        layers(self, *given, **named)
        self.register_forward_hook(in_forward)

    LlamaDecoderLayer.__init__ = made
    register_optimizer_step_post_hook(lambda *_: passed(f"in the optimizer, {now[0]}"))
    torch.set_num_threads(1)


def break_step(number: int) -> None:
    """Multiplies the loss and the gradients of this step by no number."""
    from packtrain.train.loop import StepTrainer

    step = StepTrainer.forward_and_backward

    def broken(self: Any, *given: Any) -> Any:
        import torch

        own, bad = self.loss.compute, self.state.step + 1 == number
        self.loss.compute = lambda *given: own(*given) * (float("nan") if bad and torch.is_grad_enabled() else 1)
        try:
            return step(self, *given)
        finally:
            self.loss.compute = own

    StepTrainer.forward_and_backward = broken


# In the process that watches them


def make_inputs(folder: Path) -> None:
    """Data for every objective, and a model to start from (in a process that has torch)."""
    folder.mkdir(parents=True)
    for name, count, seed in (("", 14, 0), ("-eval", 3, 1)):
        chats = running.conversations(count, seed)
        for row in chats:
            row["messages"] = row["messages"][:2]
        prompts = [row["messages"][:1] for row in chats]
        answers = [row["messages"][1] for row in chats]
        other = [{"role": "assistant", "content": answer["content"].upper() + " no"} for answer in answers]
        pairs = [
            {"prompt": prompt, "chosen": [good], "rejected": [bad]}
            for prompt, good, bad in zip(prompts, answers, other, strict=True)
        ]
        labelled = [
            {"prompt": one["prompt"], "completion": one["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}
            for i, one in enumerate(pairs)
        ]
        for verb, rows in (("sft", chats), ("dpo", pairs), ("reward", pairs), ("kto", labelled)):
            running.write_jsonl(folder / f"{verb}{name}.jsonl", rows)
    if (code := ended(forked.begun(save_start, folder / "start"))) != 0:
        raise SystemExit(f"no model to start from: exit code {code}")
    for file in folder.glob("*.jsonl"):
        os.utime(file, (0, 0))  # long settled: their hashes are remembered


def save_start(folder: Path) -> None:
    from packtrain.config.schema import Model, Peft
    from packtrain.data.tokens.pretrained import load_tokenizer
    from packtrain.model.load import load_model

    described = Model(init="random", config=MODEL, tokenizer="quickstart")
    words = load_tokenizer(described)
    load_model(described, Peft(), words, seed=0).save_pretrained(folder)
    words.save_pretrained(folder)


def ended(process: Any) -> int | None:
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
    return process.exitcode


def attempt(
    setup: Setup,
    folder: Path,
    point: Point | None = None,
    *,
    logs: str = "",
    with_bytes: bool = False,
    keep: int | None = 1,
) -> list[int | None]:
    """Runs the command once, killed at the point if there is one; the exit codes of its ranks. `keep`: trainer.keep_checkpoints."""
    config = setup.config(folder)
    config["trainer"]["keep_checkpoints"] = keep
    (path := folder / "config.yaml").write_text(yaml.safe_dump(config))
    several = setup.processes > 1
    told = forked.told_by_torchrun(setup.processes) if several else [{}]
    ranks: list[Any] = []
    for rank, own in enumerate(told):
        said = [folder / f"rank-{rank}.{name}" for name in ("out", "err")]
        for file in said:
            file.unlink(missing_ok=True)
        environment = {**forked.ENVIRONMENT, **own, "TMPDIR": str(folder / "tmp")}
        mine = point if point and point.rank == rank else None
        log = folder / f"{logs or 'points'}-{0 if with_bytes else rank}.log"
        given = ((setup.verb, str(path)), environment, folder, said, ranks[0].pid if ranks else None)
        ranks.append(forked.begun(rank_of_a_run, *given, mine, log, with_bytes))
    return [ended(one) for one in ranks]


def fresh(folder: Path, warm: Path | None) -> Path:
    """An empty folder for a run, with the token cache of another if there is one."""
    (folder / "tmp").mkdir(parents=True)
    if warm is not None:
        shutil.copytree(warm / "cache", folder / "cache")
    return folder


def points_in(log: Path, **about: Any) -> list[Point]:
    """The points of a rank, in order."""
    seen: Counter[str] = Counter()
    found = []
    for line in log.read_bytes().decode(errors="replace").splitlines():
        what = "\t".join(line.split("\t")[:3])
        seen[what] += 1
        found.append(Point(what, seen[what], **about))
    return found


def record(setup: Setup, folder: Path, *, resumed: bool) -> list[Point]:
    """The undisturbed run in folder/whole, which the others are held against; all points of it, and of a `resumed` one."""
    whole, again = fresh(folder / "whole", None), fresh(folder / "again", None)
    if any(codes := attempt(setup, whole)):
        raise SystemExit(f"{setup.name} does not train: {codes}\n{said_by(whole)}")
    found = [one for rank in range(setup.processes) for one in points_in(whole / f"points-{rank}.log", rank=rank)]
    if not resumed:
        return [one for one in found if re.match(r"at\t|\w+\t(run|cache)", one.what)]
    attempt(setup, again, Point(RESUMED_AT, 1))
    if any(codes := attempt(setup.again, again, logs="resumed")):
        raise SystemExit(f"{setup.name} does not resume: {codes}\n{said_by(again)}")
    for rank in range(setup.again.processes):
        found += points_in(again / f"resumed-{rank}.log", rank=rank, attempt=1)
    return [one for one in found if re.match(r"at\t|\w+\t(run|cache)", one.what)]


def said_by(folder: Path) -> str:
    return "\n".join(file.read_text(errors="replace")[-1500:] for file in sorted(folder.glob("rank-*.err")))


def drawn(points: Sequence[Point], count: int, setup: Setup, seed: int) -> list[Point]:
    """`count` of the points: of every kind one, then of every sort, then any; of the first setup also every boundary of a step."""
    points = list(dict.fromkeys(points))
    if setup.processes > 1:  # some of them for one rank alone
        phases = [one for one in points if re.match(r"at\t(?!done)", one.what) and not one.attempt]
        points += [replace(one, alone=True) for one in phases]
    random.Random(f"{seed} {setup.name}").shuffle(points)
    first: list[Point] = []
    if setup == SETUPS[0]:
        first = [one for one in points if one.what.startswith("at\tdata step") and not one.attempt]
    kinds, sorts, rest = [], [], []
    seen = {one.kind for one in first}
    for one in points:
        if one in first:
            continue
        if one.kind not in seen:
            kinds.append(one)
        elif one.sort not in seen:
            sorts.append(one)
        else:
            rest.append(one)
        seen |= {one.kind, one.sort}
    if count == SHORT.get(setup.name):
        of_rows = {row_of(one.kind): one for one in [*rest, *sorts, *kinds]}
        ordered = [*ROWS, *sorted(of_rows.keys() - ROWS.keys())]
        return [of_rows[row] for row in ordered if row in of_rows.keys() - LEFT_OUT][:count]
    return [*first, *kinds, *sorts, *rest][:count]


def place_of(line: str) -> tuple[int, bool] | None:
    """The step of a line of metrics.jsonl, and whether it is of an evaluation; None of a torn line."""
    try:
        return (found := json.loads(line))["step"], "eval_loss" in found
    except (ValueError, KeyError):
        return None


def lines_of(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, without what no two runs share."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not TIMES.fullmatch(key)} for line in lines]


def names_in(folder: Path) -> set[str]:
    """What lies in a case's folder, but for logs and diagnoses, what was moved aside, and locks that nobody holds."""
    logs, others = (
        r"run/logs/(rank-\d+\.log|diagnosis\.txt|stacks-.*|\d{8}-.*)",
        r"run\.\d+(/.*)?|cache/.*\.lock|tmp/.*",
    )
    apart = re.compile(rf"{logs}|{others}|[^/]*\.(log|out|err|yaml)")
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {name for name in names if not apart.fullmatch(name)}


def differences(found: Path, whole: Path) -> Iterator[str]:
    """What is not as the undisturbed run has left it."""
    from packtrain.train.checkpoint.folder import damage, list_checkpoints

    for name in sorted(names_in(found) ^ names_in(whole)):
        yield f"{name} {'is left behind' if (found / name).exists() else 'is missing'}"
    for place in whole.glob("run/final*/*"):
        twin = found / place.relative_to(whole)
        if twin.is_file() and twin.read_bytes() != place.read_bytes():
            yield f"{place.relative_to(whole)} differs"
    for step, checkpoint in list_checkpoints(found / "run" / "checkpoints").items():
        if wrong := damage(checkpoint):
            yield f"checkpoint {step}: {wrong}"
    spikes = found / "run" / "spikes.jsonl"
    if spikes.exists() and spikes.read_text() != (whole / "run" / "spikes.jsonl").read_text():
        yield "spikes.jsonl differs"
    ours, theirs = lines_of(found / "run"), lines_of(whole / "run")
    if ours != theirs:
        steps = [(line["step"], "eval" if "eval_loss" in line else "") for line in ours]
        yield f"metrics.jsonl differs: its lines are of {steps}"
    if json.loads((found / "run" / "summary.json").read_text())["status"] != "done":
        yield "summary.json does not say done"


def elsewhere(found: Path, whole: Path) -> Iterator[str]:
    """What is not as the undisturbed run has left it where another number of processes went on: within rounding."""
    from packtrain.train.checkpoint.folder import damage, list_checkpoints

    for step, checkpoint in list_checkpoints(found / "run" / "checkpoints").items():
        if wrong := damage(checkpoint):
            yield f"checkpoint {step}: {wrong}"
    kept = [
        [(one["step"], one.get("loss"), one.get("eval_loss")) for one in lines_of(of / "run")] for of in (found, whole)
    ]
    steps, expected = ([one[0] for one in lines] for lines in kept)
    if steps != expected:
        yield f"metrics.jsonl is of steps {steps}"
    near = (
        abs((a or 0) - (b or 0)) <= 1e-5 * abs(b or 0)
        for one, other in zip(*kept, strict=False)
        for a, b in zip(one, other, strict=True)
    )
    if not all(near):
        yield f"losses differ by more than 1e-5: {kept}"
    ours, theirs = (load_file(of / "run" / "final" / "model.safetensors") for of in (found, whole))
    far = [name for name, weight in theirs.items() if not np.allclose(ours[name], weight, rtol=1e-4, atol=1e-5)]
    if far:
        yield f"weights differ: {far}"
    if json.loads((found / "run" / "summary.json").read_text())["status"] != "done":
        yield "summary.json does not say done"


def case(setup: Setup, point: Point, folder: Path, whole: Path) -> Outcome:
    """Kills a run at the point, and runs the command until it ends."""
    began = time.perf_counter()
    fresh(folder, None if "cache" in point.kind else whole)
    wrong: list[str] = []
    if point.attempt:
        attempt(setup, folder, Point(RESUMED_AT, 1))
    codes = attempt(setup.again if point.attempt else setup, folder, point)
    killed = codes[point.rank] == -9
    if point.alone and killed and codes[1 - point.rank] is None:
        wrong.append(f"the other rank did not end within {LIMIT_S} s")
    tries = 0
    while any(code != 0 for code in codes) and tries < ATTEMPTS:
        codes, tries = attempt(setup.again, folder), tries + 1
    if any(codes):
        wrong.append(f"exit codes {codes}: {said_by(folder)[-700:]}")
    else:
        wrong += elsewhere(folder, whole) if setup.then else differences(folder, whole)
    moved = len(list(folder.glob("run.*")))
    outcome = Outcome(setup.name, point, killed, tries, wrong, moved, time.perf_counter() - began)
    if not wrong:
        shutil.rmtree(folder)
    return outcome


def compiled(folder: Path) -> Path:
    """crash_points.c as a library."""
    library = folder / "crash_points.so"
    source = Path(__file__).with_suffix("").with_name("crash_points.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl", "-lpthread"], check=True)
    return library


ROWS = {
    "as it resumes, killed again": "resumed, ",
    "one of two ranks alone": "one rank, ",
    "start, tokenizer, model, proof": "(in a layer, )?(start|join|proof|prepare|load)$",
    "boundary of a step": "(data|counts|step end)$",
    "forward": "(in a layer, )?forward$",
    "backward": "(in a layer, )?backward$",
    "optimizer": "in the optimizer, |optimizer$",
    "eval": "(in a layer, )?eval$",
    "checkpoint begins": "checkpoint$",
    "token cache": "token cache: ",
    "metrics.jsonl": "metrics: ",
    "final/": "(in a layer, )?final",
    "summary.json, data.json, report.html": "summary|data: |report|done",
    "config.yaml, logs and so on": "run folder|logs",
}
"""Kinds of points by the row of the table that they are counted in; those of checkpoints have a row for each call."""


def row_of(kind: str) -> str:
    return next((row for row, pattern in ROWS.items() if re.match(pattern, kind)), kind)


def table(outcomes: Sequence[Outcome]) -> str:
    """Counts by kind and setup: runs that came to the same end, of those that were killed."""
    setups = [one.name for one in SETUPS if any(one.name == found.setup for found in outcomes)]
    killed = [one for one in outcomes if one.killed]
    rows = {row_of(one.point.kind) for one in killed}
    ordered = [*(row for row in ROWS if row in rows), *sorted(rows - ROWS.keys())]

    def cell(cases: Sequence[Outcome]) -> str:
        good = sum(not one.wrong for one in cases)
        return "" if not cases else f"{good}" if good == len(cases) else f"**{good} of {len(cases)}**"

    lines = ["| killed at | " + " | ".join(setups) + " | all |", "|---" * (len(setups) + 2) + "|"]
    for row in [*ordered, "all"]:
        of_row = [one for one in killed if row in (row_of(one.point.kind), "all")]
        cells = [cell([one for one in of_row if one.setup == name]) for name in setups]
        lines.append(f"| {row} | {' | '.join(cells)} | {cell(of_row)} |")
    return "\n".join(lines)


@contextmanager
def prepared(folder: Path | None) -> Iterator[Path]:
    """A folder for runs, with their inputs (a temporary one, if none is given); their processes preload the library of points."""
    with tempfile.TemporaryDirectory(prefix="crash-") as made:
        place = (folder or Path(made)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        library = compiled(place)
        os.environ[LIBRARY] = str(library)
        os.environ["LD_PRELOAD"] = str(library)  # of the process that all runs are forked from
        forked._CONTEXT.set_forkserver_preload([forked.PRIMED, "benchmarks.crash"])
        make_inputs(place / "inputs")
        yield place


def main() -> int:
    """Prints the table; returns 1 if a run did not come to the same end."""
    parser = argparse.ArgumentParser(description="Kills runs at every kind of moment.")
    parser.add_argument("--short", action="store_true", help="a fixed sample of all kinds")
    parser.add_argument("--setups", help="only those whose names match this expression")
    parser.add_argument("--kinds", help="only points whose kinds match this expression")
    parser.add_argument(
        "--points", type=int, help="of each setup (default: 128 of the first, 17 of one process, 10 of two)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=240, help="no point is begun after so many")
    parser.add_argument("--folder", type=Path, help="kept, with the runs that went wrong")
    parser.add_argument("--json", type=Path, help="all outcomes")
    options = parser.parse_args()
    with prepared(options.folder) as place:
        outcomes = measured(options, place)
        also = of_the_disk(place) if options.short else []
    print(table(outcomes))
    bad = [one for one in outcomes if one.wrong]
    seconds, killed = sum(one.seconds for one in outcomes), sum(one.killed for one in outcomes)
    moved = sum(one.moved > 0 for one in outcomes)
    print(
        f"\n{moved} times an attempt without a checkpoint, or its final/, was moved aside; {len({one.point.kind for one in outcomes})} kinds"
    )
    print(
        f"\n{len(outcomes)} points, {killed} runs killed, {len(outcomes) - len(bad)} came to the same end; {seconds:.0f} s"
    )
    for one in bad:
        print(f"{one.setup}, {one.point.words}: {'; '.join(one.wrong)}")
    if options.json:
        options.json.write_text(json.dumps([{**vars(one), "point": vars(one.point)} for one in outcomes], indent=1))
    print("\n".join(also))
    return 1 if bad or also else 0


def of_the_disk(place: Path) -> list[str]:
    """What was wrong with some states after a loss of power, and with damaged checkpoints (crash_disk.py)."""
    from benchmarks import crash_disk

    _, lost = crash_disk.power_loss(SETUPS[0], place / "power", resumed=0, every=12)
    _, harmed = crash_disk.damage(SETUPS[0], place / "harmed", runs=0)
    return lost + harmed


def measured(options: argparse.Namespace, place: Path) -> list[Outcome]:
    """The outcomes of all setups that were asked for."""
    until = time.monotonic() + 60 * options.minutes
    chosen = [one for one in SETUPS if re.search(options.setups or "", one.name)]
    if options.short:
        chosen = [one for one in chosen if one.name in SHORT]
    with ThreadPoolExecutor(options.jobs) as pool:

        def recorded(one: Setup) -> list[Point]:
            return record(one, folder_of(place, one), resumed=not options.short or one == SETUPS[0])

        found = dict(zip(chosen, pool.map(recorded, chosen), strict=True))
        cases = []
        for setup, points in found.items():
            usual = 128 if setup == SETUPS[0] else 17 if setup.processes == 1 else 10
            usual = SHORT.get(setup.name, 0) if options.short else usual
            kept = [one for one in points if re.search(options.kinds or "", one.kind)]
            for number, point in enumerate(drawn(kept, options.points or usual, setup, options.seed)):
                folder = folder_of(place, setup)
                cases.append(functools.partial(case, setup, point, folder / str(number), folder / "whole"))
        random.Random(options.seed).shuffle(cases)
        outcomes = []
        for done in pool.map(lambda one: one() if time.monotonic() < until else None, cases):
            if done is None:
                continue
            outcomes.append(done)
            mark = f"WRONG {done.wrong}" if done.wrong else "ok" if done.killed else "not killed"
            print(f"{len(outcomes)}/{len(cases)} {done.setup}, {done.point.words}: {mark}", file=sys.stderr, flush=True)
    return outcomes


def folder_of(place: Path, setup: Setup) -> Path:
    return place / setup.name.replace(" ", "-")


if __name__ == "__main__":
    from benchmarks import crash  # one module, whoever else imports it

    sys.exit(crash.main())
