"""`packtrain verify --collator`: where collators of others leak, where they do not, and what is wrong with those that cannot be had."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import LLAMA, base_config, packtrain, written

from packtrain import __version__
from packtrain.config.schema import Model, Peft, Trainer
from packtrain.errors import UserError
from packtrain.train.verify.foreign_collator import verify_collator

OF_OTHERS = """
import os
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
flat, number = DataCollatorWithFlattening(), 3
def flattening(): return flat
def of_trl(pad_token_id): return DataCollatorForLanguageModeling(pad_token_id=pad_token_id, padding_free=True)
def padding(tokenizer): return DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
def padding_left(tokenizer):
    tokenizer.padding_side = "left"
    names = ("input_ids", "attention_mask")
    return lambda features: tokenizer.pad([{n: one[n] for n in names} for one in features], return_tensors="pt")
def without_positions(features): return {name: value for name, value in flat(features).items() if name != "position_ids"}
def trains_borders(features): return {**(row := flat(features)), "labels": row["input_ids"].clone()}
def last_first(features): return flat(features[::-1])
def cutting(features):
    return flat([{**one, "input_ids": one["input_ids"][:4], "labels": one["labels"][:4]} for one in features])
def raising(features): return {}[features[0]["text"]]
def leaving(features): os._exit(0)
def with_more(features): return {**flat(features), "inputs_embeds": 1}
def nothing(features): return [1, 2]
class Needy:
    def __init__(self, tokenizer, rows): ...
