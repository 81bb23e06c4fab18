"""Loss of power and damaged files: is what is left of a run whole, or seen to be damaged, and does the run come to the same end?

    python benchmarks/crash_disk.py            # the tables of RESULTS.md

**Loss of power.** crash_points.c notes a run's writes with their bytes. Played back onto a model of a disk, they give what
may be found after each call: a file has what was synced (none, a half or zeros of the rest), a folder the names that were synced
or the newest ones, or each folder its own. In each state the checkpoint that a run would resume from must be the newest that was completed,
or a newer one; the lines of metrics.jsonl until then must be there; the folder must be packtrain's; the tokens, final/ and summary
that are there must be right. From some states, drawn with a fixed seed, the command is run to its end.

**Damage.** In every file of the newest checkpoint a bit is flipped (first, middle and last byte), or it is cut to nothing or to half,
removed, or a folder in its place; and the manifest holds other values. It must be named, and the one before be taken.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from benchmarks import crash  # noqa: E402

MANIFESTS = ["[]", "null", "1", '"x"', "{}", '{"a": 1}', '{"a": {}}', '{"a": {"bytes": 1}}', "[" * 100_000, "\xff\x00"]
FLIPS = ("bit of the first byte", "bit of the middle byte", "bit of the last byte")
DAMAGES = (*FLIPS, "cut to nothing", "cut to half", "removed", "a folder in its place")


@dataclass
class File:
    """What was written, and what of it is on the disk."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class Folder:
    """Its names, and those on the disk."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """Files under one folder, whose own names are always on the disk."""

    def __init__(self) -> None:
        self.root = Folder()

    def place(self, path: str) -> tuple[Folder, str]:
        """The folder of a path, and the name in it; safetensors renames its temporary file by a call that is not seen."""
        *above, name = path.split("/")
        folder = self.root
        for part in above:
            found = folder.names[part]
            assert isinstance(found, Folder)
            folder = found
        return folder, name

    def do(self, call: str, path: str, other: str, offset: int, data: bytes, count: int) -> None:
        """One line of the log; a call fails where the folder is not there."""
        try:
            folder, name = self.place(path)
        except KeyError:
            return
        if call in ("fsync", "write") and name not in folder.names and ".tmp#" in folder.names:
            folder.names[name] = folder.names.pop(".tmp#")
        if call == "create":
            folder.names[name] = File()
        elif call == "mkdir":
            folder.names.setdefault(name, Folder())
        elif call in ("unlink", "rmdir"):
            folder.names.pop(name, None)
        elif call == "rename":
            target, new = self.place(other)
            if name in folder.names:  # else another rank was quicker with a note of the same name
                target.names[new] = folder.names.pop(name)
        else:
            self.change(folder.names[name], call, offset, data)

    @staticmethod
    def change(one: File | Folder, call: str, offset: int, data: bytes) -> None:
        if isinstance(one, Folder):
            one.synced = dict(one.names)
        elif call == "fsync":
            one.synced = bytes(one.data)
        elif call == "truncate":
            one.data = bytearray()
        elif call == "resize":
            one.data = one.data[:offset].ljust(offset, b"\0")
        else:
            one.data = one.data.ljust(offset, b"\0")
            one.data[offset : offset + len(data)] = data

    def found(self, names: Callable[[], bool], content: Callable[[File], bytes]) -> dict[str, bytes | None]:
        """What lies there by path (None: a folder); `names` says of a folder whether it has its newest names."""
        found: dict[str, bytes | None] = {}

        def look(folder: Folder, path: str) -> None:
            newest = folder is self.root or names()
            for name, one in (folder.names if newest else folder.synced).items():
                found[path + name] = None if isinstance(one, Folder) else content(one)
                if isinstance(one, Folder):
                    look(one, f"{path}{name}/")

        look(self.root, "")
        return found


def unwritten(one: File, rest: Callable[[bytes], bytes]) -> bytes:
    """A file of which the bytes that were not synced became `rest` of them."""
    if bytes(one.data) == one.synced:
        return one.synced
    return one.synced if not one.data.startswith(one.synced) else one.synced + rest(bytes(one.data[len(one.synced) :]))


LOSSES: dict[str, tuple[Callable[[random.Random], bool], Callable[[File], bytes]]] = {
    "names and bytes as synced": (lambda _: False, lambda one: one.synced),
    "newest names, bytes as synced": (lambda _: True, lambda one: one.synced),
    "newest names, half of the rest": (lambda _: True, lambda one: unwritten(one, lambda rest: rest[: len(rest) // 2])),
    "newest names, zeros for the rest": (lambda _: True, lambda one: unwritten(one, lambda rest: bytes(len(rest)))),
    "names as synced, newest bytes": (lambda _: False, lambda one: bytes(one.data)),
    "each folder its own": (lambda chance: chance.random() < 0.5, lambda one: one.synced),
}


def calls_of(log: Path) -> Iterator[tuple[str, str, str, int, bytes, int]]:
    """The lines of a log with bytes, but for phases and files that are no part of the run."""
    with log.open("rb") as file:
        while line := file.readline():
            call, path, other, offset, count = line.decode().rstrip("\n").split("\t")
            data = file.read(int(count)) if call == "write" else b""
            if call != "at" and path.split("/")[0] in ("run", "cache"):
                yield call, path, other, int(offset), data, int(count)


def write_state(state: dict[str, bytes | None], folder: Path) -> None:
    for path, data in state.items():
        place = folder / path
        if data is None:
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)


def wrong_with(folder: Path, promised: int, whole: Path) -> Iterator[str]:
    """What a run must not find after a loss of power, when the checkpoint of step `promised` was complete."""
    from packtrain.data.tokens.cache import DamagedStore, Store
    from packtrain.errors import UserError
    from packtrain.run_folder import RunFolder
    from packtrain.train.checkpoint.folder import find_resume, step_of

    run = RunFolder(folder / "run")
    checkpoint, _ = find_resume("auto", run.checkpoints)
    step = step_of(checkpoint) if checkpoint else 0
    if step < promised:
        yield f"it would go on from step {step}, though the checkpoint of {promised} was complete"
    if step:
        lines = (run.metrics.read_text(errors="replace") if run.metrics.exists() else "").splitlines()
        expected = (whole / "run" / "metrics.jsonl").read_text().splitlines()
        due = sum(json.loads(line)["step"] <= step for line in expected)
        if [crash.place_of(line) for line in lines[:due]] != [crash.place_of(line) for line in expected[:due]]:
            yield f"metrics.jsonl lacks lines of steps until {step}"
        with contextlib.suppress(UserError):
            run.check_ours()
            step = -1
        if step != -1:
            yield "the folder is not packtrain's any more"
    for store in (folder / "cache").glob("[0-9a-f]" * 32):
        with contextlib.suppress(DamagedStore):
            Store(store)
            if any(
                file.read_bytes() != (whole / "cache" / store.name / file.name).read_bytes()
                for file in store.iterdir()
                if file.name != "manifest.json"
            ):
                yield f"the tokens in {store.name} are others, and not seen to be damaged"
    for note in (folder / "cache" / "hashes").glob("[0-9a-f]" * 32):
        if (digest := note.read_text(errors="replace")) != (whole / "cache/hashes" / note.name).read_text() and len(
            digest
        ) == 32:
            yield f"the hash in {note.name} is another"
    done = run.status() == "done"
    for file in (whole / "run").glob("final*/*"):
        twin = folder / file.relative_to(whole)
        if (done or twin.parent.exists()) and (not twin.is_file() or twin.read_bytes() != file.read_bytes()):
            yield f"{file.relative_to(whole)} is not whole" + (", though summary.json says done" if done else "")


def power_loss(setup: crash.Setup, place: Path, resumed: int, every: int = 1) -> tuple[str, list[str]]:
    """The table of one setup, and what was wrong; from `resumed` states the command is run. `every`: one state in so many."""
    whole = crash.fresh(place / "whole", None)
    if any(codes := crash.attempt(setup, whole, with_bytes=True)):
        raise SystemExit(f"{setup.name} does not train: {codes}\n{crash.said_by(whole)}")
    disk, promised, chance = Disk(), 0, random.Random(0)
    seen: set[bytes] = set()
    states, wrong, kept = Counter[str](), [], []
    bad: Counter[str] = Counter()
    for number, call in enumerate(calls_of(whole / "points-0.log")):
        disk.do(*call)
        if call[:2] == ("fsync", "run/checkpoints"):
            checkpoints = disk.place("run/checkpoints/x")[0].names
            promised = max((int(name[5:]) for name in checkpoints if name.startswith("step-")), default=promised)
        if number % every and call[0] != "rename":
            continue
        for loss, (names, content) in LOSSES.items():
            state = disk.found(lambda names=names: names(chance), content)
            key = hashlib.blake2b(repr((promised, sorted(state.items(), key=lambda one: one[0]))).encode()).digest()
            states[loss] += 1
            if key in seen:
                continue
            seen.add(key)
            with tempfile.TemporaryDirectory(dir=place) as made:
                write_state(state, Path(made))
                for what in wrong_with(Path(made), promised, whole):
                    bad[loss] += 1
                    wrong.append(f"{setup.name}, {loss}, after {call[0]} {call[1]} {call[2]} (#{number}): {what}")
            kept.append((loss, f"{call[0]} {call[1]} {call[2]}", state))
    for number, (loss, after, state) in enumerate(chance.sample(kept, min(resumed, len(kept)))):
        folder = place / f"resumed-{number}"
        write_state(state, crash.fresh(folder, None))
        codes = crash.attempt(setup, folder)
        states["run to its end"] += 1
        found = (
            [f"exit code {codes}: {crash.said_by(folder)[-500:]}"]
            if any(codes)
            else [*crash.differences(folder, whole)]
        )
        if found:
            bad["run to its end"] += 1
            wrong.append(f"{setup.name}, {loss}, after {after}: {'; '.join(found)}")
        else:
            shutil.rmtree(folder)
    rows = [f"| {setup.name} | {loss} | {count} | {bad[loss]} |" for loss, count in states.items()]
    return "\n".join(rows) + f"\n| {setup.name} | different states | {len(seen)} | |", wrong


def damaged(path: Path, how: str) -> None:
    """Does it to a file."""
    data = bytearray(path.read_bytes())
    if how in FLIPS and data:
        data[(0, len(data) // 2, -1)[FLIPS.index(how)]] ^= 1
        path.write_bytes(data)
    elif how.startswith("cut"):
        path.write_bytes(data[: len(data) // 2 if "half" in how else 0])
    else:
        path.unlink()
        if "folder" in how:
            path.mkdir()


def damage(setup: crash.Setup, place: Path, runs: int = len(DAMAGES)) -> tuple[str, list[str]]:
    """Rows of the table, and what was not noticed; of so many damages also by the command itself."""
    from packtrain.train.checkpoint.folder import find_resume, list_checkpoints

    whole, base = crash.fresh(place / "whole", None), crash.fresh(place / "base", None)
    if runs:
        crash.attempt(setup, whole, keep=None)
    crash.attempt(setup, base, crash.Point(f"at\tfinal step {crash.STEPS}\t", 1), keep=None)
    checkpoints = base / "run" / "checkpoints"
    *_, before, newest = list_checkpoints(checkpoints).values()
    counts, unseen, wrong = Counter[str](), Counter[str](), []

    def look(how: str, file: Path, name: str) -> None:
        counts[how] += 1
        found, remarks = find_resume("auto", checkpoints)
        said = " ".join(remarks)
        if found != before or newest.name not in said or (name not in said and "manifest" not in name):
            unseen[how] += 1
            wrong.append(f"{setup.name}, {name}: {how}: goes on from {found}, says {remarks}")

    files = sorted(path for path in newest.rglob("*") if path.is_file())
    for file in files:
        kept = file.read_bytes()
        for how in DAMAGES:
            if not kept and how != "removed":
                continue
            damaged(file, how)
            look(how, file, str(file.relative_to(newest)))
            if file.is_dir():
                file.rmdir()
            file.write_bytes(kept)
    manifest = newest / "manifest.json"
    kept = manifest.read_bytes()
    for text in MANIFESTS:
        manifest.write_bytes(text.encode("latin-1"))
        look("another manifest", manifest, "manifest.json")
    manifest.write_bytes(kept)
    for number, how in enumerate(DAMAGES[:runs]):  # and by the command itself
        folder = place / f"damaged-{number}"
        shutil.copytree(base, folder)
        file = folder / "run" / "checkpoints" / newest.name / files[number % len(files)].relative_to(newest)
        damaged(file, how)
        codes, name = crash.attempt(setup, folder, keep=None), file.name
        said = re.sub(r"\s+", " ", (folder / "rank-0.out").read_text() + (folder / "rank-0.err").read_text())
        counts["run to its end"] += 1
        found = (
            [one for one in crash.differences(folder, whole) if "/aside-" not in one]
            if not any(codes)
            else [str(codes)]
        )
        if found or "is passed over" not in said or f"resuming from {before.name}" not in said:
            unseen["run to its end"] += 1
            wrong.append(f"{setup.name}, {name}: {how}: {found}: {said[-600:]}")
    rows = [f"| {setup.name} | {how} | {count} | {unseen[how]} |" for how, count in counts.items()]
    return "\n".join(rows), wrong


def main() -> int:
    """Prints the tables; returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description="Loss of power and damaged files.")
    parser.add_argument("--folder", type=Path, help="kept")
    parser.add_argument(
        "--resumed", type=int, default=12, help="states after a loss of power from which the command is run"
    )
    parser.add_argument("--every", type=int, default=1, help="looks at one state in so many, and at all renames")
    parser.add_argument(
        "--setups", default="sft full 1|sft full 2 (zero2|fsdp2)|dpo lora 1", help="of benchmarks/crash.py"
    )
    options = parser.parse_args()
    setups = [one for one in crash.SETUPS if re.fullmatch(options.setups, one.name)]
    with crash.prepared(options.folder) as place:
        lost, harmed, wrong = [], [], []
        for setup in setups:
            own = place / setup.name.replace(" ", "-")
            rows, found = power_loss(setup, own / "power", options.resumed, options.every)
            lost.append(rows)
            wrong += found
            rows, found = damage(setup, own)
            harmed.append(rows)
            wrong += found
    print("| setup | after a loss of power | states | wrong |\n|---|---|---|---|\n" + "\n".join(lost))
    print("\n| setup | damage | cases | not noticed |\n|---|---|---|---|\n" + "\n".join(harmed))
    print("\n" + "\n".join(wrong[:60]) + (f"\n… {len(wrong)} in all" if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
