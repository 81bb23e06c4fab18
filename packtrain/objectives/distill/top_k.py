"""Distributions of a teacher as its most likely tokens, with the rest of the mass as one more outcome.

Divergences over these outcomes are at most the ones over all tokens (data processing). They have the values and the gradients of a teacher whose
rest is spread like the student's: both depend only on the ratios of probabilities, and the rest then has one ratio. Such a teacher is `fill`.
"""

from __future__ import annotations

import torch


def pick(logits: torch.Tensor, targets: torch.Tensor, k: int, temperature: float) -> torch.Tensor:
    """Return the records of a teacher's `logits` [n, words] at `targets` int64 [n]: int32 [n, 2m + 2].

    A record has the ids of the m = k + 1 most likely tokens; if the target is not among them, it takes the last place. Then follow the bits of
    float32 numbers: their log-probabilities at temperature 1, and the logarithms of the rest's mass at 1 and, not normalised, at `temperature`.
    """
    log_probs, goals = logits.log_softmax(dim=-1, dtype=torch.float32), targets[:, None]
    ids = log_probs.topk(min(k + 1, log_probs.shape[1])).indices
    ids[:, -1:] = torch.where((ids == goals).any(dim=1, keepdim=True), ids[:, -1:], goals)
    own = log_probs.gather(1, ids)
    log_probs.scatter_(1, ids, -torch.inf)
    rests = [(log_probs / heat).logsumexp(dim=1, keepdim=True) for heat in (1, temperature)]
    return torch.cat([ids.int(), torch.cat([own, *rests], dim=1).view(torch.int32)], dim=1)


def fill(records: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the teacher's log-probabilities of all tokens, from `records` and those of the `student` [n, words] at this `temperature`.

    It is 1, or the one of `pick`. The most likely token is `records[:, 0]`.
    """
    m = records.shape[1] // 2 - 1
    ids, floats = records[:, :m].long(), records[:, m:].contiguous().view(torch.float32)
    rest = floats[:, m : m + 1] if temperature == 1 else floats[:, m + 1 :]
    outcomes = torch.cat([floats[:, :m] / temperature, rest], dim=1).log_softmax(dim=1)
    teacher = student.scatter(1, ids, -torch.inf)
    teacher += outcomes[:, m:] - teacher.logsumexp(dim=1, keepdim=True)
    return teacher.scatter_(1, ids, outcomes[:, :m])
