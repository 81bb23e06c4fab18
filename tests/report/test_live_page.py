"""`report --serve` in a browser: curves grow in the open page, and choices stay."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from packtrain.launch.attempt import LOCK
from packtrain.report import live
from packtrain.run_folder import RunFolder
from tests.report import test_report_browser as still
from tests.report.test_report_browser import By, Keys, barriers, click, value, wait_until_drawn
from tests.train.forked import ENVIRONMENT
from tests.unit.report.run_folders import leave_run, lines_of
from tests.waiting import LONG_S, until

browser = still.browser
KEYS = ("step", "loss", "eval_loss", "grad_norm", "tokens", "seconds")  # few: drawing each figure takes time
LINES = [{key: line[key] for key in KEYS if key in line} for line in lines_of(40, eval_every=10) if line["step"]]
POINTS = "document.getElementById('plot0').data.map(one => one.x.length)"
RANGES = "[0, 1].map(number => document.getElementById('plot' + number)._fullLayout.xaxis.range)"


@contextmanager
def served(*folders: RunFolder) -> Iterator[str]:
    """Serve these runs in a thread, and yield the URL."""
    server = live._Server(0, list(folders))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{server.secret}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def going_on(folder: RunFolder) -> Iterator[None]:
    """Hold the lock of a run, as a training process does."""
    with (folder.logs / LOCK).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def opened(browser: Any, url: str) -> None:
    """Open a page, and set a mark that only a reload removes."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(url)
    wait_until_drawn(browser)
    browser.execute_script("window.marker = 1")


def add(folder: RunFolder, lines: list[dict[str, Any]], rest: str = "") -> None:
    with folder.metrics.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + rest)


def shown(browser: Any, script: str, wanted: object) -> None:
    until(lambda: value(browser, script) == wanted, said=lambda: (value(browser, script), browser.get_log("browser")))
    wait_until_drawn(browser)
    assert value(browser, "window.marker") == 1


def text_of(browser: Any, name: str) -> str:
    return value(browser, "document.getElementById(arguments[0]).textContent", name)


def check_calm(browser: Any, url: str) -> None:
    """Assert an empty console, no requests to other hosts, and no barriers.

    Requests of Chromium's own new tab do not count.
    """
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    assert {asked for asked in still.hits(browser) if not asked.startswith((url, "chrome:"))} == set()
    found = [one for one in barriers(browser) if one["impact"] in ("serious", "critical")]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []


def test_curves_grow_without_a_reload_and_zoom_hidden_curves_axis_and_smoothing_stay(
    browser: Any, tmp_path: Path
) -> None:
    folder = leave_run(tmp_path / "run", lines=[line for line in LINES if line["step"] <= 20], status=None)
    with served(folder) as url, going_on(folder):
        opened(browser, url)
        shown(browser, "document.getElementById('live').textContent", "live, step 20")
        click(browser, "held out", "#legend0")
        click(browser, "Tokens", "#axes")
        slider = browser.find_element(By.ID, "smooth")
        slider.send_keys(Keys.ARROW_RIGHT)
        browser.find_element(By.XPATH, "//summary[contains(., 'with their defaults')]").click()
        browser.find_element(By.ID, "plot0").send_keys("+")
        wait_until_drawn(browser)
        zoom = value(browser, RANGES)
        assert zoom[0] == zoom[1] and zoom[0][0] > 90
        add(folder, [line for line in LINES if 20 < line["step"] <= 30], rest='{"step": 31, "lo')
        shown(browser, POINTS, [30, 30])  # points of the faint and the smoothed curve; the hidden one has none
        assert value(browser, RANGES) == zoom
        assert text_of(browser, "live") == "live, step 30" and "step 20" in text_of(browser, "spoken")
        assert "30 steps" in browser.find_element(By.CLASS_NAME, "tiles").text
        pressed = "[...document.querySelectorAll('[aria-pressed=true]')].map(one => one.textContent)"
        assert value(browser, pressed) == ["Tokens", "training"]
        assert value(browser, "document.querySelector('details[open] summary').textContent").endswith("defaults")
        browser.execute_script("window.older = document.getElementById('plot0')")
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES if line["step"] <= 31))
        more = [{**line, "novelty": 2.0} for line in LINES if line["step"] > 31]
        add(folder, more)  # another figure, so all are laid out anew
        shown(browser, POINTS, [40, 40])
        assert value(browser, RANGES) == zoom and value(browser, pressed) == ["Tokens", "training"]
        assert browser.find_elements(By.TAG_NAME, "figcaption")[-1].text == "novelty"
        assert value(browser, "[older.isConnected, older.data]") == [False, None]  # plotly has let go of it
        assert value(browser, "document.getElementById('smooth').value") == "0.02"
        click(browser, "held out", "#legend0")
        assert value(browser, POINTS) == [40, 40, 4]
        click(browser, "whole curves")
        assert value(browser, RANGES)[0][1] > 3600
        for key in (Keys.END, "+", "+", "+", "-"):
            browser.find_element(By.ID, "plot0").send_keys(key)
            wait_until_drawn(browser)
        assert 2600 < value(browser, RANGES)[0][0] < 2800  # the last quarter
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES[:10]))  # it began anew
        shown(browser, "document.getElementById('live').textContent", "live, step 10")
        assert value(browser, RANGES)[0][0] <= 90 and value(browser, RANGES)[0][1] >= 900
        check_calm(browser, url)


