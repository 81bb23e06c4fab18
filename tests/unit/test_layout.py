"""The package is laid out in layers, small folders and small files, under names that each mean one thing."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

from packtrain.strategies.spec import STRATEGIES, packages_of_strategies

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "packtrain"
LAYERS = (
    ("wording",),
    ("system",),
    ("errors",),
    ("registry", "faults"),
    ("optimizers",),
    ("registries",),
    ("config",),
    ("specs",),
    ("run_folder",),
    ("monitor",),
    ("plan",),
    ("mirror",),
    ("data",),
    ("packing",),
    ("inspect",),
    ("attention",),
    ("proof",),
    ("objectives",),
    ("model",),
    ("changes",),
    ("library",),
    ("train",),
    ("runs",),
    ("diagnose",),
    ("report",),
    ("serve",),
    ("bench",),
    ("convert",),
    ("cli",),
    ("__main__",),
)
"""Each imports only what stands before it."""
KINDS_OF_THINGS = ("attention", "objectives", "strategies")
"""Folders of things. Any module may import a spec; a run is imported by its name in the spec."""
FOR_TYPES = {(f"packtrain.{kind}.spec", "packtrain.config.schema") for kind in ("objectives", "strategies")}
"""The rules of a thing take the whole config."""
LAUNCH = {
    *("errors", "registry", "system", "wording"),
    *("faults", "registries", "specs"),
    *("config", "run_folder", "monitor", "plan", "mirror"),
}
"""What `launch` imports: it starts training as processes, never by an import."""
FROM_LAUNCH = {"cli": "", "__main__": "", "diagnose": "", "train": "packtrain.launch.worker"}
"""Who imports `launch`: what is on top, and of `train` nothing but what a process says to its launcher."""
MAX_FILES, MAX_LINES, MAX_LINES_OF_A_FUNCTION = 14, 600, 70
MAX_CONDUCTORS = 24
MOST_READ = {"One step of training": 12, "One launch": 13, "One resume": 10}
"""Files through which docs/architecture.md leads a reader."""
WITHOUT_TORCH = (
    "config",
    "convert",
    "plan",
    "optimizers",
    "launch",
    "report",
    "serve",
    "cli",
    "packing/bins",
    "monitor/channel",
    "bench/search",
    "bench/launches",
)
MEANINGLESS = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "base"}
OF_OTHERS = {
    "modeling_auto.py",
    "serve.py",
    "sft.py",
    "orpo/spec.py",
    "orpo/run.py",
    "equal/spec.py",
    "equal/run.py",
    "looped/spec.py",
    "looped/run.py",
    "acme/norms.py",
    "convert_hf_to_gguf.py",
    "mine.py",
    "kernels/chunked_logprob.py",
    "leakcheck.py",
}
OF_OTHERS |= {f"configuration_{name}.py" for name in ("auto", "utils")} | {"auto_mappings.py"}
"""Files that are spoken of and not ours: examples of programs, TRL's and transformers'."""
MADE_BY_A_RUN = {"checkpoints/", "final/", "logs/"}


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package, parsed, by its dotted name."""
    return {name_of(path): ast.parse(path.read_text(), str(path)) for path in sorted(PACKAGE.rglob("*.py"))}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(name: str) -> Iterator[str]:
    """The modules of the package that a module imports, at its top, in functions and for types."""
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("packtrain"):
            inside = [f"{node.module}.{one.name}" for one in node.names]
            yield from {one if one in trees() else str(node.module) for one in inside}
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.startswith("packtrain"))


def layer_of(name: str) -> str:
    _, layer, *inside = name.split(".") if "." in name else ("", "")
    if layer not in KINDS_OF_THINGS:
        return "faults" if (layer, *inside) == ("config",) else layer
    if inside in ([], ["spec"]):
        return "registries"
    own_folder = (ROOT / "packtrain" / layer / inside[0]).is_dir()
    return layer if not own_folder else "specs" if inside[1:] in ([], ["spec"]) else "runs"


def allowed(importer: str, imported: str) -> bool:
    mine, other = layer_of(importer), layer_of(imported)
    if mine == other or not (mine and other):  # the package itself names what is public
        return True
    if mine == "launch":
        return other in LAUNCH
    if other == "launch":
        return mine in FROM_LAUNCH and imported.startswith(FROM_LAUNCH[mine])
    return level(other) < level(mine)


def level(layer: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if layer in names)


