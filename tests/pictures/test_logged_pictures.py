"""What a run on pictures leaves in its folder: facts, the proof with pictures, and thumbnails for the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyes import encoded, picture, said, shown
from here import run_here
from running import config_on, write_jsonl
from test_trl_pictures import seeing_checkpoint

from packtrain.inspect.rendering import data_section
from packtrain.run_folder import RunFolder


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def test_a_run_tells_its_pictures_and_their_proof(tmp_path: Path) -> None:
    seeing_checkpoint(tmp_path / "model", "qwen2_vl")
    for number, size in enumerate(((56, 84), (112, 56))):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(*size, seed=number)))
    rows = [{"messages": [shown(*names), said()]} for names in (["0.png"], ["0.png", "1.png"], [], ["1.png"])]
    write_jsonl(tmp_path / "data.jsonl", rows)
    trainer = {"max_steps": 1, "log_every": 1}
    run = run_here(tmp_path, config_on(tmp_path / "model", tmp_path, trainer=trainer))
    summary, counted = run.summary, run.summary["data"]["pictures"]
    assert (counted["number"], counted["different"], counted["documents"]) == (4, 2, 3)
    assert counted["tokens"] == 2 * 6 + 2 * 8
    proof = summary["verify_pictures"]
    assert (proof["verdict"], proof["backend"]) == ("exact", summary["verify"]["backend"])
    assert max(proof["moved_before"], proof["moved_after"], proof["alone"]) <= proof["tolerance"] < proof["control"]
    fact = read(RunFolder(run.folder).facts)["facts"]["pictures"]
    assert fact.startswith("4 pictures (2 different) in 3 documents, 28 tokens") and "towers frozen; exact" in fact
    spans = [
        span
        for example in read(RunFolder(run.folder).data)["shown"]
        for part in example["parts"]
        for span in part["spans"]
    ]
    assert all("image" in span["picture"] for span in spans if "picture" in span)
    assert (
        data_section(read(RunFolder(run.folder).data)).count('<img class="data-picture" src="data:image/jpeg;base64,')
        == 4
    )