"""
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/leak-check.md").read_text()
FILES = {path.stem.removesuffix("_collator"): path for path in sorted(ROOT.glob("examples/leakcheck/*.py"))}
ON_PAGE = {f"on the page {at}": text for at, text in enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.S), 1)}
RECIPES = {**ON_PAGE, **{name: path.read_text() for name, path in FILES.items()}}
FAULTS = """
import torch
from datasets import Dataset
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
padding_free = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
padded = DataCollatorForLanguageModeling(pad_token_id=0)
def without(row, *names): return {name: value for name, value in row.items() if name not in names}
def packed(documents, strategy): return list(pack_dataset(Dataset.from_list(documents), 64, strategy))
def only_lengths(documents): return without(padding_free(documents), "position_ids")
def only_positions(documents):
    return without(padding_free(documents), "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
def mask_of_ones(documents): return {**(row := padding_free(documents)), "attention_mask": torch.ones_like(row["input_ids"])}
def wrapped(documents): return padded(packed(documents, "wrapped"))
def lost(documents): return padding_free([without(row, "seq_lengths") for row in packed(documents, "bfd")])
"""
FAULTY = {"only_lengths": "not given", "mask_of_ones": "restart", "wrapped": "not given", "lost": "run on"}
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4},
    "opt": {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 48},
    "gpt_oss": {**LLAMA, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"hidden_size": 48, "state_size": 8, "num_hidden_layers": 2},
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 4},
}


@pytest.fixture
def others(tmp_path: Path) -> str:
    (tmp_path / "others.py").write_text(OF_OTHERS)
    return f"{tmp_path / 'others.py'}:"


def proved(family: str, spec: str, **how: Any) -> dict[str, Any]:
    model = Model(init="random", config={**MODELS[family], "model_type": family}, tokenizer="quickstart")
    code, report = verify_collator(model, Peft(), Trainer(), spec, **how)
    assert code == {"exact": 0, "leaks": 3}[report["verdict"]]
    assert report["isolation"]["control"] > 1e-3
    return report


@pytest.mark.parametrize("name", ["flattening", "of_trl"])
@pytest.mark.parametrize(
    ("family", "attention", "where"),
    [
        ("llama", "sdpa", None),
        ("gpt2", "eager", None),
        ("opt", "eager", "model.decoder.layers.0.self_attn"),
        ("gpt_oss", "eager", "model.layers.0.self_attn"),
        ("mamba", None, "backbone.layers.0.mixer"),
        ("bloom", None, "transformer.h.0"),
    ],
)
def test_rows_of_transformers_and_of_trl_leak_in_some_models_and_not_once_attached(
    others: str, name: str, family: str, attention: str | None, where: str | None
) -> None:
    report = proved(family, others + name, attention=attention)
    assert (report["rows"], report["positions"]) == ([1, 37], "restart")
    if where is None:
        assert report["verdict"] == "exact" and not report["leaks"] and not report["problem"]
    else:
        assert report["where"]["module"].startswith(where)
        assert {(one["changed"], one["moved"]) for one in report["leaks"]} >= {(1, 2), (2, 3)}
        assert all(one["changed"] < one["moved"] and one["by"] > 2e-4 for one in report["leaks"])
        assert report["problem"] and "attach" in report["fix"]
    if name == "of_trl":
        assert proved(family, others + name, attached=True)["verdict"] == "exact"


@pytest.mark.parametrize("name", ["padding", "padding_left"])
def test_padding_is_exact_attached_or_not(others: str, name: str) -> None:
    for attached in (False, True):
        report = proved("llama", others + name, attached=attached)
        assert (report["verdict"], report["rows"], report["positions"]) == ("exact", [3, 27], "not given")


def test_it_tells_positions_that_run_on_and_labels_of_another_document(others: str) -> None:
    report = proved("llama", others + "without_positions")
    assert report["verdict"] == "leaks" and report["positions"] == "not given" and len(report["leaks"]) == 3
    across = proved("llama", others + "trains_borders")
    assert across["verdict"] == "leaks" and across["labels_across"] == [2, 3] and not across["leaks"]
    turned = proved("opt", others + "last_first")
    assert {(one["changed"], one["moved"]) for one in turned["leaks"]} == {(3, 2), (3, 1), (2, 1)}
    assert turned["isolation"]["max_abs_diff_before"] == 0 and turned["isolation"]["max_abs_diff_after"] > 1e-3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cutting", "5 tokens of document 1"),
        ("raising", "KeyError: 'text'"),
        ("with_more", "LlamaForCausalLM .* ValueError"),
        ("nothing", "input_ids.* but list"),
        ("Needy", "rows"),
        ("number", "int"),
        ("flatening", "flattening"),
    ],
)
def test_what_is_wrong_with_a_collator_is_said(others: str, name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        proved("llama", others + name)


def test_the_command_shows_it_and_its_exit_code_tells(tmp_path: Path, others: str) -> None:
    config = base_config(tmp_path, model={"config": {**MODELS["opt"], "model_type": "opt"}})
    written(tmp_path, config)
    (tmp_path / "broken.py").write_text("import no_such_package")

    def command(*arguments: str, expect: int) -> Any:
        return packtrain("verify", "run.yaml", *arguments, cwd=tmp_path, expect=expect)

    leaks = command("--collator", "others:flattening", expect=3).stdout
    assert "document 1 changed: 2 moves by" in leaks
    report = json.loads(command("--collator", "packtrain:PackedCollator", "--attach", "--json", expect=0).stdout)
    assert report["verdict"] == "exact" and "segmented" in report["backend"]
    assert {"model", "architecture", "isolation", "collator", "leaks", "positions"} <= report.keys()
    for spec, said in {
        "others": "others",
        "nowhere.py:x": "nowhere.py",
        "others:leaving": "others.py: it ended the process by os._exit(0)",
        "broken:x": "No module named 'no_such_package'",
    }.items():
        assert said in command("--collator", spec, expect=2).stderr
    assert "--collator" in command("--attach", expect=2).stderr


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_for_other_trainers_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    packages = set(re.findall(r"^from (\w+)", RECIPES[name], re.M))
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    monkeypatch.delenv("DISABLE_VERSION_CHECK", raising=False)  # the file sets it
    (file := tmp_path / f"recipe_{name.replace(' ', '_')}.py").write_text(RECIPES[name])
    report = proved("llama", f"{file}:collate", attention="sdpa")
    assert (report["verdict"], report["positions"]) == ("exact", "restart")
    assert "examples/s" not in capfd.readouterr().err  # progress bars of datasets


def test_three_lines_check_another_trainer() -> None:
    """The page's lines name the files that are there, in this version."""
    assert {*FILES} == {"trl", "axolotl", "llamafactory"}
    for name, path in FILES.items():
        (fetch,) = re.findall(rf"^curl -fsSO (\S+/{path.name})$", PAGE, re.M)
        assert fetch.endswith(f"/packtrain/packtrain/v{__version__}/{path.relative_to(ROOT)}")
        assert f"\npacktrain verify --collator {path.name}:collate --attention sdpa\n" in PAGE
        (text,) = re.findall(rf"```yaml\n((?:[^`]*\n){{2}}.*collator: {name}, .*\n)```", PAGE)
        install, action = yaml.safe_load(text)
        assert "pip install packtrain" in install["run"] and action["uses"] == f"packtrain/packtrain@v{__version__}"
        assert {*action["with"]} <= {*yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]}