@pytest.mark.exhaustive
def test_runs_that_begin_are_seen_to_their_end(browser: Any, tmp_path: Path) -> None:
    first, second = (leave_run(tmp_path / name, lines=[], status=None) for name in ("first", "second"))
    for folder in (first, second):
        folder.metrics.unlink()
    with served(first, second) as url, going_on(second):
        with going_on(first):
            opened(browser, url)
            shown(browser, "document.getElementById('live').textContent", "live, no step yet")
            assert "No step yet" in text_of(browser, "figures")
            check_calm(browser, url)
            add(first, LINES[:3])
            until(lambda: browser.find_elements(By.CLASS_NAME, "plot"))
            shown(browser, POINTS, [3])
            add(second, LINES[:5])
            shown(browser, POINTS, [3, 5])
        first.summary.write_text(json.dumps({"status": "done", "steps": 3}))
        status = "[...document.querySelectorAll('.status')].map(one => one.textContent)"
        shown(browser, f"{status}.slice(0, 2)", ["done", "running"])
        click(browser, "first", "#runs")
        add(second, LINES[5:7])
        shown(browser, POINTS, [7])
        check_calm(browser, url)
    shown(browser, "document.getElementById('live').textContent.slice(0, 11)", "not updated")


@pytest.mark.exhaustive
def test_a_training_is_seen_live_to_its_end(browser: Any, tmp_path: Path) -> None:
    from running import base_config, written  # imports torch

    config = base_config(tmp_path, trainer={"max_steps": 1_000_000})  # until this test has seen enough
    variables, folder = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}, RunFolder(tmp_path / "run")
    training = [sys.executable, "-m", "packtrain", "sft", written(tmp_path, config)]
    serving = [sys.executable, "-m", "packtrain", "report", str(folder.root), "--serve"]
    quiet: dict[str, Any] = {"stderr": subprocess.DEVNULL, "env": variables, "text": True}
    with subprocess.Popen(training, stdout=subprocess.DEVNULL, **quiet) as run:
        try:
            until(folder.attempt.config.exists)
            with subprocess.Popen(serving, stdout=-1, **quiet) as server:
                try:
                    assert server.stdout
                    opened(browser, url := server.stdout.readline().strip())
                    seen = set[str]()
                    until(lambda: len(seen.add(text_of(browser, "live")) or seen) > 3, said=lambda: seen)
                    assert all(words.startswith("live, ") for words in seen if words)
                    run.terminate()
                    assert run.wait(LONG_S) == 143
                    steps = json.loads(folder.summary.read_text())["steps"]
                    until(lambda: text_of(browser, "live").startswith(f"over, step {steps};"))
                    assert value(browser, "document.querySelector('.status').textContent") == "stopped"
                    check_calm(browser, url)
                finally:
                    server.terminate()
                assert server.wait(LONG_S) == 143
        finally:
            run.terminate()
