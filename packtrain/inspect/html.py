"""The data as HTML: a section for any page that defines the colours, and a page of its own for `inspect --html`.

All text of the data and the config is escaped by jinja2; characters that act are symbols already (tokens_shown.py). No script.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from packtrain.wording import counted, visible

_HERE = Path(__file__).parent
DATA_CSS = (_HERE / "data_section.css").read_text(encoding="utf-8")
"""The look of the section, in the page's own colours: --ink, --soft, --paper, --panel, --line, --accent, --trained, --untrained,
--special, --cut, --warn, --bad and --good."""


@cache
def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {"percent": percent, "number": lambda value: f"{value:,}", "counted": counted, "visible": visible}
    return made


def percent(share: float) -> str:
    """ "12 %", "0.3 %", "< 0.01 %"."""
    value = 100 * share
    if value in (0, 100) or value >= 10:
        return f"{value:.0f} %" if value in (0, 100) or value < 99 else f"{value:.1f} %"
    return f"{value:.2g} %" if value >= 0.01 else "< 0.01 %"


def data_section(summary: dict[str, Any]) -> Markup:
    """The section on a data_summary."""
    return Markup(_templates().get_template("data_section.html.j2").render(data=summary))


def page(summary: dict[str, Any], title: str) -> str:
    """A page of its own, light or dark as the reader's system is."""
    return (
        _templates()
        .get_template("data_page.html.j2")
        .render(title=title, section=data_section(summary), css=Markup(DATA_CSS))
    )
