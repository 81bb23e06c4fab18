"""Named sets of data.eval: the figures of each are those of it alone, and `eval_loss` is that of all of them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running import conversations, packtrain, train, write_jsonl
from test_eval import ROWS, config_of, evaluated, written

from packtrain.config.compose import load_config
from packtrain.errors import UserError

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
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("sft", {}), ("dpo", {"loss": ["sigmoid", "sft"]}), ("reward", {}), ("kto", {})],
    ids=["sft", "dpo", "reward", "kto"],
)
def test_each_set_has_the_figures_of_it_alone_and_all_together_those_of_one_list(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = with_sets(tmp_path, kind, objective={"kind": kind, **settings})
    path = str(written(tmp_path, config))
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
    last = alone.evals[-1]
    shown = (
        f"eval loss {last['eval_loss']:.4f} (math {last['eval_math_loss']:.4f}, chat-2 {last['eval_chat-2_loss']:.4f})"
    )
    assert shown in alone.log
    assert (
        alone.summary["eval_loss"] == alone.summary["best_eval_loss"] == min(line["eval_loss"] for line in alone.evals)
    )
    assert {key: alone.summary[key] for key in last if key.startswith("eval_")} == {
        key: value for key, value in last.items() if key.startswith("eval_")
    }
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
    with pytest.raises(UserError) as refused:
        load_config(None, ["model.path=some/model", "data.train=quickstart", "batch.examples_per_step=8", given])
    assert key in str(refused.value)
