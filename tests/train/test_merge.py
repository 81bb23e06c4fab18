"""Adapters: they find their base from any folder and refuse other weights, and a merged model says what the adapted one says."""

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
from running import config_on, packtrain, train
from safetensors.torch import load_file, save_file
from tiny_models import save_adapters, save_model, save_run, with_files
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from packtrain.config.compose import load_config
from packtrain.config.schema import Model
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import UserError
from packtrain.plan.known_model import check_weights
from packtrain.serve.export import merge
from packtrain.serve.trained import find_trained, load_trained

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
ADAPTERS: dict[str, dict[str, Any]] = {
    "layers": {},
    "tied embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "tied embeddings, trained as one": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "output head": {"target_modules": ["q_proj", "lm_head"]},
    "a head trained in full": {"modules_to_save": ["lm_head"]},
    "embeddings trained in full": {"modules_to_save": ["embed_tokens"]},
    "embeddings and head trained in full": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "dora": {"use_dora": True, "use_rslora": True},
}
LEFT_OUT = {(name, name in ("layers", "a head trained in full")) for name in ADAPTERS if " as one" not in name}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits.float()


def adapted(base: Path, adapters: Path) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters))


@pytest.mark.parametrize(
    ("lora", "tied"),
    [
        pytest.param(lora, tied, id=f"{name}, {tied=}", marks=[pytest.mark.exhaustive] * ((name, tied) in LEFT_OUT))
        for name, lora in ADAPTERS.items()
        for tied in (True, False)
    ],
)
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
        (("base",), ("[nothing-to-merge]", "adapter_config.json")),
        (("adapters", "-o", "base"), ("[output-taken]", "--output")),
        (("adapters", "-o", "base/config.json/x"), ("[output-unusable]", "--output")),
        (("./nowhere",), ("./nowhere", "[no-such-model]")),
        (("empty",), ("[not-a-model]", "trainer.output_dir")),
        (("begun",), ("[run-not-ended]",)),
    ],
)
def test_what_cannot_be_merged_is_refused(given: tuple[str, ...], says: tuple[str, ...], tmp_path: Path) -> None:
    save_adapters(tmp_path / "adapters", save_model(tmp_path / "base"))
    for name in ("empty", "begun"):
        (tmp_path / name).mkdir()
    (tmp_path / "begun" / ".packtrain").touch()
    before = sorted(tmp_path.rglob("*"))
    done = packtrain("merge", *given, expect=2, cwd=tmp_path)
    assert "Traceback" not in done.stderr and done.stdout == ""
    for words in says:
        assert words in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def trained_on(model: Path | str, folder: Path, **groups: Any) -> dict[str, Any]:
    return config_on(model, folder, **{**groups, "trainer": {"max_steps": 1, **groups.get("trainer", {})}})


def other_weights(base: Path) -> Path:
    """The model in `base` with one weight of the second layer changed."""
    name = "model.layers.1.mlp.up_proj.weight"
    return with_files(base, lambda weights: {**weights, name: weights[name] + torch.eye(*weights[name].shape)})


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
    assert torch.equal(logits(model), adapted(home / "base", home / "run/final"))


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
    assert problem.where == f"{moved}/run/final/adapter_config.json: base_model_name_or_path"
    assert str(home / "base") in problem.what


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
    with pytest.raises(UserError, match=r"layers\.7.*\[adapter-weights-surplus\]"):
        load_trained(find_trained(str(made)))


GROWN: dict[str, tuple[bool, dict[str, Any]]] = {
    "embeddings beside": (False, {}),
    "tied embeddings beside": (True, {}),
    "tied and adapted": (True, {"target_modules": ["q_proj", "embed_tokens"]}),
    "adapted, without a head": (False, {"target_modules": ["q_proj", "embed_tokens"]}),
    "trained in full": (False, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied and trained in full": (True, {"modules_to_save": ["embed_tokens", "lm_head"]}),
}


def grown(folder: Path, **lora: Any) -> tuple[Path, Any, int]:
    """Adapters on the model in folder/base with two more words than that: their folder, the model and all words."""
    words = AutoTokenizer.from_pretrained(folder / "base")
    words.add_tokens(["<new>", "<newer>"])
    torch.manual_seed(1)
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "base")
    base.resize_token_embeddings(len(words))
    given = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **lora}
    adapted: Any = get_peft_model(base, LoraConfig(**given))
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(place := folder / "adapters")
    words.save_pretrained(place)
    return place, adapted, len(words)


