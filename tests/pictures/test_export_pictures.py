"""`packtrain export` of models that see keeps architecture, names and towers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from eyes import picture
from here import loaded, train_here
from matrix import ROWS
from running import config_on, write_jsonl
from safetensors.torch import load_file
from test_runs_with_pictures import seeing
from test_trl_pictures import seeing_checkpoint
from transformers import AutoModelForImageTextToText

from packtrain.serve.export import convert, export, give_to_ollama, model_card
from packtrain.serve.trained import find_trained

FILES = ("preprocessor_config.json", "processor_config.json", "chat_template.jinja", "tokenizer.json")
CONVERTER = """
import pathlib, sys
if "--mmproj" in sys.argv and "refuse" in sys.argv:
    sys.exit("Model is not supported")
pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1]).write_text("mmproj" if "--mmproj" in sys.argv else "model")
"""


@pytest.mark.parametrize(("name", "peft"), [("qwen3_vl", "lora"), ("llava", "lora"), ("qwen3_vl", "none")])
def test_what_is_exported_keeps_towers_names_and_files(name: str, peft: str, tmp_path: Path) -> None:
    start = tmp_path / "model"
    seeing_checkpoint(start, name)
    picture(56, 84).save(tmp_path / "first.png")
    rows = write_jsonl(tmp_path / "rows.jsonl", seeing(ROWS["sft"][0])[3:9])
    config = config_on(start, tmp_path, data={"train": str(rows)}, trainer={"max_steps": 2})
    run = train_here(loaded(tmp_path, config, f"peft={peft}"), tmp_path / "run").folder
    assert "pipeline_tag: image-text-to-text" in model_card(find_trained(str(run)))
    place = run / "final"
    if peft == "lora":
        (said,) = export(str(run), "merged", name=None, public=False, output=None, converter=None, dtype=None)
        place = Path(said)
    before, after = (load_file(folder / "model.safetensors") for folder in (start, place))
    assert before.keys() == after.keys()
    changed = {one for one, weight in before.items() if not torch.equal(weight, after[one])}
    assert changed and not [one for one in changed if re.search("visual|vision|projector", one)]
    configs = [json.loads((folder / "config.json").read_text()) for folder in (start, place)]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    assert all((place / file).read_bytes() == (start / file).read_bytes() for file in FILES)
    model, found = AutoModelForImageTextToText.from_pretrained(place, output_loading_info=True)
    assert type(model).__name__ == configs[0]["architectures"][0] and not any(found.values())


@pytest.mark.parametrize("refuses", [False, True])
def test_llama_cpp_gets_the_tower_in_a_file_of_its_own(refuses: bool, tmp_path: Path, capsys, monkeypatch) -> None:
    seeing_checkpoint(tmp_path / "model", "llava")
    (tmp_path / "convert.py").write_text(CONVERTER)
    monkeypatch.setenv("PATH", "")
    program = [sys.executable, str(tmp_path / "convert.py"), *(["refuse"] if refuses else [])]
    file = convert(program, tmp_path / "model", tmp_path / "gguf", "auto")
    give_to_ollama(str(tmp_path / "model"), file, "sees")
    parts = re.findall("FROM ./(.*)", (tmp_path / "gguf" / "Modelfile").read_text())
    assert parts == ["model.gguf"] + ["mmproj.gguf"] * (not refuses)
    assert [(tmp_path / "gguf" / part).read_text() for part in parts] == ["model", "mmproj"][: len(parts)]
    assert ("Model is not supported" in capsys.readouterr().err) == refuses
