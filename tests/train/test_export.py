"""`packtrain export`: what the hub gets, what llama.cpp's converter is asked for, how Ollama renders a chat, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from here import run_here
from running import base_config, conversations, packtrain, write_jsonl
from tiny_models import save_adapters, save_model, save_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from packtrain.data.sources.quickstart import tokenizer as quickstart_tokenizer
from packtrain.serve.export import model_card, ollama_template, public_config
from packtrain.serve.trained import find_trained
from tests.train import forked

CONVERTER = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("model"), parser.add_argument("--outfile"), parser.add_argument("--outtype")
given = parser.parse_args()
config = json.load(open(os.path.join(given.model, "config.json")))
if config["hidden_size"] == 32:
    sys.exit("Model LlamaForCausalLM is not supported")
json.dump([given.outtype, sorted(os.listdir(given.model))], open(given.outfile, "w"))
"""
OLLAMA = '#!/bin/sh\necho "$@" > "$ASKED"\n'
TOKEN = "hf_" + "A1b2" * 8


def with_a_local_hub(*given: Any) -> None:
    """The command, with a hub that is the folder hub/ beside it."""
    import huggingface_hub

    class Api:
        def model_info(self, name: str) -> Any:
            return SimpleNamespace(private=name != "me/known")

        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> Any:
            if name == "taken/name":
                raise PermissionError("403 Forbidden: you cannot write to taken/name")
            Path("hub").mkdir(exist_ok=exist_ok)
            Path("private").write_text(str(private))
            return huggingface_hub.RepoUrl(f"https://huggingface.co/me/{name}")

        def create_commit(self, repo: str, operations: list[Any], *, commit_message: str) -> None:
            for operation in operations:
                with operation.as_file() as file:
                    Path("hub", operation.path_in_repo).write_bytes(file.read())

    huggingface_hub.HfApi = Api  # type: ignore[misc]
    forked.run(*given)