def test_every_folder_and_file_of_the_package_belongs_to_a_layer() -> None:
    layers = {layer_of(name) for name in trees()} - {"", "launch"}
    assert layers <= {name for names in LAYERS for name in names}


def test_imports_go_one_way() -> None:
    wrong = [(one, other) for one in trees() for other in imports(one) if not allowed(one, other)]
    assert {*wrong} == FOR_TYPES


def imports_at_run_time(name: str) -> set[str]:
    """The modules that a module imports, without those that only type checkers do."""

    def walk(node: ast.AST) -> Iterator[str]:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.If) and "TYPE_CHECKING" in ast.dump(inner.test):
                continue
            if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("packtrain"):
                every = [f"{inner.module}.{one.name}" for one in inner.names]
                yield from (one if one in trees() else str(inner.module) for one in every)
            yield from walk(inner)

    return {*walk(trees()[name])} - {"packtrain"}  # whose names are imported lazily


def test_no_files_import_each_other_in_a_circle() -> None:
    """Also within a folder, also in functions."""
    TopologicalSorter({name: imports_at_run_time(name) for name in trees()}).prepare()


def test_no_call_takes_its_keywords_from_a_literal_dict() -> None:
    """Written out, they are checked by the type checker."""
    found = []
    for name, tree in trees().items():
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AnnAssign)]
            dicts = {ast.unparse(target): node.value for node in assigned for target in _targets(node)}
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            for splat in (keyword.value for call in calls for keyword in call.keywords if keyword.arg is None):
                value = dicts.get(ast.unparse(splat), splat)
                if (
                    isinstance(value, ast.Dict)
                    and value.keys
                    and all(isinstance(key, ast.Constant) for key in value.keys)
                ):
                    found.append(f"{name}:{splat.lineno}")
    assert found == []


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def test_strategies_are_named_in_their_folders_alone() -> None:
    """All others ask the declaration. The converter of other trainers' configs is given names."""
    names = [*STRATEGIES.all(), *packages_of_strategies()]
    files = {
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and (node.value in names or str(node.value).startswith("zero"))
        if not name.startswith("packtrain.strategies.")
    }
    advice = {"packtrain.config.keys"}  # a key of other trainers
    assert files <= {"packtrain.convert.counterparts", "packtrain.train.verify.command", *advice}  # zero_margin


def test_relative_imports_do_not_hide_from_the_test_of_the_layers() -> None:
    nodes = [(name, node) for name, tree in trees().items() for node in ast.walk(tree)]
    assert not [name for name, node in nodes if isinstance(node, ast.ImportFrom) and node.level]


def test_what_answers_at_once_does_not_import_torch() -> None:
    files = [file for one in WITHOUT_TORCH for file in (*PACKAGE.glob(f"{one}.py"), *PACKAGE.glob(f"{one}/**/*.py"))]
    names = [name_of(file) for file in files]
    assert len(names) > len(WITHOUT_TORCH)
    heavy = "{'torch', 'transformers', 'trl', 'datasets', 'accelerate'}"
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
    code += f"sys.exit(str({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_no_folder_has_more_files_than_a_reader_takes_in_at_once() -> None:
    files = Counter(path.parent.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))
    assert {folder: number for folder, number in files.items() if number > MAX_FILES} == {}


def test_no_file_and_no_function_is_too_long() -> None:
    long = {}
    for path in PACKAGE.rglob("*.py"):
        if (number := len(path.read_text().splitlines())) > MAX_LINES:
            long[str(path.relative_to(ROOT))] = number
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                number = (node.end_lineno or 0) - node.lineno + 1
                if number > MAX_LINES_OF_A_FUNCTION:
                    long[f"{name}.{node.name}"] = number
    assert long == {}


