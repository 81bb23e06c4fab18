"""The report's section on documents: rows of the ledger and of spikes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.report.page import page
from packtrain.report.run_record import read_run
from packtrain.run_folder import RunFolder
from tests.unit.report.run_folders import leave_run

SECRET = "hf_AbCdEfGhIjKlMnOp"
EVIL = f"<script>alert(1)</script> \x1b[31m {SECRET} "


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Two passes over four rows: the second is hard, the fourth is forgotten."""
    turns = [{"role": "user", "content": f"question {n}"} for n in range(1, 5)]
    rows = [{"messages": [turn, {"role": "assistant", "content": EVIL + "x" * 900 + "end"}]} for turn in turns]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    losses = [(3.0, 0.1), (3.0, 2.9), (3.0, 0.1), (0.2, 2.5)]
    folder = leave_run(tmp_path / "run")
    lines = [
        {"step": step + 1, "document": at, "row": f"{tmp_path}/chats.jsonl:{at + 1}", "tokens": 3, "loss": own[step]}
        for step in (0, 1)
        for at, own in enumerate(losses)
    ]
    folder.ledger.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def tables(folder: RunFolder) -> dict[str, list[dict[str, Any]]]:
    documents = read_run(folder).documents
    assert documents is not None
    return {table["title"]: table["rows"] for table in documents["tables"]}


def test_rows_are_there_with_losses_and_short_harmless_texts(folder: RunFolder) -> None:
    found = tables(folder)
    numbers = {title: [row["row"].rpartition(":")[2] for row in rows] for title, rows in found.items()}
    assert [*found] == ["Hardest", "Never learned", "Most forgotten", "Easiest"]
    assert numbers["Hardest"][0] == "2" == numbers["Never learned"][0] and numbers["Most forgotten"] == ["4"]
    text = found["Hardest"][0]["text"]
    assert "question 2" in text and text.endswith("end") and len(text) < 400
    assert SECRET not in text and "␛" in text
    html = page([read_run(folder)])
    assert "Which documents hurt" in html and "3 → 2.900" in html
    assert "<script>alert" not in html and SECRET not in html and "Margin" not in html


def test_rows_whose_file_is_gone_have_their_place_alone_and_pairs_their_margin(folder: RunFolder) -> None:
    (folder.root.parent / "chats.jsonl").unlink()
    folder.ledger.write_text(folder.ledger.read_text().replace('"tokens": 3', '"tokens": 3, "margin": -0.75'))
    assert {row["text"] for rows in tables(folder).values() for row in rows} == {""}
    html = page([read_run(folder)])
    assert "Margin" in html and "-0.7500" in html


def test_the_rows_of_spikes_are_sorted_by_loss_with_or_without_a_ledger(folder: RunFolder) -> None:
    place = f"{folder.root.parent}/chats.jsonl"
    documents = [{"place": f"{place}:{n}", "loss": loss} for n, loss in ((1, 2.0), (2, 9.5), (3, "nan"), (4, None))]
    spike = {"step": 7, "action": "skip", "why": "the loss is 9", "documents": documents}
    folder.spikes.write_text(f'{json.dumps(spike)}\n{{"step": 8, "docu\n')
    folder.ledger.unlink()
    found = tables(folder)
    assert [*found] == ["Spike at step 7"]
    assert [row["row"][-1] for row in found["Spike at step 7"]] == ["3", "4", "2", "1"]
    assert "question 3" in found["Spike at step 7"][0]["text"]
    assert "the loss is 9" in page([read_run(folder)])


def test_without_a_ledger_or_with_a_torn_one_the_report_has_no_section(folder: RunFolder) -> None:
    for text in ('{"step": 1, "docum', "", None):
        folder.ledger.unlink() if text is None else folder.ledger.write_text(text)
        assert read_run(folder).documents is None and "Which documents hurt" not in page([read_run(folder)])


def test_several_runs_have_a_section_each(folder: RunFolder) -> None:
    other = leave_run(folder.root.parent / "other")
    assert page([read_run(folder), read_run(other)]).count("Which documents hurt") == 1
    other.ledger.write_text(folder.ledger.read_text())
    assert page([read_run(folder), read_run(other)]).count("Which documents hurt") == 2
