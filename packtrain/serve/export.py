"""`packtrain merge` and `packtrain export`: write merged models, and send models to the hub, llama.cpp or Ollama.

Adapters are merged by the code that writes final-merged/. Each target (hub, GGUF, Ollama) has the tool made for it. An upload to the hub is one
commit, private unless made public; its model card has the model's origin, held-out figures and config, but no secret and no local path.
Ollama asks the model by a Go template. Ours is derived from the tokenizer's chat template: it renders marked turns, and the text between the
marks begins and ends a turn. If the turns are not all alike, Ollama chooses a template itself: it knows many by their text.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import yaml

from packtrain import __version__
from packtrain.config.rules.paths_and_packages import DATA_SUFFIXES, MODEL_SUFFIXES, TEMPLATE_SUFFIXES
from packtrain.config.schema import BUILT_IN, Model, groups
from packtrain.data.tokens.pretrained import tokenizer_of
from packtrain.errors import UserError, boundary, read_json
from packtrain.objectives.spec import OBJECTIVES
from packtrain.plan.known_model import known_sizes
from packtrain.plan.surroundings import find_converter
from packtrain.run_folder import object_of
from packtrain.serve.trained import Trained, find_trained, load_trained
from packtrain.system import fast_imports, stdout_on_stderr
from packtrain.wording import Redactor, shortened

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Target = Literal["hub", "gguf", "ollama", "merged"]
_NAMED = ("_name_or_path", "name_or_path", "base_model_name_or_path")
"""Keys of libraries for the place that a model was loaded from."""
_LOCAL = "(local)"
TOWER = "mmproj.gguf"
"""llama.cpp's file with the tower and the projector of a model that takes pictures."""
_OF_A_PLACE = ("topology", "tracking")
"""Groups of the config about the place of the run."""
_FOLDERS = ("output_dir", "cache_dir")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_ROOTED = re.compile(r"[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|file:")
_FILES = (*MODEL_SUFFIXES, *DATA_SUFFIXES, *TEMPLATE_SUFFIXES)
_FIGURES = {
    "train_loss": "training loss, last logged step",
    "first_eval_loss": "held-out loss before",
    "eval_loss": "held-out loss after",
    "steps": "optimizer steps",
    "examples": "examples trained on",
    "tokens": "tokens",
}


@stdout_on_stderr()
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


@stdout_on_stderr()
def merge(adapters: str, output: Path | None, dtype: str | None) -> Path:
    """Merge the adapters of a folder or a run into `output` (None: beside them). The format is the base model's unless `dtype`
    names another. Raises UserError if there are no adapters, or `output` is not empty."""
    trained = find_trained(adapters)
    if trained.base is None:
        fix = "from_pretrained loads it; name a folder with an adapter_config.json, or the run that made it."
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
    """Write `target`/model.gguf, whole or not at all.

    The tower of a model that takes pictures is written to mmproj.gguf beside it. A failure raises UserError with the converter's last words;
    if only the tower is refused, this is said.
    """
    with fast_imports():
        from packtrain.train.results import published, staging

    place = staging(target)
    with published([target]):
        place.mkdir()
        command = [*program, str(model), "--outfile", str(place / "model.gguf"), "--outtype", outtype]
        _run(
            command,
            "Does this llama.cpp know the architecture, and has it its requirements.txt installed?",
            "converter-failed",
        )
        if not (place / "model.gguf").is_file():
            what = "the converter wrote nothing"
            raise UserError(what, where=shlex.join(command), fix="Run it by hand.", code="converter-failed")
        if _has_tower(str(model)):
            command = [*program, str(model), "--mmproj", "--outfile", str(place / TOWER), "--outtype", outtype]
            try:
                _run(command, "", "converter-failed")
            except UserError as refused:
                (place / TOWER).unlink(missing_ok=True)
                what = refused.problems[0].what
                print(f"{TOWER} is not written, so pictures cannot be read: the converter {what}", file=sys.stderr)
    return target / "model.gguf"