def sent(folder: Path, named: str, *more: str, expect: int = 0, **env: str) -> Any:
    given = ("export", named, "--to", "hub", *more)
    return packtrain(*given, expect=expect, cwd=folder, begin=with_a_local_hub, env=env)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as a training leaves it, with held-out figures."""
    folder = tmp_path_factory.mktemp("made")
    held_out = write_jsonl(folder / "held-out.jsonl", conversations(5, seed=1))
    config = base_config(folder, data={"eval": str(held_out)}, trainer={"max_steps": 2})
    made = run_here(folder, config).folder
    (made / "env.json").write_text('{"versions": {"transformers": "5.24.0", "deepspeed": null}}')
    return made


def test_the_hub_gets_the_model_and_its_card_in_private(run: Path, tmp_path: Path) -> None:
    done = sent(tmp_path, str(run), "--repo", "chats", HF_TOKEN=TOKEN)
    assert done.stdout.startswith("https://huggingface.co/me/chats (private)")
    assert (tmp_path / "private").read_text() == "True"
    names = {path.name for path in (tmp_path / "hub").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= names
    AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    card, summary = (tmp_path / "hub" / "README.md").read_text(), json.loads((run / "summary.json").read_text())
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "transformers" and {"packtrain", "sft"} == set(head["tags"])
    assert f"| held-out loss after | {summary['eval_loss']:.4f} |" in card
    assert f"| held-out loss before | {summary['first_eval_loss']:.4f} |" in card
    assert "22 documents" in card and "learning_rate: 0.001" in card and "transformers 5.24.0\n" in card
    for file in (tmp_path / "hub").glob("*.*"):
        if file.suffix in (".md", ".json"):
            content = file.read_text()
            assert str(run.parent) not in content and TOKEN not in content, file.name


def test_a_public_model_is_asked_for(run: Path, tmp_path: Path) -> None:
    done = sent(tmp_path, str(run / "final"), "--repo", "chats", "--public")
    assert (tmp_path / "private").read_text() == "False" and "(public)" in done.stdout
    assert "held-out loss after" in (tmp_path / "hub" / "README.md").read_text()  # of the run that the folder is in


def test_a_card_names_what_is_on_the_hub_and_nothing_of_this_machine(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    base = save_model(tmp_path / "base")
    run = save_run(tmp_path / "run", save_adapters(tmp_path / "adapters", base), eval_loss=0.5, data={"documents": 7})
    settings = run / "final" / "adapter_config.json"
    settings.write_text(settings.read_text().replace(str(base), "owner/model"))
    (tmp_path / "rows").touch()
    monkeypatch.chdir(tmp_path)
    sources = ["owner/rows", str(tmp_path / "chats.jsonl"), {"path": "/mnt/my own/rows", "split": "train"}, "rows"]
    config = {
        "model": {"path": "owner/model", "config": {"note": "correct-horse-battery"}},
        "data": {"train": sources, "cache_dir": "/scratch/me", "chat_template": "mine.jinja"},
        "objective": {"kind": "dpo", "reference": "../earlier/final", "beta": 0.3},
        "topology": {"main_address": "node17.cluster"},
        "tracking": {"run_name": "me"},
        "trainer": {"output_dir": "/home/me/run", "samples": ["What is 1/2 of 4?"], "seed": 3},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    card = model_card(find_trained(str(run)))
    head = yaml.safe_load(card.split("---")[1])
    assert head["base_model"] == "owner/model" and head["datasets"] == ["owner/rows"]
    assert head["library_name"] == "peft" and "dpo" in head["tags"]
    for word in ("correct-horse", "scratch", "jsonl", "/mnt", "mine.jinja", "earlier", "node17", "home/me", "- rows"):
        assert word not in card, word
    assert "What is 1/2 of 4?" in card and "beta: 0.3" in card and "seed: 3" in card
    assert public_config({"optim": {"name": "sgd", "beta1": 0.9}, "data": {"eval": None}}) == {"optim": {"name": "sgd"}}
    for name, torn in {"config.yaml": "data: [", "summary.json": "{"}.items():
        (run / name).write_text(torn)
    assert "Trained on local files." in model_card(find_trained(str(run)))


def test_adapters_of_a_local_model_and_what_the_hub_refuses_are_told(run: Path, tmp_path: Path) -> None:
    adapters = save_adapters(tmp_path / "adapters", save_model(tmp_path / "base"))
    assert "[base-not-public]" in sent(tmp_path, str(adapters), "--repo", "x", expect=2).stderr
    assert "[no-repo-name]" in sent(tmp_path, str(run), expect=2).stderr
    assert "[repo-public]" in sent(tmp_path, str(run), "--repo", "known", expect=2).stderr
    assert not [*(tmp_path / "hub").iterdir()]
    refused = sent(tmp_path, str(run), "--repo", "taken/name", expect=2).stderr
    assert "403 Forbidden" in refused and "HF_TOKEN" in refused and "Traceback" not in refused
    assert not [*(tmp_path / "hub").iterdir()]


def test_adapters_are_merged_for_the_converter_and_the_file_is_whole_or_absent(tmp_path: Path) -> None:
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    adapters = save_adapters(tmp_path / "adapters", save_model(tmp_path / "base"))
    done = packtrain("export", str(adapters), "--to", "gguf", "--dtype", "float32", env={"LLAMA_CPP": str(tmp_path)})
    file = tmp_path / "adapters-gguf" / "model.gguf"
    assert done.stdout == f"{file}\n"
    outtype, names = json.loads(file.read_text())
    assert outtype == "f32" and "model.safetensors" in names and "adapter_model.safetensors" not in names
    small = save_model(tmp_path / "small", hidden_size=32)
    named = ("--converter", str(tmp_path / "convert_hf_to_gguf.py"))
    refused = packtrain("export", str(small), "--to", "gguf", *named, expect=2).stderr
    assert "LlamaForCausalLM is not supported" in refused and "Traceback" not in refused
    assert not [path for path in tmp_path.iterdir() if "small-gguf" in path.name]


def test_ollama_is_handed_the_file_with_the_chat_template(tmp_path: Path) -> None:
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    model, tools = save_model(tmp_path / "Chats"), tmp_path / "bin"
    named = ("export", str(model), "--to", "ollama", "--converter", str(tmp_path))
    told = packtrain(*named, env={"PATH": str(tools)}).stdout
    modelfile = tmp_path / "Chats-gguf" / "Modelfile"
    assert f"ollama create chats -f {modelfile}" in told and "not installed here" in told
    assert modelfile.read_text().startswith('FROM ./model.gguf\nTEMPLATE """')
    assert packtrain(*named[:-2], env={"PATH": str(tools)}).stdout == told  # the file is there: nothing is converted
    os.utime(model / "model.safetensors", (2**32, 2**32))
    assert "[output-taken]" in packtrain(*named, env={"PATH": str(tools)}, expect=2).stderr
    shutil.rmtree(tmp_path / "Chats-gguf")
    tools.mkdir()
    (tools / "ollama").write_text(OLLAMA)
    (tools / "ollama").chmod(stat.S_IRWXU)
    env = {"PATH": str(tools), "ASKED": str(tmp_path / "asked")}
    told = packtrain(*named, "--name", "mine", env=env).stdout
    assert "ollama run mine" in told
    assert (tmp_path / "asked").read_text().split() == ["create", "mine", "-f", str(modelfile)]


