"""Rows of dpo, kto and reward: tokens, targets and labels are TRL's, and what cannot be such a row is refused by its line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import prepared
import pytest
from data_tokenizers import tokenizer_of
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from packtrain.config.schema import Data, DataSource
from packtrain.data.prepare import PreparedData, prepare
from packtrain.data.sources.quickstart import tokenizer as quickstart_tokenizer
from packtrain.errors import UserError


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


ASK, GOOD, BAD = user("Hello there!"), said("I am fine, thanks."), said("How are you?")
TALK = [user("What is sunny?"), said("It is the weather."), user("Tell me more.")]
SYSTEM = {"role": "system", "content": "Answer with care."}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}]
PARIS = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
CALL = said("") | {"tool_calls": [PARIS]}
PAIRS: dict[str, list[dict[str, Any]]] = {
    "strings": [
        {"prompt": "Hello there!", "chosen": " I am fine.", "rejected": " How are you? Tell me more."},
        {"prompt": "Hello the", "chosen": "re! How are you?", "rejected": "n? I am fine."},
        {"prompt": "Hello ", "chosen": "there", "rejected": "you"},
        {"prompt": "Question? ", "chosen": "\n\nAnswer<|im_end|>", "rejected": "Answer</s><|eot_id|>"},
    ],
    "implicit strings": [
        {"chosen": "Human: Hello! Assistant: I am fine.", "rejected": "Human: Hello! Assistant: How are you?"},
        {"chosen": "How are you? I am fine.", "rejected": "How are you? I am"},
    ],
    "messages": [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": TALK, "chosen": [said("It is sunny in Paris, 25 degrees.")], "rejected": [said("It is not.")]},
        {"prompt": [*TALK[:2], ASK], "chosen": [GOOD, ASK, BAD], "rejected": [BAD]},
    ],
}
STRINGS, MESSAGES = PAIRS["strings"], PAIRS["messages"]
PAIRS["implicit messages"] = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in MESSAGES]
LABELLED: dict[str, list[dict[str, Any]]] = {
    "strings": [
        {"prompt": "Hello there!", "completion": " I am fine.", "label": True},
        {"prompt": "Hello the", "completion": "re! How are you?", "label": False},  # a token across the border
        {"prompt": "Question? ", "completion": "\n\nAnswer<|im_end|>", "label": True},
    ],
    "messages": [
        {"prompt": [ASK], "completion": [GOOD], "label": True},
        {"prompt": TALK, "completion": [said("It is not.")], "label": False},
        {"prompt": TALK[:1], "completion": [GOOD, ASK, BAD], "label": False},
    ],
    "pairs": MESSAGES[:2],
    "pairs of text": PAIRS["implicit strings"][:1],
}
ANSWERS = LABELLED["messages"]
STYLES = ("quickstart", "smollm", "llama3", "qwen3", "mistral", "gemma")
Documents = list[tuple[list[int], list[bool]]]
"""Ids and targets of each document, chosen and rejected in turn."""


def tokenizer_named(style: str) -> PreTrainedTokenizerFast:
    return quickstart_tokenizer() if style == "quickstart" else tokenizer_of(style)


def write(folder: Path, rows: list[Any], name: str = "rows") -> str:
    return prepared.write(folder / f"{name}.jsonl", *rows)


def ready(folder: Path, train: Any, kind: Any = "dpo", style: str = "smollm", **keys: Any) -> PreparedData:
    return prepared.ready(folder, train, kind, tokenizer_named(style), **{"max_length": None, **keys})


def ours(folder: Path, rows: list[Any], kind: Any = "dpo", style: str = "smollm", **keys: Any) -> Any:
    """The rows rendered as in TRL."""
    return ready(folder, write(folder, rows), kind, style, **{"render": "conversation", **keys}).train


def documents(pairs: Any) -> Documents:
    found = [document for at in range(len(pairs)) for document in (pairs[at].chosen, pairs[at].rejected)]
    return [(document.input_ids.tolist(), document.loss_mask.tolist()) for document in found]


def answers(data: Any) -> list[tuple[list[int], list[bool], bool]]:
    made = ((data[at], bool(data.labels[at])) for at in range(len(data)))
    return [(document.input_ids.tolist(), document.loss_mask.tolist(), label) for document, label in made]


def dpo_by_trl(rows: list[Any], style: str, max_length: int | None = None) -> Documents:
    """What TRL's DPOTrainer makes of the rows, prepared and collated by its own code."""
    tokenizer = tokenizer_named(style)
    arguments: Any = SimpleNamespace(dataset_num_proc=None, max_length=max_length, truncation_mode="keep_start")
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer)
    made: Documents = []
    for row in DPOTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, arguments, "train"):
        batch = DataCollatorForPreference(pad_token_id=0, max_length=max_length)([row])
        for at in range(2):
            length = int(batch["attention_mask"][at].sum())
            targets = [False, *(batch["completion_mask"][at, 1:length] == 1).tolist()]  # nothing predicts the first
            made.append((batch["input_ids"][at, :length].tolist(), targets))
    return made


