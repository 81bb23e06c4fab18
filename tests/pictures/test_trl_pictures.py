"""TRL's own vision collator on the same rows: the same losses and gradients, by our packed rows and by `attach`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from eyes import make_processor, picture
from tiny_seeing import FAMILIES
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from trl_trainers import settings as of_trainer

from packtrain import attach
from packtrain.attention.backends import attending_by
from packtrain.config.schema import Data, Model
from packtrain.data.pictures.processor import PictureProcessor, PictureReader, load_processor
from packtrain.data.prepare import prepare
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import CheckFailed
from packtrain.library.seeing import row_with_pictures
from packtrain.model.forward import add_loss_sum
from packtrain.packing.collate import IGNORE, collate_flat
from packtrain.packing.pictures import Sight

SEEN = ([(56, 84)], [(112, 56), (40, 60)], [], [(84, 84)])
"""Heights and widths of the pictures of each row."""
TOKENS = {"qwen2_vl": "<|image_pad|>", "qwen3_vl": "<|image_pad|>", "llava": "<image>", "gemma3": "<image_soft_token>"}


def seeing_checkpoint(folder: Path, name: str) -> PreTrainedModel:
    """A tiny model whose ids are those of its processor."""
    make_processor(folder, name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings: dict[str, Any] = copy.deepcopy(FAMILIES["qwen2_5_vl" if name == "qwen2_vl" else name].config)
    settings |= {"mm_tokens_per_image": 4} if name == "gemma3" else {}  # as its processor writes
    settings["text_config"] |= {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    config: Any = CONFIG_MAPPING["qwen2_5_vl" if name == "qwen2_vl" else name](**settings)
    config.image_token_id = tokenizer.convert_tokens_to_ids(TOKENS[name])
    torch.manual_seed(0)
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.15)
    model.save_pretrained(folder)
    return model


def rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of TRL's form; the pictures are in files for packtrain and in memory for TRL."""
    made = []
    for number, sizes in enumerate(SEEN):
        images = [picture(*size, seed=10 * number + at) for at, size in enumerate(sizes)]
        for at, image in enumerate(images):
            image.save(folder / f"{number}-{at}.png")
        asked = [*({"type": "image"} for _ in images), {"type": "text", "text": f"what is number {number}"}]
        answer = [{"type": "text", "text": "a picture " * (number + 1) + "it is"}]
        prompt, completion = [{"role": "user", "content": asked}], [{"role": "assistant", "content": answer}]
        made.append({"prompt": prompt, "completion": completion, "images": images})
    names = [[f"{number}-{at}.png" for at in range(len(sizes))] for number, sizes in enumerate(SEEN)]
    plain = [{**row, "images": own} for row, own in zip(made, names, strict=True)]
    for row in plain:
        row["completion"] = [{"role": "assistant", "content": row["completion"][0]["content"][0]["text"]}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    return made


def gradients(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat(
        [torch.zeros(one.numel()) if one.grad is None else one.grad.flatten() for one in model.parameters()]
    )


@pytest.mark.parametrize("name", TOKENS)
def test_trls_vision_collator_on_the_same_rows(name: str, tmp_path: Path) -> None:
    model, given = seeing_checkpoint(tmp_path / "model", name), rows(tmp_path)
    settings = Model(path=str(tmp_path / "model"))
    tokenizer = load_tokenizer(settings)
    collate = DataCollatorForVisionLanguageModeling(load_processor(settings, tokenizer), completion_only_loss=True)
    batch: dict[str, Any] = dict(collate(copy.deepcopy(given)))
    # TRL trains the line break that a template writes after the end of an answer
    ends = torch.isin(batch["input_ids"], torch.tensor(tokenizer.encode("\n", add_special_tokens=False)))
    batch["labels"][ends & (torch.arange(ends.shape[1]) >= batch["attention_mask"].sum(1, keepdim=True) - 1)] = IGNORE
    trained = int((batch["labels"] != IGNORE).sum())
    theirs = model(**batch, use_cache=False).loss
    theirs.backward()
    expected = gradients(model)
    assert expected.norm() > 0

    model.zero_grad()
    handle = attach(model)
    attached = model(**batch, use_cache=False).loss
    attached.backward()
    assert handle.stats.calls == 1 and not handle.stats.unchanged
    assert attached.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert (gradients(model) - expected).norm() <= 1e-5 * expected.norm()
    handle.detach()

    data = prepare(
        Data(train=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path)), tokenizer, "sft", seed=0, model=settings
    )
    documents: Any = [data.train[number] for number in range(len(given))]
    for document, ids, real in zip(documents, batch["input_ids"], batch["attention_mask"], strict=True):
        assert document.input_ids.tolist() == ids[real == 1].tolist()
    processor = PictureProcessor(settings)
    sight = Sight.of(model, PictureReader(processor), processor.tokens)
    model.zero_grad()
    add_loss_sum(model)
    with attending_by(model, "segmented"):
        ours = model(**collate_flat(documents, sight), loss_sum=True) / trained
        ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert (gradients(model) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.exhaustive)])
def test_trls_trainer_logs_the_same_losses_attached(name: str, tmp_path: Path) -> None:
    seeing_checkpoint(tmp_path / "model", name)
    settings = Model(path=str(tmp_path / "model"))
    processor = load_processor(settings, load_tokenizer(settings))
    data = Dataset.from_list(rows(tmp_path) * 3)

    def logged(attached: bool) -> list[list[float]]:
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
        args = SFTConfig(**of_trainer(tmp_path, per_device_train_batch_size=4, max_steps=3), max_length=None)
        trainer = SFTTrainer(model, args, train_dataset=data, processing_class=processor)
        handle = attach(trainer) if attached else None
        trainer.train()
        assert not handle or (handle.stats.calls == 3 and not handle.stats.unchanged)
        return [[line["loss"], line["grad_norm"]] for line in trainer.state.log_history if "loss" in line]

    assert np.array(logged(True)) == pytest.approx(np.array(logged(False)), rel=1e-5)


def test_attach_finds_pixels_out_of_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row with pictures is compared with the padded call."""
    model, given = seeing_checkpoint(tmp_path / "model", "qwen2_vl"), rows(tmp_path)
    settings = Model(path=str(tmp_path / "model"))
    collate = DataCollatorForVisionLanguageModeling(load_processor(settings, load_tokenizer(settings)))
    batch: dict[str, Any] = dict(collate([{"messages": row["prompt"] + row["completion"], **row} for row in given]))
    make = row_with_pictures

    def turned_round(*of_call: Any) -> dict[str, Any]:
        row = make(*of_call)
        return {**row, "pixel_values": row["pixel_values"].flip(0)}

    monkeypatch.setattr("packtrain.library.attach.row_with_pictures", turned_round)
    handle = attach(model)
    with pytest.raises(CheckFailed, match="differs from the padded call"):
        model(**batch, use_cache=False)
    handle.detach()
