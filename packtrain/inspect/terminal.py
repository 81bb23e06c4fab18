"""The data on a terminal, by rich: documents as coloured text, and the summary as tables.

Texts of the data become rich's `Text`, never markup. Where there are no colours, trained text stands in ⟦ ⟧ and cut text in ~~ ~~.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from packtrain.inspect.html import percent
from packtrain.wording import counted, visible

_BAR = 32
_WIDTH = 100
"""Columns where the output is no terminal."""
_COLOURS = ("cyan", "blue")
_SEVERITY = {"bad": ("✗", "bold red"), "warn": ("!", "yellow"), "note": ("·", "")}


class DataTerminal:
    """Prints to `console`; by default to stdout."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, emoji=False)
        if console is None and not self.console.is_terminal:
            self.console = Console(highlight=False, emoji=False, width=_WIDTH)
        self.coloured = self.console.is_terminal and self.console.color_system is not None and not self.console.no_color

    def say(self, text: str = "", style: str = "") -> None:
        """A line of text; no markup in it counts."""
        self.console.print(Text(text, style))

    def legend(self) -> None:
        """How tokens are shown."""
        sample = [("trained", True, False, False), ("not trained", False, False, False)]
        sample += [("<control>", False, True, False), ("cut", False, False, True)]
        names: tuple[str, ...] = ("text", "trained", "special", "cut")
        line = Text.assemble(("tokens: ", "bold"))
        for one in sample:
            line.append_text(self._text([dict(zip(names, one, strict=True))])).append("  ")
        self.console.print(line)

    def examples(self, shown: Sequence[dict[str, Any]], unit: str) -> None:
        """Documents or pairs, one after the other."""
        for number, example in enumerate(shown, 1):
            self._example(example, f"{counted(1, unit).removeprefix('1 ')} {number}")

    def step(self, laid_out: dict[str, Any], unit: str) -> None:
        """The rows of a step on every rank."""
        one = laid_out
        self.say(
            f"step {one['step']:,} of {one['steps']:,} (epoch {one['epoch']}): {counted(one['examples'], unit)}", "bold"
        )
        if one["guessed"]:
            self.say(
                "The model's sizes are not known here: ranks may share the documents a little differently.", "yellow"
            )
        for rank in one["ranks"]:
            for number, batch in enumerate(rank["micro_batches"], 1):
                self._row(f"rank {rank['rank']}, micro-batch {number}", batch, one)
                for place, example in enumerate(batch["shown"], 1):
                    self._example(example, f"{unit.removesuffix('s')} {place}")
                if left := batch["examples"] - len(batch["shown"]):
                    self.say(f"… and {counted(left, unit)} more")

    def summary(self, data: dict[str, Any]) -> None:
        """Statistics, cost of the modes, and the audit last, where the eye is."""
        self._facts(data)
        self._table("who says it", *_roles(data))
        self._lengths(data)
        self._table("data.max_length would cut", *_cuts(data))
        self._table(f"packing.mode on {counted(data['processes'], 'processes')}", *_modes(data))
        self._remarks(data)
        self._audit(data)

    def _facts(self, data: dict[str, Any]) -> None:
        made = counted(data["documents"], "documents")
        if data["unit"] == "pairs":
            made = f"{counted(data['documents'] // 2, 'pairs')} ({made})"
        if labels := data["labels"]:
            share = percent(labels["desirable"] / max(1, sum(labels.values())))
            made += f" ({labels['desirable']:,} desirable, {share}; {labels['undesirable']:,} undesirable)"
        trained = percent(data["trained_tokens"] / data["tokens"])
        self.say(f"{visible(', '.join(data['sources']))} ({data['format']})", "bold")
        self.say(
            f"{made} of {counted(data['rows'], 'rows')}, {data['tokens']:,} tokens, {data['trained_tokens']:,} trained ({trained})"
        )
        reasons = ", ".join(f"{rows:,} {reason}" for reason, rows in data["dropped_for"].items())
        self.say(
            f"truncated {data['truncated']:,}, split {data['split']:,} ({data['cut_tokens']:,} tokens cut); dropped {data['dropped']:,}"
            + (f": {reasons}" if reasons else "")
            + ("" if data["held_out"] is None else f"; held out {counted(data['held_out'], data['unit'])}")
        )
        for remark in data["remarks"]:
            self.say(visible(remark), "dim")

    def _lengths(self, data: dict[str, Any]) -> None:
        self.say()
        words = {"0": "min", "50": "median", "100": "max"}
        marks = [f"{words.get(name, f'{name} %')} {value:,}" for name, value in data["percentiles"].items()]
        self.say("length of documents in tokens", "bold")
        most = max(one["documents"] for one in data["histogram"])
        for one in dropwhile(lambda one: not one["documents"], data["histogram"]):
            full, part = divmod(round(8 * _BAR * one["documents"] / most), 8)
            bar = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "") or ("▏" if one["documents"] else "")
            line = Text(f"  {one['first']:>7,} – {one['last']:<7,} ").append(f"{bar:<{_BAR}}", "cyan")
            self.console.print(line.append(f" {one['documents']:,}"))
        self.say(f"  {' · '.join(marks)}")

    def _table(self, title: str, names: Sequence[str], rows: Sequence[Sequence[str]], own: int | None = None) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="", title_justify="left")
        for number, name in enumerate((f"  {title}", *names)):
            table.add_column(
                Text(name, "bold" if not number else "dim"), justify="right" if number else "left", no_wrap=not number
            )
        for number, row in enumerate(rows):
            cells = [Text(cell) for cell in row]
            table.add_row(
                Text("→ " if number == own else "  ").append_text(cells[0]),
                *cells[1:],
                style="bold" if number == own else "",
            )
        self.say()
        self.console.print(table)

    def _remarks(self, data: dict[str, Any]) -> None:
        for name, one in data["modes"].items():
            if one["rows"] is None:
                self.say(f"  {name} is not possible here: {visible(one['why'])}", "yellow")
        packed = data["modes"]["packed"]
        if packed.get("fill") is not None:
            self.say(
                f"  packed rows hold {percent(packed['fill'])} of batch.tokens_per_device; what is empty is not computed",
                "dim",
            )
        if packed.get("saved_by_sharing") is not None:
            self.say(
                f"  prompts that both answers share save {percent(packed['saved_by_sharing'])} of the tokens", "dim"
            )

    def _audit(self, data: dict[str, Any]) -> None:
        self.say()
        if not data["audit"]:
            self.say("audit: nothing odd was found", "green")
            return
        self.say("audit", "bold")
        for one in data["audit"]:
            mark, style = _SEVERITY[one["severity"]]
            line = Text(f"{mark} ", style).append(one["name"].replace("_", " "), f"bold {style}")
            line.append(f": {counted(one['count'], one['unit'])} ({percent(one['share'])}): {one['what']}")
            more = " …" if one["count"] > len(one["where"]) else ""
            self._indented(line, 0)
            self._indented(Text(f"{', '.join(one['where'])}{more}", "cyan"), 2)
            self._indented(Text(f"→ {one['fix']}", "dim"), 2)

    def _indented(self, text: Text, by: int) -> None:
        self.console.print(Padding(text, (0, 0, 0, by)))

    def _row(self, title: str, batch: dict[str, Any], step: dict[str, Any]) -> None:
        """The head of a micro-batch, with a ruler on which each example is as wide as in the row."""
        size = f"{counted(batch['slots'], 'slots')}"
        if step["tokens_per_row"]:
            size += f" of {step['tokens_per_row']:,}"
        if step["mode"] == "padding":
            size += ", padding included"
        self.say()
        self.say(f"━━ {title}: {counted(batch['examples'], 'examples')} in {size}", "bold")
        if step["mode"] == "padding" or not batch["widths"]:
            return
        ruler, at, whole = Text("   "), 0, sum(batch["widths"])
        cells = self.console.width - 6
        for number, width in enumerate(batch["widths"]):
            first, end = round(at * cells / whole), round((at + width) * cells / whole)
            at += width
            ruler.append("▐" + "█" * (end - first - 1) if end > first else "", _COLOURS[number % 2])
        self.console.print(ruler)

    def _example(self, example: dict[str, Any], title: str) -> None:
        cut = f", {example['cut']:,} cut" if example["cut"] else ""
        note = f" · {example['note']}" if example["note"] else ""
        tokens = counted(example["tokens"], "tokens")
        self.say()
        self.say(f"── {title} · {example['where']} · {tokens}, {example['trained']:,} trained{cut}{note}", "bold")
        for part in example["parts"]:
            place = (
                f"tokens {part['start']:,} to {part['start'] + part['tokens'] - 1:,} of the row"
                if "start" in part
                else ""
            )
            name = f"{part['name']}, once for both answers" if part["name"] == "prompt" else part["name"]
            if head := " · ".join(filter(None, (name, place))):
                self.say(f"   {head}", "dim" if not part["name"] else "bold")
            grid = Table.grid(padding=(0, 1))
            grid.add_column(width=11, justify="right", style="dim", overflow="fold")
            grid.add_column(overflow="fold")
            for turn in part["turns"]:
                grid.add_row(Text(turn["role"]), self._text(turn["spans"]))
            self.console.print(grid)

    def _text(self, spans: Sequence[dict[str, Any]]) -> Text:
        text = Text()
        for at, span in enumerate(spans):
            trained, special, cut = span["trained"] and not span["cut"], span["special"], span["cut"]
            if self.coloured:
                style = "red strike" if cut else "magenta" if special else "green" if trained else "dim"
                text.append(span["text"], f"bold underline {style}" if trained and special else style)
                continue
            before, after = (spans[at + step] if 0 <= at + step < len(spans) else None for step in (-1, 1))
            opens, closes = ("~~", "~~") if cut else ("⟦", "⟧") if trained else ("", "")
            said, closes = span["text"], "" if _alike(span, after) else closes
            line_end = "\n" if said.endswith("\n") else ""  # behind the bracket
            text.append("" if _alike(span, before) else opens).append(
                f"{said.removesuffix(line_end)}{closes}{line_end}"
            )
        text.rstrip()
        return text


