"""ledger.jsonl has the loss of each document, each time that it is trained."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_runs import of_objective, save_model
from here import run_here
from matrix import cut
from running import LLAMA, Run, assert_same_bits, config_on, conversations, write_jsonl
from transformers import AutoModelForCausalLM

from packtrain.config.schema import Model
from packtrain.data.tokens.cache import Document
from packtrain.inspect.corpus import Corpus, find_places, open_corpus
from packtrain.packing.collate import IGNORE, shifted_labels
from packtrain.train.checkpoint import state as checkpoint_state
from packtrain.train.log.ledger import Ledger

EVERY_3 = {"checkpoint_every": 3, "keep_checkpoints": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ledger")
    save_model(Model(init="random", config=LLAMA, tokenizer="quickstart"), folder / "start")
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Run:
    """Steps of several micro-batches, with checkpoints and evaluations; documents are repeated within a step."""
    return run_here(folder, config_of(folder), name="whole")


def config_of(folder: Path, **trainer: Any) -> dict[str, Any]:
    files = [write_jsonl(folder / f"{name}.jsonl", conversations(n, n)) for name, n in (("many", 19), ("few", 3))]
    few = files[1].read_text().splitlines()
    files[1].write_text("\n\n".join(few))  # blank lines are no rows
    train = [{"path": str(files[0])}, {"path": str(files[1]), "weight": 2}]
    config = config_on(
        folder / "start", folder, trainer={"eval_every": 5, **EVERY_3, **trainer}, data={"train": train, "eval": 0.1}
    )
    config["batch"] |= {"examples_per_step": 12}
    return config


def corpus_of(run: Run) -> Corpus:
    from packtrain.config.compose import load_config

    return open_corpus(load_config(str(run.folder / "config.yaml"), []))


def test_the_mean_over_the_tokens_of_a_step_is_its_loss(whole: Run) -> None:
    for line in whole.steps:
        own = [one for one in whole.ledger if one["step"] == line["step"]]
        tokens = sum(one["tokens"] for one in own)
        assert len(own) == line["examples"]
        assert sum(one["tokens"] * one["loss"] for one in own) / tokens == pytest.approx(line["loss"], rel=1e-6)
    assert [(one["step"], one["document"]) for one in whole.ledger] == sorted(
        (one["step"], one["document"]) for one in whole.ledger
    )


def test_each_loss_is_that_of_the_document_alone_and_each_row_its_own(whole: Run) -> None:
    model, corpus = AutoModelForCausalLM.from_pretrained(whole.folder.parent / "start"), corpus_of(whole)
    first = [one for one in whole.ledger if one["step"] == 1]
    places = find_places(corpus, corpus.row_of.tolist())
    for line in first:
        document: Document = corpus.documents[line["document"]]
        labels = shifted_labels(document)
        with torch.no_grad():
            logits = model(torch.tensor(document.input_ids[None].astype("int64"))).logits[0]
        alone = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE)
        assert line["loss"] == pytest.approx(alone.item(), rel=1e-5)
        assert line["tokens"] == (labels != IGNORE).sum()
        assert line["row"] == places[int(corpus.row_of[line["document"]])]
    held_out = {*corpus.in_eval.nonzero()[0].tolist()}
    assert held_out and not held_out & {one["document"] for one in whole.ledger}
    assert {one["row"].rpartition(":")[2] for one in whole.ledger if "few.jsonl" in one["row"]} <= {"1", "3", "5"}


def test_a_killed_run_that_goes_on_has_the_same_file(whole: Run) -> None:
    file = whole.folder.with_name(cut(whole, "killed")) / "ledger.jsonl"
    text = file.read_text()
    file.write_text(text[: len(text) * 3 // 4])  # in the middle of a line
    run = run_here(whole.folder.parent, config_of(whole.folder.parent), name="killed")
    assert_same_bits(run, whole)
    assert (run.folder / "ledger.jsonl").read_text() == text


def test_without_a_ledger_the_weights_are_the_same(whole: Run) -> None:
    run = run_here(whole.folder.parent, config_of(whole.folder.parent), "trainer.ledger=false", name="without")
    assert not (run.folder / "ledger.jsonl").exists() and run.losses == whole.losses
    assert all(torch.equal(weight, run.weights()[name]) for name, weight in whole.weights().items())


def test_a_checkpoint_is_complete_only_with_the_lines_until_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, write, complete = list[tuple[str, int]](), Ledger._write, checkpoint_state.complete

    def slow(*given: Any) -> None:
        time.sleep(0.05)
        write(*given)

    def noted(staging: Path, target: Path) -> None:
        seen.append((target.name, Run(target.parent.parent).ledger[-1]["step"]))
        complete(staging, target)

    monkeypatch.setattr(Ledger, "_write", slow)
    monkeypatch.setattr(checkpoint_state, "complete", noted)
    run_here(folder, config_of(folder, max_steps=6), name="slow")
    assert [name for name, _ in seen] == ["step-000003", "step-000006"]
    assert all(step >= int(name[-6:]) for name, step in seen)


def test_a_source_that_is_gone_costs_the_names_of_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> None:
        raise OSError("no such file")

    monkeypatch.setattr("packtrain.inspect.corpus.locate", gone)
    run = run_here(folder, config_of(folder, max_steps=2), name="gone")
    assert {one["row"] for one in run.ledger} == {None} and "ledger.jsonl" in run.log and "no such file" in run.log


@pytest.mark.parametrize(("kind", "key"), [("dpo", "margin"), ("reward", "margin"), ("kto", "reward")])
def test_pairs_and_answers_have_their_margins_and_rewards(tmp_path: Path, kind: str, key: str) -> None:
    run = run_here(tmp_path, of_objective(tmp_path, kind, trainer={"max_steps": 2}))
    metric = {"dpo": "rewards/margins", "reward": "margin"}.get(kind)
    for line in run.steps:
        own = [one for one in run.ledger if one["step"] == line["step"]]
        assert all([*one][-2:] == ["loss", key] for one in own)
        assert sum(one["loss"] for one in own) / len(own) == pytest.approx(line["loss"], rel=1e-5)
        if metric:
            assert sum(one[key] for one in own) / len(own) == pytest.approx(line[metric], rel=1e-4, abs=1e-6)
        assert [Path(one["row"]).name for one in own] == [f"{kind}.jsonl:{one['document'] + 1}" for one in own]
