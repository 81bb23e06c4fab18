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
        samples = {"trained": "trained", "not trained": "", "<control>": "special", "cut": "cut"}
        line = Text.assemble(("tokens: ", "bold"))
        for text, key in samples.items():
            span = {"text": text, "trained": False, "special": False, "cut": False, **({key: True} if key else {})}
            line.append_text(self._text([span])).append("  ")
        self.console.print(line)

    def examples(self, shown: Sequence[dict[str, Any]], unit: str) -> None:
        """Documents or pairs, one after the other."""
        for number, example in enumerate(shown, 1):
            self._example(example, f"{counted(1, unit).removeprefix('1 ')} {number}")

    def step(self, laid_out: dict[str, Any], unit: str) -> None:
        """The rows of a step on every rank."""
        number, steps = f"{laid_out['step']:,}", f"{laid_out['steps']:,}"
        self.say(f"step {number} of {steps} (epoch {laid_out['epoch']}): {counted(laid_out['examples'], unit)}", "bold")
        if laid_out["guessed"]:
            self.say(
                "The model's sizes are not known here: ranks may share the documents a little differently.", "yellow"
            )
        for rank in laid_out["ranks"]:
            for number, batch in enumerate(rank["micro_batches"], 1):
                size = counted(batch["slots"], "slots")
                size += f" of {laid_out['tokens_per_row']:,}" if laid_out["tokens_per_row"] else ""
                size += ", padding included" if laid_out["mode"] == "padding" else ""
                title = f"rank {rank['rank']}, micro-batch {number}: {counted(batch['examples'], 'examples')} in {size}"
                self.say(f"\n━━ {title}", "bold")
                for place, example in enumerate(batch["shown"], 1):
                    self._example(example, f"{unit.removesuffix('s')} {place}")
                if more := batch["examples"] - len(batch["shown"]):
                    self.say(f"… and {counted(more, unit)} more")

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
        most = max(bin["documents"] for bin in data["histogram"])
        for bin in dropwhile(lambda bin: not bin["documents"], data["histogram"]):
            full, part = divmod(round(8 * _BAR * bin["documents"] / most), 8)
            bar = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "") or ("▏" if bin["documents"] else "")
            line = Text(f"  {bin['first']:>7,} – {bin['last']:<7,} ").append(f"{bar:<{_BAR}}", "cyan")
            self.console.print(line.append(f" {bin['documents']:,}"))
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
        for name, mode in data["modes"].items():
            if mode["rows"] is None:
                self.say(f"  {name} is not possible here: {visible(mode['why'])}", "yellow")
        packed = data["modes"]["packed"]
        if packed.get("fill") is not None:
            used = f"packed rows hold {percent(packed['fill'])} of batch.tokens_per_device"
            self.say(f"  {used}; what is empty is not computed", "dim")
        if packed.get("saved_by_sharing") is not None:
            saved = percent(packed["saved_by_sharing"])
            self.say(f"  prompts that both answers share save {saved} of the tokens", "dim")

    def _audit(self, data: dict[str, Any]) -> None:
        self.say()
        if not data["audit"]:
            self.say("audit: nothing odd was found", "green")
            return
        self.say("audit", "bold")
        for finding in data["audit"]:
            mark, style = _SEVERITY[finding["severity"]]
            line = Text(f"{mark} ", style).append(finding["name"].replace("_", " "), f"bold {style}")
            line.append(
                f": {counted(finding['count'], finding['unit'])} ({percent(finding['share'])}): {finding['what']}"
            )
            more = " …" if finding["count"] > len(finding["where"]) else ""
            self.console.print(line)
            for text, style in ((f"{', '.join(finding['where'])}{more}", "cyan"), (f"→ {finding['fix']}", "dim")):
                self.console.print(Padding(Text(text, style), (0, 0, 0, 2)))

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
        bracket = ""  # that is open
        for span in spans:
            trained = span["trained"] and not span["cut"]
            if self.coloured:
                style = "red strike" if span["cut"] else "magenta" if span["special"] else "green" if trained else "dim"
                text.append(span["text"], f"bold underline {style}" if trained and span["special"] else style)
                continue
            kind = "~~" if span["cut"] else "⟦" if trained else ""
            if kind != bracket:
                self._close(text, bracket)
                text.append(kind)
                bracket = kind
            text.append(span["text"])
        self._close(text, bracket)
        text.rstrip()
        return text

    @staticmethod
    def _close(text: Text, bracket: str) -> None:
        """Close a bracket, before a line end."""
        line_end = "\n" if bracket and text.plain.endswith("\n") else ""
        if line_end:
            text.right_crop(1)
        text.append({"": "", "~~": "~~", "⟦": "⟧"}[bracket] + line_end)


def _roles(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    names, rows = ["turns", "tokens", "of all", "trained", "of the trained"], []
    for role in data["roles"]:
        turns, tokens, trained = (f"{role[key]:,}" for key in ("turns", "tokens", "trained"))
        rows.append([role["role"], turns, tokens, percent(role["share"]), trained, percent(role["trained_share"])])
    return names, rows


def _cuts(data: dict[str, Any]) -> tuple[list[str], list[list[str]], int | None]:
    rows, own = [], None
    for at, cut in enumerate(data["cuts"]):
        own = at if cut["current"] else own
        lost = ["–", "–"] if cut["tokens"] is None else [f"{cut['tokens']:,}", percent(cut["tokens_share"])]
        rows.append([f"{cut['max_length']:,}", f"{cut['documents']:,}", percent(cut["share"]), *lost])
    return ["documents", "of all", "tokens lost", "of all"], rows, own


def _modes(data: dict[str, Any]) -> tuple[list[str], list[list[str]], int | None]:
    rows = []
    for name, mode in data["modes"].items():
        if mode["rows"] is None:
            rows.append([name, "–", "–", "–", "–", "–"])
            continue
        about = "about " if mode["sampled"] and name != "padding" else ""
        batches = " to ".join(f"{number:,}" for number in sorted(set(mode["micro_batches"])))
        used, imbalance = percent(mode["efficiency"]), percent(mode["imbalance"])
        rows.append([name, f"{about}{mode['rows']:,}", f"{mode['slots']:,}", used, batches, imbalance])
    names = ["rows an epoch", "token slots", "used", "micro-batches a step", "imbalance"]
    return names, rows, list(data["modes"]).index(data["mode"])
