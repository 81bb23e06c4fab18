"""`packtrain init`: the config that it writes for data and a model, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command_line import Done, packtrain
from inspecting import chat, clean, write
from PIL import Image

from packtrain.config.compose import load_config
from packtrain.config.keys import keys
from packtrain.config.yaml_files import SCHEMA_LINE
from packtrain.data.sources.quickstart import tokenizer
from packtrain.errors import UserError
from packtrain.inspect.starter import FirstRows, choose, plan_first, text_of
from packtrain.objectives.spec import OBJECTIVES
from packtrain.plan.surroundings import Surroundings

SIZES = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "vocab_size": 2048, "max_position_embeddings": 512}
PAIRS = [{"prompt": f"Question {n}? ", "chosen": f"Yes, {n}.", "rejected": f"No, not {n + 1}."} for n in range(30)]
LABELLED = [{"prompt": f"Is {n} even?", "completion": " Yes.", "label": n % 2 == 0} for n in range(30)]
ROWS: dict[str, list[dict[str, Any]]] = {"documents": clean(30), "pairs": PAIRS, "answers": LABELLED}
GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, one without a chat template, and rows of each kind."""
    made = tmp_path_factory.mktemp("starter")
    for name, template in (("model", tokenizer().chat_template), ("base", None)):
        own = tokenizer()
        own.chat_template = template
        own.save_pretrained(made / name)
        (made / name / "config.json").write_text(json.dumps(SIZES))
    for kind, rows in ROWS.items():
        write(made, rows, f"{kind}.jsonl")
    return made


def init(folder: Path, *words: str, data: str, model: str = "model") -> Done:
    return packtrain("init", *words, "--data", data, "--model", model, folder=folder)


def written(folder: Path, *words: str, file: str, **given: str) -> dict[str, Any]:
    """What `packtrain plan` makes of the file that init writes."""
    done = init(folder, *words, "-o", file, **given)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / file).read_text().startswith(f"{SCHEMA_LINE}#")
    planned = packtrain("plan", file, "--json", folder=folder)
    assert (planned.returncode, planned.stderr) == (0, "")
    return json.loads(planned.stdout)["config"]


@pytest.mark.parametrize("verb", OBJECTIVES.all())
def test_plan_takes_the_config_of_each_verb(folder: Path, verb: str) -> None:
    spec = OBJECTIVES.all()[verb]
    needed = ["objective.options.teacher=base"] if "teacher" in spec.options else []
    config = written(folder, verb, *needed, data=f"{spec.examples}.jsonl", file=f"{verb}-own.yaml")
    assert config["objective"]["kind"] == verb
    assert config["trainer"]["output_dir"] == f"runs/{verb}-own"
    assert config["batch"]["tokens_per_device"] >= spec.documents * config["data"]["max_length"]


@pytest.mark.parametrize(
    ("rows", "verb"), [("documents", "sft"), ("pairs", "dpo"), ("answers", "kto"), ("quickstart", "sft")]
)
def test_the_verb_is_guessed_from_the_rows_and_said(folder: Path, tmp_path: Path, rows: str, verb: str) -> None:
    data = rows if rows == "quickstart" else str(folder / f"{rows}.jsonl")
    done = init(tmp_path, data=data, model=str(folder / "model"))
    assert done.returncode == 0
    for command in ("inspect", "plan", verb):
        assert f"packtrain {command} {verb}.yaml" in done.stdout
        assert f"#   packtrain {command} {verb}.yaml" in (tmp_path / f"{verb}.yaml").read_text()


@pytest.mark.parametrize(
    ("word", "max_length", "slots"),
    [
        ("batch.tokens_per_device=128", 128, 128),
        ("data.max_length=4096", 4096, 4096),
        ("data.overlong=drop", 256, 2048),
    ],
)
def test_rows_and_documents_of_a_given_size_fit(folder: Path, word: str, max_length: int, slots: int) -> None:
    config = written(folder, word, data="documents.jsonl", file=f"{word}.yaml")
    assert (config["data"]["max_length"], config["batch"]["tokens_per_device"]) == (max_length, slots)


