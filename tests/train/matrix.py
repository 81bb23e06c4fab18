"""The matrix of trainings: objective × world × layout × variant, the run of each cell, and what must be equal of two runs.

All cells of an objective train the same steps on the same documents. So each is compared with one process on padded batches.
CI runs a sample in which every value meets the others, `pytest -m exhaustive` the rest.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from answer_runs import labelled, preferences, save_model
from here import run_here
from running import LLAMA, Run, config_on, conversations, train, write_jsonl
from safetensors.torch import load_file

from packtrain.config.schema import Model
from packtrain.objectives.spec import OBJECTIVES
from packtrain.strategies.spec import STRATEGIES
from tests.train import host_adam

Begin = Callable[..., None]
STEPS, CHECKPOINT = 5, 3
"""Of 7, 7, 7, 1 (kto: 2) and 7 examples: in step 4 one process has none. A run is resumed after step CHECKPOINT."""
LARGE = {**LLAMA, "hidden_size": 128, "intermediate_size": 256}
"""A model with weights that ZeRO-3 does not keep whole."""
SPARSE = {**LARGE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SPARSE |= {"head_dim": 16, "output_router_logits": True, "router_aux_loss_coef": 0.1}
HYBRID = {**LARGE, "model_type": "lfm2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID |= {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
TEACHER = {**LLAMA, "model_type": "phi", "hidden_size": 96, "intermediate_size": 128, "vocab_size": 960}
"""Its output head has a bias, and more rows than the student's."""
MODELS = {"start": LARGE, "sparse": SPARSE, "hybrid": HYBRID, "teacher": TEACHER}
DOCUMENTS = (conversations(22), conversations(5, seed=1))
PAIRS = (preferences(22, 0), preferences(5, 1))
ROWS = {
    "sft": DOCUMENTS,
    "dpo": PAIRS,
    "kto": (labelled(23, 0), labelled(6, 1)),
    "reward": PAIRS,
    "distill": DOCUMENTS,
}
LONGEST = {"sft": 200, "distill": 200}
"""Tokens of the longest document. Of an answer: 92."""
LIMIT = {"sft": 104, "distill": 104}
"""Tokens of a row where documents are split. Of answers: 80."""
ROOM = {"sft": 256, "dpo": 190, "kto": 110, "reward": 190, "distill": 256}
"""Tokens of a packed row, of which a step has several."""
OPTIONS = {"kto": {"undesirable_weight": 1.5}, "reward": {"center_rewards_coefficient": 0.02}}
OPTIONS["distill"] = {"teacher": "{folder}/teacher", "nll_share": 0.25}
ALONE = "one process"
WORLDS = (ALONE, *STRATEGIES.all())
LAYOUTS = {
    "padding": ("packing.mode=padding", "batch.tokens_per_device=null", "batch.examples_per_device=2"),
    "padding_free": ("packing.mode=padding_free", "batch.tokens_per_device=null", "batch.examples_per_device=3"),
    "packed": (),
}
MEASURED = {"seconds", "tokens_per_second", "mfu", "memory_bytes", "padding_fraction", "data_fraction"}
"""What a line of metrics has of the machine and of the layout."""
WHOLE = {"step", "document", "row", "tokens"}
"""Names in a line of the ledger besides figures."""


@dataclass(frozen=True)
class Variant:
    """What else a training has."""

    both: tuple[str, ...] = ()
    """Overrides of the cell and of its reference. They may name {folder}."""
    own: tuple[str, ...] = ()
    """Overrides of the cell alone. They may name {limit}, fewer tokens than the longest document has."""
    said: str = ""
    """A part of the cell's log alone."""
    objectives: tuple[str, ...] = tuple(OBJECTIVES.all())
    worlds: tuple[str, ...] = WORLDS
    files: tuple[str, ...] = ("final/model.safetensors",)
    loads: str = "final"
    near: float = 1e-5
    """How far losses may be off."""


