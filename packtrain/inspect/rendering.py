"""Rendering of data on a terminal (rich) and as HTML (jinja2): examples and summary.

Examples are coloured text, the summary is in tables. Texts of the data become rich's `Text`, never markup, and are escaped in HTML;
control characters are symbols already (summary.py). On a terminal without colours, trained text stands in ⟦ ⟧. The HTML has no script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import dropwhile, groupby
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from packtrain.errors import Json
from packtrain.wording import count_dropped, counted, say_example_slots, visible

_HERE = Path(__file__).parent
DATA_CSS = (_HERE / "data_section.css").read_text(encoding="utf-8")
"""The section's style sheet. The page defines its colours: --ink, --soft, --paper, --panel, --line, --accent, --trained, --untrained,
--special, --warn, --bad and --good."""
Shown = Json
"""Something to show as plain containers: a summary, an example, a step, a span of text."""
_BAR = 32
_WIDTH = 100
"""Columns if the output is not a terminal."""
_SEVERITY = {"bad": ("✗", "bold red"), "warn": ("!", "yellow"), "note": ("·", "")}


class DataTable(NamedTuple):
    """A table: rows of cells by name. The row number `current` is the config's own."""

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[str]]
    current: int | None


def percent(share: float | None) -> str:
    """Write 0.4167 as 41.7 %, 0.0000123 as 0.0012 %, and None as "–"."""
    if share is None or not math.isfinite(share):
        return "–"
    return f"{100 * share:.1f} %" if share == 0 or abs(share) >= 0.0005 else f"{100 * share:.2g} %"


def tabulate(data: Shown) -> list[DataTable]:
    """Make the tables of a summary: cuts by length limits, and costs of each mode."""
    cuts = [[f"{cut['max_length']:,}", f"{cut['documents']:,}", percent(cut["share"])] for cut in data["cuts"]]
    for row, cut in zip(cuts, data["cuts"], strict=True):
        row += ["–" if cut["tokens"] is None else f"{cut['tokens']:,}", percent(cut["tokens_share"])]
    current = next((at for at, cut in enumerate(data["cuts"]) if cut["current"]), None)
    modes = []
    for name, mode in data["modes"].items():
        if mode["rows"] is None:
            modes.append([name, *"–––––"])
            continue
        about = "about " if mode["sampled"] and name != "padding" else ""
        batches = " to ".join(f"{number:,}" for number in sorted(set(mode["micro_batches"])))
        used, imbalance = percent(mode["efficiency"]), percent(mode["imbalance"])
        modes.append([name, f"{about}{mode['rows']:,}", f"{mode['slots']:,}", used, batches, imbalance])
    title = f"packing.mode on {counted(data['processes'], 'processes')}"
    names = ["rows an epoch", "token slots", "used", "micro-batches a step", "imbalance"]
    return [
        DataTable("data.max_length would cut", ["documents", "of all", "tokens lost", "of all"], cuts, current),
        DataTable(title, names, modes, list(data["modes"]).index(data["mode"])),
    ]


def remark_on_modes(data: Shown) -> list[str]:
    """Return remarks on the costs of the modes."""
    modes = data["modes"]
    remarks = [f"{name} is not possible here: {visible(mode['why'])}" for name, mode in modes.items() if "why" in mode]
    if (fill := modes["packed"].get("fill")) is not None:
        remarks.append(f"packed rows hold {percent(fill)} of batch.tokens_per_device; what is empty is not computed")
    if (share := modes["packed"].get("saved_by_sharing")) is not None:
        of_documents = "what documents of a micro-batch begin with alike saves"
        what = "prompts that both answers share save" if data["unit"] == "pairs" else of_documents
        remarks.append(f"{what} {percent(share)} of the tokens")
    if found := modes["packed"].get("example_slots"):
        remarks.append(say_example_slots(found))
    return remarks


def templates_in(folder: Path, finalize: Callable[[object], object] | None = None) -> Environment:
    """Return jinja2's environment for the pages of a folder, with escaping. `finalize` changes each value."""
    made = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, finalize=finalize)
    made.trim_blocks = made.lstrip_blocks = True
    return made