def test_keys_of_the_command_line_win_and_are_written(folder: Path) -> None:
    config = written(folder, "peft=lora", "trainer.epochs=5", "data.eval=0.2", data="documents.jsonl", file="own.yaml")
    assert (config["peft"]["kind"], config["trainer"]["epochs"], config["data"]["eval"]) == ("lora", 5, 0.2)


def test_columns_of_other_names_are_written(folder: Path) -> None:
    write(folder, [{"frage": f"Question {n}?", "antwort": "Yes."} for n in range(5)], "other.jsonl")
    done = init(folder, data="other.jsonl")
    assert (done.returncode, "no-format-fits" in done.stderr) == (2, True)
    columns = ("data.columns.instruction=frage", "data.columns.output=antwort")
    config = written(folder, *columns, data="other.jsonl", file="other.yaml")
    assert config["data"]["columns"] == {"instruction": "frage", "output": "antwort"}
    assert config["data"]["eval"] is None  # five rows are too few to hold any out


@pytest.mark.parametrize(("data", "template"), [("documents.jsonl", "chatml"), ("answers.jsonl", None)])
def test_a_model_without_a_template_gets_one_for_chats(folder: Path, data: str, template: str | None) -> None:
    config = written(folder, data=data, model="base", file=f"base-{template}.yaml")
    assert config["data"]["chat_template"] == template


@pytest.mark.parametrize(
    "name", ["a b: 'c' \"d\" # e.jsonl", "${x}.jsonl", "x,y=z.jsonl", "ü\nñ.jsonl", "2024", "true"]
)
def test_any_file_name_is_read_back(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "named.yaml").unlink(missing_ok=True)
    place = folder / name
    if place.suffix:
        write(folder, clean(4), name)
    else:
        place.mkdir()
        write(place, clean(4))
    assert init(folder, "-o", "named.yaml", data=name).returncode == 0
    assert load_config("named.yaml", []).data.train == name


@pytest.mark.parametrize(
    ("words", "given", "code"),
    [
        ((), {"data": "empty.jsonl"}, "no-rows"),
        ((), {"data": "broken.jsonl"}, "row-broken-json"),
        (("dpo",), {"data": "documents.jsonl"}, "rows-of-other-verb"),
        ((), {"data": "broken-pairs.jsonl"}, "row-wrong-type"),
        (("dop",), {"data": "documents.jsonl"}, "bad-value"),
        (("distill",), {"data": "documents.jsonl"}, "no-teacher"),
        ((), {"data": "nowhere.jsonl"}, "no-such-path"),
        ((), {"data": "documents.jsonl", "model": "bare"}, "cannot-load-tokenizer"),
        ((), {"data": "documents.jsonl", "model": "strange"}, "unknown-model-type"),
        ((), {"data": "pictures.jsonl"}, "row-no-image-processor"),
        (("-o", "taken.yaml"), {"data": "documents.jsonl"}, "file-exists"),
        (("-o", "nowhere/a.yaml"), {"data": "documents.jsonl"}, "cannot-write"),
        (("optim.lr=1",), {"data": "documents.jsonl"}, "no-such-key"),
        (("-o", "a.yml"), {"data": "documents.jsonl"}, "config-not-yaml"),
        (("objective.kind=sft",), {"data": "pairs.jsonl"}, "rows-of-other-verb"),
    ],
)
def test_what_cannot_be_is_refused_with_a_code(folder: Path, words: tuple, given: dict, code: str) -> None:
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text(json.dumps(chat("a?", "b")) + "\n{broken\n")
    write(folder, [*PAIRS[:2], {**PAIRS[2], "chosen": 3}], "broken-pairs.jsonl")
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]
    asked = [{"role": "user", "content": parts}, {"role": "assistant", "content": "That."}]
    write(folder, [{"messages": asked}], "pictures.jsonl")
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    for name, sizes in (("bare", SIZES), ("strange", {**SIZES, "model_type": "strange"})):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(sizes))
    (folder / "taken.yaml").write_text("mine")
    done = init(folder, *words, **given)
    assert (done.returncode, f"[{code}]" in done.stderr) == (2, True), done.stderr
    assert (folder / "taken.yaml").read_text() == "mine"
    assert not (folder / "sft.yaml").exists() and not (folder / "a.yml").exists()


