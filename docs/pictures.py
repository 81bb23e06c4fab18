"""Draw the pictures of the README from real runs: `python docs/pictures.py`.

It takes two minutes and a browser (chromium and chromedriver). `--bench CONFIG [KEY=VALUE …]` takes the table of modes from that config. The
quickstart's model, the default, is so small that its modes differ by little.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

HERE = Path(__file__).parent
RECIPE = "recipes/quickstart-sft.yaml"
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>{styles} text {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""
"""rich's frame, without the fonts that it fetches from another host."""


def packtrain(*arguments: str, folder: Path) -> str:
    """Return the output of a command on a terminal of 100 columns, with its colours."""
    ours = {
        "FORCE_COLOR": "1",
        "COLUMNS": "100",
        "TTY_COMPATIBLE": "1",
        "COLORTERM": "truecolor",
        "TERM": "xterm-256color",
    }
    command = [sys.executable, "-m", "packtrain", *arguments]
    ran = subprocess.run(command, cwd=folder, env={**os.environ, **ours}, stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout


def draw(title: str, printed: str, file: Path, lines: int | None = None) -> None:
    """Write the first `lines` of a command's output as an SVG."""
    shown = "\n".join(line.rstrip() for line in printed.rstrip().split("\n")[:lines])
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=100, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text("$ ", "bold green") + Text(title, "bold"))
        console.print(Text.from_ansi(shown))
    file.write_text(
        console.export_svg(title="", theme=MONOKAI, code_format=FRAME, unique_id=file.stem), encoding="utf-8"
    )


def photograph(page: Path, file: Path, width: int, height: int) -> None:
    """Save a screenshot of a page in a browser as PNG."""
    options = webdriver.ChromeOptions()
    with tempfile.TemporaryDirectory() as profile:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}")
        for flag in (*flags, "--disable-background-networking", f"--window-size={width},{height}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            browser.set_window_size(width, height)
            browser.get(page.as_uri())
            browser.implicitly_wait(10)
            browser.find_element("css selector", ".main-svg")
            browser.save_screenshot(str(file))
        finally:
            browser.quit()


def main() -> None:
    """Make all pictures in docs/pictures/."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--bench", nargs="+", metavar="CONFIG", default=[RECIPE])
    bench = arguments.parse_args().bench
    made = HERE / "pictures"
    made.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(HERE.parent / "recipes", folder / "recipes")
        rows = packtrain("inspect", RECIPE, "--step", "1", folder=folder)
        draw(f"packtrain inspect {RECIPE} --step 1", rows, made / "inspect.svg", lines=34)
        packtrain("sft", RECIPE, folder=folder)
        photograph(folder / "runs" / "quickstart-sft" / "report.html", made / "report.png", 1100, 1150)
        config = bench[0] if bench[0] == RECIPE else str(Path(bench[0]).resolve())
        draw(f"packtrain bench {config}", packtrain("bench", config, *bench[1:], folder=folder), made / "bench.svg")


if __name__ == "__main__":
    main()
