"""The examples of docs/pictures.md are read without a change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from eyes import encoded, make_processor, picture
from prepared import write

from packtrain.config.compose import load_config
from packtrain.config.schema import Data, Model
from packtrain.data.prepare import prepare
from packtrain.data.tokens.pretrained import load_tokenizer

PAGE = (Path(__file__).resolve().parents[2] / "docs/pictures.md").read_text()
ROWS = [json.loads(line) for line in re.findall(r"`(\{\"(?:messages|prompt)\".*\})` \|$", PAGE, re.MULTILINE)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(path=make_processor(tmp_path_factory.mktemp("model"), "qwen2_vl"))


@pytest.mark.parametrize("number", range(6))
def test_each_form_of_a_row_gives_one_picture_of_the_prompt(number: int, model: Model, tmp_path: Path) -> None:
    assert len(ROWS) == 6
    (tmp_path / "cat.png").write_bytes(encoded(picture(40, 60)))
    row = json.loads(json.dumps(ROWS[number]).replace("https://example.com", tmp_path.as_uri()))
    path = write(tmp_path / "train.jsonl", row)
    verb = "dpo" if "chosen" in row else "sft"
    [found] = prepare(Data(train=path, cache_dir=str(tmp_path)), load_tokenizer(model), verb, seed=0, model=model).train
    for document in (found.chosen, found.rejected) if verb == "dpo" else (found,):
        [shown] = document.pictures
        assert (shown.height, shown.width) == (40, 60)
        assert not document.loss_mask[: shown.end].any() and document.loss_mask[shown.end :].any()


def test_all_forms_but_the_pair_have_the_same_tokens(model: Model, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(encoded(picture(40, 60)))
    rows = [json.loads(json.dumps(row).replace("https://example.com", tmp_path.as_uri())) for row in ROWS[:5]]
    made = []
    for number, row in enumerate(rows):
        data = Data(train=write(tmp_path / f"{number}.jsonl", row), cache_dir=str(tmp_path))
        [found] = prepare(data, load_tokenizer(model), "sft", seed=0, model=model).train
        made.append((found.input_ids.tolist(), found.loss_mask.tolist()))
    assert all(one == made[0] for one in made)


def test_the_settings_of_the_page_are_keys(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        base = {"model": {"path": "m/m"}, "data": {"train": "o/d", "eval": 0.1}}
        given = yaml.safe_load(block)
        merged = {**base, **{group: {**base.get(group, {}), **values} for group, values in given.items()}}
        (tmp_path / "ours.yaml").write_text(yaml.safe_dump(merged))
        load_config(str(tmp_path / "ours.yaml"), ["batch.examples_per_step=8"])
