"""`packtrain eval`: the figures that a training's evaluation finds, of any model, and answers to held-out rows that are scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from here import train_here
from running import WORDS, conversations, packtrain, write_jsonl
from tiny_models import save_adapters, save_model

from packtrain.config.compose import load_config
from tests.train import forked

PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"Say {word}."}],
        "chosen": [{"role": "assistant", "content": word}],
        "rejected": [{"role": "assistant", "content": word[::-1]}],
    }
    for word in WORDS
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
    data = {
        "train": str(folder / "train.jsonl"),
        "eval": str(folder / "eval.jsonl"),
        "cache_dir": str(folder / "cache"),
        "max_length": 200,
    }
    return {
        "model": {"path": str(folder / "base")},
        "objective": {"kind": kind},
        "data": data,
        "batch": {"examples_per_step": 4, "tokens_per_device": 512},
        "optim": {"learning_rate": 1e-2, "schedule": "constant"},
        "trainer": {"max_steps": 2, "log_every": 1, "output_dir": str(folder / "run")},
        **groups,
    }


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"


def evaluated(*given: str, expect: int = 0, **how: Any) -> Any:
    done = packtrain("eval", *given, "--json", expect=expect, **how)
    return json.loads(done.stdout) if expect == 0 else done


@pytest.mark.sample("dpo-lora", "kto-none")
@pytest.mark.parametrize(
    ("kind", "peft"),
    [("sft", "none"), ("sft", "lora"), ("dpo", "none"), ("dpo", "lora"), ("kto", "none"), ("reward", "lora")],
)
def test_the_figures_are_those_of_the_run_that_trained_the_model(kind: str, peft: str, tmp_path: Path) -> None:
    path = written(tmp_path, config_of(tmp_path, kind, peft={"kind": peft, "r": 4} if peft == "lora" else {}))
    run = train_here(load_config(str(path), []), tmp_path / "run")
    last, before = run.evals[-1], sorted((tmp_path / "run").rglob("*"))
    by_name = [str(path), f"model.path={tmp_path / 'run'}"]
    report = evaluated(*by_name if peft == "lora" else [str(tmp_path / "run")])  # a run brings its config
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert {path.name for path in tmp_path.iterdir()} == {
        "base",
        "cache",
        "run",
        "config.yaml",
        "train.jsonl",
        "eval.jsonl",
    }
    assert report["objective"] == kind and EVALUATED[kind] in report["figures"]
    for name, value in report["figures"].items():
        assert value == pytest.approx(last[name], rel=1e-5, abs=5e-5), name
    assert abs(run.evals[0]["eval_loss"] - last["eval_loss"]) > 1e-3  # else the start would do


def test_any_model_is_evaluated_with_its_own_tokenizer_and_the_config_as_it_is_means_the_start(tmp_path: Path) -> None:
    path = written(tmp_path, config_of(tmp_path, peft={"kind": "lora"}))
    start = evaluated(str(path))["figures"]["eval_loss"]
    adapters = save_adapters(tmp_path / "adapters", tmp_path / "base")  # of another rank than the config's
    changed = evaluated(str(path), f"model.path={adapters}")["figures"]["eval_loss"]
    packtrain("merge", str(adapters))
    merged = evaluated(str(path), f"model.path={adapters}-merged", "packing.mode=padding")["figures"]["eval_loss"]
    assert merged == pytest.approx(changed, rel=1e-5) and abs(changed - start) > 1e-2
    new = config_of(
        tmp_path,
        model={"init": "random", "config": {"model_type": "llama", "hidden_size": 32}, "tokenizer": "quickstart"},
    )
    assert evaluated(str(written(tmp_path, new)), f"model.path={tmp_path / 'base'}")["figures"]["eval_loss"] == start


def test_two_processes_of_a_launch_find_the_same_and_one_tells_it(tmp_path: Path) -> None:
    path = str(written(tmp_path, config_of(tmp_path)))
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
    written(run, config | {"model": {"path": str(run / "final")}})
    (run / ".packtrain").touch()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    advice = {
        "runs/shrt": "runs/short",
        "runs": "CONFIG.yaml",
        "runs/short/final": "CONFIG.yaml",
        "elsewhere": "CONFIG.yaml",
    }
    for given, said in advice.items():
        refused = packtrain("eval", given, expect=2, cwd=tmp_path).stderr
        assert given in refused and said in refused and "recipes/" not in refused
    refused = packtrain("eval", str(run), expect=2, cwd=elsewhere).stderr
    assert "train.jsonl" in refused and f"cd {tmp_path}" in refused
    write_jsonl(elsewhere / "train.jsonl", ROWS["sft"][:1])
    write_jsonl(elsewhere / "eval.jsonl", ROWS["sft"][1:2])
    assert f"cd {tmp_path}" in packtrain("eval", str(run), cwd=elsewhere).stderr  # other files of these names


def test_a_table_for_people(tmp_path: Path) -> None:
    shown = packtrain(
        "eval", str(written(tmp_path, config_of(tmp_path))), "--generate", "2", "--max-tokens", "4"
    ).stdout
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
    given = (str(written(tmp_path, config)), "--generate", "5", "--score", score)
    report = evaluated(*given, cwd=tmp_path, begin=that_answers_right)["generated"]
    assert report["rows"] == 2 and [row["answer"] for row in report["answers"]] == ["window, I think"] * 2
    assert [row["expected"].strip() for row in report["answers"]] == ["window", "paper"]
    assert report["share"] == share


HARNESS = {
    "__init__.py": """