def _alike(span: dict[str, Any], other: dict[str, Any] | None) -> bool:
    """Whether both are trained, or both cut, so that one pair of brackets holds both."""
    return other is not None and span["cut"] == other["cut"] and (span["cut"] or span["trained"] == other["trained"])


def _roles(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            one["role"],
            f"{one['turns']:,}",
            f"{one['tokens']:,}",
            percent(one["share"]),
            f"{one['trained']:,}",
            percent(one["trained_share"]),
        ]
        for one in data["roles"]
    ]
    return ["turns", "tokens", "of all", "trained", "of the trained"], rows


def _cuts(data: dict[str, Any]) -> tuple[list[str], list[list[str]], int | None]:
    rows = [
        [
            f"{one['max_length']:,}",
            f"{one['documents']:,}",
            percent(one["share"]),
            *(["–", "–"] if one["tokens"] is None else [f"{one['tokens']:,}", percent(one["tokens_share"])]),
        ]
        for one in data["cuts"]
    ]
    own = next((at for at, one in enumerate(data["cuts"]) if one["current"]), None)
    return ["documents", "of all", "tokens lost", "of all"], rows, own


def _modes(data: dict[str, Any]) -> tuple[list[str], list[list[str]], int | None]:
    rows = []
    for name, one in data["modes"].items():
        if one["rows"] is None:
            rows.append([name, "–", "–", "–", "–", "–"])
            continue
        about = "about " if one["sampled"] and name != "padding" else ""
        batches = " to ".join(f"{number:,}" for number in sorted(set(one["micro_batches"])))
        rows.append(
            [
                name,
                f"{about}{one['rows']:,}",
                f"{one['slots']:,}",
                percent(one["efficiency"]),
                batches,
                percent(one["imbalance"]),
            ]
        )
    own = list(data["modes"]).index(data["mode"])
    return ["rows an epoch", "token slots", "used", "micro-batches a step", "imbalance"], rows, own
