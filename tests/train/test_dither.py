"""Float32 masters that start off the middle of their rounding cells: the same bfloat16 model, which then sees every update."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import host_adam
import pytest
import torch
from answer_runs import of_objective
from here import run_here
from running import LLAMA, Run, assert_same_bits, base_config, joined, packtrain, train, written
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from packtrain import dither_weights
from packtrain.data.sources.quickstart import tokenizer
from packtrain.errors import CheckFailed, UserError
from packtrain.strategies.spec import STRATEGIES
from packtrain.train.optim.dither import dither_, dithered, exact_in_bfloat16, undithered

BF16 = torch.bfloat16
EDGES = [1.0, 2.0, -1.0, 0.5, 0.0, -0.0, 1e-40, -1e-39, torch.finfo(BF16).max, torch.finfo(BF16).tiny, 3e-38]


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.to(BF16).float()


@pytest.fixture
def weights() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return rounded(torch.randn(300_000, generator=generator) * 0.05)


def test_masters_round_to_the_weights_and_come_back(weights: torch.Tensor) -> None:
    every = torch.cat([weights, rounded(torch.tensor(EDGES)), torch.tensor([torch.inf, -torch.inf])])
    masters = every.clone()
    dither_(masters, 3, "a")
    assert rounded(masters).view(torch.int32).equal(every.view(torch.int32))
    assert (masters[: len(weights)] != weights).float().mean() > 0.999 and (masters[every == 0] == 0).all()
    assert undithered(masters, 3, "a").equal(every)
    with pytest.raises(CheckFailed, match=r"\[dither-inexact\]"):
        dither_(torch.full((100,), 1 + 0.98 * 2**-8), 3, "not exact in bfloat16")


def test_a_place_depends_on_seed_name_and_index_alone(weights: torch.Tensor) -> None:
    def placed(part: torch.Tensor, *where: Any) -> torch.Tensor:
        dither_(part := part.clone(), *where)
        return part

    whole = placed(weights, 3, "a")
    assert torch.cat([placed(weights[:1001], 3, "a"), placed(weights[1001:], 3, "a", 1001)]).equal(whole)
    assert undithered(whole[777:], 3, "a", 777).equal(weights[777:])
    for other in ((4, "a"), (3, "b"), (3, "a", 1)):
        offsets = [one - weights for one in (whole, placed(weights, *other))]
        assert abs(torch.corrcoef(torch.stack(offsets))[0, 1].item()) < 0.01


def test_no_block_of_a_rounding_waits_for_the_device() -> None:
    """A tensor on `meta` cannot be read back."""
    assert dithered(torch.empty(2**21 + 1, device="meta"), 0, "a").shape == (2**21 + 1,)
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.finfo(torch.float32).max])
    for alone in (edges, torch.cat([edges, torch.ones(8)])):
        assert dithered(alone, 0, "a")[:5].view(torch.int32).equal(edges.view(torch.int32))


@pytest.mark.parametrize("share", [0.003, 0.05, -0.05])
def test_an_update_is_seen_in_the_mean_at_powers_of_two_as_well(weights: torch.Tensor, share: float) -> None:
    """Whose cells are half as wide on the side of zero; `share` is of a cell."""
    powers = torch.tensor([0.25, -0.5]).repeat(100_000)
    for middle in (weights, powers):
        dither_(masters := middle.clone(), 0, "a")
        update = share * 2**-8 * middle.abs()
        seen = rounded(masters + update) - middle
        share_seen = ((seen * update).sum() / update.square().sum()).item()
        assert share_seen == pytest.approx(1, abs=0.25 if share < 0.01 else 0.1)
        plain = rounded(middle + update) - middle
        assert not plain.any()


def test_what_begins_as_zeros_is_moved_where_final_is_the_bfloat16_weights_themselves() -> None:
    ones, zeros = torch.ones(4), torch.zeros(4)
    given = {"full": ones, "inexact": ones / 3, "adapter": zeros, "bias": zeros.to(BF16)}
    assert exact_in_bfloat16(given).keys() == {"full", "bias"}


@pytest.mark.parametrize("through_bfloat16", [True, False])
def test_rows_rounded_to_8_bits_see_an_update_in_the_mean_too(weights: torch.Tensor, through_bfloat16: bool) -> None:
    """By a scale for each row, as torchao has it, of the weights as they are or of those in bfloat16."""

    def eight_bits(values: torch.Tensor) -> torch.Tensor:
        rows = (rounded(values) if through_bfloat16 else values).view(1000, 300)
        scale = rows.abs().amax(1, keepdim=True) / 448
        return ((rows / scale).to(torch.float8_e4m3fn).float() * scale).view(-1)

    def seen(masters: torch.Tensor) -> float:
        moved = masters + update
        return ((eight_bits(moved) - eight_bits(masters)) @ update / update.square().sum()).item()

    update = 1e-5 * torch.where(torch.arange(len(weights)) % 2 == 0, 1.0, -1.0)
    dither_(masters := weights.clone(), 0, "a")
    assert seen(masters) == pytest.approx(1, abs=0.15)
    assert not through_bfloat16 or seen(weights) < 0.1


def test_a_model_of_anyones_loop_is_moved_and_saved_as_it_was(model: Path) -> None:
    made: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in made.named_parameters()}
    masters = dither_weights(made)
    assert 0 < len(masters.moved) < len(before) and not any("norm" in name for name in masters.moved)
    for name, weight in made.named_parameters():
        assert weight.equal(before[name]) == (name not in masters.moved) and rounded(weight).equal(before[name])
        assert masters.in_format(name, weight, torch.float32).equal(before[name])
        assert masters.in_format(name, weight, BF16).equal(before[name].to(BF16))
    with pytest.raises(UserError, match=r"\[unknown-layers\]"):
        dither_weights(torch.nn.Sequential(made))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are bfloat16 numbers."""
    folder, own = tmp_path_factory.mktemp("model"), tokenizer()
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**LLAMA, "vocab_size": len(own)}))
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)  # far larger than the updates
    made.to(BF16).save_pretrained(folder)
    own.save_pretrained(folder)
    return folder