def render(lines: str, system: str, *pairs: tuple[str, str]) -> str:
    """What Ollama makes of a template with .System, .Prompt and .Response: it is filled once for each prompt with its answer."""
    template = re.search(r'TEMPLATE """(.*?)"""', lines, re.DOTALL)[1]  # type: ignore[index]
    own = re.search(r'SYSTEM """(.*?)"""', lines, re.DOTALL)
    system = system or (own[1] if own else "")
    return "".join(
        filled(template, System="" if at else system, Prompt=prompt, Response=answer)
        for at, (prompt, answer) in enumerate(pairs)
    )


def filled(template: str, **values: str) -> str:
    parts = re.compile(r"\{\{ if \.(\w+) \}\}(.*?)\{\{ end \}\}", re.DOTALL)
    text = parts.sub(lambda m: m[2] if values[m[1]] else "", template)
    if not values["Response"]:
        text = text.split("{{ .Response }}")[0]
    return re.sub(r"\{\{ \.(\w+) \}\}", lambda m: values[m[1]], text)


TEMPLATES = {
    "chatml with a system prompt of its own": (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "tags": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
}


def with_template(template: str | None) -> Any:
    tokenizer: Any = deepcopy(quickstart_tokenizer())
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize("template", [None, *TEMPLATES.values()], ids=["built in", *TEMPLATES])
def test_ollama_renders_what_the_chat_template_renders(template: str | None) -> None:
    tokenizer = with_template(template)
    lines, turns = ollama_template(tokenizer), [("user", "Hello"), ("assistant", "Hi."), ("user", "And now?")]
    for system in ("", "Answer in rhymes."):
        told = [("system", system)] if system else []
        messages = [{"role": role, "content": text} for role, text in (*told, *turns)]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert render(lines, system, ("Hello", "Hi."), ("And now?", "")) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system') if messages[0].role == 'system' }}",
        "{% for m in messages %}{{ m.role }}{{ loop.index }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}[[{{ '{{' }} {{ m.role }}]]{{ m.content }}\n{% endfor %}",
    ],
    ids=["refuses a system prompt", "numbers its turns", "has the signs of Go's templates"],
)
def test_a_template_that_cannot_be_told_is_left_to_ollama(template: str) -> None:
    assert ollama_template(with_template(template)) == ""


def test_a_tool_that_is_missing_is_named_before_any_work(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    refused = packtrain("export", str(model), "--to", "gguf", expect=2, env={"PATH": "", "LLAMA_CPP": ""}).stderr
    assert "[no-converter]" in refused and "--converter" in refused
    refused = packtrain("export", str(model), "--to", "gguf", "--converter", "/nowhere", expect=2).stderr
    assert "--converter: there is no /nowhere [no-converter]" in refused
    assert "[nothing-to-merge]" in packtrain("export", str(model), "--to", "merged", expect=2).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert AutoTokenizer.from_pretrained(model) and os.listdir(model)