def found(*lengths: int, kind: str = "sft", **facts: Any) -> FirstRows:
    return FirstRows(OBJECTIVES.all()[kind], "messages", 1000, np.array(lengths or (100,)), **facts)


@pytest.mark.parametrize(
    ("facts", "max_length", "slots"),
    [
        (found(5), 256, 2048),
        (found(*[900] * 50, 1100, 1100), 2048, 2048),
        (found(*[900] * 500, 30_000), 1024, 2048),  # one document in 500 is cut
        (found(3000), 4096, 4096),
        (found(3000, positions=2048), 2048, 2048),
        (found(3000, kind="dpo"), 4096, 8192),
    ],
)
def test_max_length_covers_nearly_all_documents(facts: FirstRows, max_length: int, slots: int) -> None:
    chosen = choose(facts, "", gpu=False)
    assert {f"data.max_length={max_length}", f"batch.tokens_per_device={slots}"} <= {*chosen}


LARGE = {**SIZES, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LARGE |= {"num_key_value_heads": 8, "vocab_size": 128_256, "head_dim": 128}
NF4 = "nf4" if find_spec("bitsandbytes") else "no"


@pytest.mark.parametrize(
    ("sizes", "gpus", "gib", "way"),
    [
        (SIZES, 0, None, ("none", "no", "ddp")),
        (LARGE, 0, None, ("lora", "no", "ddp")),
        (SIZES, 1, 24, ("none", "no", "ddp")),
        (LARGE, 1, 80, ("lora", "no", "ddp")),
        (LARGE, 1, 12, ("lora", NF4, "ddp")),
        (LARGE, 8, 80, ("none", "no", "fsdp2")),
        (LARGE, 1, 2, ("lora", NF4, "ddp")),  # nothing fits, which the file says
    ],
)
def test_the_first_way_that_fits_is_chosen(sizes: dict, gpus: int, gib: int | None, way: tuple) -> None:
    given = ["model.path=owner/name", "data.train=quickstart"]
    here = Surroundings(gpus=gpus, gpu_memory=gib and gib * GIB)
    config, memory = plan_first(found(700), given, sizes, here)
    assert (config.peft.kind, config.model.quantize, config.strategy.name) == way
    assert not isinstance(memory, str) and memory.fits == (
        None if gib is None else gib > 2 and (gib > 12 or NF4 == "nf4")
    )
    assert config.optim.learning_rate == (1e-4 if config.peft.kind == "lora" else 1e-5)


def test_preferences_move_a_model_less() -> None:
    rates = {kind: choose(found(kind=kind), "", gpu=True) for kind in ("sft", "dpo", "reward")}
    assert [
        f"optim.learning_rate={rate}" in rates[kind]
        for kind, rate in (("sft", "1e-05"), ("dpo", "5e-07"), ("reward", "5e-06"))
    ]


@pytest.mark.parametrize(
    ("word", "dropped"),
    [
        ("data.eval=null", "trainer.eval_every"),
        ("trainer.max_steps=10", "trainer.epochs"),
        ("batch.tokens_per_step=65536", "batch.examples_per_step"),
        ("optim.schedule=constant", "optim.warmup_steps"),
        ("peft=none", "peft.merge"),
    ],
)
def test_a_given_key_drops_a_chosen_one_that_it_leaves_idle(word: str, dropped: str) -> None:
    given = ["model.path=owner/name", "data.train=quickstart", word]
    config, _ = plan_first(found(700), given, LARGE, Surroundings())
    text = text_of(config, [*choose(found(700), "", gpu=False), *given], [])
    group, _, name = dropped.partition(".")
    values = yaml.safe_load(text).get(group, {})
    assert values.get(name, keys()[dropped].default) == keys()[dropped].default
    assert None not in values.values()


def test_a_way_that_a_key_forbids_is_passed_over() -> None:
    given = ["model.path=owner/name", "data.train=quickstart", "peft=none"]
    config, memory = plan_first(found(700), given, LARGE, Surroundings(gpus=1, gpu_memory=24 * GIB))
    assert config.peft.kind == "none" and not isinstance(memory, str) and not memory.fits
    with pytest.raises(UserError):
        plan_first(replace(found(700), positions=1), given, LARGE, Surroundings())