def kto_by_trl(rows: list[Any], style: str, max_length: int | None = None) -> list[tuple[list[int], list[bool], bool]]:
    """What TRL's KTOTrainer makes of the rows, prepared and collated by its own code."""
    tokenizer = tokenizer_named(style)
    arguments: Any = SimpleNamespace(dataset_num_proc=None, max_length=max_length)
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False, **weights)
    made = []
    for row in KTOTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, arguments, "eval"):
        batch = DataCollatorForUnpairedPreference(pad_token_id=0, max_length=max_length)([row])
        targets = [False, *(batch["completion_mask"][0, 1:] == 1).tolist()]
        made.append((batch["input_ids"][0].tolist(), targets, bool(batch["label"][0])))
    return made


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", PAIRS)
def test_tokens_and_targets_of_pairs_are_those_of_trl(tmp_path, style, shape):
    assert documents(ours(tmp_path, PAIRS[shape], style=style)) == dpo_by_trl(PAIRS[shape], style)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", LABELLED)
def test_tokens_targets_and_labels_of_answers_are_those_of_trl(tmp_path, style, shape):
    rows = LABELLED[shape]
    found, expected = answers(ours(tmp_path, rows, "kto", style)), kto_by_trl(rows, style)
    if "chosen" in rows[0]:  # TRL has all chosen answers first
        assert [label for *_, label in found] == [True, False] * len(rows)
        found, expected = (sorted(made, key=lambda answer: not answer[2]) for made in (found, expected))
    assert found == expected


