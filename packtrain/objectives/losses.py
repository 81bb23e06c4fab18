"""Losses of dpo, kto and reward: pure functions of log-probabilities, under TRL's names. (Losses of tokens: sft/spec.py.)

A loss gives one value per pair or answer. Add them up over the micro-batches and ranks of a step, then divide: the mean is exact,
however the step is cut. No tensor is read on the host and no shape depends on
values, so a GPU is never waited for. Log-probabilities and rewards are float32, one per target, answer or pair.

The formulas use log t = log π(y|x) − log π_ref(y|x) for an answer y (`logratios`), and Δ for the chosen score minus the rejected one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from packtrain.objectives.answers import LabelledAnswers, PairLogps, Pairs, Sum, Targets, sum_answers

FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
MAX_EXPONENT = 80.0
"""Exponents are cut here, since float32 overflows above 88."""


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Options of the losses of pairs, with TRL's names and defaults."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: FDivergence = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float | None = None
    use_weighting: bool = False
    discopop_tau: float = 0.05


def make_pairs(targets: Targets, reference: PairLogps, options: PairOptions) -> Pairs:
    """Return the pairs of the model's targets. All chosen answers come first.

    `reference` is from `sum_answers` with the same `ld_alpha`. `use_weighting` needs `log_sum_sq_probs`.
    """
    policy, weighted = sum_answers(targets, options.ld_alpha), options.use_weighting
    chosen_tokens, rejected_tokens = targets.counts.chunk(2)
    return Pairs(
        chosen_logps=policy.chosen,
        rejected_logps=policy.rejected,
        ref_chosen_logps=reference.chosen,
        ref_rejected_logps=reference.rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
        chosen_nll=-targets.logps.chunk(2)[0],
        weights=torch.mul(*targets.wpo_weights().chunk(2)) if weighted else torch.ones_like(policy.chosen),
    )


# f-divergences (f-DPO, arXiv 2309.16240): the score of an answer is f'(t), up to a constant that Δ cancels


def reverse_kl(log_t: torch.Tensor, options: PairOptions) -> torch.Tensor:
    """log t, as in DPO."""
    return log_t


def forward_kl(log_t: torch.Tensor, options: PairOptions) -> torch.Tensor:
    """1 − 1/t."""
    return 1 - torch.exp(-log_t)


def js_divergence(log_t: torch.Tensor, options: PairOptions) -> torch.Tensor:
    """log(2t / (1 + t))."""
    return math.log(2) + F.logsigmoid(log_t)


def alpha_divergence(log_t: torch.Tensor, options: PairOptions) -> torch.Tensor:
    """(t^(α−1) − 1) / (α−1), and its limit log t at α = 1."""
    power = options.f_alpha_divergence_coef - 1
    if abs(power) < 1e-6:
        return log_t
    return (torch.exp((power * log_t).clamp(max=MAX_EXPONENT)) - 1) / power


F_DIVERGENCES = {score.__name__: score for score in (reverse_kl, forward_kl, js_divergence, alpha_divergence)}


def score(log_t: torch.Tensor, options: PairOptions) -> torch.Tensor:
    """Return f'(t) of the chosen f-divergence."""
    return F_DIVERGENCES[options.f_divergence_type](log_t, options)