def simple_evaluate(model, tasks):
    if tasks != ["one", "two"]:
        raise KeyError("no such task")
    return {"results": {task: {"acc,none": float(model.rows == 2), "alias": task} for task in tasks}}
""",
    "models/__init__.py": "",
    "models/huggingface.py": """
class HFLM:
    def __init__(self, pretrained, tokenizer, batch_size):
        self.rows = pretrained(**tokenizer(["a", "b"], return_tensors="pt")).logits.shape[0]
""",
}


def test_tasks_are_those_of_the_harness_and_without_it_refused(tmp_path: Path) -> None:
    path = str(written(tmp_path, config_of(tmp_path)))
    refused = packtrain("eval", path, "--tasks", "one", expect=2).stderr
    assert "lm_eval" in refused and "pip install lm-eval" in refused
    for name, code in HARNESS.items():
        (tmp_path / "lm_eval" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lm_eval" / name).write_text(code)
    report = evaluated(path, "--tasks", "one,two", cwd=tmp_path, begin=beside)
    assert report["tasks"] == {task: {"acc,none": 1.0, "alias": task} for task in ("one", "two")}
    unknown = packtrain("eval", path, "--tasks", "three", expect=2, cwd=tmp_path, begin=beside).stderr
    assert "no such task" in unknown and "Traceback" not in unknown


def beside(*given: Any) -> None:
    """The command, which finds the modules of its folder."""
    import sys

    sys.path.insert(0, "")
    forked.run(*given)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("sft", ["data.eval=null"], ("data.eval", "nothing to evaluate")),
        ("sft", ["model.path=./nowhere"], ("model.path", "nowhere")),
        ("sft", ["--score", "exactly"], ("--score", "regex:PATTERN")),
        ("sft", ["--generate", "1", "--score", "regex:("], ("--score", "no pattern")),
        ("sft", ["--generate", "1", "--score", "nowhere:f"], ("--score", "nowhere")),
        ("reward", ["--generate", "1"], ("--generate", "no answers")),
        ("dpo", ["model.init=random", "model.path=base"], ("objective.reference", "Name a model")),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    kind: str, given: list[str], says: tuple[str, ...], tmp_path: Path
) -> None:
    config = config_of(tmp_path, kind)
    if "model.init=random" in given:
        config["model"] = {"init": "random", "config": {"model_type": "llama"}, "tokenizer": "quickstart"}
        given = ["model.path=base"]
    done = evaluated(str(written(tmp_path, config)), *given, expect=2, cwd=tmp_path)
    assert "Traceback" not in done.stderr and done.stdout == ""
    for words in says:
        assert words in done.stderr
