"""Every loss, gradient and figure equals TRL's for the padded batch.

TRL's trainers compute theirs with the fused head, the functions get log-probabilities computed plainly from the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel, Trainer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from packtrain.config.schema import Model
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.objectives.answers import Figures, LabelledAnswers, Sum, Targets, TokenFigures, sum_answers
from packtrain.objectives.dpo.run import pair_figures
from packtrain.objectives.kto.run import unpaired_figures
from packtrain.objectives.losses import (
    F_DIVERGENCES,
    PAIR_LOSSES,
    UNPAIRED_LOSSES,
    PairOptions,
    UnpairedOptions,
    bradley_terry,
    estimate_kl,
    make_pairs,
    pair_loss,
)
from packtrain.objectives.reward.run import reward_figures
from packtrain.objectives.sft.spec import TOKEN_WEIGHTS
from packtrain.objectives.spec import OBJECTIVES
from packtrain.train.objectives.loss import FigureSums

RELATIVE, VOCABULARY = 1e-6, 10
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
DIVERGING = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
SHAPES = ((4, 4, 2), (2, 1, 5), (6, 3, 3), (1, 2, 1), (3, 5, 4), (1, 1, 1), (5, 2, 4))
"""Tokens of the prompt, the chosen and the rejected answer of pairs."""
Batch: TypeAlias = Mapping[str, torch.Tensor]
Found: TypeAlias = tuple[torch.Tensor, dict[str, float]]
"""A loss and its figures."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # TRL reports other runs to its makers


# A tiny model, TRL's trainers of it, and figures of its targets from all logits


def tiny(seed: int, kind: type[PreTrainedModel] = LlamaForCausalLM) -> PreTrainedModel:
    """A random Llama of 6,000 parameters, far from uniform."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "num_labels": 1}
    return kind(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.2, **sizes, **special)).train()


def trainer_of(folder: Path, kind: Any, arguments: Any, columns: Any, models: Any, **given: object) -> Any:
    """TRL's own trainer, of rows that are not used."""
    usual = {"use_cpu": True, "bf16": False, "activation_checkpointing": False, "report_to": "none"}
    options = arguments(output_dir=str(folder), max_length=None, disable_tqdm=True, **usual, **given)
    tokenizer = load_tokenizer(Model(tokenizer="quickstart"))
    return kind(**models, args=options, processing_class=tokenizer, train_dataset=Dataset.from_dict(dict(columns)))


def tokens(generator: torch.Generator, length: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()


def pairs_of_tokens(count: int) -> list[dict[str, list[int]]]:
    generator, names = torch.Generator().manual_seed(0), ("prompt_ids", "chosen_ids", "rejected_ids")
    return [{name: tokens(generator, n) for name, n in zip(names, shape, strict=True)} for shape in SHAPES[:count]]


@dataclass(frozen=True)
class Scored:
    """Figures of the targets of a padded batch, from the full logits."""

    targets: Targets
    entropy: torch.Tensor
    mean_logits: torch.Tensor
    is_top1: torch.Tensor

    def tokens(self, chosen: torch.Tensor) -> TokenFigures:
        """Return the figures of the targets; `chosen` bool [answers] tells the two sides apart."""
        return TokenFigures(self.targets.of_answers(chosen), self.entropy, self.mean_logits)


def scored(model: PreTrainedModel, ids: torch.Tensor, attended: torch.Tensor, trained: torch.Tensor) -> Scored:
    logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1]
    every, following, mask = logits.log_softmax(dim=-1), ids[:, 1:], trained[:, 1:].bool()
    own = every.gather(2, following[..., None])[..., 0]
    targets = Targets(own[mask], mask.sum(dim=1), (2 * every.detach()).logsumexp(dim=-1)[mask])
    entropy, top = -(every.exp() * every).sum(dim=-1), logits.argmax(dim=-1) == following
    return Scored(targets, entropy[mask], logits.mean(dim=-1)[mask], top[mask])


def logged(kind: str, figures: Figures) -> dict[str, float]:
    """The figures of a step with this micro-batch alone, in one process."""
    sums = FigureSums.none(OBJECTIVES[kind].figures, torch.device("cpu"))
    sums = sums.plus(figures, counted=True)
    alone: Any = SimpleNamespace(reduce=lambda values, **_: values, gather=lambda values: values)
    return sums.values(alone)


