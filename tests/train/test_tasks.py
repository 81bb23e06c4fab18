"""trainer.tasks: figures of lm_eval, equal on any number of ranks. The training stays the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from here import run_here
from running import Run, base_config, conversations, packtrain, train, write_jsonl, written
from safetensors.torch import load_file

from packtrain.errors import UserError
from tests.train import forked

STAND_IN = Path(__file__).parent / "stand_in_harness"

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


def beside_harness(*given: Any) -> None:
    """The command, which finds a stand-in for lm_eval."""
    sys.path.insert(0, str(STAND_IN))
    forked.run(*given)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """lm_eval is the stand-in, for this test alone."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
            del sys.modules[name]

    forget()
    monkeypatch.syspath_prepend(STAND_IN)
    yield
    forget()


@pytest.mark.usefixtures("stand_in")
def test_figures_of_tasks_are_everywhere_and_training_is_as_without(tmp_path: Path) -> None:
    by_tasks = {"best_by": "lowest eval_words/score", "early_stop_patience": 9}
    config = config_of(tmp_path, tasks=["words"], measure_every=4, **by_tasks)
    run, names = run_here(tmp_path, config), ["eval_words/score", "eval_words/acc"]
    assert [[*line] for line in figures(run)] == [names, [], names]
    assert run.evals[0][names[0]] != run.evals[-1][names[0]] > 0
    summary = run.summary
    assert summary["best_step"] == 4 and summary["best_value"] == summary[names[0]] == run.evals[-1][names[0]]
    assert run.log.count("words acc 25.0%") == 3  # two evaluations, and the end
    packtrain("report", str(run.folder), "-o", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "words acc" in page and "lowest eval_words/score" in page
    plain = ("trainer.tasks=[]", "trainer.measure_every=null", "trainer.best_by=lowest eval_loss")
    without = run_here(tmp_path, config, *plain, name="without")
    assert run.losses == without.losses and figures(without) == [{}, {}, {}]
    weights = [one.weights("checkpoints/step-000004") for one in (run, without)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
    files = [one.folder / "final" / "tokenizer_config.json" for one in (run, without)]
    assert files[0].read_text() == files[1].read_text()  # lm_eval names a padding token
    unknown = config_of(tmp_path, tasks=["words"], best_by="highest eval_words/scores", early_stop_patience=9)
    with pytest.raises(UserError, match="eval_words/score"):
        run_here(tmp_path, unknown, name="unknown")


def test_a_run_with_tasks_needs_lm_eval_and_held_out_rows(tmp_path: Path) -> None:
    path = written(tmp_path, config_of(tmp_path))
    if find_spec("lm_eval") is None:
        refused = packtrain("sft", path, expect=2).stderr
        assert "[lm-eval-missing]" in refused and "pip install lm-eval" in refused
    refused = packtrain("sft", path, "data.eval=null", "trainer.tasks=[words]", expect=2, begin=beside_harness).stderr
    assert "[nothing-to-evaluate]" in refused and "trainer.tasks" in refused


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


def test_the_last_figures_are_those_of_packtrain_eval(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    config = config_of(tmp_path)
    run = train(tmp_path, config)
    done = packtrain("eval", str(run.folder), "--tasks", ",".join(config["trainer"]["tasks"]), "--json")
    found = json.loads(done.stdout)["tasks"]
    last = figures(run)[-1]
    assert found["choice"]["acc,none"] == last["eval_choice/acc"]
    assert found["text"]["word_perplexity,none"] == pytest.approx(last["eval_text/word_perplexity"], rel=1e-4)
    assert found["written"]["exact_match,strict"] == last["eval_written/exact_match"]


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
    ],
)
def test_what_no_task_has_is_refused_before_the_model_is_loaded(
    overrides: list[str], code: str, advice: str, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    refused = packtrain("sft", written(tmp_path, config_of(tmp_path)), *overrides, expect=2).stderr
    assert f"[{code}]" in refused and advice in refused and "precision " not in refused