def config_of(folder: Path, model: Path, dtype: str = "float32") -> dict[str, Any]:
    trainer = {"max_steps": 6, "mixed_precision": "bf16", "checkpoint_every": 3, "keep_checkpoints": None}
    config = base_config(folder, trainer=trainer, optim={"learning_rate": 2e-5})
    config["model"] = {"path": str(model), "dtype": dtype}
    return config


def seen(run: Run) -> list[float]:
    return [line["updates_seen"] for line in run.steps if "updates_seen" in line]


def learnt(run: Run, model: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    return {name: weight.to(dtype).float() - before[name] for name, weight in run.weights().items() if name in before}


def moved(run: Run, model: Path) -> bool:
    """Whether final/ has other weights than those that were loaded."""
    return any((move != 0).any() for move in learnt(run, model).values())


def along(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """How far `one` goes along with `other`, 1 if as far."""
    both, own = (sum((a[name] * other[name]).sum() for name in other) for a in (one, other))
    return float(both / own)


@pytest.mark.sample(without=("bfloat16",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_computes_in_bfloat16_sees_its_updates_and_final_has_them(
    model: Path, tmp_path: Path, dtype: str
) -> None:
    config = config_of(tmp_path, model, dtype)
    exact = run_here(tmp_path, config_of(tmp_path, model), "trainer.mixed_precision=no", name="exact")
    plain = run_here(tmp_path, config, "optim.bf16_rounding=undithered", name="plain")
    run = run_here(tmp_path, config, name="dithered")
    assert run.losses[0] == plain.losses[0], "the same bfloat16 model"
    assert "dither     " in run.log and "dither     " not in plain.log + exact.log
    assert min(seen(run)) > 0.85 and max(seen(plain)[:2]) < 0.5 and not seen(exact)
    assert "of the weight updates are seen by the model" in plain.log and "are seen by" not in run.log
    whole = learnt(exact, model)
    assert along(learnt(run, model), whole) == pytest.approx(1, abs=0.1)
    final = run_here(tmp_path, config, "optim.bf16_rounding=final", name="final") if dtype == "float32" else run
    assert {weight.dtype for weight in final.weights().values()} == {BF16}
    if dtype == "bfloat16":
        assert along(learnt(plain, model, BF16), whole) < 0.6
    assert along(learnt(final, model), whole) == pytest.approx(1, abs=0.1)


@pytest.mark.exhaustive
def test_verify_tells_what_share_of_an_update_will_be_seen(model: Path, tmp_path: Path) -> None:
    path = written(tmp_path, config_of(tmp_path, model))
    plain = packtrain("verify", path, "optim.bf16_rounding=undithered", "--json")
    spread, _ = joined(2, "verify", path, "strategy=fsdp2")
    exact = packtrain("verify", path, "trainer.mixed_precision=no", "--json")
    trained = seen(run_here(tmp_path, config_of(tmp_path, model), "optim.bf16_rounding=undithered", name="plain"))[0]
    assert json.loads(plain.stdout)["updates_seen"] == pytest.approx(trained, abs=0.03)
    assert json.loads(exact.stdout)["updates_seen"] is None
    assert re.search(r"updates that the model sees.* (1|0\.9\d*|1\.\d*) .*>= 0.5.*ok", spread.stdout), spread.stdout


@pytest.mark.exhaustive
def test_adapters_of_a_bfloat16_base_see_their_updates_too(model: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, model, "bfloat16") | {"peft": {"kind": "lora"}}
    file = "adapter_model.safetensors"
    run = run_here(tmp_path, config, name="run")
    plain = run_here(tmp_path, config, "optim.bf16_rounding=undithered", name="plain")
    assert min(seen(run)) > 0.85 and min(seen(plain)) < 0.65, "they begin as bfloat16"
    still = load_file(run_here(tmp_path, config, "optim.learning_rate=0", name="still").folder / "final" / file)
    assert all(one.dtype == torch.float32 and rounded(one).equal(one) for one in still.values()), "as they began"
    trained, masters = (load_file(run.folder / place / file) for place in ("final", "checkpoints/step-000006"))
    for name, weight in trained.items():
        assert weight.equal(masters[name]) == ("lora_B" in name), "what began as zero has no offset"


@pytest.mark.sample(without=("float32",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_updates_final_has_the_weights_that_were_loaded(model: Path, tmp_path: Path, dtype: str) -> None:
    exact = ["optim.bf16_rounding=never"] if dtype == "bfloat16" else []
    run = run_here(tmp_path, config_of(tmp_path, model, dtype), "optim.learning_rate=0", *exact, name="still")
    assert {weight.dtype for weight in run.weights().values()} == {torch.float32}
    assert not moved(run, model)


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(model: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, model)
    whole = run_here(tmp_path, config, name="whole")
    assert_same_bits(run_here(tmp_path, config, whole.resume(3), name="again"), whole, after=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("before", "after"), [((1, "ddp"), (2, "fsdp2")), ((2, "fsdp2"), (1, "ddp"))])
def test_a_run_that_goes_on_under_another_strategy_takes_off_what_was_added(
    model: Path, tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    """Which weights are computed in bfloat16, and so were moved, depends on the strategy."""
    config, resumed = config_of(tmp_path, model), f"trainer.resume={tmp_path}/first/checkpoints/step-000003"
    still = "optim.learning_rate=0"
    for (processes, strategy), name, more in ((before, "first", "trainer.max_steps=3"), (after, "run", resumed)):
        run = train(tmp_path, config, f"strategy={strategy}", more, still, name=name, processes=processes)
        assert not moved(run, model)


@pytest.mark.sample(without=("auto-auto",))
@pytest.mark.parametrize(("before", "after"), [("auto", "auto"), ("stochastic", "never")])
def test_a_run_that_goes_on_with_another_seed_or_with_masters_takes_off_what_was_added(
    model: Path, tmp_path: Path, before: str, after: str
) -> None:
    config = config_of(tmp_path, model, "float32" if before == "auto" else "bfloat16")
    still = "optim.learning_rate=0"
    first = run_here(tmp_path, config, still, f"optim.bf16_rounding={before}", "trainer.max_steps=3", name="first")
    changes = ["trainer.seed=5", f"optim.bf16_rounding={after}", first.resume(3)]
    changes.append("trainer.resume_despite=[trainer.seed,optim.bf16_rounding]")
    assert not moved(run_here(tmp_path, config, still, *changes, name="run"), model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES.all())
def test_masters_are_the_same_under_every_strategy(model: Path, tmp_path: Path, strategy: str, dtype: str) -> None:
    pytest.importorskip(STRATEGIES[strategy].package or "torch")
    config = config_of(tmp_path, model, dtype)
    exact = ["optim.bf16_rounding=never"] if dtype == "bfloat16" else []
    alone = train(tmp_path, config, *exact, name="alone")
    begin = host_adam.run if strategy == "zero3_offload" else None
    run = train(tmp_path, config, f"strategy={strategy}", *exact, name="two", processes=2, begin=begin)
    assert run.losses == pytest.approx(alone.losses, rel=2e-3)
    assert min(seen(run)) > 0.85
    assert along(learnt(run, model), learnt(alone, model)) == pytest.approx(1, abs=0.05)
    still = (f"strategy={strategy}", *exact, "optim.learning_rate=0")
    assert not moved(train(tmp_path, config, *still, name="still", processes=2, begin=begin), model)


def test_preferences_begin_with_a_zero_margin_and_are_seen(model: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, model)
    config["data"] = of_objective(tmp_path, "dpo")["data"]
    dithered, plain = (
        run_here(tmp_path, config, "objective.kind=dpo", f"optim.bf16_rounding={how}", name=how)
        for how in ("auto", "undithered")
    )
    assert dithered.losses[0] == plain.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert min(seen(dithered)) > 0.85 and max(seen(plain)[:2]) < 0.5
