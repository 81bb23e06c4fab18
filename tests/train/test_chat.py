"""`packtrain chat`: what the model is given, what is printed, and what the commands do; in a terminal and in a pipe."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from running import packtrain
from tiny_models import save_adapters, save_model, save_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from packtrain.wording import visible
from tests.train import forked


def typed(text: str, *given: Any) -> None:
    """The command in a terminal in which this was typed ahead."""
    ours, theirs = os.openpty()
    os.write(ours, text.encode())
    sys.stdin = open(theirs, encoding="utf-8")  # noqa: SIM115
    forked.run(*given)


def counting(how: Callable[..., None], text: str, *given: Any) -> None:
    """A model that answers how many turns of users and systems it sees, in two pieces."""
    from transformers import LlamaForCausalLM

    from packtrain.data.sources.quickstart import tokenizer as quickstart_tokenizer

    tokenizer = quickstart_tokenizer()

    def generate(self: Any, input_ids: Any, streamer: Any, do_sample: bool, max_new_tokens: int, **_: Any) -> None:
        seen = tokenizer.decode(input_ids[0])
        if "break" in seen:
            raise RuntimeError("it broke")
        users, systems = (seen.count(f"<|im_start|>{role}") for role in ("user", "system"))
        streamer.put(input_ids[0])
        streamer.put(torch.tensor(tokenizer(f"{users} users")["input_ids"]))
        streamer.put(torch.tensor(tokenizer(f" {systems} systems {do_sample} {max_new_tokens}")["input_ids"]))
        streamer.end()

    model: Any = LlamaForCausalLM
    model.generate = generate
    how(text, *given)


def chat(how: Callable[..., None], text: str, *given: str, expect: int = 0, **variables: str) -> tuple[str, str]:
    done = packtrain("chat", *given, expect=expect, begin=partial(how, text), env=variables)
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def greedy(folder: Path, question: str, adapters: Path | None = None) -> str:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(model, adapters) if adapters else model
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    turn = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**ids, max_new_tokens=5, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return visible(tokenizer.decode(made, skip_special_tokens=True), whitespace=True)


def test_lines_of_a_pipe_are_answered_in_plain_text_with_adapters_on_and_off(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    run = save_run(tmp_path / "run", save_adapters(tmp_path / "adapters", base))
    questions = "Hello there\nHello there\n/base\nHello there\n"
    out, err = chat(forked.piped, questions, str(run), "--max-tokens", "5")
    adapted, plain = greedy(base, "Hello there", run / "final"), greedy(base, "Hello there")
    assert adapted != plain
    assert out == f"{adapted}\n{adapted}\n{plain}\n"  # each line by itself: the second is no second turn
    assert "adapters off" in err


def test_a_conversation_goes_on_is_undone_and_asked_again(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    lines = "one two /undo three /retry /system+Be+kind four /undo /undo /undo /undo /base /what /quit five "
    text = lines.replace(" ", "\n").replace("+", " ")
    out, err = chat(partial(counting, typed), text, str(model), "--temperature", "0.5", "--max-tokens", "9")
    answers = [line.removeprefix("> ") for line in out.replace("> ", "\n> ").splitlines() if "users" in line]
    counts = ((1, 0), (2, 0), (2, 0), (2, 0), (3, 1))
    assert answers == [f"{users} users {systems} systems True 9" for users, systems in counts]
    assert "/undo: nothing was said" in err and "/base: there are no adapters" in err
    assert "/what: no such command; there are /undo, /retry" in err


def interrupted(text: str, *given: Any) -> None:
    """A terminal whose user presses Ctrl-C in the middle of the first answer."""
    from packtrain.serve import chat

    answer, told = chat.Speaker.answer, list[bool]()

    def pressed(self: Any, *of: Any) -> str:
        generate = type(self.model).generate

        def begun(model: Any, streamer: Any, **how: Any) -> None:
            if told:
                return generate(model, streamer=streamer, **how)
            told.append(True)
            print("begun", end="", flush=True)
            return signal.raise_signal(signal.SIGINT)

        self.model.generate = partial(begun, self.model)
        return answer(self, *of)

    speaker: Any = chat.Speaker
    speaker.answer = pressed
    counting(typed, text, *given)


def test_ctrl_c_ends_an_answer_and_not_the_conversation(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    out, err = chat(interrupted, "one\ntwo\n/quit\n", str(model))
    assert "begun\n" in out and "2 users 0 systems" in out and "stopped by" not in err


def test_two_models_answer_in_turn(tmp_path: Path) -> None:
    one, two = save_model(tmp_path / "one"), save_model(tmp_path / "two")
    out, _ = chat(partial(counting, forked.piped), "Hello\n", str(one), str(two), "--system", "Be kind")
    assert out == "".join(f"{name}: 1 users 1 systems False 512\n" for name in (one, two))


def test_a_model_without_a_chat_template_continues_text_and_says_so(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    out, err = chat(partial(counting, forked.piped), "Once upon a time\n", str(model))
    assert out == "0 users 0 systems False 512\n" and "no chat template" in err and "plain text" in err


def test_what_cannot_answer_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    assert chat(forked.piped, "", str(model)) == ("", "")  # nothing is asked
    assert "it broke" in chat(partial(counting, forked.piped), "break\n", str(model), expect=2)[1]
    template = "{{ raise_exception('no system, please') if messages[0].role == 'system' }}"
    (model / "chat_template.jinja").write_text(template)
    refused = chat(partial(counting, forked.piped), "Hello\n", str(model), "--system", "x", expect=2)[1]
    assert "no system, please" in refused and "[template-refused]" in refused
    config = model / "config.json"
    config.write_text(config.read_text().replace("ForCausalLM", "ForSequenceClassification"))
    assert "[scores-not-answers]" in chat(forked.piped, "", str(model), expect=2)[1]


@pytest.mark.parametrize("named", ["./nowhere", "empty", "bare"])
def test_a_model_that_is_not_there_is_named(named: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text('{"model_type": "llama"}')  # and no tokenizer
    done = packtrain("chat", named, expect=2, cwd=tmp_path, begin=partial(forked.piped, ""))
    assert named in done.stderr and "→" in done.stderr and "Traceback" not in done.stderr
