"""Batched greedy generation, spread over the ranks of a run.

Prompts are sorted by length and padded on the left. The tokens that all prompts of a batch begin with run once: their keys and values
are copied to the columns where the padded rows have them. So all distances between tokens are those of the padded rows. A measurement
before the first batch decides whether a model gives such rows the scores of prompts alone; else prompts run one at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from packtrain.attention.backends import attention_of
from packtrain.attention.forwards import rotates_by_length
from packtrain.data.tokens.cache import Document
from packtrain.model.spread import Ranks, max_over_ranks
from packtrain.monitor.heartbeat import progress
from packtrain.packing.pictures import Sight
from packtrain.packing.segments import Segments
from packtrain.proof.comparison import difference, evaluating, has_routers, tolerance_of
from packtrain.proof.isolation import random_ids
from packtrain.train.measures.due import Deadline
from packtrain.train.questions import generate

_WAYS = "with their common beginning once", "in batches", "one at a time"
_SHARED, _BATCHED, _ALONE = range(len(_WAYS))
_LEAST_SHARED = 8
"""Fewest common tokens that run apart."""
_MEASURED_TOKENS = 4


@dataclass(slots=True)
class Generator:
    """Greedy answers of a model. `attention`: the model's original implementation. `most`: token slots of a batch.

    `way` is an index of _WAYS, None until it is measured.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    attention: str
    autocast: torch.dtype | None
    sight: Sight | None
    ranks: Ranks
    most: int
    way: int | None = None

    @property
    def _cache_name(self) -> str:
        """The name of the argument, which transformers 5.24 changed."""
        return "cache" if "cache" in inspect.signature(type(self.model).forward).parameters else "past_key_values"

    def answers(self, prompts: Sequence[Document], tokens: int, deadline: Deadline) -> dict[int, str] | None:
        """Return this rank's answers, of at most `tokens` tokens, by number of the prompt. None on all ranks if the time is over.

        Every rank calls it. Sharded weights need the same number of calls on all ranks: a rank without a batch repeats another's, and
        with pictures all ranks run all batches.
        """
        rank, world = self.ranks.rank, self.ranks.world_size
        together = self.ranks.sharded and any(prompt.pictures for prompt in prompts)
        made = dict[int, str]()
        with (
            torch.no_grad(),
            evaluating(self.model, self.autocast),
            attention_of(self.model, self.attention),
            torch.compiler.set_stance("force_eager"),  # else layers would be compiled for every length of the cache
        ):
            self.way = self._measure_way() if self.way is None else self.way
            batches = self._batches(prompts, tokens)
            for first in range(0, len(batches), 1 if together else world):
                at = first + (0 if together else rank)
                numbers = batches[at] if at < len(batches) else batches[-1] if self.ranks.sharded else []
                answers = self._answer([prompts[number] for number in numbers], tokens, deadline)
                if at < len(batches):
                    made |= dict(zip(numbers, answers, strict=True))
                if deadline.is_over_anywhere():
                    return None
        return {number: made[number] for number in made if not together or number % world == rank}

    def _batches(self, prompts: Sequence[Document], tokens: int) -> list[list[int]]:
        """Return numbers of prompts: the longest first, pictures alone."""
        batches, longest = list[list[int]](), 0
        for number in sorted(range(len(prompts)), key=lambda number: -len(prompts[number].input_ids)):
            alone = self.way == _ALONE or bool(prompts[number].pictures)
            if batches and longest and not alone and (len(batches[-1]) + 1) * (longest + tokens) <= self.most:
                batches[-1].append(number)
                continue
            batches.append([number])
            longest = 0 if alone else len(prompts[number].input_ids)
        return batches

    def _answer(self, prompts: Sequence[Document], tokens: int, deadline: Deadline) -> list[str]:
        progress()
        if len(prompts) == 1 and prompts[0].pictures:
            return [generate(self.model, self.tokenizer, prompts[0], tokens, self.sight)]
        if not prompts:
            return []
        rows = [prompt.input_ids for prompt in prompts]

        def stops(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            progress()
            return torch.full((len(ids),), deadline.is_over(), device=ids.device)

        made = self._generate(rows, tokens, shared=self.way == _SHARED, stopping_criteria=[stops])
        longest = max(map(len, rows))
        return [str(self.tokenizer.decode(row[longest:], skip_special_tokens=True)) for row in made]

    def _generate(self, rows: Sequence[np.ndarray], tokens: int, *, shared: bool, **how: Any) -> Any:
        """Run transformers' generation on the left-padded rows."""
        longest, pad, device = max(map(len, rows)), self.tokenizer.pad_token_id or 0, self.model.device
        padded = [np.pad(row.astype(np.int64), (longest - len(row), 0), constant_values=pad) for row in rows]
        mask = [np.pad(np.ones(len(row), np.int64), (longest - len(row), 0)) for row in rows]
        if shared and (cache := self._begin(rows)) is not None:
            how[self._cache_name] = cache
        model: Any = self.model
        return model.generate(
            input_ids=torch.tensor(np.stack(padded), device=device),
            attention_mask=torch.tensor(np.stack(mask), device=device),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
            **how,
        )

    def _begin(self, rows: Sequence[np.ndarray]) -> DynamicCache | None:
        """Run the common beginning of `rows` once. Return its keys and values in the columns of the padded rows."""
        most, longest = min(map(len, rows)), max(map(len, rows))
        differs = np.any(np.stack([row[:most] for row in rows]) != rows[0][:most], axis=0)
        common = min(int(np.argmax([*differs, True])), longest - 1) if len(rows) > 1 else 0
        common = common if common >= _LEAST_SHARED else 0
        if not (max_over_ranks(common, self.model.device) if self.ranks.sharded else common):
            return None
        cache, model = DynamicCache(config=self.model.config), self.model
        ids = torch.tensor(rows[0][None, : max(common, 1)].astype(np.int64), device=model.device)
        kept: dict[str, Any] = {"use_cache": True, self._cache_name: cache}
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **kept)
        if not common:
            return None
        shifts = [longest - len(row) for row in rows]
        for layer in cache.layers:
            if type(layer) is not DynamicLayer:
                raise ValueError("a window, or a state of another kind")
            for name in ("keys", "values"):
                own = getattr(layer, name)
                setattr(layer, name, torch.cat([F.pad(own, (0, 0, shift, 0))[:, :, :common] for shift in shifts]))
        return cache

    def _measure_way(self) -> int:
        """Return the fastest way whose scores are those of prompts alone, the same on all ranks."""
        if rotates_by_length(self.model):
            return _ALONE
        ids, other = random_ids(self.model, Segments((32,)))
        rows = [np.concatenate([ids[:12], tail]) for tail in (ids[12:], other[:3], other[3:20])]
        way = next(way for way in range(len(_WAYS)) if way == _ALONE or self._is_exact(rows, shared=way == _SHARED))
        return max_over_ranks(way, self.model.device)

    def _scores(self, rows: Sequence[np.ndarray], *, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [rows, steps] and their scores, float32 [rows, steps, vocabulary], of a short answer to each row."""
        how = {"min_new_tokens": _MEASURED_TOKENS, "return_dict_in_generate": True, "output_scores": True}
        made = self._generate(rows, _MEASURED_TOKENS, shared=shared, **how)
        scores = torch.stack(made.scores, dim=1).float()
        return made.sequences[:, -_MEASURED_TOKENS:], scores.masked_fill(scores.isinf(), 0)

    def _is_exact(self, rows: list[np.ndarray], *, shared: bool) -> bool:
        """Return whether rows together have the scores of each alone, up to the first other token."""
        dtype = self.autocast or self.model.dtype
        tolerance = tolerance_of(dtype, routed=has_routers(self.model)).outputs
        statistic = torch.mean if dtype.itemsize < 4 else torch.max
        try:
            together = self._scores(rows, shared=shared)
            for number, row in enumerate(rows):
                (tokens, scores), (expected_tokens, expected) = (
                    [part[at] for part in found]
                    for found, at in ((together, number), (self._scores([row], shared=False), 0))
                )
                same = int((tokens == expected_tokens).int().cumprod(0).sum()) + 1
                if not difference(scores[:same], expected[:same], statistic=statistic) <= tolerance:
                    return False
            return True
        except torch.OutOfMemoryError:
            raise
        except Exception:  # models refuse such calls with exceptions of every type
            return False