def gradient(loss: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """The gradients of all parameters, one after the other."""
    model.zero_grad()
    loss.backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def gaps(trainer: Trainer, batch: Batch, ours: Found) -> dict[str, float]:
    """Relative differences to TRL: of the loss, the whole gradient and each figure."""
    model = trainer.model
    own, expected = gradient(ours[0], model), trainer.compute_loss(model, dict(batch))
    metrics = vars(trainer)["_metrics"]["train"]
    unknown = metrics.keys() if isinstance(trainer, SFTTrainer) else {"num_tokens"}  # packtrain sft logs the loss alone
    of_trl = {name: values[-1] for name, values in metrics.items() if name not in unknown}
    theirs = gradient(expected, model)
    assert ours[1].keys() == of_trl.keys()
    figures = {name: relative(ours[1][name], value, scale_of(name, of_trl)) for name, value in of_trl.items()}
    loss, norm = relative(ours[0].item(), expected.item()), max(theirs.norm().item(), 1e-12)
    return {"loss": loss, "gradient": (own - theirs).norm().item() / norm, **figures}


def relative(ours: float, theirs: float, scale: float = 0.0) -> float:
    return abs(ours - theirs) / max(abs(theirs), scale, 1e-12)


def scale_of(name: str, logged: Mapping[str, float]) -> float:
    """Size of the terms of a figure where they cancel: log-probabilities or logits."""
    if name.startswith("rewards/") or name == "kl":
        return 0.1 * max(abs(value) for other, value in logged.items() if other.startswith("logps/"))
    return 0.5 if name.startswith("logits/") else 0.0


def assert_equal(trainer: Trainer, batch: Batch, ours: Found) -> None:
    found = gaps(trainer, batch, ours)
    found["gradient"] /= 2  # of many more sums than a loss has
    assert {name: gap for name, gap in found.items() if not gap <= RELATIVE} == {}


def sampled(sample: Sequence[object], rest: Sequence[object]) -> list[object]:
    """The cases of every run, then the exhaustive ones."""
    more = {str(case): case for case in rest if case not in sample}
    return [*sample, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in more.values())]


# dpo


@dataclass(frozen=True)
class PairCase:
    """Losses with their weights, options, and the number of pairs."""

    weights: dict[str, float]
    options: PairOptions
    pairs: int = 3

    def __str__(self) -> str:
        usual = PairOptions()
        changed = {one.name: getattr(self.options, one.name) for one in fields(usual)}
        given = [f"{name}={value}" for name, value in changed.items() if value != getattr(usual, name)]
        weights = [name if weight == 1 else f"{weight}{name}" for name, weight in self.weights.items()]
        return "-".join(["+".join(weights), *given, f"{self.pairs}pairs"])


def alone(name: str, pairs: int = 3, **options: object) -> PairCase:
    smoothing = {"label_smoothing": 0.1} if name == "exo_pair" else {}
    return PairCase({name: 1.0}, replace(PairOptions(), **{**smoothing, **options}), pairs)


