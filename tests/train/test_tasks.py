"""Tasks of lm_eval, measured while training (trainer.tasks): the same figures on any number of ranks, and a training left as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import Run, base_config, conversations, packtrain, train, write_jsonl, written
from safetensors.torch import load_file

QUESTIONS = ["window", "paper", "river", "garden", "stone"]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: "{{{{q}}}}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """
output_type: generate_until
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
filter_list:
  - {name: strict, filter: [{function: regex, regex_pattern: "(w.*)"}, {function: take_first}]}
  - {name: loose, filter: [{function: take_first}]}
metric_list: [{metric: exact_match}]
"""
TEXT = """
output_type: loglikelihood_rolling
doc_to_target: "{{q}}"
metric_list: [{metric: word_perplexity}]
"""
TASKS = {"choice": CHOICE, "written": WRITTEN, "text": TEXT}


def tasks_in(folder: Path, rows: int = 5) -> list[str]:
    """YAML files of three tasks without a network."""
    docs = [
        {"q": f"Say {word} or {QUESTIONS[at - 1]}.", "a": word, "choices": [word, QUESTIONS[at - 1]], "gold": at % 2}
        for at, word in enumerate(QUESTIONS[:rows])
    ]
    (folder / "rows.json").write_text("".join(f"{json.dumps(doc)}\n" for doc in docs))
    for name, kind in TASKS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, rows=folder / "rows.json") + kind)
    return [str(folder / f"{name}.yaml") for name in TASKS]


def config_of(folder: Path, rows: int = 5, **trainer: Any) -> dict[str, Any]:
    held_out = write_jsonl(folder / "held-out.jsonl", conversations(3, seed=1))
    keys = {"max_steps": 4, "eval_every": 2, "tasks": tasks_in(folder, rows), **trainer}
    return base_config(folder, data={"eval": str(held_out)}, trainer=keys)


def figures(run: Run) -> list[dict[str, float]]:
    return [{key: value for key, value in line.items() if "/" in key} for line in run.evals]


@pytest.mark.parametrize(("processes", "strategy"), [(2, "ddp"), (3, "ddp"), (2, "fsdp2"), (2, "zero3")])
def test_any_number_of_ranks_measures_the_same_and_trains_as_without(
    processes: int, strategy: str, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    config = config_of(tmp_path)
    alone, without = train(tmp_path, config, name="alone"), train(tmp_path, config, "trainer.tasks=[]", name="without")
    run = train(tmp_path, config, f"strategy={strategy}", processes=processes, name="several")
    names = ["choice/acc", "choice/acc_norm", "written/exact_match", "text/word_perplexity"]
    assert [*figures(alone)[0]] == [f"eval_{name}" for name in names]
    for one, other in zip(figures(alone), figures(run), strict=True):
        assert other == pytest.approx(one, rel=1e-4)
    weights = [load_file(one.folder / "final" / "model.safetensors") for one in (alone, without)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_when_the_time_is_over_figures_are_left_out_and_training_goes_on(
    processes: int, strategy: str, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    config = config_of(tmp_path, measure_timeout=1e-3)
    run = train(tmp_path, config, f"strategy={strategy}", processes=processes)
    assert run.summary["steps"] == 4 and figures(run) == [{}, {}, {}]
    assert run.log.count("figures are left out") == 1 and "trainer.measured_rows" in run.log


def test_fewer_rows_than_ranks_are_measured_by_all_of_them(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    config = config_of(tmp_path, measured_rows=2)
    alone, several = train(tmp_path, config, name="alone"), train(tmp_path, config, processes=3, name="several")
    assert figures(alone)[0] and figures(several) == [pytest.approx(one, rel=1e-4) for one in figures(alone)]


@pytest.mark.parametrize(
    ("overrides", "code", "advice"),
    [
        (["trainer.tasks=[choise.yaml]"], "no-such-task", "lm-eval ls tasks"),
        (["trainer.tasks=[gsm8,hellaswagg]"], "no-such-task", "gsm8k"),
        (["trainer.best_by=highest eval_choice/ac", "trainer.early_stop_patience=2"], "no-such-figure", "choice/acc"),
    ],
)
def test_what_no_task_has_is_refused_before_the_model_is_loaded(
    overrides: list[str], code: str, advice: str, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    refused = packtrain("sft", written(tmp_path, config_of(tmp_path)), *overrides, expect=2).stderr
    assert f"[{code}]" in refused and advice in refused and "precision " not in refused