@pytest.mark.parametrize("render", ["auto", "turns"])
@pytest.mark.parametrize("shape", ["strings", "messages", "implicit strings"])
def test_answers_follow_their_prompts_as_asked_and_only_those_with_a_token_over_the_border_differ_from_trl(
    tmp_path, shape, render
):
    tokenizer, rows = tokenizer_named("smollm"), PAIRS[shape]
    data = ours(tmp_path, rows, render=render)
    differ = 0
    for at, (ids, targets) in enumerate(documents(data)):
        row, theirs = rows[at // 2], dpo_by_trl(rows, "smollm")[at]
        prompt, said = row.get("prompt"), row["rejected" if at % 2 else "chosen"]
        if (ids, targets) == theirs:
            continue
        differ += 1
        asked = tokenizer(prompt)["input_ids"]
        answer = tokenizer(said, add_special_tokens=False)["input_ids"]
        assert ids == [*asked, *answer, *[tokenizer.eos_token_id][answer[-1] == tokenizer.eos_token_id :]]
        assert targets == [at >= len(asked) for at in range(len(ids))]
    assert data.report.apart == ours(tmp_path, rows).report.apart
    assert bool(differ) == (shape == "strings")


@pytest.mark.parametrize("rows", [MESSAGES, STRINGS, PAIRS["implicit messages"]])
def test_tokens_of_rewards_are_those_of_trl(tmp_path, rows):
    args: Any = SimpleNamespace(dataset_num_proc=None, max_length=None)
    theirs = RewardTrainer._prepare_dataset(
        cast(Any, None), Dataset.from_list(rows), quickstart_tokenizer(), args, "train"
    )
    pairs = documents(ours(tmp_path, rows, "reward", "quickstart", render="auto"))
    assert [ids for ids, _ in pairs] == [row[f"{side}_ids"] for row in theirs for side in ("chosen", "rejected")]


def test_cut_answers_are_those_of_trl_and_prompts_that_fill_the_length_are_dropped(tmp_path):
    for length in (12, 20, 30):
        assert documents(ours(tmp_path, STRINGS[:3], max_length=length)) == dpo_by_trl(STRINGS[:3], "smollm", length)
    pairs = ours(tmp_path, MESSAGES, style="quickstart", max_length=27)
    assert documents(pairs) == dpo_by_trl(MESSAGES, "quickstart", 27)
    assert pairs.report.dropped == {"no trained token within data.max_length": 2} and pairs.report.truncated == 1
    for length in (30, 40, 60):
        data = ours(tmp_path, ANSWERS, "kto", "quickstart", max_length=length)
        assert answers(data) == kto_by_trl(ANSWERS, "quickstart", length)
        assert len(data) + sum(data.report.dropped.values()) == 3


def test_tools_reach_the_template_as_with_trl(tmp_path):
    row = {"prompt": [ASK], "chosen": [CALL], "rejected": [BAD], "tools": TOOLS}
    pairs = ours(tmp_path, [row], style="qwen2_5")
    assert documents(pairs) == dpo_by_trl([row], "qwen2_5")
    text = tokenizer_of("qwen2_5").decode(pairs[0].chosen.input_ids)
    assert "# Tools" in text and text.count('"name": "weather"') == 2
    with pytest.raises(UserError, match=r"\[row-tools-left-out\]"):
        ours(tmp_path, [row], style="smollm")


HUMAN = {"from": "human", "value": ASK["content"]}
GPT, GPT_BAD = ({"from": "gpt", "value": answer["content"]} for answer in (GOOD, BAD))
TEXTS = {"chosen": GOOD["content"], "rejected": BAD["content"]}
SAME_PAIR: dict[str, Any] = {
    "sharegpt": {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT_BAD},
    "sharegpt, implicit": {"chosen": [HUMAN, GPT], "rejected": [HUMAN, GPT_BAD]},
    "answers as strings": {"prompt": [ASK], **TEXTS},
    "a string and conversations": {"prompt": ASK["content"], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "a string and answers": {"prompt": ASK["content"], "chosen": [GOOD], "rejected": [BAD]},
    "the prompt twice": {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "messages": [ASK]},
    "messages in strings": {"prompt": [ASK], "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
    "other columns": {"q": [ASK], "chosen": [GOOD], "rejected": [BAD], "score": 3, "messages": [ASK, GOOD]},
    "alpaca": {"instruction": "Hello there!", **TEXTS},
    "alpaca and conversations": {"instruction": "Hello", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    # ms-swift: what its AutoPreprocessor and TemplateInputs make of these rows
    "swift": {"messages": [ASK, GOOD], "rejected_response": BAD["content"]},
    "swift, a list": {"messages": [ASK, GOOD], "rejected_response": [BAD]},
    "swift, two conversations": {"messages": [ASK, GOOD], "rejected_messages": [ASK, BAD]},
    "swift, ShareGPT": {"conversations": [HUMAN, GPT], "rejected_response": BAD["content"]},
    "swift, an exchange": {"conversation": [{"human": "Hello there!", "assistant": GOOD["content"]}], "rejected": "How are you?"},
    "swift, query": {"query": "Hello there!", "response": GOOD["content"], "rejected_response": BAD["content"]},
    "swift, prompt": {"prompt": "Hello there!", "response": GOOD["content"], "rejected_response": BAD["content"]},
    "swift, alpaca": {"instruction": "Hello there!", "input": "", "output": GOOD["content"], "rejected_response": "How are you?"},
    # axolotl: chat_template.default, chatml.default and .intel, .icr
    "axolotl, objects": {"messages": [ASK], "chosen": GOOD, "rejected": BAD},
    "axolotl, strings": {"messages": "Hello there!", **TEXTS},
    "axolotl, lists": {"messages": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    "axolotl, the last turns": {"messages": [ASK], "chosen": [TALK[0], GOOD], "rejected": [TALK[0], BAD]},
    "axolotl, JSON text": {"messages": json.dumps([ASK]), "chosen": json.dumps(GOOD), "rejected": json.dumps(BAD)},
    "axolotl, the answer once more": {"messages": [ASK, GOOD], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "question": {"question": "Hello there!", **TEXTS},
    "input": {"input": "Hello there!", "chosen_response": GOOD["content"], "rejected_response": BAD["content"]},
}  # fmt: skip
SAME_ANSWER: dict[str, Any] = {
    "LLaMA-Factory": {"messages": [ASK, GOOD], "kto_tag": True},
    "ShareGPT": {"conversations": [HUMAN, GPT], "kto_tag": "true"},
    "Alpaca": {"instruction": ASK["content"], "output": GOOD["content"], "label": 1},
    "a label as csv has it": {"prompt": [ASK], "completion": [GOOD], "label": "True"},
}


@pytest.mark.parametrize("row", SAME_PAIR.values(), ids=SAME_PAIR.keys())
def test_every_way_to_write_a_pair_gives_the_same_tokens(tmp_path, row):
    pairs = ours(tmp_path, [row], columns={"prompt": "q"} if "q" in row else {})
    assert documents(pairs) == dpo_by_trl(MESSAGES[:1], "smollm")
    assert pairs.report.format == "preference"


@pytest.mark.parametrize("row", SAME_ANSWER.values(), ids=SAME_ANSWER.keys())
def test_every_way_to_write_an_answer_gives_the_same_tokens(tmp_path, row):
    assert answers(ours(tmp_path, [row], "kto")) == answers(ours(tmp_path, ANSWERS[:1], "kto"))


def test_of_a_conversation_with_a_rejected_answer_all_after_the_last_question_is_the_answer(tmp_path):
    """As ms-swift's get_last_user_round has it, which calls of tools and their results do not end."""
    result, end = {"role": "tool", "content": "25 degrees"}, said("It is sunny.")
    before = [SYSTEM, ASK, BAD, TALK[0]]
    row = {"messages": [*before, CALL, result, end], "rejected_response": GOOD["content"], "tools": TOOLS}
    wanted = {"prompt": before, "chosen": [CALL, result, end], "rejected": [GOOD], "tools": TOOLS}
    expected = documents(ours(tmp_path, [wanted], style="qwen2_5"))
    assert documents(ours(tmp_path, [row], style="qwen2_5")) == expected


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"instruction": "Hi?", "output": "yes", "rejected_output": "no"}, "rejected=rejected_output"),
        ({"prompt": "Hi?", "chosen": "yes", "rejected_answer": "no"}, "rejected=rejected_answer"),
        ({"prompt": "Hi?", "chosen_text": "a", "Rejected": "b"}, "chosen=chosen_text data.columns.rejected=Rejected"),
        ({"instruction": "Hi?", "output": "yes", "rejected_score": 3}, None),
    ],
)
def test_near_names_of_pairs_are_given_to_dpo(tmp_path, row, advice):
    (path := tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError) as refused:
        prepare(Data(train=str(path), cache_dir=str(tmp_path)), tokenizer_of("qwen2_5"), "dpo", seed=0)
    (problem,) = refused.value.problems
    if advice is None:
        assert problem.code == "rows-of-other-verb"
        return
    assert problem.code == "pair-column-unnamed" and problem.fix.endswith(f" data.columns.{advice}")
    columns = dict(one.removeprefix("data.columns.").split("=") for one in problem.fix.split()[-len(advice.split()) :])
    data = Data(train=str(path), columns=columns, cache_dir=str(tmp_path))
    assert prepare(data, tokenizer_of("qwen2_5"), "dpo", seed=0).train.report.kept == 1


def test_pairs_of_ms_swift_are_conversations_to_sft_and_answers_that_are_json_are_what_is_said(tmp_path):
    row = {"messages": [ASK, GOOD], "rejected_response": BAD["content"]}
    data = ours(tmp_path, [row], "sft")
    assert data.report.format == "messages" and [*data.report.unread.values()] == [{"rejected_response": ""}]
    row = {"messages": [ASK], "chosen": "[1, 2]", "rejected": '{"a": 1}'}
    wanted = {"prompt": [ASK], "chosen": [said("[1, 2]")], "rejected": [said('{"a": 1}')]}
    assert documents(ours(tmp_path, [row])) == documents(ours(tmp_path, [wanted]))


def test_system_and_input_come_before_the_answer_and_plain_text_has_no_place_for_them(tmp_path):
    expected = documents(ours(tmp_path, [{"prompt": [SYSTEM, ASK], "chosen": [GOOD], "rejected": [BAD]}]))
    for name in ("sharegpt", "answers as strings", "sharegpt, implicit", "alpaca"):
        assert documents(ours(tmp_path, [{**SAME_PAIR[name], "system": SYSTEM["content"]}])) == expected
    swift = [name for name in SAME_PAIR if name.startswith(("swift", "axolotl", "question", "input"))]
    for name in (*swift, "alpaca and conversations"):
        column = "system_prompt" if "input" in SAME_PAIR[name] else "system"
        assert documents(ours(tmp_path, [{**SAME_PAIR[name], column: SYSTEM["content"]}])) == expected
    plain = {"system": SYSTEM["content"], "question": ASK["content"], **TEXTS}
    with pytest.raises(UserError, match=r"system: [\s\S]*data.columns.instruction"):
        ours(tmp_path, [plain], columns={"prompt": "question"})
    assert documents(ours(tmp_path, [plain], columns={"instruction": "question"})) == expected
    asked = [{"prompt": [user("Hello\nthere!")], "chosen": [GOOD], "rejected": [BAD]}]
    found = documents(ours(tmp_path, [{"instruction": "Hello", "input": "there!", **TEXTS}]))
    assert found == dpo_by_trl(asked, "smollm")


OTHER_QUESTIONS = {"messages": [ASK, GOOD], "rejected_messages": [TALK[0], BAD]}
ANOTHER_QUESTION = {"chosen": [ASK, GOOD, TALK[0], BAD], "rejected": [ASK, GOOD, TALK[2], BAD]}
BAD_PAIRS: dict[str, tuple[Any, str, str]] = {
    "no rejected": ({"prompt": [ASK], "chosen": [GOOD]}, "missing column", ""),
    "chosen empty": ({"prompt": "Hello", "chosen": "", "rejected": "I"}, "empty", "chosen"),
    "rejected empty": ({"prompt": [ASK], "chosen": [GOOD], "rejected": [said(" ")]}, "empty", "rejected[0].content"),
    "rejected no turn": ({"prompt": [ASK], "chosen": [GOOD], "rejected": []}, "empty", "rejected"),
    "prompt null": ({"prompt": None, "chosen": "I", "rejected": "you"}, "wrong type", "prompt"),
    "rejected null": ({"prompt": "Hello", "chosen": "I", "rejected": None}, "wrong type", "rejected"),
    "no common turn": ({"chosen": [ASK, GOOD], "rejected": [user("Who?"), BAD]}, "no common prompt", "chosen"),
    "no common word": ({"chosen": "Hello", "rejected": "Who?"}, "no common prompt", "chosen"),
    "other questions": (OTHER_QUESTIONS, "no common prompt", "rejected_messages"),
    "no answer": ({"messages": [ASK], "rejected_response": "How are you?"}, "no prompt", "messages"),
    "rejected_response null": ({"messages": [ASK, GOOD], "rejected_response": None}, "wrong type", "rejected_response"),
    "another question": (ANOTHER_QUESTION, "not an answer", "chosen"),
    "unknown role": ({**MESSAGES[0], "rejected": [BAD | {"role": "asistant"}]}, "unknown role", "rejected[0].role"),
    "a closed turn": ({"prompt": TALK[:2], "chosen": [GOOD], "rejected": [BAD]}, "closed turn", "chosen"),
    "a closed turn of ShareGPT": ({"conversations": [HUMAN, GPT], **TEXTS}, "closed turn", "chosen"),
    "a surrogate": ({"prompt": "a", "chosen": "\ud800", "rejected": "b"}, "not UTF-8", ""),
}


@pytest.mark.parametrize("row, reason, field", BAD_PAIRS.values(), ids=BAD_PAIRS.keys())
def test_what_is_no_pair_is_named_with_its_line_or_skipped_and_counted(tmp_path, row, reason, field):
    rows = [MESSAGES[0], row, MESSAGES[1]]
    with pytest.raises(UserError) as caught:
        ours(tmp_path, rows)
    (problem,) = caught.value.problems
    assert problem.where.startswith(f"{tmp_path}/rows.jsonl:2{f', {field}' if field else ''}") and problem.fix
    report = ours(tmp_path, rows, bad_rows="skip").report
    assert (report.rows, report.kept, report.dropped) == (3, 2, {reason: 1})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        *(([ANSWERS[0], ANSWERS[0] | {"label": label}], "rows.jsonl:2, label") for label in ("good", 2, 1.0, None)),
        ([ANSWERS[0], {"prompt": "Hello", "completion": "you"}], "no column 'label'"),
        ([{"messages": [ASK, GOOD]}], "label"),
        ([{"text": "Hello there!", "label": True}], r"\[rows-of-other-verb\]"),
        ([{"messages": [ASK, GOOD, ASK], "label": True}], r"messages\[2\]"),
        ([{"messages": [GOOD], "label": True}], r"messages\[0\]"),
        ([{"prompt": TALK[:2], "completion": [GOOD], "label": True}], "completion: the prompt ends in"),
    ],
)
def test_what_is_no_labelled_answer_is_refused(tmp_path, rows, words):
    with pytest.raises(UserError, match=words):
        ours(tmp_path, rows, "kto")