def delta(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """Return Δ, the chosen score minus the rejected one, [pairs]."""
    return score(pairs.chosen_logratios, options) - score(pairs.rejected_logratios, options)


def delta_per_token(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """Return Δ with each score divided by the targets of its answer, [pairs]."""
    chosen = score(pairs.chosen_logratios, options) / pairs.chosen_tokens.clamp(min=1)
    rejected = score(pairs.rejected_logratios, options) / pairs.rejected_tokens.clamp(min=1)
    return chosen - rejected


# Losses of pairs


def sigmoid(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`−log σ(βΔ)`: DPO, arXiv 2305.18290, Eq. 7."""
    return -F.logsigmoid(options.beta * delta(pairs, options))


def hinge(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`max(0, 1 − βΔ)`: SLiC-HF, arXiv 2305.10425, with a reference."""
    return torch.relu(1 - options.beta * delta(pairs, options))


def ipo(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`(Δ per token − 1/(2β))²`: IPO, arXiv 2310.12036, Eq. 17, where β is τ."""
    return (delta_per_token(pairs, options) - 1 / (2 * options.beta)) ** 2


def exo_pair(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`KL(q ‖ p)`: EXO, arXiv 2402.00856, Eq. 16.

    q = (σ(βΔ), σ(−βΔ)), p = (1 − ε, ε); ε is `label_smoothing` and above 0.
    """
    logits, epsilon = options.beta * delta(pairs, options), options.label_smoothing
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-epsilon))
    rejected = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(epsilon))
    return chosen + rejected


def nca_pair(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`−log σ(r_w) − ½ log σ(−r_w) − ½ log σ(−r_l)`, `r = β log t`: NCA, arXiv 2402.05369."""
    chosen, rejected = options.beta * pairs.chosen_logratios, options.beta * pairs.rejected_logratios
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def robust(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`(−(1 − ε) log σ(βΔ) + ε log σ(−βΔ)) / (1 − 2ε)`: robust DPO, arXiv 2403.00409."""
    logits, epsilon = options.beta * delta(pairs, options), options.label_smoothing
    return (-(1 - epsilon) * F.logsigmoid(logits) + epsilon * F.logsigmoid(-logits)) / (1 - 2 * epsilon)


def bco_pair(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`−log σ(r_w) − log σ(−r_l)`, `r = β log t`: BCO, arXiv 2404.04656.

    The paper's reward shift δ, a running mean, is 0 here as in TRL's DPOTrainer: each pair has its own loss.
    """
    chosen, rejected = options.beta * pairs.chosen_logratios, options.beta * pairs.rejected_logratios
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`(log t_w − 1/(2β))² + (log t_l + 1/(2β))²`: SPPO, arXiv 2405.00675, Eq. 4.7, hard labels."""
    goal = 0.5 / options.beta
    return (pairs.chosen_logratios - goal) ** 2 + (pairs.rejected_logratios + goal) ** 2


def aot(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """Paired AOT, arXiv 2406.05882: `log π(y_w) / π(y_l)` against the reference's, both sorted."""
    policy = torch.sort(pairs.chosen_logps - pairs.rejected_logps).values
    reference = torch.sort(pairs.ref_chosen_logps - pairs.ref_rejected_logps).values
    return _smoothed_logistic(options.beta * (policy - reference), options.label_smoothing)


def aot_unpaired(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """Unpaired AOT, arXiv 2406.05882: `log t` of chosen against rejected answers, both sorted."""
    chosen, rejected = torch.sort(pairs.chosen_logratios).values, torch.sort(pairs.rejected_logratios).values
    return _smoothed_logistic(options.beta * (chosen - rejected), options.label_smoothing)


def _smoothed_logistic(logits: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`−(1 − ε) log σ(x) − ε log σ(−x)`."""
    return -(1 - epsilon) * F.logsigmoid(logits) - epsilon * F.logsigmoid(-logits)


def apo_zero(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`1 − σ(r_w) + σ(r_l)`, `r = β log t`: APO-zero, arXiv 2408.06266, Eq. 7."""
    chosen, rejected = options.beta * pairs.chosen_logratios, options.beta * pairs.rejected_logratios
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def apo_down(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`σ(r_w) + 1 − σ(r_w − r_l)`, `r = β log t`: APO-down, arXiv 2408.06266, Eq. 8."""
    chosen, rejected = options.beta * pairs.chosen_logratios, options.beta * pairs.rejected_logratios
    return torch.sigmoid(chosen) + 1 - torch.sigmoid(chosen - rejected)


def discopop(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`−(1 − m) log σ(βΔ) + m exp(−βΔ)`, `m = σ(βΔ/τ)`: DiscoPOP, arXiv 2406.08414, Eq. 5."""
    logits = options.beta * delta(pairs, options)
    mixing = torch.sigmoid(logits / options.discopop_tau)
    return -(1 - mixing) * F.logsigmoid(logits) + mixing * torch.exp(-logits)


def sft(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`−log π(y_w|x)`: generation loss of MPO, arXiv 2411.10442, a mean over tokens."""
    return pairs.chosen_nll


def sigmoid_norm(pairs: Pairs, options: PairOptions) -> torch.Tensor:
    """`−log σ(β × Δ per token)`: length-normalised DPO of Tülu 3, arXiv 2411.15124."""
    return -F.logsigmoid(options.beta * delta_per_token(pairs, options))


PAIR_LOSSES: dict[str, Callable[[Pairs, PairOptions], torch.Tensor]] = {
    loss.__name__: loss
    for loss in (
        *(sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired),
        *(apo_zero, apo_down, discopop, sft, sigmoid_norm),
    )
}
"""The losses of TRL's DPOTrainer: [pairs], the loss of each pair, or the n-th sorted values."""
MEANS_OVER_TOKENS = {"sft"}
"""Losses of pairs whose mean is over chosen tokens. The others' is over pairs."""


def pair_loss(
    pairs: Pairs,
    loss_weights: Mapping[str, float],
    options: PairOptions,
    count: torch.Tensor,
    tokens: torch.Tensor,
    each: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the micro-batch's share of the step's loss, in the shape of the counts.

    The shares of all micro-batches and ranks add up to the loss. `loss_weights` names the losses. The whole step has `count` pairs with
    `tokens` chosen targets: scalars, or [n] to share in several means at once. `each` gets the losses of single pairs, [pairs], by name.
    """
    shares = []
    for name, weight in loss_weights.items():
        losses = PAIR_LOSSES[name](pairs, options) * pairs.weights
        shares.append(weight * losses.sum() / (tokens if name in MEANS_OVER_TOKENS else count).clamp(min=1))
        if each is not None:
            own = weight * losses.detach()
            each.append(own / pairs.chosen_tokens.clamp(min=1) if name in MEANS_OVER_TOKENS else own)
    return torch.stack(shares).sum(dim=0)


# Losses of answers with labels (kto)


@dataclass(frozen=True, slots=True)
class UnpairedOptions:
    """Options of the losses of answers with labels, with TRL's names and defaults."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


UnpairedLoss = Callable[[LabelledAnswers, torch.Tensor, UnpairedOptions], torch.Tensor]


def kto(answers: LabelledAnswers, kl: torch.Tensor, options: UnpairedOptions) -> torch.Tensor:
    """`1 − σ(β(log t − z₀))` or `1 − σ(β(z₀ − log t))`: KTO, arXiv 2402.01306, Eq. 7; z₀ is `kl`."""
    reward, kl = options.beta * answers.logratios, options.beta * kl
    return _weigh(answers, 1 - torch.sigmoid(reward - kl), 1 - torch.sigmoid(kl - reward), options)


def apo_zero_unpaired(answers: LabelledAnswers, kl: torch.Tensor, options: UnpairedOptions) -> torch.Tensor:
    """`1 − σ(r)` or `σ(r)`, `r = β log t`: APO-zero, arXiv 2408.06266, unpaired; `kl` is unused."""
    reward = options.beta * answers.logratios
    return _weigh(answers, 1 - torch.sigmoid(reward), torch.sigmoid(reward), options)


def _weigh(
    answers: LabelledAnswers, desirable: torch.Tensor, undesirable: torch.Tensor, options: UnpairedOptions
) -> torch.Tensor:
    """Return each answer's loss by its label, times the label's weight, [answers]."""
    desirable, undesirable = options.desirable_weight * desirable, options.undesirable_weight * undesirable
    return torch.where(answers.desirable, desirable, undesirable)


UNPAIRED_LOSSES: dict[str, UnpairedLoss] = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}
"""The losses of TRL's KTOTrainer, [answers]: their mean is over answers."""


@torch.no_grad()
def estimate_kl(log_t: Sum) -> torch.Tensor:
    """Return the KL estimate z₀ from the `log t` of all mismatched pairs of a step."""
    return (log_t.total / log_t.weight).clamp(min=0)


# Losses of rewards and of tokens


def bradley_terry(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    margin: torch.Tensor | None = None,
    center_rewards_coefficient: float | None = None,
) -> torch.Tensor:
    """`−log σ(r_w − r_l − m) + c (r_w + r_l)²` of rewards, [pairs].

    The margin m is from Llama 2 (arXiv 2307.09288), centring with c from arXiv 2312.09244. The mean is over pairs.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -F.logsigmoid(difference)
    if center_rewards_coefficient is None:
        return loss
    return loss + center_rewards_coefficient * (chosen + rejected) ** 2
