"""Every error for the user has a code, and docs/errors.md holds all sentences."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.errors_page import EXITS, page, sites

PAGE = Path(__file__).parents[2] / "docs/errors.md"


def test_every_error_has_a_code() -> None:
    without = [f"{site.place} {site.texts[0]}" for site in sites() if not site.codes]
    assert not without, "\n".join(without)


def test_codes_are_short_words() -> None:
    codes = {code for site in sites() for code in site.codes}
    assert len(codes) > 300
    assert not [code for code in codes if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+){0,5}", code)]


def test_a_code_has_one_exit_code() -> None:
    exits = defaultdict(set)
    for site in sites():
        for code in site.codes if site.name in EXITS else ():
            exits[code].add(EXITS[site.name])
    assert not {code: found for code, found in exits.items() if len(found) > 1}


def test_the_page_holds_the_sentences_of_the_source() -> None:
    assert PAGE.read_text() == page(), "python tests/errors_page.py > docs/errors.md"