PAGE = (Path(__file__).parents[3] / "docs/preferences.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", PAGE.split("```json\n")[1].split("```")[0].splitlines())
def test_the_rows_that_the_documentation_shows_are_read(tmp_path, line):
    pair = ours(tmp_path, [json.loads(line)])[0]
    sides = [tokenizer_of("smollm").decode(side.input_ids[side.loss_mask]) for side in (pair.chosen, pair.rejected)]
    assert "4." in sides[0] and "4." not in sides[1]


def test_each_verb_refuses_the_rows_of_another_and_names_it(tmp_path):
    rows = {"sft": {"messages": [ASK, GOOD]}, "dpo": MESSAGES[0], "kto": ANSWERS[1]}
    for kind, verb in (("dpo", "sft"), ("sft", "dpo"), ("sft", "kto"), ("dpo", "kto")):
        with pytest.raises(UserError, match=f"packtrain {verb}"):
            ours(tmp_path, [rows[verb]], kind)


def test_a_pair_without_a_chat_template_or_eos_is_refused(tmp_path):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("smollm").backend_tokenizer)
    for row, words in ((MESSAGES[0], "row-no-chat-template"), (STRINGS[0], "row-no-eos-token")):
        with pytest.raises(UserError, match=words):
            prepared.ready(tmp_path, write(tmp_path, [row]), "dpo", bare)


