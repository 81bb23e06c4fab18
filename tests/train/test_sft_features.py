"""What else a run does, seen from outside: evaluation, early stop, adapters, precision, run folder, refusals."""

from __future__ import annotations

import copy
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from here import ALONE, run_here
from running import Run, assert_same_bits, base_config, conversations, packtrain, train, write_jsonl, written
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from packtrain.config.schema import Data, Model
from packtrain.data.prepare import prepare
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import UserError
from packtrain.packing.collate import IGNORE, shifted_labels
from packtrain.train import loader
from packtrain.train.measures.generation import Generator
from packtrain.train.questions import make_questions
from tests.train import forked


def eval_loss_by_definition(model_folder: Path, documents: Path, cache: Path) -> float:
    """Σ loss / Σ trained tokens, document by document, with full logits."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    data = prepare(Data(train=str(documents), max_length=200, cache_dir=str(cache)), tokenizer, "sft", seed=0).train
    total, count = 0.0, 0
    with torch.no_grad():
        for index in range(len(data)):
            labels = shifted_labels(data[index])
            ids = torch.tensor(data[index].input_ids.astype("int64"))[None]
            total += F.cross_entropy(model(ids).logits[0], labels, ignore_index=IGNORE, reduction="sum").item()
            count += int((labels != IGNORE).sum())
    return total / count


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Four steps without any of what the tests turn on."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, train(folder, base_config(folder, trainer={"max_steps": 4}), name="plain")


@pytest.mark.sample(without=("padding-1",))
@pytest.mark.parametrize(("mode", "processes"), [("padding", 1), ("packed", 3)])
def test_eval_loss_is_exact_over_the_set_and_final_is_what_was_evaluated(
    tmp_path: Path, mode: str, processes: int
) -> None:
    held_out = write_jsonl(tmp_path / "held-out.jsonl", conversations(11, seed=1))
    config = base_config(tmp_path, data={"eval": str(held_out)}, trainer={"max_steps": 4, "eval_every": 2})
    run = train(tmp_path, config, f"packing.mode={mode}", processes=processes)
    assert [line["step"] for line in run.evals] == [0, 2, 4]
    expected = eval_loss_by_definition(run.folder / "final", held_out, tmp_path / "cache")
    assert run.evals[-1]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert run.summary["eval_loss"] == run.evals[-1]["eval_loss"]


def test_early_stop_keeps_the_weights_of_the_lowest_eval_loss(tmp_path: Path) -> None:
    held_out = write_jsonl(tmp_path / "held-out.jsonl", conversations(11, seed=1))
    config = base_config(
        tmp_path,
        data={"eval": str(held_out)},
        optim={"learning_rate": 0.05},  # soon makes it worse
        trainer={"max_steps": 60, "eval_every": 2, "early_stop_patience": 2, "keep_checkpoints": 1},
    )
    run = run_here(tmp_path, config)
    losses, summary = {line["step"]: line["eval_loss"] for line in run.evals if line["step"] > 0}, run.summary
    best = min(losses, key=lambda step: losses[step])
    assert summary["steps"] < 60 and (summary["steps"] == best + 4 or losses[summary["steps"]] == losses[best])
    expected = eval_loss_by_definition(run.folder / "final", held_out, tmp_path / "cache")
    assert expected == pytest.approx(losses[best], rel=1e-4)
    assert summary["best_step"] == best and summary["eval_loss"] == summary["best_eval_loss"] == losses[best]


def with_loader_processes(*given: Any) -> None:
    loader.loader_processes = lambda **_: 2
    forked.run(*given)


@pytest.mark.exhaustive
def test_processes_that_load_ahead_do_not_change_the_losses(plain: tuple[Path, Run]) -> None:
    folder, expected = plain
    config = base_config(folder, trainer={"max_steps": 4})
    assert train(folder, config, name="ahead", begin=with_loader_processes).losses == expected.losses


def test_objectives_change_the_loss(plain: tuple[Path, Run], tmp_path: Path) -> None:
    other = run_here(tmp_path, base_config(tmp_path, trainer={"max_steps": 1}), "objective.loss=dft")
    assert abs(other.losses[0] / plain[1].losses[0] - 1) > 1e-4


def test_samples_are_asked_with_the_system_prompt_of_the_config() -> None:
    tokenizer = copy.deepcopy(load_tokenizer(Model(tokenizer="quickstart")))  # which others share
    model = tiny_model("llama", vocab_size=len(tokenizer))
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    said = {}
    for template, system in ((turns, None), (turns, "Be brief."), (f"system: Be brief.\n{turns}", None)):
        tokenizer.chat_template = template
        (question,) = make_questions(["river"], tokenizer, system, None)
        said[template, system] = Generator(model, tokenizer, "sdpa", None, None, ALONE, 512).answers(
            [question.document], 64
        )
    without, with_prompt, by_hand = said.values()
    assert with_prompt == by_hand != without


def test_an_example_of_the_held_out_data_is_asked_in_its_own_tokens(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.jsonl", [*conversations(22)])
    held_out = [{"messages": [*turns("One?", "1"), *turns("Two?", "2")]}, {"messages": turns("Three?", "3")}]
    data = {"eval": str(write_jsonl(tmp_path / "held.jsonl", held_out)), "system": None}
    run = run_here(tmp_path, base_config(tmp_path, data=data, trainer={"max_steps": 2, "samples": [1, "Three?", 0]}))
    first, same, long = run.summary["answers"]
    assert first == {**same, "expected": "3"} and first["prompt"] == "Three?"
    assert long["expected"] == "2" and long["prompt"].split() == ["One?", "assistant", "1", "user", "Two?"]
    config = base_config(tmp_path, data=data, trainer={"max_steps": 2, "samples": [2]})
    with pytest.raises(UserError, match="no-such-example"):
        run_here(tmp_path, config, name="beyond")


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def test_the_run_folder_holds_what_is_promised_and_nothing_of_the_machine(tmp_path: Path) -> None:
    untrained = {"messages": [{"role": "user", "content": "only a question"}]}
    write_jsonl(tmp_path / "data.jsonl", [*conversations(22), untrained])
    trainer = {"max_steps": 3, "checkpoint_every": 1, "keep_checkpoints": 2, "samples": ["Say \x1b[31mbackwards: a b"]}
    tracking = {"report_to": ["tensorboard"]}
    config = base_config(tmp_path, data={"max_length": 60}, trainer=trainer, tracking=tracking)
    run = train(tmp_path, config)
    assert "Say ␛[31mbackwards: a b" in run.log and "\x1b" not in run.log  # the terminal has the same lines
    names = {path.name for path in run.folder.iterdir()}
    promised = {"config.yaml", "plan.json", "env.json", "metrics.jsonl", "checkpoints", "final", "logs", "summary.json"}
    assert promised <= names
    assert run.kept == ["step-000002", "step-000003"]
    keys = {"step", "epoch", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "padding_fraction", "mfu"}
    assert keys <= run.steps[0].keys()
    summary = run.summary
    assert summary["status"] == "done" and summary["steps"] == 3
    assert summary["examples"] == sum(step["examples"] for step in run.steps) == 16  # one epoch of what is left
    assert summary["truncated"] > 0 and summary["verify"]["verdict"] == "exact"
    assert summary["data"]["rows"] == summary["data"]["kept"] + sum(summary["dropped"].values())
    assert sum(summary["dropped"].values()) >= 1
    files = {path for part in ("final", "checkpoints") for path in (run.folder / part).rglob("*") if path.is_file()}
    assert not {"training_args.bin", "README.md"} & {path.name for path in files}
    assert {path.stat().st_mode for path in files} == {run.folder.joinpath("summary.json").stat().st_mode}
    again = packtrain("plan", str(run.folder / "config.yaml"), "--json")
    assert json.loads(again.stdout)["num_processes"] == 1
    assert list(tmp_path.glob("run/tensorboard/events.out.tfevents*"))
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_dir() and socket.gethostname() in path.name]


def test_an_attention_that_leaks_stops_the_run_before_step_1_with_exit_3(tmp_path: Path) -> None:
    config = base_config(tmp_path)
    mamba = {"model_type": "mamba", "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}
    config["model"] |= {"config": mamba, "attention": "segmented"}
    result = packtrain("sft", written(tmp_path, config), expect=3)
    assert "backbone.layers.0.mixer" in result.stderr and "model.attention=auto" in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("model.path=no/such-model", "model.path"),
        ("model.config.vocab_size=17", "model.config.vocab_size"),
        ("model.config.max_position_embeddings=50", "data.max_length"),
        ("+model.config.hiden_size=64", "model.config.hiden_size"),
        ("peft.target_modules=[lm_head]", "peft.target_modules"),
        ("peft.target_modules=[nonsense]", "peft.target_modules"),
        ("model.attention=flash", "model.attention"),
        ("data.format=text", "data.format"),
    ],
)
def test_what_only_shows_when_loading_is_still_an_error_for_the_user(tmp_path: Path, override: str, where: str) -> None:
    """Names that the model does not have before the data is read, which is wrong, too."""
    config = base_config(tmp_path, **({"peft": {"kind": "lora"}} if override.startswith("peft") else {}))
    if "hiden" in override or "nonsense" in override:
        write_jsonl(tmp_path / "data.jsonl", [{"no": "format"}])
    more = ["model.init=pretrained", "model.tokenizer=null"] if override.startswith("model.path") else []
    with pytest.raises(UserError, match=where):
        run_here(tmp_path, config, override, *more)


def test_a_deterministic_run_is_bit_for_bit_the_same_again(tmp_path: Path) -> None:
    chances = ["peft=lora", "peft.dropout=0.1"]
    overrides = [*chances, "trainer.mixed_precision=bf16", "trainer.deterministic=true", "trainer.max_steps=3"]
    first, second = (train(tmp_path, base_config(tmp_path), *overrides, name=name) for name in ("first", "second"))
    assert_same_bits(first, second)  # merged: the model it started from was new


ENDLESS, UNTRAINED = "train no end of an answer", "rows have nothing to train"


@pytest.mark.parametrize("fault", ["none", "endless", "untrained"])
def test_data_that_cannot_be_learned_from_is_warned_of(tmp_path: Path, fault: str) -> None:
    rows = conversations(9)
    if fault == "endless":
        rows = [{"input_ids": list(range(40, 60 + row))} for row in range(9)]
    elif fault == "untrained":
        for row in rows[:6]:
            for message in row["messages"]:
                message |= {"weight": 0} if message["role"] == "assistant" else {}
    write_jsonl(tmp_path / "data.jsonl", rows)
    run = run_here(tmp_path, base_config(tmp_path, trainer={"max_steps": 1}))
    assert (ENDLESS in run.log, UNTRAINED in run.log) == (fault == "endless", fault == "untrained")
