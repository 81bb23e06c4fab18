"""Find every error for the user in the source, and write docs/errors.md.

The command is python tests/errors_page.py > docs/errors.md. It reads the sentences from the syntax tree, and runs nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from packtrain.config.rules.table import rules

PACKAGE = Path(__file__).parents[1] / "packtrain"
EXITS = {"UserError": 2, "CheckFailed": 3, "NotExact": 3, "Disagreement": 3, "PeerFailed": 4, "LostPeers": 4}
ARGUMENTS = {
    "Problem": ("what", "where", "fix", "code"),
    "Fault": ("keys", "what", "fix", "because", "code"),
    "BadRow": ("reason", "what", "field", "fix"),
    "boundary": ("what", "where", "fix", "code"),
    **dict.fromkeys(EXITS, ("what",)),
}
"""Names that make an error, and their positional arguments."""
INTRODUCTION = """\
# Errors by code

Each error has a code in brackets, such as `[no-such-key]`. The code names the fault and stays when its sentence changes, so scripts and
searches can rely on it. Below, `…` stands for a name or a value. The exit code is 2 if the config, the data or the arguments are wrong, 3 if a
check failed, and 4 if another process or the network failed.

| code | what is wrong | what to do |
|---|---|---|
"""


@dataclass(frozen=True)
class Site:
    """A place in the source that makes an error. `codes` is empty if it has none; `texts` are its possible sentences."""

    place: str
    name: str
    codes: tuple[str, ...]
    texts: tuple[str, ...]
    fixes: tuple[str, ...]


@cache
def sites() -> tuple[Site, ...]:
    """Return the places that make an error with a sentence of their own."""
    return tuple(_sites())


def _sites() -> Iterator[Site]:
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
            for call in _calls(function):
                name, values = _name(call), Values(tree, function, call)
                given = dict(zip(ARGUMENTS.get(name, ("what", "fix")), call.args, strict=False))
                given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
                texts = values.texts(given.get("what"))
                codes = tuple(filter(None, values.texts(given.get("reason" if name == "BadRow" else "code"))))
                if name == "BadRow":
                    codes = tuple(f"row-{code.replace(' ', '-').lower()}" for code in codes)
                if codes == ("…",) and isinstance(function, ast.FunctionDef) and _takes_code(function):
                    continue  # its callers give the code
                if (codes and "…" not in "".join(codes)) or any(
                    any(letter.isalpha() for letter in text) for text in texts
                ):
                    place = f"{file.relative_to(PACKAGE.parent)}:{call.lineno}"
                    yield Site(place, name, codes, texts, tuple(filter(None, values.texts(given.get("fix")))))
    for rule in rules():
        sentence, advice = (_blanked(text) for text in (rule.what, rule.fix))
        yield Site(
            "packtrain/config/rules/table.py", "Fault", (rule.code,) if rule.code else (), (sentence,), (advice,)
        )


def page() -> str:
    """Return docs/errors.md. Sentences of a code are sorted, so that code may move to another file."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for site in sorted(sites(), key=lambda site: (site.texts, site.fixes)):
        for code in site.codes:
            texts, fixes = found.setdefault(code, ([], []))
            # alternatives of a code and of its sentence stand in the same order
            own = len(site.codes) == len(site.texts) > 1
            at = site.codes.index(code)
            texts.extend(site.texts[at : at + 1] if own else site.texts)
            fixes.extend(site.fixes[at : at + 1] if own and len(site.fixes) == len(site.codes) else site.fixes)
    lines = (f"| `{code}` | {_cell(texts)} | {_cell(fixes)} |" for code, (texts, fixes) in sorted(found.items()))
    return INTRODUCTION + "\n".join(lines) + "\n"


def _cell(texts: list[str]) -> str:
    plain = (text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("\n", " ") for text in texts)
    return "<br>".join(dict.fromkeys(plain))


