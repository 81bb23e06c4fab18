"""A model of new weights learns to see: the recipe, its answers with pictures, and what reads its final/."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import forked
import pytest
import torch
from running import Run, packtrain
from transformers import AutoModelForImageTextToText

from packtrain.config.compose import load_config
from packtrain.config.schema import Model
from packtrain.data.pictures.processor import PictureProcessor
from packtrain.data.sources import quickstart_pictures
from packtrain.data.sources.quickstart_pictures import conversations

SHORT = ("trainer.max_steps=12", "trainer.eval_every=12", "trainer.samples=[0,5,Hello.]", "batch.examples_per_step=8")


def with_few_pictures(*given: Any) -> None:
    quickstart_pictures.COUNTS.update(train=96, eval=24)
    forked.run(*given)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"PACKTRAIN_CACHE": str(tmp_path_factory.mktemp("cache")), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> tuple[Run, str]:
    """The run, which is some steps of the recipe on few pictures, and what it said."""
    folder = tmp_path_factory.mktemp("quickstart-pictures")
    given = ("sft", "recipes/quickstart-pictures.yaml", *SHORT)
    said = packtrain(*given, cwd=folder, env=environment, begin=with_few_pictures).stdout
    return Run(folder / "runs" / "quickstart-pictures"), said


def test_the_held_out_loss_falls_and_answers_are_shown_with_their_pictures(seen: tuple[Run, str]) -> None:
    run, said = seen
    assert run.summary["eval_loss"] < run.summary["first_eval_loss"] / 2
    assert "isolation  exact" in said and said.count("before ") == said.count("after  ") == 3
    report, rows = (run.folder / "report.html").read_text(), conversations("eval", count=6)
    *with_pictures, hello = run.summary["answers"]
    for row, answer in zip((rows[0], rows[5]), with_pictures, strict=True):
        (_, part), wanted = row["messages"][0]["content"], row["messages"][1]["content"]
        assert answer["prompt"].startswith("[picture ") and answer["prompt"].endswith(f"] {part['text']}")
        assert answer["expected"] == wanted and answer["prompt"] in said and wanted in said
        (picture,) = answer["pictures"]
        assert picture.startswith("data:image/") and f'<img src="{picture}"' in report
    assert hello.keys() == {"prompt", "before", "after"} and hello["prompt"] == "Hello."


def test_the_final_folder_has_the_same_eyes(seen: tuple[Run, str]) -> None:
    final = seen[0].folder / "final"
    recipe = load_config("recipes/quickstart-pictures.yaml", []).model
    made, saved = PictureProcessor(recipe), PictureProcessor(Model(path=str(final)))
    assert made.text_of(84, 56) == saved.text_of(84, 56) != saved.text_of(84, 112)
    ours, theirs = (one.document(84, 56) for one in (made, saved))
    assert [*ours.input_ids] == [*theirs.input_ids]
    model = AutoModelForImageTextToText.from_pretrained(final)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert all(weight.isfinite().all() for weight in model.state_dict().values() if isinstance(weight, torch.Tensor))


def test_eval_answers_questions_about_pictures_and_chat_answers_text(seen, environment) -> None:
    run, _ = seen
    given: dict[str, Any] = {"cwd": run.folder.parents[1], "env": environment}
    found = packtrain("eval", str(run.folder), "--generate", "6", "--json", begin=with_few_pictures, **given)
    report = json.loads(found.stdout)
    assert report["figures"]["eval_loss"] == pytest.approx(run.summary["eval_loss"], rel=1e-5)
    answers = report["generated"]["answers"]
    for number, answer in zip((0, 5), run.summary["answers"], strict=False):
        assert answers[number]["expected"] == answer["expected"]
        assert answers[number]["answer"].strip().startswith(answer["after"])  # up to 64 tokens, as here
    said = packtrain("chat", str(run.folder), begin=partial(forked.piped, "Hello.\n"), **given).stdout
    assert said.startswith(run.summary["answers"][2]["after"])
