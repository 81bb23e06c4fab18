"""The page: what is in it, what is escaped, and where it is written. tests/report has it in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import packtrain
from hypothesis import given
from hypothesis import strategies as st

from packtrain.report.figures import (
    POINTS_OF_A_CURVE,
    answers,
    compare_settings,
    figures_of,
    points_of,
    rank_times,
    thin,
)
from packtrain.report.page import page
from packtrain.report.run_record import read_run
from tests.unit.report.run_folders import FACTS, leave_run, lines_of

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e</style>{{ 7*7 }}"


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def test_a_page_has_headline_curves_answers_config_and_environment(tmp_path: Path) -> None:
    text = page([read_run(leave_run(tmp_path / "mine"))])
    assert len(text.encode()) < 3_000_000
    words = Elements(text).words
    shown = ("mine", "7.25", "30 steps, 3 epochs", "How are you?", "Fine.", "data.train", "chats.jsonl", "exact:")
    assert [text for text in shown if text not in words] == []
    data = data_of(text)
    assert [figure["title"] for figure in data["figures"]] == [
        *("Loss", "Learning rate", "Gradient norm", "Tokens per second", "Padding", "Memory"),
    ]
    loss, held_out = data["figures"][0]["curves"]
    assert len(loss["y"]) == 30 and len(held_out["y"]) == 4 and held_out["heldOut"]
    assert loss["y"][4] == pytest.approx(lines_of(30)[5]["loss"], rel=1e-6)
    assert data["xs"][loss["x"]]["tokens"][:2] == [90, 180]
    assert data["xs"][held_out["x"]]["tokens"] == [0, 900, 1800, 2700]
    assert data["xs"][held_out["x"]]["seconds"][1] == 1.6


def test_planted_markup_in_any_text_is_text(tmp_path: Path) -> None:
    config = {"data": {"train": EVIL, EVIL: EVIL}, EVIL: {EVIL: EVIL}}
    folder = leave_run(
        tmp_path / EVIL.replace("/", "∕"),
        lines=lines_of(20, **{EVIL: 1.0}),
        config=config,
        status=EVIL,
        facts={**FACTS, "loss": EVIL, EVIL: [EVIL]},
        answers=[{"prompt": EVIL, "before": EVIL, "after": EVIL}],
        rank_seconds={EVIL: [1.0, 2.0]},
    )
    folder.environment.write_text(json.dumps({"platform": EVIL, "versions": {EVIL: EVIL}}))
    (folder.checkpoints / "step-000010").mkdir(parents=True)
    run = read_run(folder)
    for runs in ([run], [run, replace(run, name=f"2{EVIL}", settings={})]):
        text = page([replace(shown, why=[EVIL], later=[EVIL]) for shown in runs])
        assert "\x1b" not in text and "\u202e" not in text and "49" not in Elements(text).words.split()
        elements = Elements(text).found
        assert [tag for tag, _ in elements].count("script") == 3 and not [tag for tag, _ in elements if tag == "img"]
        assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
        assert "{{ 7*7 }}" in Elements(text).words
        addresses = [own.get(name) for _, own in elements for name in ("src", "href", "action") if name in own]
        assert addresses == ["#main"]


def test_unknown_figures_and_those_of_pairs_are_drawn(tmp_path: Path) -> None:
    pairs = {f"rewards/{side}": 0.5 for side in ("chosen", "rejected", "margins", "accuracies")}
    held_out = {"step": 10, "eval_rewards/chosen": 1.0, "eval_loss": 1.0, "eval_novelty": 2.0}
    lines = [*lines_of(10, **pairs, novelty=3.0), held_out]
    figures = figures_of([read_run(leave_run(tmp_path / "run", lines=lines))])
    curves = {figure.title: [curve.label for curve in curves] for figure, curves in figures}
    assert curves["Rewards"] == ["chosen", "chosen, held out", "rejected"]
    assert curves["novelty"] == ["novelty", "held out"]


def test_a_page_of_many_long_runs_stays_small(tmp_path: Path) -> None:
    run = read_run(leave_run(tmp_path / "run", lines=lines_of(5000, eval_every=50)))
    assert len(points_of([run])["figures"][0]["curves"][0]["y"]) <= POINTS_OF_A_CURVE
    assert len(page([replace(run, name=f"run {number}") for number in range(12)]).encode()) < 3_000_000


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(4, 60))
def test_ends_and_extremes_of_a_thinned_curve_stay(values: list[float], most: int) -> None:
    curve = np.array(values)
    kept = thin(curve, most)
    assert len(kept) <= max(most, 4) and (np.diff(kept) > 0).all()
    assert kept[0] == 0 and kept[-1] == len(curve) - 1
    assert curve[kept].min() == curve.min() and curve[kept].max() == curve.max()


def test_a_run_without_lines_has_no_script_and_says_why_it_failed(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", lines=[], status=None)
    (folder.logs / "diagnosis.txt").write_text("rank 0 lacks memory\n")
    elements = Elements(page([read_run(folder)]))
    assert "rank 0 lacks memory" in elements.words and "script" not in [tag for tag, _ in elements.found]


def test_several_runs_are_compared(tmp_path: Path) -> None:
    base = {"data": {"train": "chats.jsonl"}, "trainer": {"output_dir": "1"}}
    first = read_run(leave_run(tmp_path / "first", config=base))
    other = {**base, "packing": {"mode": "padding"}, "trainer": {"output_dir": "2"}}
    asked = [{"prompt": "How are you?", "before": "###", "after": "Well."}, {"prompt": "Why?", "after": "So."}]
    second = read_run(leave_run(tmp_path / "second", config=other, answers=asked))
    assert compare_settings([first, second]) == [("packing.mode", ["–", "padding"])]
    after = {text: [entry.get("after") for entry in by_run] for (text, _), by_run in answers([first, second]).items()}
    assert after == {"How are you?": ["Fine.", "Well."], "Why?": [None, "So."]}
    words = Elements(page([first, second])).words
    assert "2 runs" in words and words.count("###") == 1


def test_questions_are_shown_with_their_pictures_and_nothing_else_is_loaded(tmp_path: Path) -> None:
    ours, theirs = (f"data:image/jpeg;base64,{text}" for text in ("AAAA", "/+9="))
    asked = [
        {"prompt": "[picture 3×2] What?", "before": "", "after": f"A {one}", "pictures": pictures, "expected": "A cat."}
        for one, pictures in (
            ("dog", [ours]),
            ("cat", [theirs, "https://example.com/a.jpg", 'data:image/jpeg;base64,"']),
        )
    ]
    elements = Elements(page([read_run(leave_run(tmp_path / "run", answers=asked))]))
    assert [own["src"] for tag, own in elements.found if tag == "img"] == [ours, theirs]
    assert elements.words.count("[picture 3×2] What?") == elements.words.count("A cat.") == 2
    assert "A dog" in elements.words and "example.com" not in elements.words


def test_the_slow_rank_is_named(tmp_path: Path) -> None:
    seconds = {"forward": [0.1, 0.1, 0.2], "backward": [0.2] * 3, "data": [0.0, 0.0, 0.1], "counts": [0.1, 0.1, 0]}
    run = read_run(leave_run(tmp_path / "run", rank_seconds=seconds))
    assert [rank.slow for rank in rank_times(run)] == [False, False, True]
    assert "Slow: rank 2" in Elements(page([run])).words


def test_the_command_writes_into_the_run_folder_or_where_it_is_asked_to(tmp_path: Path) -> None:
    for place in ("a", "x/b", "y/b"):
        leave_run(tmp_path / place)
    for runs, written in ((["a"], "a/report.html"), (["a"], "a/report.html"), (["x/b", "y/b"], "report.html")):
        done = packtrain("report", *runs, folder=tmp_path)
        assert done.returncode == 0 and written in done.stdout and (tmp_path / written).is_file()
    (tmp_path / "link.html").symlink_to("real.html")
    assert packtrain("report", "x/b", "y/b", "-o", "link.html", folder=tmp_path).returncode == 0
    text = (tmp_path / "real.html").read_text()
    assert (tmp_path / "link.html").is_symlink() and text == (tmp_path / "report.html").read_text() and "y/b" in text
    assert not [*tmp_path.rglob("*.partial")]


REFUSED = ("none", "empty", "a -o notes.html", "a -o nowhere/x.html", "a -o empty", "a -o /dev/null")


@pytest.mark.parametrize("arguments", REFUSED)
def test_the_command_refuses_what_is_no_run_and_spares_files_of_others(tmp_path: Path, arguments: str) -> None:
    leave_run(tmp_path / "a")
    (tmp_path / "notes.html").write_text("mine")
    (tmp_path / "empty").mkdir()
    done = packtrain("report", *arguments.split(), folder=tmp_path)
    assert done.returncode == 2 and arguments.split()[-1] in done.stderr
    assert (tmp_path / "notes.html").read_text() == "mine"
