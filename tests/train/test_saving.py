"""No training is lost at its end: what the library refuses to save is found before step 1, and weights are written first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from here import run_here
from running import Run, base_config, config_on, train
from safetensors.torch import load_file
from tiny_models import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase

from packtrain.errors import UserError
from packtrain.model.save import mend_generation_config, try_saving

AS_LLAMA_2 = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}
SHORT: dict[str, Any] = {"max_steps": 2}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as one downloads it."""
    return save_model(tmp_path_factory.mktemp("model"), pad_token_id=0, bos_token_id=None, eos_token_id=2)


def starting_from(model: Path, folder: Path, generation: dict | str, **groups: dict) -> dict:
    """A config that trains `model`, whose generation_config.json says `generation`."""
    text = generation if isinstance(generation, str) else json.dumps(generation)
    (model / "generation_config.json").write_text(text)
    return config_on(model, folder, **{"trainer": SHORT, **groups})


def generation(folder: Path) -> dict:
    """What a folder says of generation, after it was loaded as users load it."""
    AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return json.loads((folder / "generation_config.json").read_text())


def said(run: Run) -> list[str]:
    return [line for line in run.log.splitlines() if "generation_config.json" in line]


@pytest.mark.sample("merged")
@pytest.mark.parametrize(
    ("overrides", "places", "processes"),
    [
        ([], ["final", "checkpoints/step-000001"], 1),
        (["peft=lora", "peft.merge=true"], ["final-merged"], 1),
        (["strategy=fsdp2", "peft=lora", "peft.merge=true"], ["final-merged"], 2),
    ],
    ids=["full", "merged", "merged-of-shards"],
)
def test_sampling_settings_that_the_library_refuses_are_saved_with_sampling_on(
    pretrained: Path, tmp_path: Path, overrides: list[str], places: list[str], processes: int
) -> None:
    config = starting_from(pretrained, tmp_path, AS_LLAMA_2, trainer={**SHORT, "checkpoint_every": 1})
    run = train(tmp_path, config, *overrides, processes=processes)
    for place in places:
        assert {**AS_LLAMA_2, "do_sample": True}.items() <= generation(run.folder / place).items()
    (line,) = said(run)
    assert "do_sample: true" in line and "`0.6`" in line


@pytest.mark.sample(without=("given1-kept1-as it came",))
@pytest.mark.parametrize(
    ("given", "kept", "words"),
    [
        ({"early_stopping": True, "temperature": 0.7}, {"early_stopping": True, "temperature": 0.7}, "as it came"),
        ({"temperature": 0.0}, {"temperature": 0.0}, "as it came"),
        ({"top_k": 5, "of_ours": [1]}, {"top_k": 5, "of_ours": [1], "do_sample": True}, "with do_sample: true"),
        ({"pad_token_id": -1, "of_ours": 1}, {"pad_token_id": 0, "of_ours": 1}, ""),  # transformers sets it itself
    ],
)
def test_what_else_a_generation_config_may_say_costs_nothing(
    pretrained: Path, tmp_path: Path, given: dict | str, kept: dict, words: str
) -> None:
    run = run_here(tmp_path, starting_from(pretrained, tmp_path, given))
    found = generation(run.folder / "final")
    assert kept.items() <= found.items() and ("do_sample" in found) == ("do_sample" in kept)
    assert (words in said(run)[0]) if words else not said(run)


@pytest.mark.parametrize("given", ["[1]", '"sampling"', "null"])
def test_a_generation_config_of_other_values_is_refused_before_training(
    pretrained: Path, tmp_path: Path, given: str
) -> None:
    with pytest.raises(UserError):
        run_here(tmp_path, starting_from(pretrained, tmp_path, given))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("kind", "fails_in"),
    [
        (PreTrainedTokenizerBase, "packtrain-saving-"),
        (PreTrainedTokenizerBase, ".final"),
        (LlamaConfig, ".final.partial"),
    ],
)
def test_a_tokenizer_or_a_config_that_cannot_be_saved_costs_no_training(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, fails_in: str
) -> None:
    """It is found before step 1; where it shows at the end alone, weights are there."""
    save = kind.save_pretrained

    def refuse(self: Any, folder: Any, **given: Any) -> Any:
        if Path(folder).name.startswith(fails_in):
            raise TypeError("it has a lambda")
        return save(self, folder, **given)

    monkeypatch.setattr(kind, "save_pretrained", refuse)
    with pytest.raises(UserError, match="it has a lambda"):
        run_here(tmp_path, starting_from(pretrained, tmp_path, {}))
    monkeypatch.undo()
    final = tmp_path / "run" / "final"
    assert (
        (tmp_path / "run" / "metrics.jsonl").exists() == (final / "model.safetensors").exists() == ("final" in fails_in)
    )
    if final.exists():
        assert load_file(final / "model.safetensors").keys() == load_file(pretrained / "model.safetensors").keys()
        assert kind == LlamaConfig or AutoModelForCausalLM.from_pretrained(final)
        assert (final / "config.json").exists() == (kind != LlamaConfig)


def test_a_model_that_cannot_generate_is_saved(pretrained: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(pretrained)
    model.generation_config, model.can_generate = None, lambda: False
    words = AutoTokenizer.from_pretrained(pretrained)
    assert mend_generation_config(model, words) == ""
    try_saving(model, words, whole=True)


def test_adapters_of_a_model_whose_embeddings_are_tied_are_saved_from_shards(tmp_path: Path) -> None:
    """torch leaves the second name of a frozen weight that has two among the trained ones."""
    config = base_config(tmp_path, peft={"kind": "lora"}, trainer={**SHORT, "checkpoint_every": 1})
    run = train(tmp_path, config, "strategy=fsdp2", "model.config.tie_word_embeddings=true", processes=2)
    (file,) = run.folder.glob("final*/adapter_model.safetensors")
    assert all("lora_" in name for name in load_file(file))
