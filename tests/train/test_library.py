"""The public library as strangers use it: the page's examples, and packed rows of an attached model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_models import gradient, off, tiny_model

from packtrain import PackedCollator, Segments, attach
from packtrain.config.schema import Model
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import UserError

PAGE = Path(__file__).resolve().parents[2] / "docs/library.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny new models for those of the hub."""
    tokenizer = load_tokenizer(Model(tokenizer="quickstart"))
    made = tiny_model("llama", vocab_size=len(tokenizer))  # type: ignore[arg-type]
    made.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    of_hub = {"Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M"}
    monkeypatch.chdir(tmp_path)
    prompts = Dataset.from_dict({"prompt": ["What is a young cow called? " * 4] * 8})
    names: dict[str, Any] = {"documents": tokens(30, 12, 7, 25), "prompts": prompts}
    text = "\n".join(BLOCKS)
    assert len(BLOCKS) == 4 and all(name in text for name in of_hub)
    for name in of_hub:
        text = text.replace(name, str(tmp_path / "model"))
    text = text.replace('output_dir="grpo",', 'output_dir="grpo", max_completion_length=8, use_cpu=True,')
    text = text.replace('TrainingArguments("run",', 'TrainingArguments("run", use_cpu=True, max_steps=1,')
    exec(compile(text, str(PAGE), "exec"), names)
    assert names["handle"].stats.calls > 0 and names["logits"].shape[:2] == (1, 14)


def tokens(*lengths: int) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 97, (length,), generator=drawn).tolist()} for length in lengths]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3_text", "bloom", "mamba"])
def test_a_packed_row_of_an_attached_model_trains_what_its_documents_alone_do(family: str) -> None:
    model = tiny_model(family)
    data = tokens(9, 1, 21, 14)
    row, alone = PackedCollator()(data), [PackedCollator(return_segments=False)([one]) for one in data]
    trained = [int((one["labels"][:, 1:] != -100).sum()) for one in alone]
    expected = sum(model(**one).loss * count for one, count in zip(alone, trained, strict=True) if count) / sum(trained)
    expected.backward()
    gradients = gradient(model)
    model.zero_grad()
    handle = attach(model)
    loss = model(**row).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and off(gradient(model), gradients) <= 1e-4
    assert not handle.stats.unchanged


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba"])
def test_a_row_counts_its_own_positions_and_is_refused_with_other_tokens(family: str) -> None:
    model = tiny_model(family)
    attach(model)
    row = Segments((9, 14))
    ids = torch.randint(3, 97, (1, 23), generator=torch.Generator().manual_seed(1))
    alone = torch.cat([model(one).logits for one in ids.split((9, 14), dim=1)], dim=1)
    found = model(input_ids=ids, segments=row).logits
    assert (found - alone).abs().max() <= 1e-5 * alone.abs().max()
    for wrong in (ids[:, :20], ids.repeat(2, 1)):
        with pytest.raises(UserError, match=r"segments are of a row \[1, 23\]"):
            model(input_ids=wrong, segments=row)
