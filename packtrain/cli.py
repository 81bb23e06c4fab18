"""`packtrain VERB [CONFIG] [key=value …]`: one thin function per verb.

Nothing heavy is imported before a verb needs it, so that help answers at once. Unknown options are
refused as wrong overrides, with the other problems of the config.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from packtrain import __version__
from packtrain.errors import UserError, exit_code_of, report_error
from packtrain.launch.arguments import (
    check_folder,
    check_verb,
    for_collator,
    load_and_plan,
    load_job,
    note,
    split_arguments,
)
from packtrain.objectives.spec import OBJECTIVES
from packtrain.system import fast_imports, open_streams, outlive_terminal
from packtrain.wording import CleanStream, learn

try:
    _objectives = OBJECTIVES.all()
except UserError as error:  # another package's objective
    sys.exit(report_error(error))
if TYPE_CHECKING:
    from packtrain.config.schema import RunConfig
    from packtrain.plan.launch_plan import LaunchPlan
    from packtrain.run_folder import RunFolder

    TrainingVerb = str
else:
    TrainingVerb = Literal[(*_objectives,)]

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_VERB_SETTINGS = {**_SETTINGS, "ignore_unknown_options": True}

app = typer.Typer(
    name="packtrain",
    help="Fine-tune language models on packed sequences, driven by YAML.",  # wins over the callback's docstring
    epilog="packtrain VERB -h lists the options and config keys of a verb. Exit codes: 0 done, 2 wrong config, data or "
    "arguments, 3 a check failed, 4 another process or the network failed, 130/143 stopped by a signal.",
    context_settings=_SETTINGS,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Verb(TyperCommand):
    """A verb; its function returns its exit code. It is called outside click, which would turn Ctrl-C into exit code 1."""

    def invoke(self, ctx: Any) -> NoReturn:
        raise typer.Exit(exit_code_of(partial(super().invoke, ctx)))


class ConfigVerb(Verb):
    """A verb that takes a config. Its help ends with every config key, or explains the keys named beside -h."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = list(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from packtrain.config.help import ALL, help_text
        from packtrain.config.keys import keys
        from packtrain.config.schema import groups

        asked = [name for name in ctx.meta["arguments"] if name in groups() or name in keys()]
        asked += [name for name in ctx.meta["arguments"] if name == ALL and not asked]
        if asked in ([], [ALL]):
            super().format_help(ctx, formatter)
        formatter.write("\n" + help_text(min(shutil.get_terminal_size().columns, 120), asked) + "\n")


def _complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from packtrain.config.help import complete_config, complete_override

    return (complete_override if ctx.params.get("arguments") else complete_config)(incomplete)