WHOLE_MODEL = (ALONE, "ddp", "zero1", "zero2")
"""Worlds in which each process has the whole model."""
ADAPTED = ("final/adapter_model.safetensors", "final-merged/model.safetensors")
LORA = ("peft=lora", "peft.r=4", "peft.merge=true")
DORA = "peft.options={use_dora: true, use_rslora: true}"
GROUPS = r"optim.groups=[{match: embed_tokens, lr_scale: 0}, {match: 'layers\.0\.', lr_scale: 3, weight_decay: 0}]"
BF16, CHANCE = "model.dtype=bfloat16", "optim.bf16_rounding=stochastic"
PLAIN_OPTIMIZER = (ALONE, "ddp", "fsdp2")
"""Worlds in which the optimizer is not DeepSpeed's."""
VARIANTS = {
    "plain": Variant(),
    "lora": Variant(both=LORA, files=ADAPTED, loads="final-merged"),
    "dora": Variant((*LORA, DORA), objectives=("sft",), files=ADAPTED, loads="final-merged"),
    "groups": Variant((GROUPS,), objectives=("sft",)),
    "average": Variant(
        both=("trainer.ema=0.75",),
        objectives=("sft", "dpo"),
        worlds=PLAIN_OPTIMIZER,
        files=("final/model.safetensors", "final-ema/model.safetensors"),
        loads="final-ema",
    ),
    "bf16": Variant(both=("trainer.mixed_precision=bf16",), near=1e-2),
    "masters": Variant((BF16, "optim.bf16_rounding=never"), objectives=("sft",), near=1e-2),
    "rounded by chance": Variant((BF16, CHANCE), objectives=("sft",), worlds=PLAIN_OPTIMIZER, near=1e-2),
    "tokens a step": Variant(
        both=("batch.examples_per_step=null", "batch.tokens_per_step=1024", "batch.tokens_per_device=256"),
        objectives=("sft",),
    ),
    "recomputed": Variant(own=("trainer.gradient_checkpointing=full",)),
    "partly recomputed": Variant(own=("trainer.gradient_checkpointing=selective",), objectives=("sft", "dpo")),
    "tiles": Variant(
        (), ("trainer.tokens_per_mlp_tile=33",), "2 MLPs on tiles of 33 tokens", objectives=("sft", "dpo")
    ),
    "grouped experts": Variant(
        both=("model.path={folder}/sparse",),
        own=("model.experts=auto",),
        said="experts    all of a layer in one grouped product (",
        objectives=("sft",),
        worlds=(*WORLDS[1:], ALONE),
    ),
    "adapted experts": Variant(
        both=("model.path={folder}/sparse", *LORA, "peft.experts=true", "model.config.output_router_logits=false"),
        objectives=("sft", "dpo"),
        files=ADAPTED,
        loads="final-merged",
    ),
    "hybrid": Variant(
        both=("model.path={folder}/hybrid",),
        said="attention  mixers",
        objectives=("sft", "dpo", "kto"),
        worlds=("fsdp2", "zero3", "ddp", "zero2"),
    ),
    "by document": Variant(own=("model.attention=per_document",), worlds=WHOLE_MODEL),
    "unshared prompts": Variant(own=("packing.share_prefix=false",), objectives=("dpo", "reward")),
    "known reference": Variant(own=("objective.reference=precomputed",), objectives=("dpo", "kto")),
    "split documents": Variant(
        own=("strategy.sequence_parallel=auto", "batch.tokens_per_device={limit}"),
        said="split ",
        worlds=tuple(one for one in WORLDS if one not in (ALONE, "zero3_offload")),
    ),
}


@dataclass(frozen=True)
class Cell:
    """A training of `objective` in a world, which is a strategy on several processes or ALONE."""

    objective: str
    world: str
    layout: str = "packed"
    variant: str = "plain"

    def __str__(self) -> str:
        return "-".join((self.objective, self.world, self.layout, self.variant)).replace(" ", "_")

    @property
    def of(self) -> Variant:
        return VARIANTS[self.variant]

    @property
    def exists(self) -> bool:
        """Whether there is such a training. Variants are tried in packed rows, all layouts without any."""
        known = self.objective in self.of.objectives and self.world in self.of.worlds
        return known and (self.variant == "plain" or self.layout == "packed")

    @property
    def processes(self) -> int:
        """Of kto as many that one has no example in step 4."""
        return 1 if self.world == ALONE else 3 if self.objective == "kto" else 2

    @property
    def answers(self) -> int:
        """Questions that are answered before and after, which takes longer than the training."""
        return int(self.layout == "padding_free" and self.objective == "sft")

    @property
    def family(self) -> str:
        return "zero" if self.world.startswith("zero") else self.world

    @property
    def pairs(self) -> set[Any]:
        """What a sample of cells shows by this one: pairs of its values, of strategies of one family alike."""
        return {*combinations((self.objective, self.family, self.layout), 2), (self.world,), (self.variant,)}

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        package = "" if self.world == ALONE else STRATEGIES[self.world].package
        return [needs(package)] if package else []


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"{package} is not installed")


CELLS = [
    cell
    for objective in OBJECTIVES.all()
    for variant in VARIANTS
    for world in VARIANTS[variant].worlds
    for layout in LAYOUTS
    if (cell := Cell(objective, world, layout, variant)).exists
]


def sample(cells: Iterable[Cell], shown: Callable[[Cell], set[Any]] = lambda cell: cell.pairs) -> list[Cell]:
    """Few cells by which all is `shown` that all cells show; DeepSpeed on the host is left out."""
    kept, seen = [], set[Any]()
    rest = [cell for cell in cells if cell.world != "zero3_offload"]
    while rest and shown(best := max(rest, key=lambda cell: len(shown(cell) - seen))) - seen:
        kept.append(best)
        seen |= shown(best)
    return kept


def parameters(cells: Sequence[Any], sampled: Sequence[Any]) -> list[Any]:
    """Cases of a test, of cells or others with `marks`. Those that are not sampled are exhaustive."""
    more = pytest.mark.exhaustive
    return [pytest.param(one, id=str(one), marks=[*one.marks, *([] if one in sampled else [more])]) for one in cells]