def test_rows_of_trl_that_lose_their_borders_leak(tmp_path: Path) -> None:
    """Each collator loses one fact about the borders."""
    (tmp_path / "faults.py").write_text(FAULTS)
    for name, positions in FAULTY.items():
        report = proved("llama", f"{tmp_path}/faults.py:{name}", attention="sdpa")
        assert (report["verdict"], report["positions"], len(report["leaks"])) == ("leaks", positions, 3), name
        assert (report["labels_across"] == []) is (name in ("only_lengths", "mask_of_ones")), name
    assert proved("llama", f"{tmp_path}/faults.py:only_positions", attention="sdpa")["verdict"] == "exact"


def acted(folder: Path, code: int, reported: subprocess.CompletedProcess[str], **inputs: str) -> dict[str, str]:
    """Run the GitHub action on this report; return stdout, summary and output."""
    step = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"][0]
    files = {name: folder / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for path in files.values():
        path.write_text("")
    (folder / "stdout").write_text(reported.stdout)
    (folder / "stderr").write_text(reported.stderr)
    (bin := folder / "bin").mkdir(exist_ok=True)
    (bin / "python").write_text(
        f"""#!/bin/bash
[ "$1" = -m ] || exec {shlex.quote(sys.executable)} -S "$@"
printf '%s\\n' "$@" > {folder}/called
[ "$2" = packtrain ] || exit 0
cat {folder}/stdout; cat {folder}/stderr >&2; exit {reported.returncode}
"""
    )
    (bin / "python").chmod(0o755)
    assert "${{" not in step["run"]  # an input is never part of the script
    values = {name: inputs.get(name.lower(), "") for name in step["env"]}
    values |= {name: str(path) for name, path in files.items()}
    env = {**os.environ, **values, "GITHUB_ACTION_PATH": str(ROOT), "PATH": f"{bin}:{os.environ['PATH']}"}
    (folder / "script").write_text(step["run"])
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(folder / "script")]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return {"said": done.stdout, **{name: path.read_text() for name, path in files.items()}}


def test_the_github_action_fails_on_a_leak_and_says_who_sees_whom(tmp_path: Path, others: str) -> None:
    """Bash runs the action as GitHub does, on real reports of a tiny model."""

    def command(name: str, expect: int) -> subprocess.CompletedProcess[str]:
        return packtrain("verify", "--collator", others + name, "--json", cwd=tmp_path, expect=expect)

    inputs = {"version": "installed", "collator": "a b.py:$(touch hit)`", "attention": "sdpa"}
    sound = acted(tmp_path, 0, command("flattening", 0), **inputs, model="model=quickstart\nmodel.config={a: 1, b: 2}")
    assert sound["GITHUB_OUTPUT"] == "verdict=exact\n" and "::error" not in sound["said"]
    called = (tmp_path / "called").read_text().splitlines()
    expected = ["-m", "packtrain", "verify", "--json", "--collator", inputs["collator"], "--attention", "sdpa"]
    assert called == [*expected, "model=quickstart", "model.config={a: 1, b: 2}"]
    acted(tmp_path, 0, command("flattening", 0), version="installed", collator="axolotl")
    assert (tmp_path / "called").read_text().splitlines()[-1] == f"{FILES['axolotl']}:collate"
    leaks = acted(tmp_path, 3, command("without_positions", 3), **inputs)
    assert leaks["GITHUB_OUTPUT"] == "verdict=leaks\n" and leaks["said"].count("::error title=") == 1
    assert all(
        f"| {changed} | {moved} | " in leaks["GITHUB_STEP_SUMMARY"] for changed, moved in ((1, 2), (1, 3), (2, 3))
    )
    unchecked = acted(tmp_path, 2, subprocess.CompletedProcess([], 2, "", "error:\n  100% wrong\n"), **inputs)
    assert unchecked["GITHUB_OUTPUT"] == "verdict=unchecked\n" and "error:%0A  100%25 wrong" in unchecked["said"]
    assert not (tmp_path / "hit").exists()