def _blanked(text: str) -> str:
    """Replace each {field} by …"""
    return "".join("…" if at % 2 else part for at, part in enumerate(text.replace("}", "{").split("{")))


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _calls(function: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that make an error, without those in functions inside."""
    for node in ast.iter_child_nodes(function):
        own = isinstance(node, ast.Call) and any(keyword.arg == "code" for keyword in node.keywords)
        if isinstance(node, ast.Call) and (own or _name(node) in ARGUMENTS):
            yield node
        if not isinstance(node, ast.FunctionDef):
            yield from _calls(node)


def _takes_code(function: ast.FunctionDef) -> bool:
    return any(one.arg in ("code", "reason") for one in [*function.args.args, *function.args.kwonlyargs])


class Values:
    """Possible values of a call's arguments, by the assignments before it or in the file."""

    def __init__(self, tree: ast.Module, function: ast.AST, call: ast.Call) -> None:
        self._tree, self._function, self._call = tree, function, call
        self._blocks = {id(block) for block, inside in _blocks(function) if call in inside}

    def texts(self, value: ast.expr | None) -> tuple[str, ...]:
        """Return the texts that `value` may be, with … for all that is only known at run time."""
        if isinstance(value, ast.Constant):
            return (value.value,) if isinstance(value.value, str) else ()
        if isinstance(value, ast.IfExp):
            return (*self.texts(value.body), *self.texts(value.orelse))
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            return self._joined([value.left, value.right])
        if isinstance(value, ast.JoinedStr):
            return self._joined([part.value if isinstance(part, ast.FormattedValue) else part for part in value.values])
        if isinstance(value, ast.Name):
            return tuple(text for one in self._assigned(value.id) for text in self.texts(one)) or ("…",)
        return () if value is None else ("…",)

    def _joined(self, parts: list[ast.expr]) -> tuple[str, ...]:
        plain = (ast.Constant, ast.IfExp, ast.JoinedStr, ast.BinOp)
        choices = [self.texts(part) if isinstance(part, plain) else ("…",) for part in parts]
        return tuple("".join(texts) for texts in product(*choices))

    def _assigned(self, name: str) -> Iterator[ast.expr]:
        """Yield the values that `name` may have.

        Go back from the call: take every assignment up to the first that surely ran, which is one in a block around the call. Two values on
        one line are the two ways of a conditional expression.
        """
        found = [
            (block, value)
            for block, _ in _blocks(self._function)
            for statement in block
            if statement.lineno < self._call.lineno
            for value in _values_for(name, statement)
        ]
        found.sort(key=lambda item: -item[1].lineno)
        for block, value in found:
            yield value
            if id(block) in self._blocks and not any(
                other.lineno == value.lineno and other is not value for _, other in found
            ):
                return
        if not found:
            for statement in (*self._tree.body, *_imported(self._tree, name)):
                yield from _values_for(name, statement)


def _imported(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Return the statements of the module of ours that `name` comes from."""
    for one in tree.body:
        ours = isinstance(one, ast.ImportFrom) and (one.module or "").startswith(f"{PACKAGE.name}.")
        if ours and any(alias.name == name for alias in one.names):
            file = PACKAGE.parent / f"{(one.module or '').replace('.', '/')}.py"
            return ast.parse(file.read_text()).body if file.exists() else []
    return []


def _blocks(function: ast.AST) -> Iterator[tuple[list[ast.stmt], set[ast.AST]]]:
    """Yield each list of statements in the function, with all nodes inside."""
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block:
                yield block, {inner for statement in block for inner in ast.walk(statement)}


def _values_for(name: str, statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the values that a statement gives to `name`."""
    if not isinstance(statement, ast.Assign):
        return
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple):
        names = [one.id if isinstance(one, ast.Name) else "" for one in target.elts]
        if name in names:
            ways = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            yield from (way.elts[names.index(name)] for way in ways if isinstance(way, ast.Tuple))


if __name__ == "__main__":
    print(page(), end="")
