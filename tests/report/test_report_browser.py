"""The report as a reader has it: in a headless Chromium, without a network."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from packtrain.report.page import page
from packtrain.report.run_record import read_run
from tests.unit.report.run_folders import leave_run, lines_of

selenium = pytest.importorskip("selenium", reason="selenium is not installed")
CHROME = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
if not (CHROME and DRIVER):
    pytest.skip("no chromium and chromedriver (Debian: apt-get install chromium-driver)", allow_module_level=True)

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.options import Options  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--window-size=1200,900",
)
LONG_S = 120  # reached only where something hangs
LINES = lines_of(60, eval_every=20)
MARKUP = (
    "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script><a href='javascript:1'>\x1b[31m"
)
# of the traces of the figure with this number
TRACES = "return document.getElementById('plot' + arguments[0]).data.map(one => [one.name, one.x.length, [...one.y]])"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = Options()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.binary_location = str(CHROME)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    os.environ["SE_OFFLINE"] = "true"  # no search for another driver
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """one.html, two.html of runs with planted names and keys, failed.html, long.html."""
    folder = tmp_path_factory.mktemp("pages")
    evil = [{**line, MARKUP: 1.0} for line in LINES]
    ranks = {"forward": [0.1, 0.2], "backward": [0.2, 0.2], "data": [0.01, 0.0], "counts": [0.1, 0.0]}
    answered = [{"prompt": MARKUP, "before": MARKUP, "after": MARKUP}]
    config = {"data": {"train": MARKUP}, "batch": {"examples_per_step": 8}, "trainer": {"log_every": 1}}
    one = read_run(leave_run(folder / "one", lines=LINES, rank_seconds=ranks))
    two = read_run(leave_run(folder / f"two {MARKUP}".replace("/", ""), lines=evil, answers=answered, config=config))
    failed = leave_run(folder / "failed", lines=[], status=None)
    (failed.logs / "diagnosis.txt").write_text("rank 1 on n0 is stopped\n  → kill -CONT 77\n")
    long = read_run(leave_run(folder / "long", lines=lines_of(20_000, eval_every=100)))
    shown = {"one": [one], "two": [one, two], "failed": [read_run(failed)], "long": [long]}
    for name, runs in shown.items():
        (folder / f"{name}.html").write_text(page(runs), encoding="utf-8")
    return folder


def wait_until_drawn(browser: Any) -> None:
    end = time.monotonic() + LONG_S
    while not browser.execute_script("return document.documentElement.dataset.drawn"):
        assert time.monotonic() < end, browser.get_log("browser")
        time.sleep(0.05)


def opened(browser: Any, file: Path) -> None:
    """Opens a page and waits until its curves are drawn, and everything that it may ask for has been asked for."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(file.as_uri())
    if "<script" in file.read_text():
        wait_until_drawn(browser)


def hits(browser: Any) -> list[str]:
    """What a page asked for beside itself."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    asked += [event["params"]["url"] for event in events if event["method"] == "Network.webSocketCreated"]
    return [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]


def barriers(browser: Any) -> list[dict[str, Any]]:
    """What axe-core finds in the way of a reader."""
    package = metadata.distribution("axe-playwright-python")  # for its copy of axe-core alone
    browser.execute_script(Path(str(package.locate_file("axe_playwright_python/axe.min.js"))).read_text())
    return browser.execute_async_script("axe.run().then(found => arguments[0](found.violations))")


def click(browser: Any, text: str, inside: str = "body") -> None:
    browser.find_element(By.CSS_SELECTOR, inside).find_element(By.XPATH, f".//button[contains(., '{text}')]").click()
    wait_until_drawn(browser)


def value(browser: Any, script: str, *given: Any) -> Any:
    return browser.execute_script(f"return {script}", *given)


@pytest.mark.parametrize("name", ["one", "two", "failed", "long"])
def test_a_page_asks_no_host_for_anything_and_has_no_error_or_barrier(browser: Any, pages: Path, name: str) -> None:
    opened(browser, pages / f"{name}.html")
    for scheme in ("light", "dark") if name != "long" else ():  # built as one.html is
        value(browser, "document.documentElement.dataset.theme = arguments[0]", scheme)
        found = barriers(browser)
        assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []
    assert hits(browser) == []
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    assert browser.title != "hit"


def test_curves_have_the_points_of_the_file(browser: Any, pages: Path) -> None:
    opened(browser, pages / "one.html")
    titles = [one.text for one in browser.find_elements(By.TAG_NAME, "figcaption")]
    assert titles == ["Loss", "Learning rate", "Gradient norm", "Tokens per second", "Padding", "Memory"]
    losses = [line["loss"] for line in LINES if "loss" in line]
    training, held_out = browser.execute_script(TRACES, 0)
    assert (training[1], held_out[1]) == (60, 4)
    assert training[2] == pytest.approx(losses, rel=1e-6)
    drawn = "document.querySelectorAll('#plot0 .scatterlayer .trace').length"
    assert value(browser, drawn) == 2
    click(browser, "held out", "#legend0")
    assert value(browser, drawn) == 1
    browser.find_element(By.ID, "logy").click()
    click(browser, "Tokens", "#axes")
    plot = "document.getElementById('plot0')"
    assert value(browser, f"[{plot}._fullLayout.yaxis.type, {plot}.data[0].x.at(-1)]") == ["log", 5400]


def said(browser: Any) -> list[str]:
    """What stands under the pointer, line by line."""
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        if lines := value(
            browser, "[...document.querySelectorAll('#plot0 .hoverlayer text')].map(at => at.textContent)"
        ):
            return [line for line in lines if line]
        time.sleep(0.05)
    raise AssertionError("nothing under the pointer")


def test_a_figure_is_read_and_zoomed_with_the_keyboard(browser: Any, pages: Path) -> None:
    opened(browser, pages / "one.html")
    plot = browser.find_element(By.ID, "plot0")
    assert "from 7" in value(browser, "document.getElementById('words0').textContent")
    plot.send_keys(Keys.END)
    plot.send_keys(Keys.ARROW_LEFT)
    loss = next(line["loss"] for line in LINES if line["step"] == 59 and "loss" in line)
    words = value(browser, "document.getElementById('reading').textContent")
    assert words.startswith("step 59: training ") and float(words.split()[-1]) == pytest.approx(loss, rel=1e-4)
    plot.send_keys("+")
    wait_until_drawn(browser)
    assert value(browser, "document.getElementById('plot1')._fullLayout.xaxis.range")[0] > 1
    plot.send_keys("0")
    wait_until_drawn(browser)


def test_runs_over_each_other_are_clicked_away_and_their_names_do_nothing(browser: Any, pages: Path) -> None:
    opened(browser, pages / "two.html")
    names = [one for one, *_ in browser.execute_script(TRACES, 0)]
    assert [name.split()[0] for name in names] == ["one", "one", "two", "two"]
    click(browser, "one", "#runs")
    assert [one.split()[0] for one, *_ in browser.execute_script(TRACES, 0)] == ["two", "two"]
    plot = browser.find_element(By.ID, "plot0")
    ActionChains(browser).move_to_element_with_offset(plot, 60, 20).perform()
    assert any("<img" in line for line in said(browser))
    assert value(browser, "[document.images.length, document.querySelectorAll('a[href^=javascript]').length]") == [0, 0]
    assert browser.title != "hit"
