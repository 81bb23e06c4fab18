"""Find every error for the user in the source, and write docs/errors.md: python tests/errors_page.py > docs/errors.md

Sentences stand in the source, where they are raised. Here they are read from the syntax tree, without running anything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
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
# Errors by their code

Each error ends with a code in brackets, such as `[no-such-key]`. A code names one fault and stays when its sentence changes, so that
scripts and searches can rely on it. `…` stands for a name or a value. Exit codes: 2 the config, the data or the arguments, 3 a check, 4 another process
or the network.

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


def sites() -> Iterator[Site]:
    """Yield the places of the package that make an error with a sentence of their own."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
            for call in _calls(function):
                name = _name(call)
                given = dict(zip(ARGUMENTS[name], call.args, strict=False))
                given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
                texts = _texts(given.get("what"), function)
                codes = tuple(
                    code for code in _texts(given.get("reason" if name == "BadRow" else "code"), function) if code
                )
                if name == "BadRow":
                    codes = tuple(f"row-{code.replace(' ', '-')}" for code in codes)
                if any(any(letter.isalpha() for letter in text) for text in texts):
                    place = f"{file.relative_to(PACKAGE.parent)}:{call.lineno}"
                    yield Site(place, name, codes, texts, tuple(fix for fix in _texts(given.get("fix"), function) if fix))
    for rule in rules():
        sentence, advice = (_blanked(text) for text in (rule.what, rule.fix))
        yield Site("packtrain/config/rules/table.py", "Fault", (rule.code,) if rule.code else (), (sentence,), (advice,))


def page() -> str:
    """Return docs/errors.md."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for site in sites():
        for code in site.codes:
            texts, fixes = found.setdefault(code, ([], []))
            # alternatives of a code and of its sentence stand in the same order
            own = len(site.codes) == len(site.texts) > 1
            at = site.codes.index(code)
            texts.extend(site.texts[at : at + 1] if own else site.texts)
            fixes.extend(site.fixes[at : at + 1] if own and len(site.fixes) == len(site.codes) else site.fixes)
    lines = (
        f"| `{code}` | {_cell(texts)} | {_cell(fixes)} |" for code, (texts, fixes) in sorted(found.items())
    )
    return INTRODUCTION + "\n".join(lines) + "\n"


def _cell(texts: list[str]) -> str:
    return "<br>".join(dict.fromkeys(text.replace("|", "\\|").replace("\n", " ") for text in texts))


def _blanked(text: str) -> str:
    return "".join("…" if at % 2 else part for at, part in enumerate(text.replace("}", "{").split("{")))


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _calls(function: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that make an error, without those in functions inside."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Call) and _name(node) in ARGUMENTS:
            yield node
        if not isinstance(node, ast.FunctionDef):
            yield from _calls(node)


def _texts(value: ast.expr | None, function: ast.AST) -> tuple[str, ...]:
    """Return the texts that `value` may be, with … for all that is only known at run time."""
    if value is None:
        return ()
    if isinstance(value, ast.Constant):
        return (value.value,) if isinstance(value.value, str) else ()
    if isinstance(value, ast.IfExp):
        return (*_texts(value.body, function), *_texts(value.orelse, function))
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _joined([value.left, value.right], function)
    if isinstance(value, ast.JoinedStr):
        return _joined([part.value if isinstance(part, ast.FormattedValue) else part for part in value.values], function)
    if isinstance(value, ast.Name):
        return tuple(text for one in _assigned(value.id, function) for text in _texts(one, function)) or ("…",)
    return ("…",)


def _joined(parts: list[ast.expr], function: ast.AST) -> tuple[str, ...]:
    choices = [
        _texts(part, function) if isinstance(part, (ast.Constant, ast.IfExp, ast.JoinedStr, ast.BinOp)) else ("…",)
        for part in parts
    ]
    return tuple("".join(texts) for texts in product(*choices))


def _assigned(name: str, function: ast.AST) -> Iterator[ast.expr]:
    """Yield the values that the function gives to `name`."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name) and target.id == name:
            yield value
        elif isinstance(target, ast.Tuple):
            names = [one.id if isinstance(one, ast.Name) else "" for one in target.elts]
            if name in names:
                ways = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                yield from (way.elts[names.index(name)] for way in ways if isinstance(way, ast.Tuple))


if __name__ == "__main__":
    print(page(), end="")
