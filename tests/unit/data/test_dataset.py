"""What training sees: pairs that are never parted, held-out rows by their content, and counts that add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import prepared
import pytest
from data_tokenizers import tokenizer_of
from prepared import TOKENIZER, write

from packtrain.config.schema import Batch, Packing
from packtrain.data.dataset import PairDataset, TokenDataset, UnpairedDataset
from packtrain.data.prepare import PreparedData
from packtrain.errors import UserError
from packtrain.packing.schedule import make_schedule
from packtrain.train.objectives.pairs_and_answers import PairSteps


def row(prompt: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def rows(count: int) -> list[dict[str, Any]]:
    """Pairs that all differ, of different lengths."""
    return [row(f"{n}:" + " word" * (n % 7), f" yes {n}" + " it is" * (n % 5), f" no {n}") for n in range(count)]


def ready(tmp_path: Path, lines: list[Any], kind: Any = "dpo", **keys: Any) -> PreparedData:
    return prepared.ready(tmp_path, write(tmp_path / "pairs.jsonl", *lines), kind, **{"max_length": None, **keys})


def texts(pairs: PairDataset) -> list[tuple[str, str, str]]:
    """Prompt, chosen and rejected of each pair."""
    found = []
    for pair in map(pairs.__getitem__, range(len(pairs))):
        sides = [TOKENIZER.decode(side.input_ids[side.loss_mask]) for side in (pair.chosen, pair.rejected)]
        found.append((TOKENIZER.decode(pair.chosen.input_ids[~pair.chosen.loss_mask]), *sides))
    return found


def numbers(pairs: PairDataset) -> list[int]:
    """The number of each pair, once it is seen that its documents belong together."""
    for prompt, chosen, rejected in texts(pairs):
        number = prompt.split(":")[0]
        assert chosen.startswith(f" yes {number}") and rejected.startswith(f" no {number}")
    return [int(prompt.split(":")[0]) for prompt, _, _ in texts(pairs)]


def test_both_documents_begin_with_the_prompt_and_train_all_that_follows_and_a_step_counts_its_targets(tmp_path):
    pairs = ready(tmp_path, rows(30)).train
    assert numbers(pairs) == list(range(30)) and len(pairs) == 30
    for at in range(30):
        pair = pairs[at]
        sides = (pair.chosen, pair.rejected)
        prompts = [side.input_ids[: pair.prompt].tolist() for side in sides]
        assert prompts[0] == prompts[1] == TOKENIZER(rows(30)[at]["prompt"])["input_ids"]
        assert all(
            (np.flatnonzero(side.loss_mask) == np.arange(pair.prompt, len(side.input_ids))).all() for side in sides
        )
        lengths = [len(side.input_ids) for side in sides]
        assert pairs.lengths[at] == sum(lengths)
        assert pairs.trained[at] == sum(side.loss_mask.sum() for side in sides)
        assert pairs.shared_lengths[at] == pair.prompt - 1 + sum(length - pair.prompt + 1 for length in lengths)
    assert pairs.lengths.dtype == pairs.shared_lengths.dtype == pairs.trained.dtype == pairs.prompts.dtype == np.int32
    steps = PairSteps(pairs, make_schedule(pairs.lengths, Packing(), Batch(examples_per_step=4)), "shared", 0)
    for step in (0, 3):
        assert steps.documents_of(step)[2] == sum(batch.trained + batch.rejected for batch in steps[step]) > 0


def test_a_prompt_of_fewer_than_two_tokens_has_nothing_to_share(tmp_path):
    pairs = ready(tmp_path, [row("", "yes", "no"), row("a", " yes", " no"), row("a:", " yes", " no")]).train
    assert pairs.prompts.tolist() == [0, 0, 2] == [pairs[at].prompt for at in range(3)]
    assert (pairs.lengths - pairs.shared_lengths).tolist() == [0, 0, 1]
    figures = pairs.report.pairs
    assert figures is not None and (figures.pairs, figures.shareable, pairs.report.documents) == (3, 1, 6)
    assert figures.prompt_share == pytest.approx(2 * (1 + 1 + 2) / pairs.lengths.sum(), abs=1e-4)


def test_identical_answers_are_dropped_and_counted(tmp_path):
    lines = [*rows(3), row("Hello", " there", " there"), row("Hello", " there", " there<|im_end|>")]
    report = ready(tmp_path, lines).train.report
    assert (report.rows, report.kept, report.dropped) == (5, 3, {"identical answers within data.max_length": 2})
    long = [*rows(3), row("Hello", " there" * 40 + " yes", " there" * 40 + " no")]
    report = ready(tmp_path, long, max_length=30).train.report
    assert report.dropped == {"identical answers within data.max_length": 1}
    with pytest.raises(UserError, match="1 identical answers"):
        ready(tmp_path, long[3:], max_length=30)


LONG = [
    row("first" + " you" * 30 + " last:", " yes", " no no no no"),  # an over-long prompt
    row("Hello:", " yes" * 40, " no"),  # an over-long answer
    row("Hello:", " yes", " no"),
]


@pytest.mark.parametrize(
    "overlong, kept, dropped, truncated",
    [
        ("truncate", 2, {"no trained token within data.max_length": 1}, 1),
        ("drop", 1, {"longer than data.max_length": 2}, 0),
    ],
)
def test_pairs_that_are_too_long_are_cut_or_dropped_and_counted(tmp_path, overlong, kept, dropped, truncated):
    whole, pairs = ready(tmp_path, LONG).train, ready(tmp_path, LONG, max_length=20, overlong=overlong).train
    report = pairs.report
    assert (report.rows, report.kept, report.dropped, report.truncated) == (3, kept, dropped, truncated)
    found = [(len(pair.chosen.input_ids), len(pair.rejected.input_ids)) for pair in map(pairs.__getitem__, range(kept))]
    assert max(map(max, found)) <= 20 and all(trained > 0 for trained in pairs.trained)
    survivors = {"truncate": [1, 2], "drop": [2]}[overlong]
    assert report.cut_tokens == whole.lengths[survivors].sum() - pairs.lengths.sum()


@pytest.mark.parametrize("shape", ["strings", "implicit strings", "messages", "labels"])
def test_all_answers_to_a_prompt_are_on_the_same_side(tmp_path, shape):
    """Three pairs for each of 20 prompts; two of them begin with the same words in both of their answers."""
    lines: list[Any] = []
    for number in range(60):
        asked = f"Human: {number % 20}?\n\nAssistant:"
        answers = [f" I say {'yes' * (number < 40)}{n}" for n in range(2)]
        if shape == "messages":
            said = [[{"role": "assistant", "content": answer}] for answer in answers]
            lines.append(row([{"role": "user", "content": asked}], *said))
        elif shape == "strings":
            lines.append(row(asked, *answers))
        else:
            lines.append({"chosen": asked + answers[0], "rejected": asked + answers[1]})
    if shape == "labels":  # two answers for each of 20 prompts
        lines = [{"prompt": f"Human: {n % 20}?", "completion": f" {n}", "label": n < 20} for n in range(40)]
    kind = "kto" if shape == "labels" else "dpo"
    made = ready(tmp_path, lines, kind, eval=0.25, chat_template="chatml")
    expected = (30, 10) if shape == "labels" else (45, 15)
    assert made.eval is not None and (len(made.train), len(made.eval)) == expected
    train, held = ({asked_of(side, at) for at in range(len(side))} for side in (made.train, made.eval))
    assert len(train) == 15 and len(held) == 5 and not train & held


def asked_of(side: Any, at: int) -> str:
    """The number in the prompt of an example."""
    document = side[at] if isinstance(side, UnpairedDataset) else side[at].chosen
    return TOKENIZER.decode(document.input_ids).split("Human: ")[1].split("?")[0]


def talks(count: int) -> list[dict[str, Any]]:
    """Conversations that all differ, of very different lengths."""
    talks = []
    for number in range(count):
        answer = {"role": "assistant", "content": " ".join(f"{number}-{word}" for word in range(1 + number % 30))}
        asked = {"role": "user", "content": f"Question number {number}?"}
        talks.append({"id": number, "messages": [asked, answer]})
    return talks


def sides(tmp_path: Path, path: str, style: str = "smollm", seed: int = 0, **keys: Any) -> list[TokenDataset]:
    """The train and the held-out side."""
    keys = {"eval": 0.2, "max_length": None, **keys}
    made = prepared.ready(tmp_path, path, tokenizer=tokenizer_of(style), seed=seed, **keys)
    assert made.eval is not None
    return [made.train, made.eval]


def said(side: TokenDataset, style: str = "smollm") -> set[int]:
    """The numbers of the questions in a side."""
    texts = (tokenizer_of(style).decode(side[index].input_ids) for index in range(len(side)))
    return {int(text.split("Question number ")[1].split("?")[0]) for text in texts if "Question number" in text}


@pytest.mark.parametrize(
    "style, keys",
    [
        ("smollm", {"chat_template": "chatml"}),
        ("llama3", {}),
        ("smollm", {"max_length": 100}),
        ("smollm", {"max_length": 120, "overlong": "drop"}),
        ("smollm", {"max_length": 90, "overlong": "split"}),
        ("smollm", {"seed": 1}),
    ],
)
def test_the_same_rows_are_held_out_whatever_is_made_of_them(tmp_path, style, keys):
    path = write(tmp_path / "x.jsonl", *talks(100))
    train, held = map(said, sides(tmp_path, path))
    assert (len(train), len(held)) == (80, 20)
    other_train, other_held = (said(side, style) for side in sides(tmp_path, path, style, **keys))
    assert other_train <= train and other_held <= held
    assert len(other_train) + len(other_held) >= 30


def test_each_side_counts_its_own_rows_and_one_without_a_document_is_an_error(tmp_path):
    unanswered = [{"messages": [{"role": "user", "content": f"Nobody answers {number}."}]} for number in range(30)]
    path = write(tmp_path / "x.jsonl", *talks(100), *unanswered, *[{"messages": []}] * 5)
    keys: dict[str, Any] = {"max_length": 100, "bad_rows": "skip"}
    whole = prepared.ready(tmp_path, path, **keys).train
    train, held = sides(tmp_path, path, **keys)
    for side in (train, held):
        report = side.report
        assert report.rows == report.kept + sum(report.dropped.values())
        assert (report.documents, report.tokens) == (report.kept, side.lengths.sum())
        assert report.trained_tokens == side.trained.sum()
        assert 0 < report.truncated < whole.report.truncated
        assert 0 < report.dropped["no trained token within data.max_length"] < 30
    for figure in ("rows", "kept", "truncated", "cut_tokens", "documents", "tokens", "trained_tokens"):
        assert getattr(train.report, figure) + getattr(held.report, figure) == getattr(whole.report, figure)
    assert train.report.held_out == len(held) and 22 <= held.report.rows <= 31
    unanswered = [{"messages": [{"role": "user", "content": f"Nobody answers {n}."}]} for n in range(30)]
    for lines, fraction in ((talks(1), 0.5), ([*talks(1), *unanswered], 0.1)):
        with pytest.raises(UserError, match=r"\[empty-side\]"):
            sides(tmp_path, write(tmp_path / "x.jsonl", *lines), eval=fraction)
