"""`packtrain eval`: evaluate any model on data.eval like a training, by the objective of a config.

The model is prepared like in training, in a temporary run folder, and evaluated by the same call, without a step. The reference (dpo, kto)
stays the start of the config. Generated answers are greedy. A document's prompt is everything before its last trained part,
in its own tokens: the model gets the prompts of its training, for any format of rows.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from packtrain.config.compose import load_config
from packtrain.config.objective import REFERENCES
from packtrain.config.overrides import assignment
from packtrain.config.rules.paths_and_packages import is_local, nearest
from packtrain.config.schema import DEFAULT_ROW_TOKENS, Model, RunConfig, Tracking, sources
from packtrain.config.yaml_files import read_config
from packtrain.errors import Json, UserError, boundary
from packtrain.plan.launch_plan import LaunchPlan
from packtrain.run_folder import RunFolder
from packtrain.serve.trained import adapters_of, find_trained, load_trained
from packtrain.system import fast_imports, stdout_on_stderr
from packtrain.train.verify.command import finite, on_this_machine
from packtrain.wording import counted, shortened, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from packtrain.train.measures.right_answers import Score

_SHOWN = 3
"""Number of printed answers."""


def evaluate(
    given: tuple[str | None, list[str]],
    config: RunConfig,
    execute: Callable[[LaunchPlan, RunConfig], int],
    *,
    rows: int,
    score: str,
    tokens: int,
    tasks: list[str],
    as_json: bool,
) -> int:
    """Measure the model of `config` and print the figures; return the exit code. `given`: the config's file and the changes to it. Beside
    held-out figures: answer `rows` documents of data.eval in up to `tokens` tokens each, and run `tasks` of lm_eval."""
    if not config.data.eval:
        what = "there is nothing to evaluate"
        raise UserError(what, where="data.eval", fix="Name held-out documents.", code="nothing-to-evaluate")
    run = of_model(config, *given)
    model, more = run.model, bool(rows or tasks)
    if more and (model.path is None or model.init == "random"):
        what = "new weights have nothing to say"
        raise UserError(what, where="model.path", fix="Name a model: model.path=…", code="untrained-model")
    if rows and run.objective.spec.scores:
        what = "a reward model gives no answers"
        raise UserError(what, where="--generate", fix="Leave it away.", code="scores-not-answers")
    if tasks and find_spec("lm_eval") is None:
        what = "tasks need the package lm_eval (lm-evaluation-harness), which is not installed"
        raise UserError(what, where="--tasks", fix="pip install lm-eval", code="lm-eval-missing")
    with fast_imports():
        from packtrain.train.measures.harness import ask, load_tasks, run_tasks
        from packtrain.train.measures.right_answers import score_of

    judge = score_of(score, "--score")
    code, figures = held_out_figures(run, execute)
    if code or not figures:  # under another launcher only the first process has them
        return code
    report: Json = {"model": model.path, "objective": run.objective.kind, "figures": figures}
    with stdout_on_stderr():
        trained = find_trained(str(model.path)) if more else None
        loaded = trained and load_trained(trained, model.dtype, trust=model.trust_remote_code, on_gpu=True)
        if loaded and rows:
            made = answer_held_out(*loaded, run, judge, rows=rows, tokens=tokens)
            report["generated"] = {"score": score, **made}
        if loaded and tasks:
            with boundary("lm_eval failed", "--tasks", code="lm-eval-failed"):
                lm = ask(*loaded, batch=1 if loaded[0].device.type == "cpu" else "auto")
                report["tasks"] = run_tasks(load_tasks(tasks, "--tasks"), lm)["results"]
    if as_json:
        print(json.dumps(finite(report), indent=2, default=str))
    else:
        _print(report)
    return 0


def load_evaluated(
    path: str | None, changes: list[str], note: Callable[[str], None]
) -> tuple[tuple[str | None, list[str]], RunConfig]:
    """Load the config at `path`; a run folder has one, and its model. Return the config's file and changes, and the config.

    Raises UserError with advice for other folders. `note` hears of relative paths that started elsewhere in training.
    """
    folder = RunFolder(place := Path(path or "").expanduser())
    if path is None or not folder.config.is_file():
        if path and place.is_dir():
            fix = "Name a run folder (trainer.output_dir), or a config: packtrain eval CONFIG.yaml model.path=MODEL."
            raise UserError("this folder is no run: it has no config.yaml", where=path, fix=fix, code="no-run")
        if path and not place.exists() and place.suffix != ".yaml" and is_local(path, ()):
            what = "there is no such run folder or config file"
            raise UserError(what, where=path, fix=nearest(path), code="no-run-or-config")
        return (path, changes), load_config(path, changes, note)
    said, root = Path(read_config(folder.config).values.get("trainer", {}).get("output_dir", "")), place.resolve()
    start = root.parents[len(said.parts) - 1] if str(root).endswith(f"/{said}") else Path.cwd()
    if start != Path.cwd():
        now = f"{path}: relative paths start at {Path.cwd()} now, and did at {start} in training"
        note(f"{now}: cd {shlex.quote(str(start))} for the same files")
    given = (str(folder.config), [assignment("model.path", path), *changes])
    return given, load_config(*given, note)


def _print(report: Json) -> None:
    console, table = Console(highlight=False, soft_wrap=True, markup=False), Table("held-out figure", "value")
    for name, value in report["figures"].items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if value is not None else "none")
    console.print(table)
    if made := report.get("generated"):
        for answer in made["answers"][:_SHOWN]:
            shown = (visible(shortened(answer[part], 200), whitespace=True) for part in ("expected", "answer"))
            console.print("  expected {}\n  answer   {}".format(*shown))
        console.print(f"{made['share']:.1%} of {counted(made['rows'], 'answers')} are right, by {made['score']}")
    for task, results in report.get("tasks", {}).items():
        numbers = [f"{name} {value:.4g}" for name, value in results.items() if isinstance(value, int | float)]
        console.print(f"{task}: {', '.join(numbers)}")


def of_model(config: RunConfig, path: str | None, changes: list[str]) -> RunConfig:
    """Return a config that evaluates the model of `config` on data.eval.

    `config` was made from the file `path` with the command line's `changes`. A model.path in the changes brings its own tokenizer
    and adapters, unless they are given. Raises UserError if the reference is not known.
    """
    model, objective, peft = config.model, config.objective, config.peft
    keys = [change.partition("=")[0] for change in changes]
    if "model.path" in keys and model.path:
        try:
            others = [change for change in changes if not change.lstrip("+~").startswith("model.")]
            start = load_config(path, others).model
        except UserError:  # without the changes it names no model
            start = Model(init="random")
        trained = find_trained(model.path)
        tokenizer = model.tokenizer if "model.tokenizer" in keys else None  # its own
        changed = {} if start.init == "random" else model.config
        quantize = model.quantize if trained.base or "model.quantize" in keys else "no"  # it is for bases of adapters
        model = replace(
            model, path=trained.path, init="pretrained", config=changed, tokenizer=tokenizer, quantize=quantize
        )
        peft = adapters_of(trained)
        if objective.spec.reference and objective.reference in REFERENCES:
            if start.path is None or start.init == "random":
                what, fix = "the reference is the start of the training, new weights that nobody has", "Name a model."
                raise UserError(what, where="objective.reference", fix=fix, code="reference-lost")
            objective = replace(objective, reference=start.path)
    data = config.data
    if not isinstance(data.eval, int | float):
        data = replace(data, train=[*sources(data.eval, "eval")], streaming=False, stages=[])
    trainer = replace(config.trainer.bare(), max_steps=1, restarts=0)
    optim = replace(config.optim, bf16_rounding="undithered")
    if not config.strategy.spec.steps_in_backward:
        optim = replace(optim, name="sgd")  # it has no states; there is no step
    own = replace(config, model=model, objective=objective, peft=peft, data=data)
    return replace(own, trainer=trainer, optim=optim, tracking=Tracking())


def held_out_figures(config: RunConfig, execute: Callable[[LaunchPlan, RunConfig], int]) -> tuple[int, Json]:
    """Return (exit code, figures of data.eval by name). Runs in as many processes as training on this machine."""
    folder = tempfile.mkdtemp(prefix="packtrain-eval-")
    aside = replace(config, trainer=replace(config.trainer, output_dir=folder))
    try:
        with stdout_on_stderr():
            code = execute(on_this_machine(aside, "eval"), aside)
        report = RunFolder.of(aside.trainer).summary
        return code, json.loads(report.read_text()) if report.exists() else {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def answer_held_out(
    model: Any, tokenizer: PreTrainedTokenizerBase, run: RunConfig, judge: Score, *, rows: int, tokens: int
) -> Json:
    """Answer the first `rows` documents of data.eval, in up to `tokens` tokens each. Return the share of right answers, and the answers."""
    from packtrain.attention.backends import own_attention
    from packtrain.data.dataset import has_pictures_in
    from packtrain.data.pictures.processor import PictureProcessor, PictureReader
    from packtrain.data.prepare import prepare
    from packtrain.data.tokens.chat_template import give_template
    from packtrain.model.load import base_model
    from packtrain.model.spread import Ranks
    from packtrain.packing.pictures import Sight
    from packtrain.train.measures.generation import Generator
    from packtrain.train.measures.right_answers import held_out_rows, judged

    documents = prepare(run.data, tokenizer, run.objective.kind, seed=run.trainer.seed, model=run.model).eval
    sight = None
    if documents is not None and has_pictures_in(documents):
        processor = PictureProcessor(run.model, run.data.max_picture_tokens)
        sight = Sight.of(base_model(model), PictureReader(processor), processor.tokens)
    if run.data.chat_template:
        give_template(tokenizer, run.data.chat_template)
    asked = held_out_rows({"": documents}, tokenizer, rows, "--generate")
    base, most = base_model(model), run.batch.limits(run.packing.mode)[1] or DEFAULT_ROW_TOKENS
    alone = Ranks(0, 1, base.device)
    generator = Generator(base, tokenizer, own_attention(base), sight, None, alone, most)
    made, answers = generator.answers([row.document for row in asked], tokens) or {}, list[Json]()
    for number, row in enumerate(asked):
        answer, score = made[number], judged(judge, made[number], row, "--score")
        answers.append({"answer": answer, "expected": row.expected, "prompt": row.text, "score": score})
    share = sum(answer["score"] for answer in answers) / len(answers)
    return {"rows": len(answers), "share": share, "answers": answers}
