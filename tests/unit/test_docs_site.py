"""docs/ builds as a site without a dead link, and so do the links of the pages outside it; the README stays short."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(folder / "mkdocs.yml")]
    return subprocess.run([*command, "-d", str(folder / "site")], capture_output=True, text=True, timeout=300)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


def test_the_site_builds_and_asks_no_other_host_for_anything(copied: Path) -> None:
    built = build(copied)
    assert built.returncode == 0, built.stderr
    pages = list((copied / "site").rglob("*.html"))
    assert len(pages) >= len(list((ROOT / "docs").glob("*.md")))
    loaded = r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"https?://[^\"]*\""
    assert [found for page in pages for found in re.findall(loaded, page.read_text())] == []


@pytest.mark.parametrize("line", ["[gone](gone.md)", "[no heading](data.md#no-such-heading)"])
def test_a_dead_link_ends_the_build(copied: Path, line: str) -> None:
    with (copied / "docs" / "data.md").open("a") as page:
        page.write(f"\n{line}\n")
    assert build(copied).returncode != 0


def test_a_page_that_nothing_leads_to_ends_the_build(copied: Path) -> None:
    (copied / "docs" / "lonely.md").write_text("# Lonely\n")
    assert build(copied).returncode != 0


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_outside_the_site_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [one for one in re.findall(r"(?:\]\(|src=\")([^)\"\s]+)", text) if "://" not in one and one[0] != "#"]
    assert links
    assert [one for one in links if not (ROOT / one.split("#")[0]).exists()] == []


def test_the_readme_is_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