@pytest.mark.sample("embeddings beside", "tied and adapted", "adapted, without a head")
@pytest.mark.parametrize(("tied", "lora"), GROWN.values(), ids=GROWN)
def test_adapters_whose_vocabulary_has_grown_are_chatted_with_merged_and_trained_on(
    tied: bool, lora: dict[str, Any], tmp_path: Path
) -> None:
    save_model(tmp_path / "base", tie_word_embeddings=tied)
    place, adapted, words = grown(tmp_path, **lora)
    if lora.get("target_modules") and not tied:  # PEFT saves no head then
        with pytest.raises(UserError, match=r"\[adapters-lack-head\]"):
            load_trained(find_trained(str(place)))
        return
    expected = logits(adapted)
    assert expected.shape[-1] == words
    model, loaded = load_trained(find_trained(str(place)))
    assert torch.equal(logits(model), expected) and len(loaded) == words
    merge(str(place), tmp_path / "merged", None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == words
    assert (logits(merged) - expected).abs().max() <= 1e-5 * expected.abs().max()
    on = {"kind": "lora", "r": 4, "alpha": 8, "target_modules": lora.get("target_modules", ["q_proj"])}
    if lora.get("target_modules") or (tied and lora):
        return
    still: Any = {"optim": {"learning_rate": 0.0}, "trainer": {"checkpoint_every": 1}}
    more = run_here(tmp_path, trained_on(str(place), tmp_path, peft=on, **still))
    for made in (more.folder, more.checkpoint(1)):
        again, _ = load_trained(find_trained(str(made)))
        assert torch.equal(logits(again), expected)


CAME = "preprocessor_config.json processor_config.json video_preprocessor_config.json special_tokens_map.json"
CAME += " tokenizer.model modeling_mine.py LICENSE USE_POLICY.md"
STAYS = "README.md model.onnx rust_model.ot 64.tflite model.ckpt.data-00000-of-00001 all_results.json optimizer.pt"
STAYS += " pytorch_model.bin.index.json .gitattributes data.jsonl"


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("furnished") / "base")
    for name in (*CAME.split(), *STAYS.split()):
        (folder / name).write_text({"tokenizer.model": "pieces", "LICENSE": "free"}.get(name, "{}"))
    return folder


def test_files_that_came_with_the_model_go_along(furnished: Path, tmp_path: Path) -> None:
    run = run_here(tmp_path, trained_on(str(furnished), tmp_path))
    names = {file.name for file in (run.folder / "final").iterdir()}
    assert {*CAME.split()} <= names and not {*STAYS.split()} & names
    assert (run.folder / "final/tokenizer.model").read_text() == "pieces"
    adapters = save_adapters(tmp_path / "adapters", furnished)
    merge(str(adapters), tmp_path / "merged", None)
    assert {*CAME.split()} <= {file.name for file in (tmp_path / "merged").iterdir()}


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
    save_model(tmp_path / "base")
    place, adapted, _ = grown(tmp_path)
    on = {"kind": "lora", "r": 4, "alpha": 8, "target_modules": ["q_proj"], "merge": True}
    config = trained_on(str(place), tmp_path, peft=on, optim={"learning_rate": 0.0})
    run = train(tmp_path, config, "strategy=fsdp2", processes=2)
    whole, merged = (logits(load_trained(find_trained(str(run.folder / f"final{end}")))[0]) for end in ("", "-merged"))
    expected = logits(adapted)
    assert torch.equal(whole, expected) and (merged - expected).abs().max() <= 1e-5 * expected.abs().max()
