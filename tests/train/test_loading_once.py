"""Under fsdp2 and zero3 each process reads its own rows of the weights, and what is written at the end is never whole in memory."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from running import LLAMA, Run, config_on, joined, train, written
from safetensors.torch import load_file
from tiny_models import with_files
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packtrain.config.schema import Model, Peft
from packtrain.data.tokens.pretrained import load_tokenizer
from tests.train import forked

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURE = {"num_experts_per_tok": 1, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # type, settings, how it is saved
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
    "experts": ("qwen3_moe", {**MIXTURE, "num_experts": 2}, {}),  # which one of three processes has none of
    "merged": ("qwen3_moe", {**MIXTURE, "num_experts": 5}, {"save_original_format": False}),
    "scaled": ("gemma2", {}, {}),
    "biased": ("gpt_oss", {"num_local_experts": 3, "num_experts_per_tok": 2}, {}),
}
MACHINES = [{"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)} for rank in range(4)]
"""What torchrun tells four processes on two machines."""


def save_models(folder: Path) -> None:
    for name, (kind, settings, how) in FAMILIES.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SMALL, **settings, "pad_token_id": 0}))
        half = model.to(torch.bfloat16) if name in ("tied", "merged") else model
        half.save_pretrained(folder / name, **how)


def compare(arguments: tuple[str, ...], environment: dict[str, str], cwd: Path, outputs: list[Path]) -> None:
    """One of several processes: what it reads, and what they write together, against the whole model."""
    forked.enter(environment, cwd, outputs)
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from packtrain.model import save
    from packtrain.model.load import load_model
    from packtrain.model.spread import Ranks, placement_of, reading_mesh, spread
    from packtrain.model.weights import weights_hash

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(rank, world, torch.device("cpu"), arguments[1], copies=2 if world == 4 else 1)
    save.FILE_BYTES = 20_000
    tokenizer = Tokens()
    for name in FAMILIES:
        for peft, scores in ((Peft(), False), (Peft(kind="lora", r=3), True)):
            given: Any = {"seed": 3, "scores": scores}
            source = Model(path=str(Path(arguments[0], name)))
            whole = load_model(source, peft, tokenizer, **given)
            model = load_model(source, peft, tokenizer, **given, mesh=reading_mesh(ranks))
            expected = dict(whole.named_parameters(remove_duplicate=False))
            sliced = [isinstance(weight, DTensor) for name, weight in model.named_parameters() if name in expected]
            assert sum(sliced) >= len(sliced) - (4 * 7 * 2 + 1 if scores else 0), (name, sliced)
            assert weights_hash(model) == weights_hash(whole), name
            spread(model, ranks)
            for key, weight in model.named_parameters(remove_duplicate=False):
                # ZeRO-3 has one format
                assert torch.equal(save.gathered(weight), expected[key].to(weight.dtype)), (name, key)
                assert weight.requires_grad == expected[key].requires_grad, (name, key)
            assert len({*model.parameters()}) == len({*whole.parameters()}), name
            for ours, theirs in zip(model.buffers(), whole.buffers(), strict=True):
                assert torch.equal(ours, theirs), name
            ids, end = torch.arange(9)[None], placement_of(ranks.spec).open_proofs(model, ranks)
            if arguments[1] == "zero3":
                whole.to(whole.dtype)
            with torch.no_grad():
                assert torch.equal(model.eval()(input_ids=ids).logits, whole.eval()(input_ids=ids).logits), name
            end()
            if not scores:
                check_files(model, whole, Path(arguments[0], f"{name}-of-{world}"), main=rank == 0)
    dist.destroy_process_group()


def check_files(model: Any, whole: Any, folder: Path, *, main: bool) -> None:
    from packtrain.model import save

    folder.mkdir(exist_ok=True)
    plan = save.plan_files(model, torch.float32)
    assert plan is not None and len(plan.files) > 1
    save.write_files(model, plan, folder, save.gathered, main=main)
    if main:
        whole.save_pretrained(folder / "expected")
        expected = load_file(folder / "expected" / "model.safetensors")
        written = {key: value for file in plan.files for key, value in load_file(folder / file).items()}
        assert written.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in written.items())
        assert all((folder / file).stat().st_size <= 25_000 or len(names) == 1 for file, names in plan.files.items())
        whole.config.save_pretrained(folder)
        again = type(whole).from_pretrained(folder, dtype=torch.float32).state_dict()
        assert all(torch.equal(value, again[key]) for key, value in whole.state_dict().items())


class Tokens:
    """As much of a tokenizer as loading asks for."""

    pad_token_id = 0

    def __len__(self) -> int:
        return 50


@pytest.mark.sample("3-fsdp2")
@pytest.mark.parametrize(("processes", "strategy"), [(3, "fsdp2"), (3, "zero3"), (4, "fsdp2")])
def test_slices_are_those_of_the_whole_model_and_files_too(tmp_path: Path, processes: int, strategy: str) -> None:
    save_models(tmp_path)
    joined(processes, str(tmp_path), strategy, begin=compare)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of rows that no number of processes divides, and a run of one process on it."""
    folder = tmp_path_factory.mktemp("loading")
    torch.manual_seed(0)
    names = load_tokenizer(Model(tokenizer="quickstart"))
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"vocab_size": len(names) + 3}
    AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**settings)).save_pretrained(folder / "model")
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    trainer = {"max_steps": 4, "checkpoint_every": 2, "keep_checkpoints": None}
    config = config_on(folder / "model", folder, trainer=trainer, optim={"max_grad_norm": 0.5})
    return {**config, "model": {**config["model"], "tokenizer": "quickstart"}}