def test_every_module_says_what_it_is_for() -> None:
    assert [name for name, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_no_name_says_nothing() -> None:
    assert [name for name in trees() if MEANINGLESS & set(name.split("."))] == []


REGISTRY = {"attention": "BACKENDS", "objectives": "OBJECTIVES"}
NAMED_IN = {
    "attention": set[str](),
    "objectives": {
        "config/objective.py",  # the default of objective.kind
        "convert/foreign_data.py",  # names of methods of other trainers
        "convert/conversion.py",
    },
}
"""Files that name a thing outside the folder of its kind."""


@pytest.mark.parametrize("kind", NAMED_IN)
def test_a_thing_is_named_in_its_own_folder(kind: str) -> None:
    things = {*importlib.import_module(f"packtrain.{kind}.spec").__dict__[REGISTRY[kind]].all()}
    named_in = set()
    for path in PACKAGE.rglob("*.py"):
        tree = trees()[name_of(path)]
        named = any(isinstance(node, ast.Constant) and node.value in things for node in ast.walk(tree))
        if named and kind not in path.relative_to(PACKAGE).parts[:1]:
            named_in.add(path.relative_to(PACKAGE).as_posix())
    assert named_in == NAMED_IN[kind]


def test_a_stage_takes_its_part_of_the_config_and_not_the_whole() -> None:
    """Who makes the config and who conducts sees it whole; `config` itself is left out."""
    whole = [
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"(?<!train\.)\bRunConfig", path.read_text())
    ]
    assert (
        len([one for one in whole if not one.startswith("packtrain/config/") and not one.endswith("spec.py")])
        <= MAX_CONDUCTORS
    ), whole


def test_no_two_files_have_one_name() -> None:
    files = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in ("__init__", "__main__", "spec", "run"):  # which are as their folder
            files[path.stem].append(path.relative_to(ROOT).as_posix())
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_no_two_files_of_tests_have_one_name() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []  # pytest imports them by their name alone


def test_no_two_public_classes_have_one_name() -> None:
    classes = defaultdict(list)
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    assert {name: found for name, found in classes.items() if len(found) > 1} == {}


def named(page: Path) -> list[tuple[str, str]]:
    """Paths that a page names in backticks, each with the function or class after `::`."""
    spans = re.findall(r"`([\w./-]+?)(?:::(\w+))?`", page.read_text())
    return [(path, name) for path, name in spans if path.endswith((".py", "/")) or name]


def files_of_section(page: Path, title: str) -> set[str]:
    """The modules that a page names in backticks below a heading."""
    section = page.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"`([\w/]+\.py)", section))


def found(path: str) -> Path | None:
    return next((root / path for root in (PACKAGE, ROOT) if (root / path).exists()), None)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_what_a_page_says_of_the_layout_is_there(page: str) -> None:
    names = named(ROOT / page)
    assert names
    for path, name in names:
        file = found(path)
        assert file is not None or path in MADE_BY_A_RUN, path
        if name and file:
            kinds = (ast.FunctionDef, ast.ClassDef)
            assert name in {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}, (
                path
            )


@pytest.mark.parametrize("title", MOST_READ)
def test_a_reader_is_led_through_few_files(title: str) -> None:
    assert 0 < len(files_of_section(ROOT / "docs/architecture.md", title)) <= MOST_READ[title]


def test_files_that_code_and_pages_speak_of_are_there() -> None:
    pages = [*PACKAGE.rglob("*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "pyproject.toml"]
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.rglob("*.py") if ".venv" not in path.parts[0]]
    gone = []
    for page in pages:
        spoken_of = set(re.findall(r"(?<![\w/.-])((?:[a-z_]+/)*[a-z_0-9]+\.py)\b", page.read_text())) - OF_OTHERS
        gone += [f"{page.name}: {one}" for one in sorted(spoken_of) if not any(f.endswith(f"/{one}") for f in files)]
    assert gone == []


def test_the_map_leads_into_every_folder() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    folders = {
        file.parent.name for file in PACKAGE.glob("*/*.py")
    }  # not those that only hold caches of an older checkout
    assert [name for name in folders if f"{name}/" not in page] == []


def test_what_benchmarks_and_gpu_tests_import_is_there() -> None:
    for file in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/gpu/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("packtrain."):
                module = importlib.import_module(str(node.module))
                gone = [
                    one.name for one in node.names if not hasattr(module, one.name) and one.name not in _inside(module)
                ]
                assert not gone, f"{file.name}: {node.module} has no {gone}"


def _inside(package: ModuleType) -> list[str]:
    return [one.name for one in pkgutil.iter_modules(getattr(package, "__path__", []))]


def test_the_cases_left_to_exhaustive_are_there() -> None:
    """A renamed test would be run again everywhere, and nobody would notice."""
    listed = [line for line in (ROOT / "tests/exhaustive.txt").read_text().splitlines() if "::" in line]
    assert listed
    for case in listed:
        file, _, name = case.partition("::")
        test = name.partition("[")[0]
        assert re.search(rf"^(def {test}\(|{test} = )", (ROOT / file).read_text(), re.MULTILINE), case
