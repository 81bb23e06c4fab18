"""`packtrain chat`: a conversation with a model in the terminal, or with two at once; lines of a pipe are questions of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from packtrain.boundary import boundary
from packtrain.errors import UserError
from packtrain.serve.trained import find_trained, load_trained
from packtrain.wording import visible

_COMMANDS = "/undo, /retry, /system TEXT, /base (adapters off and on), /quit"


@dataclass(slots=True)
class Speaker:
    """A model that answers; `adapts`: whether its adapters are on, None where it has none."""

    name: str
    model: Any
    tokenizer: Any
    adapts: bool | None

    def stream(self, messages: list[dict[str, str]], temperature: float, tokens: int) -> Iterator[str]:
        """The answer, piece by piece as it is made. Raises UserError where the chat template refuses the conversation."""
        from transformers import TextIteratorStreamer

        text, chats, failed = messages[-1]["content"], bool(self.tokenizer.chat_template), list[Exception]()
        if chats:
            with boundary("the chat template refuses this conversation", self.name, "Leave the system prompt away."):
                text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = self.tokenizer(text, add_special_tokens=not chats, return_tensors="pt").to(self.model.device)
        streamer: Any = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        how: dict[str, Any] = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        how |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        how |= {"max_new_tokens": tokens, "pad_token_id": self.tokenizer.pad_token_id, "streamer": streamer}

        def generate() -> None:
            try:
                self.model.generate(**how)
            except Exception as error:  # raised again where the answer is read
                failed.append(error)
                streamer.end()

        with self.model.disable_adapter() if self.adapts is False else nullcontext():
            worker = Thread(target=generate, daemon=True)
            worker.start()
            yield from streamer
            worker.join()
        if failed:
            raise UserError(f"{self.name} cannot answer: {failed[0]}", fix="Ask less at once.") from failed[0]


@dataclass(slots=True)
class Chat:
    """A conversation: questions, each with the answer of every speaker."""

    speakers: list[Speaker]
    system: str
    temperature: float
    tokens: int
    console: Console
    turns: list[tuple[str, list[str]]] = field(default_factory=list)

    def ask(self, question: str) -> None:
        """Has every speaker answer; answers are shown as they are made, in a terminal those of two beside each other."""
        names, answers = [speaker.name for speaker in self.speakers], ["" for _ in self.speakers]
        beside = len(names) > 1 and self.console.is_terminal
        with Live(console=self.console, vertical_overflow="visible") if beside else nullcontext() as live:
            for at, speaker in enumerate(self.speakers):
                if not live:
                    self.console.out(f"{speaker.name}: " if names[1:] else "", end="")
                for piece in speaker.stream(self._messages(question, at), self.temperature, self.tokens):
                    answers[at] += visible(piece, whitespace=True)
                    if live:
                        table = Table(*(Column(name, ratio=1) for name in names), expand=True)
                        table.add_row(*map(Text, answers))
                        live.update(table)
                    else:
                        self.console.out(visible(piece, whitespace=True), end="")
                        self.console.file.flush()
                if not live:
                    self.console.out("")
        self.turns.append((question, answers))

    def _messages(self, question: str, speaker: int) -> list[dict[str, str]]:
        said = [("system", self.system)] if self.system else []
        for earlier, answers in self.turns:
            said += [("user", earlier), ("assistant", answers[speaker])]
        return [{"role": role, "content": text} for role, text in (*said, ("user", question))]

    def obey(self, line: str) -> bool:
        """Carries out a line, a question or a command; returns whether the conversation goes on."""
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


def load_speaker(name: str) -> Speaker:
    """The model of that name, on a GPU where there is one. Raises UserError for one that cannot answer."""
    if (trained := find_trained(name)).scores:
        raise UserError("a reward model scores answers, and gives none", where=name, fix="Name another model.")
    model, tokenizer = load_trained(trained, on_gpu=True)
    return Speaker(name, model, tokenizer, True if trained.base else None)


def converse(speakers: list[Speaker], system: str, temperature: float, tokens: int) -> int:
    """Talks until /quit or the end of the input; returns the exit code."""
    chat = Chat(speakers, system, temperature, tokens, Console(highlight=False, soft_wrap=True))
    for speaker in speakers:
        if not speaker.tokenizer.chat_template:
            print(f"{speaker.name} has no chat template: it continues each line as plain text", file=sys.stderr)
    if not sys.stdin.isatty():
        for line in sys.stdin:
            chat.turns.clear()
            if not chat.obey(line):
                break
        return 0
    with suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited
    print(_COMMANDS, file=sys.stderr)
    with suppress(EOFError):
        while chat.obey(chat.console.input("[bold]> [/]")):
            pass
    return 0
