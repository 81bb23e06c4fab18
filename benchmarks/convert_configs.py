"""Converts the configs of a folder of another trainer's (a checkout with its examples) and plans each result.

    python benchmarks/convert_configs.py FOLDER… [--from ORIGIN] [--under examples] [--gpu-memory 80]

Of .yaml, .json and .sh files each is one config; of .md files and the docstrings of .py files each block with a command. Files that
are no config of that trainer, and those of what packtrain does not train, are counted apart, with the reason. The share is that of
the keys that files set and that mean something for a training: converted to the same training, of these, those that train otherwise, and
those without a counterpart. Files are planned in the folder, so that data beside them is there; a result that plan refuses for what only that machine lacks is named so.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from packtrain.cli import app
from packtrain.convert.conversion import Conversion, commented_yaml, convert_file
from packtrain.errors import UserError

_BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\s*(\w+=\S+ )*(trl|swift|python|accelerate|torchrun) ", re.MULTILINE)


def configs(folder: Path, kept: Path) -> Iterator[tuple[str, Path]]:
    """Names and files of the configs in a folder; blocks of text are written into `kept` first."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix in (".yaml", ".yml", ".json", ".sh") and path.stat().st_size < 200_000:
            yield name, path
        elif path.suffix in (".md", ".py"):
            text = path.read_text(errors="replace")
            found = (
                [block for _, block in _BLOCK.findall(text)] if path.suffix == ".md" else _docstring(text).splitlines()
            )
            for number, block in enumerate(filter(_COMMAND.search, found), 1):
                file = kept / f"{name.replace('/', '__')}-{number}.sh"
                file.write_text(block)
                yield f"{name}, command {number}", file


def _docstring(text: str) -> str:
    comment = re.search(r'^"""(.*?)^"""', text, re.DOTALL | re.MULTILINE)
    try:
        return ast.get_docstring(ast.parse(text)) or (comment[1] if comment else "")
    except SyntaxError:
        return ""


def planned(done: Conversion, kept: Path, gpu_memory: str) -> str:
    """ "" if `packtrain plan` takes the result, else what it says."""
    file = kept / "converted.yaml"
    file.write_text(commented_yaml(done))
    result = CliRunner().invoke(app, ["plan", str(file), "--gpu-memory", gpu_memory])
    lines = [line for line in result.stderr.splitlines() if line.strip() and "→" not in line]
    return "" if result.exit_code == 0 else " | ".join(lines)[:300] or f"exit code {result.exit_code}"


def main() -> None:
    """Prints a line for each config and the totals of each folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--from", dest="origin")
    parser.add_argument("--under", default=".")
    parser.add_argument("--gpu-memory", default="80")
    asked = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    for folder in asked.folders:
        _table(folder.absolute(), asked)


def _table(folder: Path, asked: argparse.Namespace) -> None:
    total, lacking, reasons = Counter[str](), Counter[str](), Counter[str]()
    brief = dict[str, list[str]]()
    os.chdir(folder)
    with tempfile.TemporaryDirectory() as kept:
        for name, path in configs(folder / asked.under, Path(kept)):
            try:
                done = convert_file(path, asked.origin)
            except UserError as error:
                reasons[error.problems[0].what] += 1
                print(f"{name}: not converted: {error.problems[0].what}")
                continue
            kinds = Counter(note.kind for note in done.of_kind("converted", "differs", "not needed", "no counterpart"))
            lacking.update(note.key for note in done.of_kind("no counterpart"))
            says = planned(done, Path(kept), asked.gpu_memory)
            total.update({"files": 1, "plan": not says, **kinds})
            meant = kinds.total() - kinds["not needed"]
            print(f"{name}: {kinds.total()} keys, {kinds['converted']} of {meant} converted: {says or 'passes'}")
            parent, _, own = name.rpartition("/")
            brief.setdefault(parent or ".", []).append(
                f"{own} {kinds['converted']}/{meant}{' (plan refuses)' if says else ''}"
            )
    print("\n" + "; ".join(f"`{parent}`: {', '.join(names)}" for parent, names in brief.items()))
    meant = total["converted"] + total["differs"] + total["no counterpart"]
    share = f"{total['converted']:,} ({total['converted'] / max(meant, 1):.1%})"
    print(
        "\n| files | keys | not needed here | with a meaning for training | converted | and train otherwise | pass plan |\n|---|---|---|---|---|---|---|"
    )
    keys = [total["files"], meant + total["not needed"], total["not needed"], meant]
    print(f"| {' | '.join(f'{number:,}' for number in keys)} | {share} | {total['differs']:,} | {total['plan']} |\n")
    for title, counts in {"not converted": reasons, "no counterpart": lacking}.items():
        print(f"{title}: " + ", ".join(f"{name} {number}" for name, number in counts.most_common(30)))


if __name__ == "__main__":
    main()