@cache
def _templates() -> Environment:
    made = templates_in(_HERE)
    made.filters |= {
        "percent": percent,
        "number": lambda value: f"{value:,}",
        "counted": counted,
        "visible": visible,
    }
    return made


def data_section(summary: Shown) -> Markup:
    """Render the section on a summary, for any page that defines the colours of DATA_CSS."""
    tables, remarks = tabulate(summary), remark_on_modes(summary)
    template = _templates().get_template("data_section.html.j2")
    return Markup(template.render(data=summary, tables=tables, remarks=remarks))


def data_page(summary: Shown, title: str) -> str:
    """Render a page with the section alone, light or dark like the reader's system."""
    template = _templates().get_template("data_page.html.j2")
    return template.render(title=title, section=data_section(summary), css=Markup(DATA_CSS))


class DataTerminal:
    """The data on stdout."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, emoji=False)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, emoji=False, width=_WIDTH)
        self.coloured = self.console.is_terminal and self.console.color_system is not None and not self.console.no_color

    def say(self, text: str = "", style: str = "") -> None:
        """Print a line of text, without interpreting markup in it."""
        self.console.print(Text(text, style))

    def legend(self) -> None:
        """Print how tokens are shown."""
        line = Text("tokens: ", "bold")
        for text in ("trained", "not trained", "<control>"):
            span = {"text": text, "trained": text == "trained", "special": text == "<control>"}
            line.append_text(self._style([span])).append("  ")
        self.console.print(line)

    def examples(self, shown: Sequence[Shown], unit: str) -> None:
        """Print documents or pairs, one after the other."""
        for number, example in enumerate(shown, 1):
            self._example(example, f"{unit.removesuffix('s')} {number}")

    def remarks(self, remarks: Sequence[str]) -> None:
        """Print remarks on the data, such as columns that nothing reads."""
        for remark in remarks:
            self.say(visible(remark), "dim")

    def step(self, step: Shown, unit: str) -> None:
        """Print the rows of a step on every rank."""
        number, steps = f"{step['step']:,}", f"{step['steps']:,}"
        self.say(f"step {number} of {steps} (epoch {step['epoch']}): {counted(step['examples'], unit)}", "bold")
        if step["guessed"]:
            what = "The model's sizes are not known here: ranks may share the documents a little differently."
            self.say(what, "yellow")
        for rank in step["ranks"]:
            for number, batch in enumerate(rank["micro_batches"], 1):
                size = counted(batch["slots"], "slots")
                size += f" of {step['tokens_per_row']:,}" if step["tokens_per_row"] else ""
                size += ", padding included" if step["mode"] == "padding" else ""
                title = f"rank {rank['rank']}, micro-batch {number}: {counted(batch['examples'], 'examples')} in {size}"
                self.say(f"\n━━ {title}", "bold")
                self.examples(batch["shown"], unit)
                if more := batch["examples"] - len(batch["shown"]):
                    self.say(f"… and {counted(more, unit)} more")

    def summary(self, data: Shown) -> None:
        """Print statistics, costs of the modes, and the audit. The audit is last, so the reader sees it first."""
        self._facts(data)
        self._lengths(data)
        for table in tabulate(data):
            self._table(table)
        for remark in remark_on_modes(data):
            self.say(f"  {remark}", "dim")
        self._audit(data)

    def _facts(self, data: Shown) -> None:
        made = counted(data["documents"], "documents")
        if data["unit"] == "pairs":
            made = f"{counted(data['documents'] // 2, 'pairs')} ({made})"
        if labels := data["labels"]:
            share = percent(labels["desirable"] / max(1, sum(labels.values())))
            made += f" ({labels['desirable']:,} desirable, {share}; {labels['undesirable']:,} undesirable)"
        trained = f"{data['trained_tokens']:,} trained ({percent(data['trained_tokens'] / data['tokens'])})"
        self.say(f"{visible(', '.join(data['sources']))} ({data['format']})", "bold")
        self.say(f"{made} of {counted(data['rows'], 'rows')}, {data['tokens']:,} tokens, {trained}")
        if pictures := data["pictures"]:
            self.say(pictures["words"])
        cut = f"truncated {data['truncated']:,}, split {data['split']:,} ({data['cut_tokens']:,} tokens cut)"
        held_out = "" if data["held_out"] is None else f"; held out {counted(data['held_out'], data['unit'])}"
        self.say(f"{cut}; {count_dropped(data['dropped_for'])}{held_out}")
        self.remarks(data["remarks"])

    def _lengths(self, data: Shown) -> None:
        self.say("\nlength of documents in tokens", "bold")
        most = max(bin["documents"] for bin in data["histogram"])
        for bin in dropwhile(lambda bin: not bin["documents"], data["histogram"]):
            bar = "█" * round(_BAR * bin["documents"] / most) or ("▏" if bin["documents"] else "")
            line = Text(f"  {bin['first']:>7,} – {bin['last']:<7,} ").append(f"{bar:<{_BAR}}", "cyan")
            self.console.print(line.append(f" {bin['documents']:,}"))
        words = {"0": "min", "50": "median", "100": "max"}
        marks = [f"{words.get(name, f'{name} %')} {value:,}" for name, value in data["percentiles"].items()]
        self.say(f"  {' · '.join(marks)}")

    def _table(self, table: DataTable) -> None:
        grid = Table(box=None, padding=(0, 2, 0, 0), header_style="")
        grid.add_column(Text(f"  {table.title}", "bold"), no_wrap=True)
        for name in table.names:
            grid.add_column(Text(name, "dim"), justify="right")
        for number, (first, *cells) in enumerate(table.rows):
            mark, style = ("→ ", "bold") if number == table.current else ("  ", "")
            grid.add_row(mark + first, *cells, style=style)
        self.say()
        self.console.print(grid)

    def _audit(self, data: Shown) -> None:
        if not data["audit"]:
            self.say("\naudit: nothing odd was found", "green")
            return
        self.say("\naudit", "bold")
        for finding in data["audit"]:
            mark, style = _SEVERITY[finding["severity"]]
            line = Text(f"{mark} ", style).append(finding["name"].replace("_", " "), f"bold {style}")
            number = f"{counted(finding['count'], finding['unit'])} ({percent(finding['share'])})"
            more = " …" if finding["count"] > len(finding["where"]) else ""
            self.console.print(line.append(f": {number}: {finding['what']}"))
            for text, style in ((f"{', '.join(finding['where'])}{more}", "cyan"), (f"→ {finding['fix']}", "dim")):
                self.console.print(Padding(Text(text, style), (0, 0, 0, 2)))

    def _example(self, example: Shown, title: str) -> None:
        cut = f", {example['cut']:,} cut" if example["cut"] else ""
        note = f" · {example['note']}" if example["note"] else ""
        tokens = counted(example["tokens"], "tokens")
        self.say(f"\n── {title} · {example['where']} · {tokens}, {example['trained']:,} trained{cut}{note}", "bold")
        for part in example["parts"]:
            name = f"{part['name']}, once for both answers" if part["name"] == "prompt" else part["name"]
            end = part.get("start", 0) + part["tokens"] - 1
            place = f"tokens {part['start']:,} to {end:,} of the row" if "start" in part else ""
            if head := " · ".join(filter(None, (name, place))):
                self.say(f"   {head}", "dim" if not part["name"] else "bold")
            self.console.print(Padding(self._style(part["spans"]), (0, 0, 0, 3)))

    def _style(self, spans: Sequence[Shown]) -> Text:
        """Render spans as coloured text. Without colours, trained text is in brackets, which close before a line end."""
        text = Text(overflow="fold")
        for trained, group in groupby(spans, key=lambda span: span["trained"]):
            if self.coloured:
                for span in group:
                    style = "magenta" if span["special"] else "green" if trained else "dim"
                    text.append(span["text"], f"bold underline {style}" if trained and span["special"] else style)
                continue
            written = "".join(span["text"] for span in group)
            body = written.rstrip("\n")
            text.append(f"⟦{body}⟧{written[len(body) :]}" if trained else written)
        text.rstrip()
        return text