def test_labels_and_margins_change_the_fingerprint_and_stay_with_their_weighted_rows(tmp_path):
    data, other = ours(tmp_path, ANSWERS, "kto"), ours(tmp_path, [ANSWERS[0] | {"label": False}, *ANSWERS[1:]], "kto")
    assert data.fingerprint != other.fingerprint
    twice = ready(tmp_path, [DataSource(path=str(tmp_path / "rows.jsonl"), weight=2.0)], "kto").train
    assert twice.labels.tolist() == other.labels.tolist() * 2
    assert (data.report.labels.desirable, data.report.labels.undesirable) == (1, 2)
    margins = (ours(tmp_path, [row | {"margin": by} for row in MESSAGES], "reward").fingerprint for by in (0, 1))
    assert len({*margins}) == 2
    mixed: Any = [DataSource(path=write(tmp_path, [STRINGS[0] | {"margin": -1}], "other"), weight=2)]
    pairs = ready(tmp_path, [*mixed, write(tmp_path, MESSAGES, "third")], "reward").train
    assert pairs.margins.tolist() == [-1, -1, 0, 0, 0]


def test_margins_stay_with_their_pairs_when_rows_are_dropped_and_held_out(tmp_path):
    rows = [{"prompt": f"{n}:", "chosen": " yes", "rejected": " no", "better_by": n / 2} for n in range(6)]
    del rows[2]["better_by"]
    rows[3]["better_by"] = None
    same = {"prompt": "x", "chosen": "y", "rejected": "y", "better_by": 9.0}  # dropped
    train = write(tmp_path, [*rows[:2], same, *rows[2:]])
    made = ready(tmp_path, train, "reward", columns={"margin": "better_by"}, eval=0.34)
    assert len(made.eval) == 2 and made.train.margins.dtype == "float32"
    assert sorted([*made.train.margins, *made.eval.margins]) == [0, 0, 0, 0.5, 2, 2.5]
    for part in (made.train, made.eval):
        for number in range(len(part)):
            asked = int(tokenizer_of("smollm").decode(part[number].chosen.input_ids)[0])
            assert part.margins[number] == (rows[asked].get("better_by") or 0)


def test_margins_are_numbers_of_float32_and_text_in_csv(tmp_path):
    assert len(ours(tmp_path, [MESSAGES[0] | {"margin": "large"}])) == 1  # dpo has none
    for margin in ("large", "nan", 1e300, True):
        with pytest.raises(UserError, match="margin: expected a number"):
            ours(tmp_path, [MESSAGES[0] | {"margin": margin}], "reward")
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected,margin\na,b,c,0.5\nd,e,f,\ng,h,i,-2\n")
    assert ready(tmp_path, str(tmp_path / "rows.csv"), "reward").train.margins.tolist() == [0.5, 0, -2]