def _run(command: list[str], fix: str, code: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()] or ["it said nothing"]
        what = f"ended with code {done.returncode}: {shortened(said[-1], 400)}"
        raise UserError(what, where=shlex.join(command), fix=fix, code=code)


def give_to_ollama(model: str, file: Path, name: str) -> list[str]:
    """Write the Modelfile beside a .gguf file, and give both to an installed Ollama. Return lines for the user."""
    from transformers import AutoTokenizer

    template, modelfile = ollama_template(AutoTokenizer.from_pretrained(model)), file.parent / "Modelfile"
    parts = [file.name, *([TOWER] if file.with_name(TOWER).is_file() else [])]
    modelfile.write_text("".join(f"FROM ./{part}\n" for part in parts) + template, "utf-8")
    left = "the chat template cannot be written in Ollama's terms: Ollama goes by the one in the .gguf"
    command = ["ollama", "create", name, "-f", str(modelfile)]
    said = [str(file), str(modelfile), *([] if template else [left])]
    if shutil.which("ollama") is None:
        return [*said, f"Ollama is not installed here; where it is: {shlex.join(command)}"]
    _run(command, "See whether its server runs: ollama serve.", code="ollama-failed")
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


def push(trained: Trained, name: str | None, *, public: bool) -> str:
    """Upload a model's folder; return the address. Raises UserError if others could not load it, or the hub refuses."""
    from huggingface_hub import CommitOperationAdd, HfApi

    if not name:
        fix = "Give --repo YOU/NAME, or --repo NAME."
        raise UserError("the hub needs a name for the model", where="--repo", fix=fix, code="no-repo-name")
    if trained.base is not None and not is_public_name(trained.base):
        what = "these adapters belong to a model in a local folder, which nobody else has"
        fix = f"packtrain export {trained.path} --to merged, then export that folder."
        raise UserError(what, where=f"{trained.path}: base_model_name_or_path", fix=fix, code="base-not-public")
    files = dict(_files(trained.folder))
    if trained.run is not None or "README.md" not in files:
        files["README.md"] = model_card(trained).encode()
    fix = "Log in by hf auth login, or set HF_TOKEN to a token that may write; see whether the name is yours."
    with boundary("the hub did not take the model", "--repo", fix, code="upload-refused"):
        api = HfApi()
        address = api.create_repo(name, private=not public, exist_ok=True)
        if not (public or api.model_info(address.repo_id).private):
            fix = "Take another name, or say that everybody may see the model: --public."
            raise UserError("this is a public repository already", where=f"--repo {name}", fix=fix, code="repo-public")
        operations = [CommitOperationAdd(path, source) for path, source in files.items()]
        api.create_commit(address.repo_id, operations, commit_message="Model trained with packtrain")
    return f"{address} ({'public' if public else 'private'})"


