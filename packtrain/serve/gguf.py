"""Export to a .gguf file by llama.cpp's converter, and to Ollama by a Modelfile.

Ollama asks the model by a Go template. Ours is derived from the tokenizer's chat template: it renders marked turns, and the text between the
marks begins and ends a turn. If the turns are not all alike, Ollama chooses a template itself: it knows many by their text.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from packtrain.errors import UserError
from packtrain.wording import shortened

_SYSTEM, _USER, _ANSWER = "⟦system⟧", "⟦user⟧", "⟦answer⟧"


def convert(program: list[str], model: Path, target: Path, outtype: str) -> Path:
    """Write `target`/model.gguf, whole or not at all. A failure raises UserError with the converter's last words."""
    from packtrain.train.results import published, staging

    place = staging(target)
    with published([target]):
        place.mkdir()
        command = [*program, str(model), "--outfile", str(place / "model.gguf"), "--outtype", outtype]
        _run(command, "Does this llama.cpp know the architecture, and has it its requirements.txt installed?")
        if not (place / "model.gguf").is_file():
            raise UserError("the converter wrote nothing", where=shlex.join(command), fix="Run it by hand.")
    return target / "model.gguf"


def _run(command: list[str], fix: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()] or ["it said nothing"]
        what = f"ended with code {done.returncode}: {shortened(said[-1], 400)}"
        raise UserError(what, where=shlex.join(command), fix=fix)


def give_to_ollama(model: str, file: Path, name: str) -> list[str]:
    """Write the Modelfile beside a .gguf file, and give both to an installed Ollama. Return lines for the user."""
    from transformers import AutoTokenizer

    template, modelfile = ollama_template(AutoTokenizer.from_pretrained(model)), file.parent / "Modelfile"
    modelfile.write_text(f"FROM ./{file.name}\n{template}", "utf-8")
    left = "the chat template cannot be written in Ollama's terms: Ollama goes by the one in the .gguf"
    command, said = (
        ["ollama", "create", name, "-f", str(modelfile)],
        [str(file), str(modelfile), *([] if template else [left])],
    )
    if shutil.which("ollama") is None:
        return [*said, f"Ollama is not installed here; where it is: {shlex.join(command)}"]
    _run(command, "See whether its server runs: ollama serve.")
    return [*said, f"ollama run {name}"]


def ollama_template(tokenizer: Any) -> str:
    """Return Modelfile lines that make Ollama render like the chat template. "" if there is none, or its turns are not all alike."""
    adds_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]

    def render(*texts: str, ask: bool = False) -> str:
        roles = {_SYSTEM: "system", _ANSWER: "assistant"}
        messages = [{"role": roles.get(text, "user"), "content": text} for text in texts]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        return text.removeprefix(tokenizer.bos_token) if adds_bos else text  # Ollama adds it, too

    try:
        asked = render(_SYSTEM, _USER, _ANSWER, _USER, ask=True)
        system, rest = asked.split(_SYSTEM)
        between, after, next_turn, asks = rest.replace(_ANSWER, _USER).split(_USER)
        end = render(_USER, _ANSWER).split(_ANSWER)[1]
        first, _ = render(_USER, ask=True).split(_USER)
    except Exception:  # a template may raise any error at a conversation that it refuses
        return ""
    user = next_turn.removeprefix(end)
    ends, own = between.removesuffix(user), first.removesuffix(user)  # own: a default system prompt
    default = own.removeprefix(system).removesuffix(ends)
    alike = (next_turn, between, after, first) == (end + user, ends + user, asks, own + user)
    is_default = bool(default) and own == system + default + ends
    if not alike or (own and not is_default) or any(sign in f"{asked}{own}" for sign in ("{{", '"""')):
        return ""
    turns = "{{ if .System }}" + system + "{{ .System }}" + ends + "{{ end }}{{ if .Prompt }}" + user
    lines = [f'TEMPLATE """{turns}{{{{ .Prompt }}}}{asks}{{{{ end }}}}{{{{ .Response }}}}{end}"""']
    lines += [f'PARAMETER stop "{end.strip()}"'] if end.strip() else []
    return "\n".join([*lines, *([f'SYSTEM """{default}"""'] if default else []), ""])