class Runs:
    """The runs of cells in a folder, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, Run] = {}
        for objective, (rows, held_out) in ROWS.items():
            write_jsonl(folder / f"{objective}.jsonl", rows)
            write_jsonl(folder / f"{objective}-eval.jsonl", held_out)
        for name, config in MODELS.items():
            save_model(Model(init="random", config=config, tokenizer="quickstart"), folder / name)

    def of(self, cell: Cell) -> Run:
        return self.run(cell, str(cell), *cell.of.own)

    def reference(self, cell: Cell) -> Run:
        """One process on padded batches."""
        alone = replace(cell, world=ALONE, layout="padding")
        loop = ("model.experts=loop",) if cell.variant == "grouped experts" else ()
        shared = alone if cell.of.both else replace(alone, variant="plain")
        return self.run(shared, f"reference-{shared}", *loop)

    def run(self, cell: Cell, name: str, *overrides: str, processes: int = 0, begin: Begin | None = None) -> Run:
        """The run of that name; if it was not made yet, of the cell with these overrides."""
        if name not in self.made:
            limit = LIMIT.get(cell.objective, 80)
            given = [
                one.replace("{folder}", str(self.folder)).replace("{limit}", str(limit))
                for one in (*LAYOUTS[cell.layout], *cell.of.both, *overrides)
            ]
            config = self.config_of(cell.objective, answers=cell.answers)
            if cell.world == ALONE:
                self.made[name] = run_here(self.folder, config, *given, name=name)
            else:
                begin = host_adam.run if cell.world == "zero3_offload" else begin
                how: Any = {"command": cell.objective, "processes": processes or cell.processes, "begin": begin}
                self.made[name] = train(self.folder, config, f"strategy={cell.world}", *given, name=name, **how)
        return self.made[name]

    def config_of(self, objective: str, answers: int) -> dict[str, Any]:
        """Steps of several micro-batches, their gradients clipped, with evaluations, checkpoints and maybe answers."""
        trainer: dict[str, Any] = {"max_steps": STEPS, "checkpoint_every": CHECKPOINT, "keep_checkpoints": None}
        trainer |= {"eval_every": 4, "samples": ["river stone"] * answers}
        config = config_on(self.folder / "start", self.folder, trainer=trainer)
        given = OPTIONS.get(objective, {}).items()
        options = {name: one.format(folder=self.folder) if isinstance(one, str) else one for name, one in given}
        config["objective"] = {"kind": objective, "options": options}
        config["optim"] |= {"schedule": "linear", "warmup_steps": 2, "max_grad_norm": 0.5, "weight_decay": 0.1}
        files = {name: str(self.folder / f"{objective}{end}.jsonl") for name, end in (("train", ""), ("eval", "-eval"))}
        config["data"] |= {**files, "max_length": LONGEST.get(objective, 92)}
        config["batch"]["tokens_per_device"] = ROOM[objective]
        return config


def cut(run: Run, name: str, step: int = CHECKPOINT) -> str:
    """A copy of a run, beside it, as if it had been killed after the checkpoint of that step; its name."""
    place = run.folder.with_name(name)
    shutil.copytree(run.folder, place)
    for final in place.glob("final*"):
        shutil.rmtree(final)
    (place / "summary.json").unlink()
    for checkpoint in (place / "checkpoints").glob("step-*"):
        if checkpoint.name != f"step-{step:06d}":
            shutil.rmtree(checkpoint)
    return name


def assert_same_training(
    run: Run, expected: Run, files: Sequence[str] = ("final/model.safetensors",), near: float = 1e-5
) -> None:
    """Lines, documents and weights are equal but for rounding, of losses by `near`."""
    assert len(run.ledger) == len(expected.ledger) > 0
    for ours, theirs in zip(run.ledger, expected.ledger, strict=True):
        assert [*ours] == [*theirs]
        for name, value in theirs.items():
            # a document's loss is a mean over few tokens, a reward is of one
            within = near * (20 if name in ("margin", "reward") else 10)
            assert ours[name] == (value if name in WHOLE else pytest.approx(value, rel=within, abs=within)), theirs
    assert len(run.lines) == len(expected.lines)
    for ours, theirs in zip(run.lines, expected.lines, strict=True):
        assert ours.keys() - MEASURED == theirs.keys() - MEASURED
        for name in theirs.keys() - MEASURED:
            # kto's estimate is a difference of log-probabilities of a hundred nats or more, a reward is of one token
            within = near * (5 if name.endswith(("kl", "_reward")) else 10 if name == "grad_norm" else 1)
            # a margin near zero has either sign: before the first step, and under coarse rounding
            if "accurac" not in name or (theirs["step"] and near < 1e-3):
                assert ours[name] == pytest.approx(theirs[name], rel=within, abs=within), (theirs["step"], name)
    for file in files:
        ours, theirs = load_file(run.folder / file), load_file(expected.folder / file)
        assert ours.keys() == theirs.keys()
        for name, weight in ours.items():
            off = (weight.float() - theirs[name].float()).norm()
            assert off <= min(10 * near, 5e-3) * theirs[name].float().norm(), name
