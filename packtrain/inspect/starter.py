"""First config of a run, chosen by its data, its model and this machine.

Each way to train is planned as by `packtrain plan`, and the first that fits is written. Comments come from config/schema.py.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml
from rich.console import Console

from packtrain.config.compose import changes, load_config
from packtrain.config.keys import keys
from packtrain.config.overrides import assignment
from packtrain.config.schema import BUILT_IN, RunConfig, sources
from packtrain.config.yaml_files import SCHEMA_LINE, SUFFIX
from packtrain.data.prepare import Tokeniser, make_encoder
from packtrain.data.sources.locate import locate
from packtrain.data.tokens.pretrained import hub, load_tokenizer, location
from packtrain.errors import UserError, boundary
from packtrain.objectives.spec import OBJECTIVES, Spec, objective_for
from packtrain.plan.fit import Memory
from packtrain.plan.known_model import Sizes, below_adapters, check_model_config, check_weights, language_sizes
from packtrain.plan.memory import estimate
from packtrain.plan.surroundings import Surroundings, detect_surroundings
from packtrain.wording import counted, in_millions, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALL = 500_000_000  # weights; on a CPU larger models are trained by adapters
LORA = "peft=lora peft.merge=true"
NARROW = f"{LORA} model.dtype=bfloat16"


@dataclass(frozen=True, slots=True)
class FirstRows:
    """Facts about the first `rows`. `lengths`: tokens of documents. `positions`: most that fit. `asked`: by the user."""

    spec: Spec
    form: str
    rows: int
    lengths: np.ndarray
    positions: int = 2**20
    asked: int | None = None
    template: str = ""


def choose(found: FirstRows, way: str, *, gpu: bool) -> list[str]:
    """Choose the overrides of a run that trains in this way."""
    spec, rows = found.spec, found.rows
    nearly_all = max(256, 1 << (int(np.percentile(found.lengths, 99)) - 1).bit_length())
    longest = found.asked or min(nearly_all, found.positions)
    slots, step = max(8192 if gpu else 2048, spec.documents * longest), min(32, max(4, 1 << (rows // 40).bit_length()))
    rate = (5e-7 if spec.reference else 5e-6 if spec.scores else 1e-5) * (10 if "lora" in way else 1)
    chosen = f"objective.kind={spec.name} packing.mode=packed trainer.mixed_precision=auto optim.schedule=cosine {way}"
    chosen += f" data.max_length={longest} batch.tokens_per_device={slots} batch.examples_per_step={step}"
    chosen += f" optim.learning_rate={rate:g} optim.warmup_steps=0.05 trainer.checkpoint_every=50 {found.template}"
    chosen += f" trainer.epochs={1 if spec.reference else 2}"
    chosen += f" data.eval={0.05 if rows >= 500 else 0.1} trainer.eval_every=50" if rows >= 20 else ""
    chosen += " objective.beta=0.1" if spec.reference else " data.overlong=drop" if spec.scores else ""
    return chosen.split()


def look(config: RunConfig, kinds: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> FirstRows:
    """Tokenise the first rows of data.train for the first of `kinds` (objectives) that takes them. Raises UserError if none does."""
    given, chatml = sources(config.data.train)[0], not (config.data.chat_template or tokenizer.chat_template)
    data = replace(config.data, max_length=None, chat_template="chatml" if chatml else config.data.chat_template)
    encoder = make_encoder(data, tokenizer, kinds[0], "", config.model)
    tokeniser = Tokeniser(encoder, Path(), 0, Console(quiet=True), ExitStack())
    try:
        with boundary("cannot be used", given.path, code="bad-source"):
            source = locate(given, "train", config.trainer.seed, kinds[0], data.split_text)
            form, outcomes = tokeniser.read_first(source, 1000)
    except UserError as error:
        if not kinds[1:] or error.problems[0].code.startswith("row-"):
            raise
        return look(config, kinds[1:], tokenizer)
    template = "data.chat_template=chatml" if chatml and form not in ("text", "prompt_completion", "tokenised") else ""
    lengths, rows = np.concatenate([one.lengths for one in outcomes]), sum(len(one.fates) for one in outcomes)
    return FirstRows(OBJECTIVES[kinds[0]], form, rows, lengths, template=template)


def plan_first(found: FirstRows, given: list[str], sizes: Sizes, here: Surroundings) -> tuple[RunConfig, Memory | str]:
    """Plan the first way to train that fits this machine, else the last possible one."""
    done, gpus, gpu = list[tuple[RunConfig, Memory | str]](), max(here.gpus, 1), here.gpus > 0
    on_gpus = (*("", "strategy=fsdp2")[:gpus], NARROW, f"{NARROW} model.quantize=nf4")
    for way in on_gpus if gpu else ("", LORA):
        with suppress(UserError):  # quantised weights cannot be trained in full, and nf4 needs a package
            config = load_config(None, given, weak=choose(found, way, gpu=gpu))
            check_weights(config, gpu=gpu)
            if (config.peft.kind == "lora") != ("lora" in way):
                continue  # the user chose: another way has its learning rate
            if isinstance(memory := estimate(config, gpus, here.gpu_memory), str):  # no weights yet
                by_sizes = replace(config.model, path=None, init="random", config={**sizes})
                memory = estimate(replace(config, model=by_sizes), gpus, here.gpu_memory)
            done.append((config, memory))
            fits = "lora" in way  # adapters are safest if nothing is known
            if not isinstance(memory, str):
                fits = memory.fits is not False if gpu else memory.parameters < SMALL
            if fits:
                break
    return done[-1] if done else (load_config(None, given, weak=choose(found, "", gpu=gpu)), "not known")


def text_of(config: RunConfig, chosen: Sequence[str], head: Sequence[str]) -> str:
    """Write the `chosen` keys of a config, and the changed ones, as YAML with comments."""
    lines, values = [f"# {visible(line)}".replace("\n", "") for line in head], asdict(config)
    shown = {item.partition("=")[0] for item in chosen}
    shown |= {f"{group}.{name}" for group, changed in changes(config).items() for name in changed}
    shown -= {"trainer.epochs"} if config.trainer.max_steps else set()
    for group in values:
        own = [key for key in keys().values() if key.path in shown and key.path.startswith(f"{group}.")]
        own = [key for key in own if not values[group][key.path.partition(".")[2]] is key.default is None]
        lines += ["", f"{group}:"] if own else []
        for key in own:
            name, doc = key.path.partition(".")[2], key.doc.removeprefix(f"{', '.join(key.objectives)}: ")
            value, about = values[group][name], re.split(r"[;:.]( |$)| \(", doc)[0]
            text = yaml.safe_dump({name: value}, allow_unicode=True, sort_keys=False, width=2**20).replace("${", "\\${")
            text = f"{name}: {value}" if isinstance(value, float) else text
            first, *more = text.rstrip("\n").split("\n")
            first = first if more and first[-1] != ":" else f"{first:<32}  # {about[0].lower()}{about[1:]}"
            lines += [f"  {line}" for line in (first, *more)]
    return SCHEMA_LINE + "\n".join(lines) + "\n"


def describe(found: FirstRows, config: RunConfig, memory: Memory | str, data: str, file: str) -> list[str]:
    """Return lines with the next commands, and about the data and the model."""
    verbs = {"inspect": "shows the data as the model will see it", "plan": "shows the run, and starts nothing"}
    lines = [f"  packtrain {verb} {file}  # {what}" for verb, what in (verbs | {found.spec.name: "trains"}).items()]
    middle, nearly, longest = (f"{length:,.0f}" for length in np.percentile(found.lengths, [50, 95, 100]))
    cut = np.count_nonzero(found.lengths > (config.data.max_length or found.positions)) / len(found.lengths)
    data = f"{data}: {counted(found.rows, 'rows')} read, of the format {found.form}, for packtrain {found.spec.name}."
    tokens = f"Tokens: half have up to {middle}, 95 of 100 up to {nearly}, the longest {longest}; {cut:.1%} exceed data.max_length."
    size = f"{in_millions(memory.parameters)} weights" if isinstance(memory, Memory) else "size not known"
    needs = memory.sentence() if isinstance(memory, Memory) else memory
    return [*lines, data, tokens, f"{config.model.path}: {size}. Memory: {needs}."]


def write_starter(data: str, model: str, words: Sequence[str], output: Path | None) -> int:
    """Write the config of a run of `model` on `data`. `words`: a verb or none, and overrides. Returns the exit code."""
    verb, given = [word for word in words[:1] if "=" not in word], [assignment("data.train", data)]
    given += [assignment("model.path", model), *(f"objective.kind={kind}" for kind in verb), *words[len(verb) :]]
    fix = "Name another with -o."
    if output and output.suffix != SUFFIX:
        raise UserError("a config file ends with .yaml", where=str(output), fix=fix, code="config-not-yaml")
    base = load_config(None, given, weak=["batch.examples_per_step=4", "data.max_length=2"])
    check_model_config(base.model, scores=base.objective.spec.scores)
    kinds = [
        objective_for(one).name for one in ("pairs", "answers", "documents")
    ]  # documents last: rows of the others can be read as documents
    verb = verb or [base.objective.kind for word in words if word.startswith(("objective=", "objective.kind="))][:1]
    kinds, whole = verb or (kinds[-1:] if data in BUILT_IN else kinds), below_adapters(base.model)
    found = look(base, kinds, load_tokenizer(base.model))
    if os.path.lexists(file := output or Path(f"{found.spec.name}.yaml")):
        raise UserError("this file exists, and is not overwritten", where=str(file), fix=fix, code="file-exists")
    with hub(whole.path), boundary("its config cannot be read", "model.path", code="no-model-config"):
        from transformers import AutoConfig

        sizes = AutoConfig.from_pretrained(**location(str(whole.path), whole)).to_dict()
    most = language_sizes(sizes).get("max_position_embeddings") or found.positions
    most, asked = min(most, (base.batch.tokens_per_device or most) // found.spec.documents), base.data.max_length
    found = replace(found, positions=most, asked=asked if asked != 2 else None)
    given = [assignment("trainer.output_dir", f"runs/{file.stem}"), *given]
    config, memory = plan_first(found, given, sizes, detect_surroundings())
    head = describe(found, config, memory, data, shlex.quote(str(file)))
    with boundary("cannot be written", str(file), "Name another file with -o.", code="cannot-write"):
        file.write_text(text_of(config, [*choose(found, "", gpu=False), *given], head), encoding="utf-8")
    load_config(str(file), [])  # raises if the file cannot be read back
    print("\n".join([f"{file} is written:", *head]))
    return 0
