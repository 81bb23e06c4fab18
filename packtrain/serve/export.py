"""`packtrain merge` and `packtrain export`: write merged models, and send models to the hub, llama.cpp or Ollama.

Adapters are merged by the code that writes final-merged/. Each target (hub, GGUF, Ollama) has the tool made for it. Ollama asks the model by a
Go template. Ours is derived from the tokenizer's chat template: it renders marked turns, and the text between the marks begins and ends a turn.
If the turns are not all alike, Ollama chooses a template itself: it knows many by their text.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from packtrain.config.schema import Model
from packtrain.data.tokens.pretrained import tokenizer_of
from packtrain.errors import UserError, boundary
from packtrain.plan.known_model import known_sizes
from packtrain.plan.surroundings import find_converter
from packtrain.serve.trained import Trained, find_trained, load_trained
from packtrain.wording import shortened

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Target = Literal["hub", "gguf", "ollama", "merged"]


def export(
    named: str,
    to: Target,
    *,
    name: str | None,
    public: bool,
    output: Path | None,
    converter: str | None,
    dtype: str | None,
) -> list[str]:
    """Export the model that `named` stands for. Return lines about the results and the next steps."""
    if to == "merged":
        return [str(merge(named, output, dtype))]
    trained = find_trained(named)
    if to == "hub":
        from packtrain.serve.hub import push

        return [push(trained, name, public=public)]
    if trained.scores:
        what = "a reward model gives scores, and programs that run GGUF want tokens"
        raise UserError(what, where=named, fix="Export it to the hub: --to hub.", code="scores-not-answers")
    own, target = trained.run.root if trained.run else trained.folder, output or beside(trained, "gguf")
    if to == "ollama" and dtype is None and _holds(file := target / "model.gguf", trained.folder):
        return give_to_ollama(str(tokenizer_of(trained.path)), file, name or own.resolve().name.lower())
    program = find_converter(converter)
    check_free_place(target)
    with ExitStack() as stack:
        folder = trained.folder
        if trained.base is not None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="packtrain-merged-")), "merged")
            write_merged(trained, folder, dtype)
        file = convert(program, folder, target, {"float32": "f32", "bfloat16": "bf16"}.get(dtype or "", "auto"))
        return [str(file)] if to == "gguf" else give_to_ollama(str(folder), file, name or own.resolve().name.lower())


def _holds(file: Path, folder: Path) -> bool:
    """Return whether an earlier export is newer than the model in the folder."""
    return file.is_file() and file.stat().st_mtime >= max(inner.stat().st_mtime for inner in folder.iterdir())


def merge(adapters: str, output: Path | None, dtype: str | None) -> Path:
    """Merge the adapters of a folder or a run into `output` (None: beside them). The format is the base model's unless `dtype`
    names another. Raises UserError if there are no adapters, or `output` is not empty."""
    trained = find_trained(adapters)
    if trained.base is None:
        fix = "from_pretrained loads it as it is; name a folder with an adapter_config.json, or the run that made it."
        what = "this is a whole model: there is nothing to merge"
        raise UserError(what, where=trained.path, fix=fix, code="nothing-to-merge")
    target = output or beside(trained, "merged")
    check_free_place(target)
    write_merged(trained, target, dtype)
    return target


def beside(trained: Trained, ending: str) -> Path:
    """Return the folder for a product of a model, such as RUN_DIR/final-merged for RUN_DIR/final."""
    folder = trained.folder.absolute()
    return folder.with_name(f"{folder.name}-{ending}")


def check_free_place(place: Path) -> None:
    """Raise UserError if something would be overwritten, or nothing can be written."""
    with boundary("cannot be made", str(place), "Name another folder: --output DIR.", code="output-unusable"):
        place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        fix = "Name another folder: --output DIR."
        raise UserError("there is something already", where=str(place), fix=fix, code="output-taken")


def write_merged(trained: Trained, target: Path, dtype: str | None) -> None:
    """Write the merged model and its tokenizer, whole or not at all. A quantised base is dequantised."""
    model, tokenizer = load_trained(trained, "float32" if dtype == "float32" else "auto", dequantize=True)
    import torch
    from peft.utils.save_and_load import load_peft_weights

    from packtrain.model.load import base_model, dequantized_in
    from packtrain.model.save import complete, mend_generation_config
    from packtrain.train.results import merged_in, published, staging

    wanted = base_model(model).dtype if dtype is None else getattr(torch, dtype)
    quantised = known_sizes(Model(path=trained.path)).get("quantization_config")
    mend_generation_config(model, tokenizer)
    weights = load_peft_weights(str(trained.folder), device="cpu")
    with ExitStack() as stack:
        stack.enter_context(boundary(f"cannot merge {trained.path}", str(target), code="merge-failed"))
        stack.enter_context(published([target]))
        stack.enter_context(torch.no_grad())
        whole = stack.enter_context(merged_in(model, weights, wanted))
        whole.save_pretrained(staging(target))
        tokenizer.save_pretrained(staging(target))
        complete(whole, Model(path=trained.path), staging(target))
    if quantised:
        print(f"{trained.base}: {dequantized_in(wanted)}", file=sys.stderr)


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
            what = "the converter wrote nothing"
            raise UserError(what, where=shlex.join(command), fix="Run it by hand.", code="converter-failed")
    return target / "model.gguf"


def _run(command: list[str], fix: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()] or ["it said nothing"]
        what = f"ended with code {done.returncode}: {shortened(said[-1], 400)}"
        raise UserError(what, where=shlex.join(command), fix=fix, code="converter-failed")


def give_to_ollama(model: str, file: Path, name: str) -> list[str]:
    """Write the Modelfile beside a .gguf file, and give both to an installed Ollama. Return lines for the user."""
    from transformers import AutoTokenizer

    template, modelfile = ollama_template(AutoTokenizer.from_pretrained(model)), file.parent / "Modelfile"
    modelfile.write_text(f"FROM ./{file.name}\n{template}", "utf-8")
    left = "the chat template cannot be written in Ollama's terms: Ollama goes by the one in the .gguf"
    command = ["ollama", "create", name, "-f", str(modelfile)]
    said = [str(file), str(modelfile), *([] if template else [left])]
    if shutil.which("ollama") is None:
        return [*said, f"Ollama is not installed here; where it is: {shlex.join(command)}"]
    _run(command, "See whether its server runs: ollama serve.")
    return [*said, f"ollama run {name}"]


def ollama_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return Modelfile lines that make Ollama render like the chat template. "" if there is none, or its turns are not all alike."""
    adds_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]

    def render(*texts: str, ask: bool = False) -> str:
        roles = {_SYSTEM: "system", _ANSWER: "assistant"}
        messages = [{"role": roles.get(text, "user"), "content": text} for text in texts]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))
        return text.removeprefix(str(tokenizer.bos_token)) if adds_bos else text  # Ollama adds it, too

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
