"""Rules about Slurm jobs, and about secrets that would reach scripts and config.yaml. Pure.

Only faults that are certain are refused here; sbatch itself refuses what only the cluster knows. A text is refused only if it certainly
holds a secret (packtrain/wording.py). For options of sbatch, and for values of a mapping, the name is enough. Lines of topology.setup
are the user's own program: they stay, with a warning.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress

from packtrain.config import Fault, is_list, is_mapping
from packtrain.config.schema import Topology
from packtrain.wording import is_certain, learn, speaks_of_secrets, variable_of, whole

_FIXED = {  # packtrain's own options, and options that break the script, with advice
    "array": "A sweep makes one: packtrain sbatch VERB CONFIG -m …",
    "container-image": "The whole script would run in the image, which has no srun: name the image in topology.command.",
    "export": "The job gets all variables of the shell that submits; set others in topology.environment.",
    "nodes": "Set topology.nodes.",
    "output": "The log is in the run folder: set trainer.output_dir.",
    "signal": "Set topology.signal_before.",
    "time": "Set topology.time.",
    **dict.fromkeys(("ntasks", "ntasks-per-node"), "Each machine has one task: set topology.nodes and gpus_per_node."),
    **dict.fromkeys(("requeue", "no-requeue"), "Set topology.requeue."),
    **dict.fromkeys(("chdir", "open-mode"), "The job starts where packtrain sbatch is called, and goes on in its log."),
}
_LONG = ("array", "cpus-per-task", "chdir", "gpus", "job-name", "nodes", "ntasks", "output", "time", "nodelist")
_SHORT = dict(zip("acDGJNnotw", _LONG, strict=True))
_ASSIGNED = re.compile(r"\b(\w+)=(?![\"']?\$)[\"']?[^\s\"']")
_SAID = re.compile(
    r"--((?:api-?)?key|token|password)\s+(?![\"']?\$)[\"']?[^\s\"'-]|\b(wandb) login\s+\w{20}"
    r"|authorization: *(?:bearer|basic|token) +(?!\$)[^\s\"']",
    re.IGNORECASE,
)
_BARE_KEY = re.compile(r"[0-9a-f]{40}")
_NAMES = ("model.revision", "trainer.output_dir", "data.cache_dir", "tracking.run_name")
"""Keys whose value may be the hash of a commit."""
_SETUP, _CODE = "topology.setup[", ("topology.sbatch[", "topology.command")
_MAPPING = re.compile(r"model\.config\.(?:.*\.)?(\w+)")
_EXPORT = "Export it in the shell that submits{}."


def check_sbatch(topology: Topology) -> Iterator[Fault]:
    """Yield options of sbatch that cannot work."""
    asked = count_gpus(topology)
    if asked and topology.gpus_per_node is not None and topology.gpus_per_node > asked:
        what = f"a machine has {topology.gpus_per_node} processes, but topology.sbatch asks for {asked} GPUs"
        fix = "Remove one of the two keys."
        yield Fault(("topology.gpus_per_node", "topology.sbatch"), what, fix, code="more-processes-than-gpus")
    for at, line in enumerate(topology.sbatch):
        where, options = (f"topology.sbatch[{at}]",), parse_options([line])
        if not options or "\n" in line or not line.startswith("-"):
            what = f"{line!r} is no option of sbatch"
            yield Fault(where, what, "Write it as on its command line: --exclude=n7.", code="not-an-sbatch-option")
            continue
        for name in sorted(_FIXED.keys() & options):
            yield Fault(where, f"--{name} cannot be set here", _FIXED[name], code="sbatch-option-taken")


def parse_options(lines: list[str]) -> dict[str, str]:
    """Return the options in lines of topology.sbatch by long names, with values. A line with an open quote has none."""
    options: dict[str, str] = {}
    name = ""
    for line in lines:
        with suppress(ValueError):
            for word in shlex.split(line, comments=True):
                if option := re.fullmatch(r"--([a-z][\w-]*)(?:=(.*))?|-(\w)(.*)", word, re.DOTALL):
                    name = option[1] or _SHORT.get(option[3], option[3])
                    options[name] = option[2] or option[4] or ""
                elif name:
                    options[name] = word
    return options


def count_gpus(topology: Topology) -> int | None:
    """Return the GPUs per machine in topology.sbatch (`--gres=gpu:h100:8,nvme:1` → 8); None without a number."""
    given = parse_options(topology.sbatch)
    gres = f"gpu:{given['gpus-per-node']}" if "gpus-per-node" in given else given.get("gres", "")
    if gres == "none":
        return 0
    numbers = [whole(part.split("(")[0].rpartition(":")[2]) for part in gres.split(",") if re.match(r"gpu\b", part)]
    return None if not numbers or None in numbers else sum(number or 0 for number in numbers)


def check_secrets(config: Mapping[str, object]) -> list[Fault]:
    """Return a fault for every secret in a text of the config (plain containers). It gives the place, not the secret."""
    texts = [(path, text) for path, text in _texts(config, "") if not path.startswith(_SETUP)]
    return [item for path, text in texts for item in _secrets_in(path, text)]


def note_secrets(setup: list[str]) -> Iterator[str]:
    """Yield warnings of secrets in topology.setup. The secrets are then hidden on the terminal and in the run folder."""
    for at, line in enumerate(setup):
        if any(_secrets_in(f"{_CODE[0]}{at}]", line)):
            learn(line, names=True)
            yield f"{_SETUP}{at}]: it has a secret, and the script shows it in plain text; {_EXPORT.format(', and name it: $NAME')}"


def _secrets_in(path: str, text: str) -> Iterator[Fault]:
    code, named = path.startswith(_CODE), _MAPPING.fullmatch(path)
    bare = _BARE_KEY.fullmatch(text) and path not in _NAMES and not os.path.exists(text)
    if variable := variable_of(text):
        what = f"it has the value of ${variable}, which by its name is a secret and would be written into files"
        yield Fault((path,), what, f"If it is no secret, unset {variable}, or rename the variable.", code="has-secret")
    elif is_certain(text) or bare or (code and _SAID.search(text)) or (named and text and speaks_of_secrets(named[1])):
        what = f"it has a secret (a password or token), which would be written into {'the script' if code else 'files'}"
        yield Fault((path,), what, _EXPORT.format(", and name the variable: $NAME" if code else ""), code="has-secret")
    for variable in _ASSIGNED.findall(text) if code else ():
        if speaks_of_secrets(variable):
            what = f"by its name {variable} is a secret, which would be written into the script"
            fix = _EXPORT.format(f", or read it from a file: {variable}=$(cat FILE)")
            yield Fault((path,), what, fix, code="has-secret")


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield every text in nested mappings and lists, with its path."""
    if isinstance(value, str):
        yield path, value
    elif is_mapping(value):
        for name, item in value.items():
            yield from _texts(item, f"{path}.{name}" if path else str(name))
    elif is_list(value):
        for at, item in enumerate(value):
            yield from _texts(item, f"{path}[{at}]")
