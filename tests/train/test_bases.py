"""Adapters find their base from any folder, and refuse other weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from here import run_here
from huggingface_hub import constants
from peft import LoraConfig, PeftModel, get_peft_model
from running import base_config, train
from safetensors.torch import load_file, save_file
from tiny_served import save_adapters, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from packtrain.config.compose import load_config
from packtrain.config.schema import Model
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import UserError
from packtrain.plan.known_model import check_weights
from packtrain.serve.export import merge
from packtrain.serve.trained import find_trained, load_trained

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


def trained_on(model: str, folder: Path, **groups: Any) -> dict[str, Any]:
    groups["trainer"] = {"max_steps": 1, **groups.get("trainer", {})}
    return {**base_config(folder, **groups), "model": {"path": model}}


def other_weights(base: Path) -> Path:
    """The model in `base` with one weight of the second layer changed."""
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    return base


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and adapters that were trained on it by its relative path."""
    home = tmp_path_factory.mktemp("home")
    save_model(home / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run_here(home, trained_on("base", home, peft={"kind": "lora"}))
    return home


def test_adapters_name_their_base_by_a_path_that_leads_there_from_anywhere(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_weights(save_model(tmp_path / "base"))
    monkeypatch.chdir(tmp_path)
    named = json.loads((home / "run/final/adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == str(home / "base") and named["revision"] is None
    model, _ = load_trained(find_trained(str(home / "run")))
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(home / "base"), home / "run/final")
    assert torch.equal(logits(model), logits(expected))


def test_a_base_of_other_weights_is_refused_by_all_that_loads_adapters(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, moved := tmp_path / "moved")
    file = moved / "run/final/adapter_config.json"
    settings = json.loads(file.read_text()) | {"base_model_name_or_path": str(other_weights(moved / "base"))}
    file.write_text(json.dumps(settings))
    final = str(file.parent)
    for loads in (
        lambda: check_weights(
            load_config(None, [f"model.path={final}", "data.train=rows", "batch.examples_per_step=4"]), gpu=False
        ),
        lambda: load_trained(find_trained(final)),
        lambda: merge(final, tmp_path / "merged", None),
        lambda: run_here(tmp_path, trained_on(final, tmp_path), name="more"),
        lambda: run_here(tmp_path, trained_on(final, tmp_path, peft={"kind": "lora"}), name="on"),
    ):
        with pytest.raises(UserError) as refused:
            loads()
        assert str(home / "base") in str(refused.value) and str(moved / "base") in str(refused.value)
    assert refused.value.exit_code == 2 and not (tmp_path / "merged").exists()


def test_adapters_move_to_another_machine_with_their_base_or_say_what_to_write(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, moved := tmp_path / "moved")
    hidden = home.rename(home.with_name("gone"))
    try:
        model, _ = load_trained(find_trained(str(moved / "run")))
        assert find_trained(str(moved / "run")).base == str(moved / "base") and logits(model).isfinite().all()
        shutil.rmtree(moved / "base")
        with pytest.raises(UserError) as refused:
            find_trained(str(moved / "run"))
    finally:
        hidden.rename(home)
    (problem,) = refused.value.problems
    assert (
        str(home / "base") in problem.what
        and problem.where == f"{moved}/run/final/adapter_config.json: base_model_name_or_path"
    )


def test_a_base_on_the_hub_stays_its_name_with_the_commit(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--model"
    shutil.copytree(home / "base", repository / "snapshots" / commit)
    (repository / "snapshots" / commit / "LICENSE").write_text("free")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("packtrain.data.tokens.pretrained.is_reachable", lambda: False)
    run = run_here(tmp_path, trained_on("owner/model", tmp_path, peft={"kind": "lora", "merge": True}))
    settings = json.loads((run.folder / "final/adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("owner/model", commit)
    assert (run.folder / "final-merged/LICENSE").read_text() == "free"
    (repository / "refs/main").write_text("f" * 40)  # which moves on
    load_trained(find_trained(str(run.folder)))


def test_adapters_without_a_tokenizer_have_that_of_their_base(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "run/final", bare := tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert len(load_tokenizer(Model(path=str(bare)))) == len(AutoTokenizer.from_pretrained(home / "base"))
    run_here(tmp_path, trained_on(str(bare), tmp_path, peft={"kind": "lora"}))


def test_weights_that_the_adapters_do_not_make_are_an_error(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "run/final", made := tmp_path / "made")
    weights = load_file(made / "adapter_model.safetensors")
    name = next(iter(weights)).replace("layers.0", "layers.7")
    save_file({**weights, name: torch.ones(2, 2)}, made / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 weights in their file are not of these adapters: .*layers\.7"):
        load_trained(find_trained(str(made)))


GROWN: dict[str, tuple[bool, dict[str, Any]]] = {
    "embeddings beside": (False, {}),
    "tied embeddings beside": (True, {}),
    "tied and adapted": (True, {"target_modules": ["q_proj", "embed_tokens"]}),
    "adapted, without a head": (False, {"target_modules": ["q_proj", "embed_tokens"]}),
    "trained in full": (False, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied and trained in full": (True, {"modules_to_save": ["embed_tokens", "lm_head"]}),
}


@pytest.mark.sample("embeddings beside", "tied and adapted", "adapted, without a head")
@pytest.mark.parametrize(("tied", "lora"), GROWN.values(), ids=GROWN)
def test_adapters_whose_vocabulary_has_grown_are_chatted_with_merged_and_trained_on(
    tied: bool, lora: dict[str, Any], tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", tie_word_embeddings=tied)
    words = AutoTokenizer.from_pretrained(base)
    words.add_tokens(["<new>", "<newer>"])
    torch.manual_seed(1)
    grown: Any = AutoModelForCausalLM.from_pretrained(base)
    grown.resize_token_embeddings(len(words))
    adapted: Any = get_peft_model(
        grown, LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **lora})
    )
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(place := tmp_path / "adapters")
    words.save_pretrained(place)
    if lora.get("target_modules") and not tied:  # PEFT saves no head then
        with pytest.raises(UserError, match="no output head"):
            load_trained(find_trained(str(place)))
        return
    expected = logits(adapted)
    assert expected.shape[-1] == len(words)
    model, loaded = load_trained(find_trained(str(place)))
    assert torch.equal(logits(model), expected) and len(loaded) == len(words)
    merge(str(place), tmp_path / "merged", None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == len(words)
    assert (logits(merged) - expected).abs().max() <= 1e-5 * expected.abs().max()
    on = {"kind": "lora", "r": 4, "alpha": 8, "target_modules": lora.get("target_modules", ["q_proj"])}
    if lora.get("target_modules") or (tied and lora):
        return
    still: Any = {"optim": {"learning_rate": 0.0}, "trainer": {"checkpoint_every": 1}}
    more = run_here(tmp_path, trained_on(str(place), tmp_path, peft=on, **still))
    for made in (more.folder, more.folder / "checkpoints/step-000001"):
        again, _ = load_trained(find_trained(str(made)))
        assert torch.equal(logits(again), expected)


CAME = {
    "preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "video_preprocessor_config.json": "{}",
    "special_tokens_map.json": "{}",
    "tokenizer.model": "pieces",
    "modeling_mine.py": "",
    "LICENSE": "free",
    "USE_POLICY.md": "well",
}
STAYS = {
    "README.md": "",
    "model.onnx": "",
    "rust_model.ot": "",
    "64.tflite": "",
    "model.ckpt.data-00000-of-00001": "",
    "all_results.json": "{}",
    "optimizer.pt": "",
    "pytorch_model.bin.index.json": "",
    ".gitattributes": "",
    "data.jsonl": "",
}


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("furnished") / "base")
    for name, text in {**CAME, **STAYS}.items():
        (folder / name).write_text(text)
    return folder


def test_files_that_came_with_the_model_go_along(furnished: Path, tmp_path: Path) -> None:
    run = run_here(tmp_path, trained_on(str(furnished), tmp_path))
    names = {file.name for file in (run.folder / "final").iterdir()}
    assert CAME.keys() <= names and not STAYS.keys() & names
    assert (run.folder / "final/tokenizer.model").read_text() == "pieces"
    adapters = save_adapters(tmp_path / "adapters", furnished)
    merge(str(adapters), tmp_path / "merged", None)
    assert CAME.keys() <= {file.name for file in (tmp_path / "merged").iterdir()}


def test_files_of_another_tokenizer_come_from_it(furnished: Path, tmp_path: Path) -> None:
    words = AutoTokenizer.from_pretrained(furnished)
    words.save_pretrained(own := tmp_path / "words")
    (own / "vocab.txt").write_text("own")
    (own / "LICENSE").write_text("another")
    config = trained_on(str(furnished), tmp_path)
    config["model"]["tokenizer"] = str(own)
    final = run_here(tmp_path, config).folder / "final"
    assert (final / "vocab.txt").exists() and not (final / "tokenizer.model").exists()
    assert (final / "LICENSE").read_text() == "free" and (final / "preprocessor_config.json").exists()


@pytest.mark.exhaustive
def test_a_grown_vocabulary_is_saved_again_where_no_process_has_the_whole_model(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    words = AutoTokenizer.from_pretrained(base)
    words.add_tokens(["<new>"])
    grown: Any = AutoModelForCausalLM.from_pretrained(base)
    grown.resize_token_embeddings(len(words))
    adapted: Any = get_peft_model(grown, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(place := tmp_path / "adapters")
    words.save_pretrained(place)
    on = {"kind": "lora", "r": 4, "alpha": 8, "target_modules": ["q_proj"], "merge": True}
    config = trained_on(str(place), tmp_path, peft=on, optim={"learning_rate": 0.0})
    run = train(tmp_path, config, "strategy=fsdp2", processes=2)
    for made in ("final", "final-merged"):
        model, _ = load_trained(find_trained(str(run.folder / made)))
        assert torch.equal(logits(model), logits(adapted)), made