def _files(folder: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the files of a model by path. Configs come without local paths."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        path = file.relative_to(folder)
        if any(part.startswith(".") for part in path.parts) or file.name in ("training_args.bin", "optimizer.pt"):
            continue
        content = read_json(file) if file.name.endswith("config.json") else {}
        local = [key for key in _NAMED if isinstance(content.get(key), str) and os.path.exists(content[key])]
        for key in local:
            content[key] = ""
        yield path.as_posix(), json.dumps(content, indent=2).encode() if local else str(file)


def _has_tower(path: str) -> bool:
    """Return whether a model takes pictures, by its config on this machine."""
    return "vision_config" in known_sizes(Model(path=path))


def is_public_name(path: str | None) -> bool:
    """Return whether it is a name on the hub, and nothing on this machine."""
    if path is None or path.lower().endswith(_FILES) or os.path.exists(os.path.expanduser(path)):
        return False
    return _HUB_NAME.fullmatch(path) is not None and not path.startswith(".")


def model_card(trained: Trained) -> str:
    """Write a model's README.md, with facts from its run folder if there is one."""
    import numpy as np
    from huggingface_hub import ModelCardData

    from packtrain.report.run_record import read_config, read_metrics

    run = trained.run
    config = read_config(run.config) if run else {}
    model, data = _mapping(config.get("model")), _mapping(config.get("data"))
    default = next(name for name, spec in OBJECTIVES.all().items() if spec.scores == trained.scores)
    kind = str(_mapping(config.get("objective")).get("kind", default))
    base = next((name for name in (trained.base, model.get("path")) if is_public_name(name)), None)
    train = data.get("train") if isinstance(data.get("train"), list) else [data.get("train")]
    paths = [str(source["path"] if isinstance(source, Mapping) else source) for source in train or () if source]
    answers = "image-text-to-text" if _has_tower(trained.base or trained.path) else "text-generation"
    head = ModelCardData(
        library_name="transformers" if trained.base is None else "peft",
        pipeline_tag="text-classification" if trained.scores else answers,
        tags=["packtrain", kind],
        base_model=base,
        datasets=[path for path in paths if is_public_name(path)] or None,
    )
    local = "new weights" if model.get("init") == "random" else "a local model"
    of = f"[{base}](https://huggingface.co/{base})" if base else local
    what = "Adapters for" if trained.base is not None else "Trained from"
    about = OBJECTIVES[kind].about if kind in OBJECTIVES.all() else kind
    parts = [f"---\n{head.to_yaml()}\n---", "# Model card", f"{what} {of}: {about} with packtrain {__version__}."]
    if run is not None:
        summary = object_of(run.summary)
        named = [path if is_public_name(path) or path in BUILT_IN else "local files" for path in paths]
        parts += ["## Data", f"Trained on {', '.join(dict.fromkeys(named)) or 'local files'}."]
        if report := _mapping(summary.get("data")):
            held = f"; {_number(report['held_out'])} documents were held out" if report.get("held_out") else ""
            size = f"{_number(report.get('documents'))} documents, {_number(report.get('tokens'))} tokens"
            parts += [f"An epoch has {size}{held}."]
        figures = {text: summary.get(key) for key, text in _FIGURES.items()}
        columns = read_metrics(run.metrics).columns
        best = np.flatnonzero(columns.get("eval_loss", np.zeros(0)) == summary.get("eval_loss"))[-1:]
        others = [key for key in columns if key.startswith("eval_") and key != "eval_loss" and len(best)]
        found = {key: float(columns[key][best[0]]) for key in others}
        figures |= {f"held-out {key[5:]}": at for key, at in found.items() if np.isfinite(at)}
        rows = [f"| {name} | {_number(value)} |" for name, value in figures.items() if value is not None]
        parts += ["## Figures", "\n".join(["| | |", "|---|---|", *rows])]
        parts += ["## Config", f"```yaml\n{yaml.safe_dump(public_config(config), sort_keys=False)}```"]
        versions = _mapping(object_of(run.environment).get("versions"))
        made = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
        parts += ["## Libraries", made or "not recorded"]
    return Redactor(os.environ).text("\n\n".join(parts)) + "\n"


def public_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the config's changes of defaults. The place of the run, secrets and local paths are left out."""
    defaults = {name: asdict(group()) for name, group in groups().items() if name not in _OF_A_PLACE}
    kept = {}
    for name, own in defaults.items():
        changed = {key: value for key, value in _mapping(config.get(name)).items() if value != own.get(key)}
        if shown := _without_paths(changed):
            kept[name] = shown
    return Redactor(os.environ).plain(kept)


def _without_paths(value: object) -> object:
    if isinstance(value, Mapping):
        inner = {name: _without_paths(entry) for name, entry in value.items() if name not in _FOLDERS}
        return {name: entry for name, entry in inner.items() if entry not in (None, [], {})}
    if isinstance(value, list):
        return [_without_paths(entry) for entry in value]
    if not isinstance(value, str) or is_public_name(value) or value in BUILT_IN:
        return value
    is_path = _ROOTED.match(value) or (re.search(r"[/\\]", value) and not re.search(r"\s", value))
    return _LOCAL if is_path or value.lower().endswith(_FILES) or os.path.exists(value) else value


def _mapping(value: object) -> Mapping:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> str:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return f"{value:,.0f}" if whole else f"{value:.4f}" if isinstance(value, float) else "none"
