"""docs/ builds as a site without a dead link, and so do the links of the pages outside it; the README stays short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = "https://packtrain.github.io/packtrain/"


def test_the_site_builds_without_a_dead_link_and_asks_no_other_host_for_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(list((ROOT / "docs").glob("*.md")))
    loaded = r"<(?:script|img|link(?! rel=\"canonical\")|iframe)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*\""
    assert [found for page in pages for found in re.findall(loaded, page.read_text())] == []
    places = {page: f"{SITE}{page.relative_to(tmp_path).as_posix().removesuffix('index.html')}" for page in pages}
    named = {page for page in pages if f'<link rel="canonical" href="{places[page]}">' in page.read_text()}
    assert {*pages} - named == {tmp_path / "404.html"}  # its paths begin at the host: it answers at any depth
    assert 'href="/packtrain/css/' in (tmp_path / "404.html").read_text()
    listed = re.findall(r"<loc>(.*)</loc>", (tmp_path / "sitemap.xml").read_text())
    assert {*listed} == {places[page] for page in named}
    edit = r"https://github\.com/packtrain/packtrain/edit/main/(docs/[\w-]+\.md)"
    edited = {file for page in named for file in re.findall(edit, page.read_text())}
    assert len(edited) == len(named) and all((ROOT / file).is_file() for file in edited)


def test_links_outside_the_site_lead_somewhere_and_the_readme_is_read_in_a_minute() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        links = [one for one in re.findall(r"(?:\]\(|src=\")([^)\"\s]+)", text) if "://" not in one and one[0] != "#"]
        assert links
        assert [one for one in links if not (ROOT / one.split("#")[0]).exists()] == []
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_all_pages_count_the_model_types_alike() -> None:
    measured = (ROOT / "docs/architectures.md").read_text()
    rows = re.findall(r"^\| [\w.-]+ \| (?:segmented|mixers|per_document|padding only|refused) \| .*\|$", measured, re.M)
    [total] = re.findall(r"^\| all \| (\d+) \|", measured, re.M)
    assert int(total) == len(rows) > 0
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    said = {page.name: re.findall(r"([\d,]+) types that transformers registers", page.read_text()) for page in pages}
    assert {name: found for name, found in said.items() if found} == {"README.md": [total], "modes.md": [total]}
    counts = dict(
        re.findall(r"^\| (segmented|mixers|per_document|refused) \| (\d+) \|", measured.split("| all |")[0], re.M)
    )
    in_words = (
        r"(\d+) run by `segmented` \(or `flash`\), (\d+) by `mixers`, (\d+) by `per_document`, and (\d+) are refused"
    )
    assert re.findall(in_words, (ROOT / "docs/modes.md").read_text()) == [tuple(counts.values())]
    assert re.findall(r"(\d+) of them run in flattened rows", (ROOT / "README.md").read_text()) == [
        str(int(counts["segmented"]) + int(counts["mixers"]))
    ]


def test_the_picture_of_packed_rows_has_the_figures_that_were_measured() -> None:
    measured = (ROOT / "benchmarks/RESULTS.md").read_text().partition("## On GPUs")[2]
    runs = ("padding, bf16 + masters, eager", "packed, bf16 + masters, eager", "packed, bf16 + masters, Liger")
    rows = [next(line for line in measured.splitlines() if line.startswith(f"| sft 1.5B, {run} |")) for run in runs]
    drawn = re.findall(r"(?<=>)([\d,.]+)(?: → ([\d.]+))?</text>", (ROOT / "docs/pictures/packed.svg").read_text())
    speeds, losses = [one for one, last in drawn if not last], [f"{one} | {last}" for one, last in drawn if last]
    for row, speed, loss in zip(rows, speeds, losses, strict=True):
        assert f"| {speed} |" in row and row.endswith(f"| {loss} |")
    assert all(speed in (ROOT / page).read_text() for page in ("README.md", "docs/speed.md") for speed in speeds)
