"""`packtrain merge`: a whole model says what the adapted one says, wherever its adapters are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from running import packtrain
from tiny_models import save_adapters, save_model, save_run
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from packtrain.errors import UserError
from packtrain.serve.export import merge

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
ADAPTERS: dict[str, dict[str, Any]] = {
    "layers": {},
    "tied embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "tied embeddings, trained as one": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "output head": {"target_modules": ["q_proj", "lm_head"]},
    "a head trained in full": {"modules_to_save": ["lm_head"]},
    "embeddings trained in full": {"modules_to_save": ["embed_tokens"]},
    "embeddings and head trained in full": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits.float()


def adapted(base: Path, adapters: Path) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters))


@pytest.mark.sample(
    without=(
        "a head trained in full-tied",
        "embeddings and head trained in full-untied",
        "embeddings trained in full-untied",
        "layers-tied",
        "output head-untied",
        "tied embeddings-untied",
    )
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("lora", ADAPTERS.values(), ids=ADAPTERS)
def test_a_merged_model_equals_the_adapted_one(lora: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tie_word_embeddings=tied)
    adapters = save_adapters(tmp_path / "adapters", base, **lora)
    done = packtrain("merge", str(adapters))
    assert done.stdout == f"{tmp_path / 'adapters-merged'}\n"
    expected, merged = adapted(base, adapters), AutoModelForCausalLM.from_pretrained(tmp_path / "adapters-merged")
    assert (logits(merged) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (logits(AutoModelForCausalLM.from_pretrained(base)) - expected).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "adapters-merged").chat_template


def test_a_run_is_merged_beside_its_adapters_in_the_format_that_is_asked_for(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    run = save_run(tmp_path / "run", save_adapters(tmp_path / "adapters", base))
    packtrain("merge", str(run), "--dtype", "bfloat16")
    merged = AutoModelForCausalLM.from_pretrained(run / "final-merged", dtype="auto")
    expected = adapted(base, run / "final")
    assert merged.dtype == torch.bfloat16
    assert (logits(merged) - expected).norm() <= 0.05 * expected.norm()


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = save_adapters(tmp_path / "adapters", save_model(tmp_path / "base"))

    def save(model: Any, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").touch()
        raise ValueError("no saving")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="no saving"):
        merge(str(adapters), None, None)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("base",), ("this is a whole model", "adapter_config.json")),
        (("adapters", "-o", "base"), ("there is something already", "--output")),
        (("adapters", "-o", "base/config.json/x"), ("cannot be made", "--output")),
        (("./nowhere",), ("there is no ./nowhere",)),
        (("empty",), ("neither a config.json nor an adapter_config.json", "trainer.output_dir")),
        (("begun",), ("no final/ yet",)),
    ],
)
def test_what_cannot_be_merged_is_refused(given: tuple[str, ...], says: tuple[str, ...], tmp_path: Path) -> None:
    save_adapters(tmp_path / "adapters", save_model(tmp_path / "base"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / ".packtrain").touch()
    before = sorted(tmp_path.rglob("*"))
    done = packtrain("merge", *given, expect=2, cwd=tmp_path)
    assert "Traceback" not in done.stderr and done.stdout == ""
    for words in says:
        assert words in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