@pytest.fixture(scope="module")
def alone(folder: Path) -> Run:
    return train(folder, config_of(folder), name="alone")


def on_two_machines(folder: Path, *overrides: str, name: str) -> Run:
    ranks = [{**own, **there} for own, there in zip(forked.told_by_torchrun(4), MACHINES, strict=True)]
    given = ("strategy=fsdp2", "strategy.shard_within=machine", f"trainer.output_dir={folder / name}")
    arguments = ("sft", written(folder, config_of(folder), name), *given, *overrides)
    for result in forked.results_of(arguments, ranks, None, 600):
        assert result.returncode == 0, result.stderr
    return Run(folder / name)


def of_sum(terms: int = 256) -> float:
    """How far two sums differ by rounding: each addition is off by half of EPS, one way or the other, in both.

    Losses and norms of gradients are sums over the tokens of a micro-batch, 256 at most (running.py::base_config)."""
    return torch.finfo(torch.float32).eps * math.sqrt(terms)


def of_adam(weights: int) -> float:
    """The same of a norm of `weights` numbers that Adam made from zeros, such as an adapter.

    Adam divides each gradient by its own size, so the smallest ones count as much as the largest. All are off by the rounding of a
    usual one. The smallest is `weights` times smaller: its step is off by as many roundings, √weights of the norm of all."""
    return of_sum() * math.sqrt(weights)


def assert_same(run: Run, expected: Run) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=of_sum())
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    ours, theirs = run.weights(), expected.weights()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert (weight - theirs[name]).norm() <= of_adam(weight.numel()) * theirs[name].norm(), name


def test_copies_on_two_machines_train_as_one_process_and_go_on_as_one_group(folder: Path, alone: Run) -> None:
    run = on_two_machines(folder, name="machines")
    assert_same(run, alone)
    for gone in (run.folder / "final", run.checkpoint(4)):
        shutil.rmtree(gone)
    (run.folder / "summary.json").unlink()
    again = train(folder, config_of(folder), "strategy=fsdp2", name="machines", processes=2)
    assert_same(again, alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_head_that_is_trained_in_full_beside_adapters_is_a_copy_of_its_slices(folder: Path, strategy: str) -> None:
    config = {**config_of(folder), "peft": {"kind": "lora", "modules_to_save": ["lm_head"]}}
    one = train(folder, config, name=f"adapted-{strategy}-one")
    two = train(folder, config, f"strategy={strategy}", name=f"adapted-{strategy}", processes=2)
    assert two.losses == pytest.approx(one.losses, rel=of_sum()) and one.losses[-1] < one.losses[0]
    config["model"]["path"] = str(one.folder / "final")
    on = [
        train(folder, config, f"strategy={how}", name=f"adapted-{strategy}-on-{how}", processes=processes)
        for how, processes in (("ddp", 1), (strategy, 2))
    ]
    assert on[1].losses == pytest.approx(on[0].losses, rel=of_sum()) and on[0].losses[0] < one.losses[0]


def test_a_weight_in_another_shape_is_refused_on_all_ranks(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path, dirs_exist_ok=True)
    name = "model.layers.0.mlp.up_proj.weight"  # of 96 rows: the first of two processes would have 48 of 95, too
    with_files(tmp_path, lambda weights: {**weights, name: weights[name][:-1]})
    config = config_of(folder)
    config["model"]["path"], config["trainer"]["output_dir"] = str(tmp_path), str(tmp_path / "run")
    for result in joined(2, "sft", written(tmp_path, config), "strategy=fsdp2", expect=2):
        assert name in result.stderr, result.stderr


@pytest.mark.sample(without=("zero3",))
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_files_of_another_training_on_one_machine_are_noticed(folder: Path, tmp_path: Path, strategy: str) -> None:
    environments = forked.told_by_torchrun(2)
    for rank, environment in enumerate(environments):
        environment["HOME"] = str(home := tmp_path / f"home{rank}")
        shutil.copytree(folder / "model", home / "model")
    with_files(home / "model", lambda weights: {name: one + 1e-3 for name, one in weights.items()})
    config = config_of(folder)
    config["model"]["path"], config["trainer"]["output_dir"] = "~/model", str(tmp_path / "run")
    arguments = ("sft", written(tmp_path, config), f"strategy={strategy}")
    results = forked.results_of(arguments, environments, None, 600, None)
    assert [result.returncode for result in results] == [3, 3], results
    said = "".join(result.stderr for result in results)
    assert "files differ there" in said and "model.path: rank 1 has files with hash" in said
