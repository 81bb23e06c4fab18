"""`packtrain eval`: the figures that a training's evaluation finds, of any model and of named sets, and scored answers to held-out rows."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from here import run_here
from running import WORDS, base_config, conversations, packtrain, train, write_jsonl, written
from tiny_models import save_adapters, save_model

from packtrain.config.compose import load_config
from packtrain.errors import UserError
from tests.train import forked


def turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


PAIRS = [
    {"prompt": turn("user", f"Say {one}."), "chosen": turn("assistant", one), "rejected": turn("assistant", one[::-1])}
    for one in WORDS
]
LABELS = [
    {"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good}
    for row, good in zip(PAIRS, [True, False] * 6, strict=True)
]
ROWS = {"sft": conversations(12), "dpo": PAIRS, "reward": PAIRS, "kto": LABELS}
EVALUATED = {"sft": "eval_tokens", "dpo": "eval_rewards/margins", "reward": "eval_accuracy", "kto": "eval_kl"}


def config_of(folder: Path, kind: str = "sft", **groups: Any) -> dict[str, Any]:
    """A short training of the model in folder/base on the first 7 rows of a kind, held out are the others."""
    if not (folder / "base").exists():
        save_model(folder / "base")
    for name, rows in {"train": ROWS[kind][:7], "eval": ROWS[kind][7:]}.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    data = {name: str(folder / f"{name}.jsonl") for name in ("train", "eval")}
    batch = {"examples_per_step": 4, "tokens_per_device": 512}
    given = {"objective": {"kind": kind}, "batch": batch, "optim": {"learning_rate": 1e-2}, "trainer": {"max_steps": 2}}
    return {**base_config(folder, data=data, **given), "model": {"path": str(folder / "base")}, **groups}


def evaluated(*given: str, expect: int = 0, **how: Any) -> Any:
    done = packtrain("eval", *given, "--json", expect=expect, **how)
    return json.loads(done.stdout) if expect == 0 else done


@pytest.mark.sample("dpo-lora", "kto-none")
@pytest.mark.parametrize(
    ("kind", "peft"),
    [("sft", "none"), ("sft", "lora"), ("dpo", "none"), ("dpo", "lora"), ("kto", "none"), ("reward", "lora")],
)
def test_the_figures_are_those_of_the_run_that_trained_the_model(kind: str, peft: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, kind, peft={"kind": peft, "r": 4} if peft == "lora" else {})
    run = run_here(tmp_path, config, name="run")
    last, before = run.evals[-1], sorted((tmp_path / "run").rglob("*"))
    by_name = [f"{tmp_path}/run.yaml", f"model.path={tmp_path / 'run'}"]
    report = evaluated(*by_name if peft == "lora" else [str(tmp_path / "run")])  # a run brings its config
    made = "base cache run run.yaml data.jsonl train.jsonl eval.jsonl"
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert {path.name for path in tmp_path.iterdir()} == {*made.split()}
    assert report["objective"] == kind and EVALUATED[kind] in report["figures"]
    for name, value in report["figures"].items():
        assert value == pytest.approx(last[name], rel=1e-5, abs=5e-5), name
    assert abs(run.evals[0]["eval_loss"] - last["eval_loss"]) > 1e-3  # else the start would do


def test_any_model_is_evaluated_with_its_own_tokenizer_and_the_config_as_it_is_means_the_start(tmp_path: Path) -> None:
    path = written(tmp_path, config_of(tmp_path, peft={"kind": "lora"}))

    def loss(*given: str) -> float:
        return evaluated(*given)["figures"]["eval_loss"]

    start = loss(path)
    adapters = save_adapters(tmp_path / "adapters", tmp_path / "base")  # of another rank than the config's
    changed = loss(path, f"model.path={adapters}")
    packtrain("merge", str(adapters))
    merged = loss(path, f"model.path={adapters}-merged", "packing.mode=padding")
    assert merged == pytest.approx(changed, rel=1e-5) and abs(changed - start) > 1e-2
    new = {"init": "random", "config": {"model_type": "llama", "hidden_size": 32}, "tokenizer": "quickstart"}
    path = written(tmp_path, config_of(tmp_path, model=new))
    assert loss(path, f"model.path={tmp_path / 'base'}") == start


def test_two_processes_of_a_launch_find_the_same_and_one_tells_it(tmp_path: Path) -> None:
    path = written(tmp_path, config_of(tmp_path))
    alone = evaluated(path)["figures"]
    told = [done.stdout for done in forked.joined(2, "eval", path, "--json") if done.returncode == 0]
    assert len(told) == 2 and sorted(map(bool, told)) == [False, True]
    figures = json.loads(max(told))["figures"]
    assert figures == pytest.approx(alone, rel=1e-5)


def test_a_run_folder_is_found_by_name_and_knows_where_its_relative_paths_start(tmp_path: Path) -> None:
    config = config_of(tmp_path, trainer={"max_steps": 2, "output_dir": "runs/short"})
    config["data"] |= {"train": "train.jsonl", "eval": "eval.jsonl"}
    (run := tmp_path / "runs/short").mkdir(parents=True)
    (tmp_path / "base").rename(run / "final")
    written(run, config | {"model": {"path": str(run / "final")}}, "config")
    (run / ".packtrain").touch()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    advice = {"runs/shrt": "runs/short", **dict.fromkeys(("runs", "runs/short/final", "elsewhere"), "CONFIG.yaml")}
    for given, said in advice.items():
        refused = packtrain("eval", given, expect=2, cwd=tmp_path).stderr
        assert given in refused and said in refused and "recipes/" not in refused
    refused = packtrain("eval", str(run), expect=2, cwd=elsewhere).stderr
    assert "train.jsonl" in refused and f"cd {tmp_path}" in refused
    write_jsonl(elsewhere / "train.jsonl", ROWS["sft"][:1])
    write_jsonl(elsewhere / "eval.jsonl", ROWS["sft"][1:2])
    assert f"cd {tmp_path}" in packtrain("eval", str(run), cwd=elsewhere).stderr  # other files of these names


def test_a_table_for_people(tmp_path: Path) -> None:
    path = written(tmp_path, config_of(tmp_path))
    shown = packtrain("eval", path, "--generate", "2", "--max-tokens", "4").stdout
    assert "eval_loss" in shown and "0.0% of 2 answers are right, by exact" in shown and "expected" in shown


SCORES = "def first(answer, expected, prompt):\n    return prompt.startswith('user') and 0.5\n"


def that_answers_right(*given: Any) -> None:
    """The command, with a model that knows the held-out answers of this file."""
    import torch
    from transformers import LlamaForCausalLM

    from packtrain.data.sources.quickstart import tokenizer

    ids = tokenizer()("window, I think")["input_ids"]

    def generate(self: Any, input_ids: Any, **_: Any) -> Any:
        return torch.cat([input_ids, torch.tensor([ids])], dim=1)

    model: Any = LlamaForCausalLM
    model.generate = generate
    forked.run(*given)


@pytest.mark.sample("kto-regex:^\\\\w+-0.5", "sft-scores:first-0.5")
@pytest.mark.parametrize(
    ("kind", "score", "share"),
    [
        ("dpo", "exact", 0.0),
        ("dpo", r"regex:(window|garden)", 0.5),
        ("kto", r"regex:^\w+", 0.5),
        ("kto", "scores.py:first", 0.5),
        ("sft", "scores:first", 0.5),
    ],
)
def test_answers_are_scored(kind: str, score: str, share: float, tmp_path: Path) -> None:
    rows = [row for word in ("window", "paper") for row in PAIRS if row["chosen"][0]["content"] == word]
    if kind == "sft":
        rows = [{"messages": [*row["prompt"], *row["chosen"]]} for row in rows]
    if kind == "kto":
        labelled = {"prompt": rows[0]["prompt"], "completion": rows[0]["chosen"], "label": False}
        rows = [labelled, *({"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in rows)]
    config = config_of(tmp_path, kind)
    write_jsonl(tmp_path / "eval.jsonl", rows)
    (tmp_path / "scores.py").write_text(SCORES)
    given = (written(tmp_path, config), "--generate", "5", "--score", score)
    report = evaluated(*given, cwd=tmp_path, begin=that_answers_right)["generated"]
    assert report["rows"] == 2 and [row["answer"] for row in report["answers"]] == ["window, I think"] * 2
    assert [row["expected"].strip() for row in report["answers"]] == ["window", "paper"]
    assert report["share"] == share


def test_tasks_are_those_of_the_harness_and_without_it_refused(tmp_path: Path) -> None:
    path = written(tmp_path, config_of(tmp_path))
    if find_spec("lm_eval") is None:
        assert "[lm-eval-missing]" in packtrain("eval", path, "--tasks", "words", expect=2).stderr
    tasks = evaluated(path, "--tasks", "words,letters", begin=beside_harness)["tasks"]
    assert {*tasks} == {"words", "letters"} and tasks["words"]["acc,none"] == 0.25 and tasks["words"]["score,first"]
    unknown = packtrain("eval", path, "--tasks", "wrds", expect=2, begin=beside_harness).stderr
    assert "[no-such-task]" in unknown and "words" in unknown and "Traceback" not in unknown


def beside_harness(*given: Any) -> None:
    """The command, which finds a stand-in for lm_eval."""
    import sys

    sys.path.insert(0, str(Path(__file__).parent / "stand_in_harness"))
    forked.run(*given)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("sft", ["data.eval=null"], ("data.eval", "[nothing-to-evaluate]")),
        ("sft", ["model.path=./nowhere"], ("model.path", "nowhere")),
        ("sft", ["--score", "exactly"], ("--score", "regex:PATTERN")),
        ("sft", ["--generate", "1", "--score", "regex:("], ("--score", "[bad-pattern]")),
        ("sft", ["--generate", "1", "--score", "nowhere:f"], ("--score", "nowhere")),
        ("reward", ["--generate", "1"], ("--generate", "[scores-not-answers]")),
        ("dpo", ["model.init=random", "model.path=base"], ("objective.reference", "[reference-lost]")),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    kind: str, given: list[str], says: tuple[str, ...], tmp_path: Path
) -> None:
    config = config_of(tmp_path, kind)
    if "model.init=random" in given:
        config["model"] = {"init": "random", "config": {"model_type": "llama"}, "tokenizer": "quickstart"}
        given = ["model.path=base"]
    done = evaluated(written(tmp_path, config), *given, expect=2, cwd=tmp_path)
    assert "Traceback" not in done.stderr and done.stdout == ""
    for words in says:
        assert words in done.stderr


SIZES = {"tokens", "pairs", "answers"}


def with_sets(folder: Path, kind: str, **groups: Any) -> dict[str, Any]:
    """A config with the sets `math` (two files) and `chat-2`."""
    config = config_of(folder, kind, **groups)
    rows = [*ROWS[kind], *ROWS[kind][1:4]] if kind != "sft" else conversations(15)
    for name, part in {"a": rows[7:9], "b": rows[9:11], "c": rows[11:]}.items():
        write_jsonl(folder / f"{name}.jsonl", part)
    a, b, c = (str(folder / f"{name}.jsonl") for name in "abc")
    config["data"]["eval"] = {"math": [a, {"path": b, "weight": 2.0}], "chat-2": c}
    return config


def of_set(line: dict[str, Any], name: str) -> dict[str, Any]:
    return {key.removeprefix(f"eval_{name}_"): value for key, value in line.items() if key.startswith(f"eval_{name}_")}


@pytest.mark.sample("dpo")
@pytest.mark.parametrize("kind", ROWS)
def test_each_set_has_the_figures_of_it_alone_and_all_together_those_of_one_list(kind: str, tmp_path: Path) -> None:
    settings = {"loss": ["sigmoid", "sft"]} if kind == "dpo" else {}
    config = with_sets(tmp_path, kind, objective={"kind": kind, **settings})
    path = written(tmp_path, config)
    found = evaluated(path)["figures"]
    math = config["data"]["eval"]["math"]
    sets = {"math": f"data.eval=[{math[0]},{{path: {math[1]['path']},weight: 2.0}}]"}
    sets |= {"chat-2": f"data.eval={config['data']['eval']['chat-2']}"}
    for name, only in sets.items():
        alone = {key.removeprefix("eval_"): value for key, value in evaluated(path, only)["figures"].items()}
        assert of_set(found, name) == pytest.approx(alone, rel=1e-6, abs=1e-7)
    together = sets["math"].replace("]", f",{config['data']['eval']['chat-2']}]")
    one_list = evaluated(path, together)["figures"]
    whole = {key: found[key] for key in one_list}
    # the estimate of kto pairs each answer with the one before it in its set
    assert whole == pytest.approx(one_list, rel=1e-6 if kind != "kto" else 1e-2, abs=1e-7)
    (unit,) = SIZES & {key.removeprefix("eval_") for key in one_list}
    weights = {name: found[f"eval_{name}_{unit}"] for name in sets}
    assert sum(weights.values()) == found[f"eval_{unit}"]
    if kind != "dpo":  # whose loss `sft` is a mean over tokens
        mean = sum(found[f"eval_{name}_loss"] * weight for name, weight in weights.items()) / found[f"eval_{unit}"]
        assert found["eval_loss"] == pytest.approx(mean, rel=1e-6)


def test_a_run_tells_them_everywhere_alike_on_two_processes_and_stops_by_all_of_them(tmp_path: Path) -> None:
    config = with_sets(tmp_path, "sft")
    config["trainer"] |= {"eval_every": 1, "early_stop_patience": 5}
    del config["data"]["eval"]["chat-2"]
    chat = f"data.eval.chat-2={tmp_path / 'c.jsonl'}"
    alone, two = train(tmp_path, config, chat, name="alone"), train(tmp_path, config, chat, name="two", processes=2)
    assert len(alone.evals) == len(two.evals) == 3
    for one, other in zip(alone.evals, two.evals, strict=True):
        held_out = {key: value for key, value in one.items() if key.startswith("eval_")}
        assert {key: other[key] for key in held_out} == pytest.approx(held_out, rel=1e-6)
    last, summary = alone.evals[-1], alone.summary
    whole, math, chat_2 = (f"{last[f'eval_{name}loss']:.4f}" for name in ("", "math_", "chat-2_"))
    assert f"eval loss {whole} (math {math}, chat-2 {chat_2})" in alone.log
    assert summary["eval_loss"] == summary["best_eval_loss"] == min(line["eval_loss"] for line in alone.evals)
    assert all(summary[key] == value for key, value in last.items() if key.startswith("eval_"))
    page = tmp_path / "page.html"
    packtrain("report", str(alone.folder), "-o", str(page))
    assert "Held-out loss of math" in page.read_text() and "Held-out sets" in page.read_text()
    again = train(tmp_path, config, "trainer.max_steps=3", name="alone")  # other sets do not keep a run from going on
    assert {"eval_math_loss"} == {key for key in again.evals[-1] if key.startswith(("eval_math_l", "eval_chat"))}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("data.eval.loss=quickstart", "data.eval.loss"),
        ("data.eval={a b:quickstart}", "data.eval.a b"),
        ("data.eval={}", "data.eval"),
        ("data.eval={math:[]}", "data.eval"),
        ("data.eval={math:0.1}", "data.eval.math"),
        ("data.eval={math:missing.jsonl}", "missing.jsonl"),
        ("data.eval={math:{pth:x.jsonl}}", "data.eval.math.pth"),
        ("data.eval={path:quickstart,pth:1}", "data.eval.pth"),
    ],
)
def test_sets_that_cannot_be_are_refused_by_name(given: str, key: str) -> None:
    with pytest.raises(UserError, match=key):
        load_config(None, ["model.path=some/model", "data.train=quickstart", "batch.examples_per_step=8", given])
