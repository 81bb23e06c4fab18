"""trainer.answers: the share of right answers, equal on any number of ranks. The training stays the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from here import loaded, run_here
from running import Run, assert_same_bits, base_config, conversations, train, write_jsonl
from tiny_models import save_model, tiny_model

from packtrain.config.schema import Trainer
from packtrain.data.tokens.cache import Document
from packtrain.errors import UserError
from packtrain.inspect.rendering import percent
from packtrain.report.figures import figures_of, tiles
from packtrain.report.run_record import read_run
from packtrain.run_folder import RunFolder
from packtrain.serve.evaluation import answer_held_out
from packtrain.serve.trained import find_trained, load_trained
from packtrain.train.measures.due import Deadline
from packtrain.train.measures.right_answers import RightAnswers, score_of

SCORES = """
import torch
torch.manual_seed(1)
asked = []
def digits(answer, expected, prompt):
    torch.manual_seed(len(answer))
    return sum(map(ord, answer)) % 97 / 96
def raises(answer, expected, prompt):
    return 1 / 0
def nothing(answer, expected, prompt):
    return None
def infinite(answer, expected, prompt):
    return float("inf")
def percents(answer, expected, prompt):
    return 50
def takes_one(answer):
    return 1
def tires(answer, expected, prompt):
    asked.append(answer)
    return 1 / (len(asked) < 12)