PAIR_SAMPLE = [
    alone("sigmoid"),
    alone("aot", label_smoothing=0.1),
    alone("exo_pair", pairs=7),
    alone("sigmoid_norm", beta=2.0),
    PairCase({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, PairOptions()),
    alone("sigmoid", f_divergence_type="forward_kl"),
    alone("ipo", f_divergence_type="alpha_divergence", ld_alpha=0.3),
    PairCase({"apo_zero": 1.0, "robust": 0.5}, PairOptions(use_weighting=True, ld_alpha=0.5, label_smoothing=0.2)),
]
PAIR_REST = [
    *(alone(name, pairs) for name in PAIR_LOSSES for pairs in (1, 3, 7)),
    *(alone(name, label_smoothing=value) for name in SMOOTHED for value in (1e-3, 0.2, 0.4)),
    *(alone(name, beta=beta) for name in PAIR_LOSSES for beta in (0.02, 1.0)),
    *(alone(name, f_divergence_type=kind) for name in DIVERGING for kind in F_DIVERGENCES),
    *(
        alone(name, f_divergence_type="alpha_divergence", f_alpha_divergence_coef=value)
        for name in ("sigmoid", "hinge")
        for value in (-0.5, 0.7, 1.0, 1.5)
    ),
    *(alone(name, 7, ld_alpha=value) for name in PAIR_LOSSES for value in (0.0, 0.5, 1.0)),
    *(alone(name, use_weighting=True) for name in PAIR_LOSSES if name not in {"sft", "hinge", "aot", "aot_unpaired"}),
    *(alone("discopop", discopop_tau=value) for value in (0.01, 0.5, 3.0)),
    PairCase({"sigmoid": 1.0, "sft": 1.0}, PairOptions(f_divergence_type="js_divergence")),
    PairCase({"sigmoid": 0.7, "sft": 0.3}, PairOptions(ld_alpha=0.5), 7),
    PairCase(dict.fromkeys(PAIR_LOSSES, 1.0), PairOptions(label_smoothing=0.1), 7),
    PairCase({"hinge": 0.0, "nca_pair": 2.5}, PairOptions(beta=0.5), 7),
]


def pair_trainer(folder: Path, case: PairCase) -> DPOTrainer:
    given = {"loss_type": [*case.weights], "loss_weights": [*case.weights.values()], **asdict(case.options)}
    columns = {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}
    return trainer_of(folder, DPOTrainer, DPOConfig, columns, {"model": tiny(1), "ref_model": tiny(2)}, **given)


def our_pairs(trainer: DPOTrainer, batch: Batch, case: PairCase) -> Found:
    inputs = (batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    ours = scored(trainer.model, *inputs)
    with torch.no_grad():
        reference = sum_answers(scored(trainer.ref_model, *inputs).targets, case.options.ld_alpha)
    pairs = make_pairs(ours.targets, reference, case.options)
    counts = torch.tensor(case.pairs), pairs.chosen_tokens.sum()
    tokens = ours.tokens(torch.arange(2 * case.pairs) < case.pairs)
    figures = pair_figures(pairs, case.options.beta, tokens, ours.is_top1)
    return pair_loss(pairs, case.weights, case.options, *counts), logged("dpo", figures)


@pytest.mark.parametrize("case", sampled(PAIR_SAMPLE, PAIR_REST), ids=str)
def test_a_loss_of_pairs_equals_trl(case: PairCase, tmp_path: Path) -> None:
    trainer = pair_trainer(tmp_path, case)
    batch = trainer.data_collator(pairs_of_tokens(case.pairs))
    assert_equal(trainer, batch, our_pairs(trainer, batch, case))


def test_a_weighted_hinge_has_the_loss_of_trl_and_a_gradient(tmp_path: Path) -> None:
    """TRL cannot train it: it changes the output of relu in place."""
    case = alone("hinge", use_weighting=True)
    trainer = pair_trainer(tmp_path, case)
    batch = trainer.data_collator(pairs_of_tokens(case.pairs))
    loss, expected = our_pairs(trainer, batch, case)[0], trainer.compute_loss(trainer.model, dict(batch))
    assert relative(loss.item(), expected.item()) <= RELATIVE
    with pytest.raises(RuntimeError, match="inplace"):
        expected.backward()
    assert gradient(loss, trainer.model).norm() > 0


# kto


@dataclass(frozen=True)
class UnpairedCase:
    """A loss, its options and labels. Swapped models turn the sign of the KL estimate."""

    loss: str
    labels: tuple[bool, ...]
    options: UnpairedOptions
    swapped: bool = False

    def __str__(self) -> str:
        labels = "".join("du"[not label] for label in self.labels)
        weights = f"{self.options.desirable_weight}-{self.options.undesirable_weight}"
        return f"{self.loss}-{labels}-{weights}-{self.options.beta}{'-swapped' if self.swapped else ''}"


BOTH, GOOD, BAD = (True, False, True), (True, True, True), (False, False, False)
WEIGHED = UnpairedOptions(desirable_weight=1.5, undesirable_weight=0.7)
UNPAIRED_SAMPLE = [
    UnpairedCase("kto", BOTH, WEIGHED),
    UnpairedCase("kto", GOOD, UnpairedOptions(), swapped=True),
    UnpairedCase("apo_zero_unpaired", BOTH, WEIGHED),
]
UNPAIRED_REST = [
    UnpairedCase(loss, labels, options, swapped)
    for loss in UNPAIRED_LOSSES
    for labels in (BOTH, GOOD, BAD, (False, True, True, False, False, True, False))
    for options in (UnpairedOptions(), WEIGHED, UnpairedOptions(beta=1.0), UnpairedOptions(undesirable_weight=0.0))
    for swapped in (False, True)
]


def unpaired_trainer(folder: Path, case: UnpairedCase) -> KTOTrainer:
    policy, reference = (tiny(2), tiny(1)) if case.swapped else (tiny(1), tiny(2))
    columns = {"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]}
    given = {"loss_type": case.loss, "per_device_train_batch_size": 2, **asdict(case.options)}
    return trainer_of(folder, KTOTrainer, KTOConfig, columns, {"model": policy, "ref_model": reference}, **given)


def unpaired_batch(trainer: KTOTrainer, case: UnpairedCase) -> Batch:
    pairs = pairs_of_tokens(len(case.labels))
    rows = [
        {"prompt_ids": one["prompt_ids"], "completion_ids": one["chosen_ids"], "label": label}
        | ({"KL_completion_ids": other["chosen_ids"]} if trainer.calculate_KL else {})
        for one, other, label in zip(pairs, pairs[-1:] + pairs[:-1], case.labels, strict=True)
    ]
    return trainer.data_collator(rows)


def our_answers(trainer: KTOTrainer, batch: Batch, case: UnpairedCase) -> Found:
    inputs = (batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    kl, reference, policy = torch.zeros(()), trainer.ref_model, scored(trainer.model, *inputs)
    with torch.no_grad():
        ref_logps = scored(reference, *inputs).targets.logps
        if case.loss == "kto":
            mismatched = [batch[f"KL_{name}"] for name in ("input_ids", "attention_mask", "completion_mask")]
            sides = [scored(model, *mismatched).targets.logps for model in (trainer.model, reference)]
            kl = estimate_kl(Sum((sides[0] - sides[1]).sum(), torch.tensor(len(case.labels))))
    answers = LabelledAnswers(policy.targets.logps, ref_logps, batch["label"].bool())
    losses = UNPAIRED_LOSSES[case.loss](answers, kl, case.options)
    figures = unpaired_figures(answers, kl, case.options.beta, policy.tokens(answers.desirable))
    return losses.sum() / len(case.labels), logged("kto", figures)


@pytest.mark.parametrize("case", sampled(UNPAIRED_SAMPLE, UNPAIRED_REST), ids=str)
def test_a_loss_of_answers_with_labels_equals_trl(case: UnpairedCase, tmp_path: Path) -> None:
    trainer = unpaired_trainer(tmp_path, case)
    batch = unpaired_batch(trainer, case)
    assert_equal(trainer, batch, our_answers(trainer, batch, case))


# reward and sft


@pytest.mark.parametrize("coefficient", [None, 0.3])
@pytest.mark.parametrize("margins", [False, True])
def test_the_loss_of_rewards_equals_trl(margins: bool, coefficient: float | None, tmp_path: Path) -> None:
    columns, given = {"chosen": ["a"], "rejected": ["b"]}, {"center_rewards_coefficient": coefficient}
    models = {"model": tiny(1, LlamaForSequenceClassification)}
    trainer = trainer_of(tmp_path, RewardTrainer, RewardConfig, columns, models, **given)
    rows: list[dict[str, Any]] = []
    for number, one in enumerate(pairs_of_tokens(3)):
        rows.append({name: one["prompt_ids"] + one[name] for name in ("chosen_ids", "rejected_ids")})
        rows[-1] |= {"margin": 0.5 * number - 0.2} if margins else {}
    batch = trainer.data_collator(rows)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    chosen, rejected = trainer.model(**inputs, use_cache=False).logits[:, 0].chunk(2)
    losses = bradley_terry(chosen, rejected, margin=batch.get("margin"), **given)
    assert_equal(trainer, batch, (losses.sum() / len(losses), logged("reward", reward_figures(chosen, rejected))))


@pytest.mark.parametrize("loss", TOKEN_WEIGHTS)
def test_a_loss_of_tokens_equals_trl(loss: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, SFTTrainer, SFTConfig, {"text": ["a"]}, {"model": tiny(1)}, loss_type=loss)
    rows = []
    for one in pairs_of_tokens(3):
        prompt, answer = one["prompt_ids"], one["chosen_ids"]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    batch = trainer.data_collator(rows)
    ours = scored(trainer.model, batch["input_ids"], batch["attention_mask"], batch["labels"] != -100)
    log_probs = ours.targets.log_probs
    assert_equal(trainer, batch, (-(TOKEN_WEIGHTS[loss](log_probs) * log_probs).mean(), {}))
