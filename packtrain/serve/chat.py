"""`packtrain chat`: talk to one model in the terminal, or to two in turn. Each line of a pipe is a new conversation."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packtrain.errors import UserError, boundary
from packtrain.serve.trained import find_trained, load_trained
from packtrain.system import Stopped, stdout_on_stderr
from packtrain.wording import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COMMANDS = "/undo, /retry, /system TEXT, /base (adapters off and on), /quit; Ctrl-C ends an answer"


@dataclass(slots=True)
class Speaker:
    """A model that answers. `adapts`: whether its adapters are on, None if it has none."""

    name: str
    model: Any
    tokenizer: PreTrainedTokenizerBase
    adapts: bool | None

    def answer(self, messages: list[dict[str, str]], temperature: float, tokens: int) -> str:
        """Answer, printing the text as it grows. Raises UserError if the chat template refuses the conversation."""
        from transformers import TextStreamer

        text, chats, pieces = messages[-1]["content"], bool(self.tokenizer.chat_template), list[str]()
        if chats:
            what, fix = "the chat template refuses this conversation", "Leave the system prompt away."
            with boundary(what, self.name, fix, code="template-refused"):
                text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        inputs = self.tokenizer(text, add_special_tokens=not chats, return_tensors="pt").to(self.model.device)

        class Shown(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                pieces.append(visible(text, whitespace=True))
                print(pieces[-1], end="\n" if stream_end else "", flush=True)

        with (
            _ended_by_ctrl_c(),
            self.model.disable_adapter() if self.adapts is False else nullcontext(),
            boundary("it cannot answer", self.name, "Ask less at once.", code="answer-failed"),
        ):
            self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                streamer=Shown(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
                **({"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}),
            )
        return "".join(pieces)


@dataclass(slots=True)
class Chat:
    """A conversation: questions, each with the answer of every speaker."""

    speakers: list[Speaker]
    system: str
    temperature: float
    tokens: int
    turns: list[tuple[str, list[str]]] = field(default_factory=list)

    def ask(self, question: str) -> None:
        """Let every speaker answer."""
        answers = []
        for number, speaker in enumerate(self.speakers):
            said = [("system", self.system)] if self.system else []
            for earlier, before in self.turns:
                said += [("user", earlier), ("assistant", before[number])]
            messages = [{"role": role, "content": text} for role, text in (*said, ("user", question))]
            print(f"{speaker.name}: " if self.speakers[1:] else "", end="")
            answers.append(speaker.answer(messages, self.temperature, self.tokens))
        self.turns.append((question, answers))

    def obey(self, line: str) -> bool:
        """Carry out a question or a command. Return whether the conversation goes on."""
        command, _, rest = line.strip().partition(" ")
        adapted = [speaker for speaker in self.speakers if speaker.adapts is not None]
        if command and not command.startswith("/"):
            self.ask(line.strip())
        elif command in ("/undo", "/retry") and self.turns:
            question, _ = self.turns.pop()
            if command == "/retry":
                self.ask(question)
        elif command == "/system":
            self.system = rest.strip()
        elif command == "/base" and adapted:
            for speaker in adapted:
                speaker.adapts = not speaker.adapts
                print(f"{speaker.name}: adapters {'on' if speaker.adapts else 'off'}", file=sys.stderr)
        elif command not in ("", "/quit"):
            why = {"/undo": "nothing was said", "/retry": "nothing was said", "/base": "there are no adapters"}
            print(f"{command}: {why.get(command, f'no such command; there are {_COMMANDS}')}", file=sys.stderr)
        return command != "/quit"


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C on a terminal end the block (an answer), and not the conversation."""
    if not sys.stdin.isatty():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Stopped):  # by another signal
            raise
        print()
    finally:
        signal.signal(signal.SIGINT, before)


@stdout_on_stderr()
def load_speaker(name: str) -> Speaker:
    """Load the model of that name, on a GPU if there is one. Raises UserError for a model that cannot answer."""
    if (trained := find_trained(name)).scores:
        what = "a reward model scores answers, and gives none"
        raise UserError(what, where=name, fix="Name another model.", code="scores-not-answers")
    model, tokenizer = load_trained(trained, on_gpu=True)
    if not tokenizer.chat_template:
        print(f"{name} has no chat template: it continues each line as plain text", file=sys.stderr)
    return Speaker(name, model, tokenizer, True if trained.base else None)


def converse(speakers: list[Speaker], system: str, temperature: float, tokens: int) -> int:
    """Talk until /quit or the end of the input; return the exit code."""
    chat, asks = Chat(speakers, system, temperature, tokens), sys.stdin.isatty()
    if asks:
        with suppress(ImportError):
            import readline  # noqa: F401  # lines can be edited
        print(_COMMANDS, file=sys.stderr)
    with suppress(EOFError):
        while chat.obey(input("> " if asks else "")):
            if not asks:
                chat.turns.clear()
    return 0