Arguments = Annotated[
    list[str] | None,
    Argument(
        metavar="CONFIG | KEY=VALUE",
        help="A YAML file or a recipe of packtrain, then changes to it in Hydra's grammar.",
        autocompletion=_complete,
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"packtrain {__version__}")
        raise typer.Exit


@app.callback()
def _packtrain(
    version: Annotated[
        bool, Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
    local_rank: Annotated[
        int | None,  # DeepSpeed's launcher puts it before the verb; LOCAL_RANK says the same
        Option("--local_rank", "--local-rank", hidden=True),
    ] = None,
) -> None:
    """Options before the verb."""


AsJson = Annotated[bool, Option("--json", help="One JSON document on stdout.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the plan, and stop.")]
OutputFile = Annotated[Path | None, Option("--output", "-o", help="A file, not stdout.")]
OutputFolder = Annotated[Path | None, Option("--output", "-o", metavar="DIR", help="By default beside the model.")]
Submit = Annotated[bool, Option("--submit", help="Submit it, and say where its log is.")]
MaxTokens = Annotated[int, Option("--max-tokens", metavar="N", min=1, help="Longest answer.")]
Dtype = Annotated[Literal["float32", "bfloat16"] | None, Option("--dtype", help="Number format of the weights.")]
Named = Annotated[str, Argument(metavar="RUN_DIR | MODEL", help="A run folder, a model folder, or a hub id.")]
Training = Annotated[TrainingVerb, Argument(metavar="VERB")]

_verb = partial(app.command, cls=Verb, context_settings=_SETTINGS)
_config_verb = partial(app.command, cls=ConfigVerb, context_settings=_VERB_SETTINGS)


def _add_training_verb(verb: str, about: str) -> None:
    @_config_verb(verb, help=about)
    def train(arguments: Arguments = None, dry_run: DryRun = False) -> int:
        run, launch = load_and_plan(arguments, verb)
        if dry_run:
            from packtrain.plan.known_model import check_weights
            from packtrain.plan.screen import print_plan

            check_folder(run, arguments)
            check_weights(run, gpu=launch.gpu_memory is not None)
            print_plan(run, launch, verb, arguments or [])
            return 0
        outlive_terminal()
        return _execute(verb, launch, run, split_arguments(arguments)[0], _report)


for objective in _objectives.values():
    _add_training_verb(objective.name, objective.help)


@_config_verb()
def init(
    data: Annotated[
        str, Option("--data", help="Training data (data.train): a file, a folder, a hub id, or quickstart.")
    ],
    model: Annotated[str, Option("--model", help="The model (model.path): a hub id, a folder, or a .gguf file.")],
    words: Annotated[
        list[str] | None, Argument(metavar="[VERB] KEY=VALUE", help="Without a verb the rows choose it.")
    ] = None,
    output: Annotated[Path | None, Option("--output", "-o", help="The new file; by default VERB.yaml.")] = None,
) -> int:
    """Look at data, a model and the GPUs here, and write a commented config."""
    with fast_imports():
        from packtrain.inspect.starter import write_starter
    return write_starter(data, model, words or [], output)


@_config_verb()
def plan(
    arguments: Arguments = None,
    full: Annotated[bool, Option("--full", help="Also every setting and every machine's command.")] = False,
    gpu_memory: Annotated[
        float | None, Option("--gpu-memory", metavar="GIB", min=0, help="Plan for GPUs of this size.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show what a run would be, on one screen: model, data, processes, steps, memory, the command."""
    from packtrain.config.rules.paths_and_packages import FOR_GPUS, check_packages
    from packtrain.plan.fit import GIB
    from packtrain.plan.known_model import check_weights
    from packtrain.plan.screen import plan_json, print_plan

    run, launch = load_and_plan(arguments, packages=False)
    needed = [*check_packages(run)]
    for_gpus = launch.gpus == 0 and any(fault.keys[0] in FOR_GPUS for fault in needed)
    if needed and not (for_gpus or gpu_memory is not None or launch.nodes > 1 or launch.obstacles):
        load_and_plan(arguments)  # it would start here: raises the run's own errors
    check_folder(run, arguments)
    if gpu_memory is not None:
        launch = replace(launch, gpu_memory=int(gpu_memory * GIB))
    check_weights(run, gpu=launch.gpu_memory is not None)
    if as_json:
        print(json.dumps(plan_json(run, launch), indent=2))
    else:
        print_plan(run, launch, run.objective.kind, arguments or [], full=full)
    return 0


@_config_verb()
def inspect(
    arguments: Arguments = None,
    rows: Annotated[int | None, Option("--rows", metavar="N", help="Show the first N documents.")] = None,
    step: Annotated[int | None, Option("--step", metavar="N", help="Show the rows of step N, from 1.")] = None,
    source: Annotated[str | None, Option("--source", metavar="FILE:LINE", help="Show this row.")] = None,
    html: Annotated[Path | None, Option("--html", metavar="FILE", help="Write it as a page.")] = None,
    ledger: Annotated[
        str | None,
        Option("--ledger", metavar="RUN_DIR", help="Show rows with the losses of this run."),
    ] = None,
    sort: Annotated[
        Literal["hardest", "easiest", "forgotten", "alike"],
        Option("--sort", help="With --ledger: their order. alike: losses that hardly change from pass to pass."),
    ] = "hardest",
    top: Annotated[int | None, Option("--top", metavar="N", min=1, help="With --ledger: the first N (20).")] = None,
    above: Annotated[
        float | None, Option("--above", metavar="LOSS", help="With --ledger: only rows whose last loss is above it.")
    ] = None,
    write: Annotated[
        Path | None, Option("--write", metavar="FILE", help="With --ledger: list their places, for data.leave_out.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show the data as the model will see it: tokens, statistics, what each mode costs, what is odd."""
    with fast_imports():
        from packtrain.inspect.by_ledger import show_by_ledger
        from packtrain.inspect.corpus import training_sources
        from packtrain.inspect.summary import show_data

    with_ledger = {"--top": top, "--above": above, "--write": write}
    without = {"--rows": rows, "--step": step, "--source": source, "--html": html}
    for name in (name for name, value in (with_ledger if ledger is None else without).items() if value is not None):
        what = "it goes only with --ledger RUN_DIR" if ledger is None else "it does not go with --ledger"
        raise UserError(what, where=name, fix="Leave one of them out, or add the other.", code="ledger-options")
    run, launch = load_and_plan(arguments)
    if ledger is not None:
        return show_by_ledger(ledger, training_sources(run), sort, top, above, write, as_json=as_json)
    title = split_arguments(arguments)[0] or "data"
    return show_data(run, launch.num_processes, title, rows=rows, step=step, source=source, html=html, as_json=as_json)


@_config_verb()
def verify(
    arguments: Arguments = None,
    collator: Annotated[
        str | None,
        Option("--collator", metavar="MODULE:NAME", help="Prove this collator (also FILE.py:NAME) in place of ours."),
    ] = None,
    attention: Annotated[
        str | None,
        Option("--attention", metavar="NAME", help="With --collator: transformers' attention, such as eager."),
    ] = None,
    attached: Annotated[bool, Option("--attach", help="With --collator: on the model after attach.")] = False,
    as_json: AsJson = False,
) -> int:
    """Prove on the loaded model that packed rows train as the documents alone: outputs, losses, gradients."""
    from packtrain.train.verify.command import run_on_collator, run_verification

    if collator is None and (attached or attention is not None):
        name = "--attach" if attached else "--attention"
        what = "it says how the model of --collator runs"
        raise UserError(what, where=name, fix="Give --collator, too.", code="no-collator")
    run, _ = load_and_plan(arguments if collator is None else for_collator(arguments or []))
    if collator is None:
        return run_verification(run, partial(_execute, "verify"), as_json=as_json)
    return run_on_collator(run, collator, attention=attention, attached=attached, as_json=as_json)


def _measure(launch: LaunchPlan, short: RunConfig) -> int:
    """Run `bench` once. It is at module level, since a process started anew for the GPUs gets it by name."""
    return exit_code_of(partial(_execute, "bench", launch, short))


@_config_verb()
def bench(
    arguments: Arguments = None,
    seconds: Annotated[float, Option("--seconds", help="About how long to measure, after loading.")] = 120,
    as_json: AsJson = False,
) -> int:
    """Measure which packing mode and sizes train this config fastest here; nothing is kept."""
    from packtrain.bench.launches import run_bench

    run, _ = load_and_plan(arguments)
    return run_bench(run, _measure, seconds=seconds, as_json=as_json, given=arguments or [])


@_config_verb()
def env(
    arguments: Arguments = None,
    cluster: Annotated[bool, Option("--cluster", help="Compare all machines of the run.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show this machine's facts for bug reports, and check whether a run can train here."""

    def load() -> RunConfig | None:
        from packtrain.config.compose import load_config

        return load_config(*split_arguments(arguments), note) if arguments else None

    if cluster:
        from packtrain.diagnose.cluster import show_cluster

        given = [*(arguments or []), "--cluster", *(["--json"] if as_json else [])]
        return show_cluster(load, given, as_json=as_json)
    from packtrain.diagnose.env import show_environment

    return show_environment(load, as_json=as_json)


@_config_verb()
def sbatch(
    verb: Training,
    arguments: Arguments = None,
    submit: Submit = False,
    output: OutputFile = None,
    sweep: Annotated[bool, Option("--multirun", "-m", help="A job array: key=a,b runs once for each.")] = False,
    as_json: AsJson = False,
) -> int:
    """Write a Slurm script for a run or a sweep of runs, or submit it."""
    from packtrain.launch.jobs import submit_or_write

    job = load_job(verb, arguments, sweep)
    return submit_or_write(job, submit=submit, file=output, as_json=as_json)


@_config_verb()
def deploy(
    verb: Training,
    arguments: Arguments = None,
    on: Annotated[
        Literal["kubeflow", "skypilot", "dstack"], Option("--on", help="The engine that places it.")
    ] = "skypilot",
    image: Annotated[str | None, Option("--image", metavar="IMAGE", help="The container it runs in.")] = None,
    gpu: Annotated[
        str | None, Option("--gpu", metavar="NAME", help="By the engine's name, such as H100; none: on CPUs.")
    ] = None,
    spot: Annotated[bool, Option("--spot", help="Machines that may be taken away, for less.")] = False,
    submit: Submit = False,
    output: OutputFile = None,
) -> int:
    """Write a run as a job of Kubeflow, or a task of SkyPilot or dstack, or submit it."""
    from packtrain.launch.jobs import Machines, deploy_or_write

    said = [word for name, value in (("--image", image), ("--gpu", gpu)) if value for word in (name, value)]
    said = ["packtrain", "deploy", "--on", on, *said, *(["--spot"] if spot else []), verb, *(arguments or [])]
    job = replace(load_job(verb, arguments, False, packages=False), invoked_as=tuple(said))
    return deploy_or_write(on, job, Machines(image, gpu, spot), submit=submit, file=output)


@_verb()
def convert(
    file: Annotated[Path, Argument(metavar="FILE", help="A YAML or JSON, or a .sh or .md with the command.")],
    origin: Annotated[
        Literal["axolotl", "llamafactory", "ms-swift", "trl"] | None,
        Option("--from", help="Whose config it is, where its keys do not say."),
    ] = None,
    devices: Annotated[
        int | None, Option("--devices", metavar="N", min=1, help="How many GPUs it was written for.")
    ] = None,
    output: OutputFile = None,
    as_json: AsJson = False,
) -> int:
    """Write a config of axolotl, LLaMA-Factory, ms-swift or TRL as one of ours; every key of theirs is converted or listed."""
    from packtrain.convert.conversion import write_conversion

    return write_conversion(file, origin, devices, output, as_json=as_json)


@_verb()
def schema() -> int:
    """Print a JSON Schema of configs: editors complete and check their keys by it."""
    from packtrain.config.json_schema import schema_text

    print(schema_text())
    return 0


@_verb()
def doctor(
    run: Annotated[str, Argument(metavar="RUN_DIR", help="The run's folder (trainer.output_dir).")],
    stacks: Annotated[bool, Option("--stacks", help="Ask the live processes what they are doing.")] = False,
    as_json: AsJson = False,
) -> int:
    """Say where the processes of a run are, and why it stands still or has failed; exit code 4 if it does."""
    from packtrain.diagnose.doctor import show_run

    return show_run(run, ask=stacks, as_json=as_json)


@_verb()
def report(
    runs: Annotated[
        list[str], Argument(metavar="RUN_DIR …", help="Run folders (trainer.output_dir, or trainer.mirror).")
    ],
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="The file; by default RUN_DIR/report.html, of several runs ./report.html."),
    ] = None,
    serve: Annotated[bool, Option("--serve", help="Show it in a browser while the run goes on.")] = False,
    port: Annotated[int, Option("--port", metavar="N", min=0, max=65535, help="With --serve; 0: a free one.")] = 0,
) -> int:
    """Write a run, or several over each other, as one HTML file: curves, answers, data, config, failures."""
    from packtrain.report.page import report_runs

    if serve or port:
        from packtrain.report.live import serve_runs

        return serve_runs(runs, output, port)
    return report_runs(runs, output)


@_config_verb("eval")
def evaluate(
    arguments: Arguments = None,
    generate: Annotated[int, Option("--generate", metavar="N", min=0, help="Also answer N rows of data.eval.")] = 0,
    score: Annotated[
        str, Option("--score", metavar="HOW", help="exact, regex:PATTERN, or module:function, of answers.")
    ] = "exact",
    max_tokens: MaxTokens = 256,
    tasks: Annotated[str | None, Option("--tasks", metavar="A,B", help="Also tasks of lm_eval.")] = None,
    as_json: AsJson = False,
) -> int:
    """Measure any model (model.path=…) on data.eval as a training would, on answers to it, or on tasks of lm_eval."""
    from packtrain.serve.evaluation import evaluate, load_evaluated

    given, run = load_evaluated(*split_arguments(arguments), note)
    check_verb(run, run.objective.kind)
    names, execute = tasks.split(",") if tasks else [], partial(_execute, "eval")
    return evaluate(given, run, execute, rows=generate, score=score, tokens=max_tokens, tasks=names, as_json=as_json)


@_verb()
def merge(
    adapters: Annotated[str, Argument(metavar="ADAPTERS", help="A folder of adapters, or the run that made it.")],
    output: OutputFolder = None,
    dtype: Dtype = None,
) -> int:
    """Make a whole model of adapters and their base model, which from_pretrained loads."""
    from packtrain.serve.export import merge

    print(merge(adapters, output, dtype))
    return 0


@_verb()
def export(
    named: Named,
    to: Annotated[Literal["hub", "gguf", "ollama", "merged"], Option("--to", help="Where it is to be used.")],
    name: Annotated[
        str | None, Option("--repo", "--name", metavar="NAME", help="Its name on the hub, or in Ollama.")
    ] = None,
    public: Annotated[bool, Option("--public", help="hub: for everybody to see, if it is new there.")] = False,
    output: OutputFolder = None,
    converter: Annotated[
        str | None, Option("--converter", metavar="PATH", help="gguf, ollama: llama.cpp's convert_hf_to_gguf.py.")
    ] = None,
    dtype: Dtype = None,
) -> int:
    """Take a trained model to the hub (with a model card), llama.cpp or Ollama, or merge its adapters."""
    from packtrain.serve.export import export

    lines = export(named, to, name=name, public=public, output=output, converter=converter, dtype=dtype)
    print("\n".join(lines))
    return 0


@_verb()
def chat(
    named: Named,
    second: Annotated[str | None, Argument(metavar="SECOND", help="A model that answers beside it.")] = None,
    system: Annotated[str, Option("--system", metavar="TEXT", help="System prompt.")] = "",
    temperature: Annotated[float, Option("--temperature", min=0, help="0: the likeliest token each time.")] = 0.0,
    max_tokens: MaxTokens = 512,
) -> int:
    """Talk to a model in the terminal; each line of a pipe is answered by itself."""
    from packtrain.serve.chat import converse, load_speaker

    speakers = [load_speaker(name) for name in (named, second) if name]
    return converse(speakers, system, temperature, max_tokens)


_own_verbs = {one.name or getattr(one.callback, "__name__", "") for one in app.registered_commands[len(_objectives) :]}
for _name in _own_verbs & {*_objectives}:
    _what = f"an objective of another package is called {_name}, which is a verb of packtrain itself"
    _fix = "Rename it, or uninstall the package."
    sys.exit(report_error(UserError(_what, where="packtrain.objectives", fix=_fix, code="verb-taken")))


def _execute(verb: str, launch: LaunchPlan, run: RunConfig, *more: Any) -> int:
    """Launch `verb`; `more` are the optional arguments of `execute`, used only by training verbs."""
    from packtrain.launch.execute import execute

    return execute(launch, run, partial(work, verb, run), *more)


def work(verb: str, config: RunConfig) -> int:
    """Do one process's work under a training or measuring verb; return its exit code."""
    with fast_imports():
        from packtrain.train.run import train
    if verb == "bench":
        from packtrain.bench.measured_run import measure_in

        return train(verb, config, measure_in)
    if verb == "eval":
        from packtrain.train.run import evaluate_in

        return train(verb, config, evaluate_in)
    return train(verb, config)


def _report(folder: RunFolder) -> None:
    from packtrain.report.page import report_at_end

    report_at_end(folder)


def main() -> None:
    """Run the console command `packtrain`."""
    open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "≥" in the help must not fail on a latin-1 terminal
    try:
        if os.path.expanduser("~") == "~":  # a user id without an account, as in some containers
            os.environ["HOME"] = tempfile.gettempdir()
        os.environ.setdefault("USER", str(os.getuid()))  # else libraries look up the account
        learn("\n".join(sys.argv[1:]), names=True)
        sys.stdout, sys.stderr = CleanStream(sys.stdout), CleanStream(sys.stderr)
        app()
    except Exception as error:  # raised outside any verb
        sys.exit(report_error(error))