"""


def config_of(folder: Path, **trainer: Any) -> dict[str, Any]:
    """Six steps of a tiny model, and two named held-out sets."""
    if not (folder / "base").exists():
        save_model(folder / "base", attention_dropout=0.1)
    (folder / "answer_scores.py").write_text(SCORES)
    data: dict[str, Any] = {"train": str(write_jsonl(folder / "train.jsonl", conversations(9)))}
    rows = conversations(17)[9:]
    data["eval"] = {name: str(write_jsonl(folder / f"{name}.jsonl", rows[at])) for name, at in SETS.items()}
    given = {
        "max_steps": 6,
        "eval_every": 2,
        "answers": f"{folder}/answer_scores.py:digits",
        "answer_tokens": 6,
        **trainer,
    }
    batch = {"examples_per_step": 3, "tokens_per_device": 512}
    config = base_config(folder, data=data, batch=batch, optim={"learning_rate": 1e-2}, trainer=given)
    return {**config, "model": {"path": str(folder / "base")}}


SETS = {"chat": slice(0, 3), "math": slice(3, 8)}


def answers_of(run: Run) -> list[tuple[int, dict[str, float]]]:
    return [(line["step"], {key: line[key] for key in line if key.endswith("right")}) for line in run.evals]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answers")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Run:
    """A run with answers every fourth step."""
    return run_here(folder, config_of(folder, measure_every=4, checkpoint_every=2, keep_checkpoints=None), name="whole")


def test_figures_are_those_of_the_saved_model_before_and_after_training_and_every_so_many_steps(
    whole: Run, folder: Path
) -> None:
    found = answers_of(whole)
    assert [(step, bool(figures)) for step, figures in found] == [(0, True), (2, False), (4, True), (6, True)]
    config = loaded(folder, config_of(folder), name="again")
    score = score_of(str(config.trainer.answers), "--score")
    for step, place in ((0, folder / "base"), (6, whole.folder / "final")):
        made = answer_held_out(*load_trained(find_trained(str(place))), config, score, rows=8, tokens=6)["answers"]
        scores = [answer["score"] for answer in made]
        wanted = {f"eval_{name}_right": sum(scores[at]) / len(scores[at]) for name, at in SETS.items()}
        assert dict(found)[step] == pytest.approx({"eval_right": sum(scores) / 8, **wanted})
        assert len({*scores}) > 3


def test_weights_and_losses_are_those_of_a_run_without_answers(whole: Run, folder: Path) -> None:
    config = config_of(folder)
    del config["trainer"]["answers"], config["trainer"]["answer_tokens"]
    plain = run_here(folder, config, name="plain")
    assert_same_bits(whole, plain)
    assert answers_of(plain)[0] == (0, {})


def test_a_resumed_run_repeats_no_answers_and_writes_the_same_lines(whole: Run, folder: Path) -> None:
    checkpoint = whole.folder / "checkpoints/checkpoint-4"
    again = f"trainer.resume={checkpoint if checkpoint.is_dir() else next(whole.folder.rglob('*4'))}"
    resumed = run_here(folder, config_of(folder, measure_every=4), again, name="resumed")
    assert answers_of(resumed) == [one for one in answers_of(whole) if one[0] > 4]


def test_people_see_percentages(whole: Run) -> None:
    found, record = dict(answers_of(whole)), read_run(RunFolder(whole.folder))
    assert f"right answers {found[4]['eval_right']:.1%}" in whole.log
    assert f"right answers {found[6]['eval_right']:.1%}" in whole.log.partition("done in")[2]
    assert ("Held-out right answers", percent(found[6]["eval_right"]), "") in tiles(record)
    kinds = {drawing.title: (drawing.kind, [curve.key for curve in curves]) for drawing, curves in figures_of([record])}
    assert kinds["right answers"] == ("percent", ["eval_right"])
    assert kinds["right"] == ("percent", ["eval_chat_right", "eval_math_right"])  # of each set


@pytest.mark.sample("2-fsdp2")
@pytest.mark.parametrize(("processes", "strategy"), [(2, "ddp"), (3, "ddp"), (2, "fsdp2"), (3, "fsdp2"), (2, "zero3")])
def test_ranks_share_the_prompts_and_find_the_same(
    processes: int, strategy: str, whole: Run, folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder, max_steps=1, eval_every=None)
    run = train(tmp_path, config, f"strategy.name={strategy}", name="run", processes=processes)
    assert answers_of(run)[0] == (0, pytest.approx(dict(answers_of(whole))[0]))
    assert len(answers_of(run)) == 2


@pytest.mark.sample("1")
@pytest.mark.parametrize("processes", [1, 2])
def test_figures_that_take_too_long_are_left_out_with_one_warning(processes: int, folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, measure_timeout=1e-6)
    run = train(tmp_path, config, name="run", processes=processes) if processes > 1 else run_here(tmp_path, config)
    assert [figures for _, figures in answers_of(run)] == [{}] * 4
    assert run.log.count("trainer.measure_timeout=1e-06") == 1 and "trainer.measured_rows" in run.log


@pytest.mark.sample("nothing")
@pytest.mark.parametrize("name", ["raises", "nothing", "infinite", "percents", "takes_one"])
def test_a_score_that_fails_ends_the_run_before_step_1(name: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run_here(tmp_path, config_of(folder, answers=f"{folder}/answer_scores.py:{name}"))
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("score-failed", "trainer.answers")


def test_a_score_that_fails_later_leaves_its_figures_out(folder: Path, tmp_path: Path) -> None:
    run = run_here(tmp_path, config_of(folder, answers=f"{folder}/answer_scores.py:tires", measured_rows=3))
    assert [bool(figures) for _, figures in answers_of(run)] == [True, False, False, False]
    assert run.log.count("eval_right is left out") == 3 and run.summary["status"] == "done"


@pytest.mark.parametrize(("error", "code"), [(IndexError("too long"), "answer-failed"), (RuntimeError("lost"), "")])
def test_lost_ranks_and_a_lack_of_memory_keep_their_own_errors(error: Exception, code: str) -> None:
    def answers(*_: object) -> None:
        raise error

    document = Document(np.arange(9, dtype=np.int32), np.arange(9) > 5)
    tokenizer = SimpleNamespace(decode=lambda ids, **_: str(ids))
    generator: Any = SimpleNamespace(model=tiny_model("llama"), tokenizer=tokenizer, answers=answers)
    measure = RightAnswers(Trainer(answers="exact"), {"": [document]}, generator, print)
    with pytest.raises(UserError if code else RuntimeError) as caught:
        measure(Deadline(torch.device("cpu")))
    assert not code or caught.value.problems[0].code == code  # type: ignore[union-attr]


def test_only_rows_with_prompts_are_asked_and_one_is_needed(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, max_steps=1)
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "one two three"}, {"text": "four five six"}])
    config["data"] |= {"train": str(texts), "eval": str(texts), "format": "text"}
    with pytest.raises(UserError) as caught:
        run_here(tmp_path, config)
    assert caught.value.problems[0].code == "no-prompts"


def test_of_labelled_answers_the_good_ones_are_asked(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, max_steps=1, answers="regex:(good|^)") | {"objective": {"kind": "kto"}}
    rows = [{"prompt": f"Say {word}.", "completion": word, "label": word == "good"} for word in ("good", "bad", "ill")]
    config["data"] |= dict.fromkeys(("train", "eval"), str(write_jsonl(tmp_path / "labels.jsonl", rows * 2)))
    run = run_here(tmp_path, config, "model.config.attention_dropout=0.0")
    assert [line["eval_answers"] for line in run.evals] == [6, 6]  # their number, as of any kto
    assert [line["eval_right"] for line in run.evals] == [0, 0]  # none says "good"; to a bad row "" were right


def test_weights_in_bfloat16_answer_as_they_compute(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, max_steps=1) | {"peft": {"kind": "lora", "r": 4}}
    config["trainer"]["mixed_precision"] = "bf16"
    assert [len(figures) for _, figures in answers_of(run_here(tmp_path, config))] == [3, 3]
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16 and not torch.is_autocast_enabled("cpu")
