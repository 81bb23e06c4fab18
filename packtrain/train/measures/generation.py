"""Greedy generation in batches, spread over the ranks of a run.

Prompts are padded on the left. The beginning that all prompts of a batch have in common runs once. Its keys and values are copied to its
columns in each padded row, so distances between tokens stay. Before the first batch a measurement chooses the fastest way (SHARED,
BATCHED, ALONE) whose scores of random prompts equal single runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
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
from packtrain.system import holding
from packtrain.train.measures.due import Deadline

SHARED, BATCHED, ALONE = range(3)
"""Ways to run prompts: with their common beginning once, in batches, one at a time."""
_LEAST_SHARED = 8
"""Fewest common tokens that run apart."""
_MEASURED = 4
"""Tokens of the answers that are compared."""


@dataclass(slots=True)
class Generator:
    """Greedy answers of a model, computed in `autocast` by `attention`, its original implementation. They end at its EOS tokens.

    `most`: token slots of a batch. `sight`: for prompts with pictures. `way`: SHARED, BATCHED or ALONE; None until it is measured.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    attention: str
    sight: Sight | None
    autocast: torch.dtype | None
    ranks: Ranks
    most: int
    way: int | None = None

    def answers(
        self, prompts: Sequence[Document], tokens: int, deadline: Deadline | None = None
    ) -> dict[int, str] | None:
        """Return this rank's answers, of at most `tokens` tokens, by number of the prompt. None on all ranks if the time is over."""
        rank, world, made = self.ranks.rank, self.ranks.world_size, dict[int, str]()
        ends = cast(GenerationConfig, self.model.generation_config).eos_token_id
        with (
            holding(self.model, generation_config=GenerationConfig(eos_token_id=ends)),  # no beams, no penalties
            torch.no_grad(),
            evaluating(self.model, self.autocast),
            attention_of(self.model, self.attention),
            torch.compiler.set_stance("force_eager"),  # else layers would be compiled for every length of the cache
        ):
            self.way = self._measure_way() if self.way is None else self.way
            batches = self._batches(prompts, tokens)
            for first in range(0, len(batches), world):
                own = batches[first + rank] if first + rank < len(batches) else []
                # with sharded weights all ranks make the same calls
                if ran := own or (batches[-1] if self.ranks.sharded else []):
                    answers = self._answer([prompts[number] for number in ran], tokens, deadline)
                    made |= dict(zip(own, answers, strict=False))
                if deadline is not None and deadline.is_over_anywhere():
                    return None
        return made

    def _batches(self, prompts: Sequence[Document], tokens: int) -> list[list[int]]:
        """Return the numbers of the prompts of each batch, longest first. Pictures run alone, and every rank gets some prompts.

        `slots`: tokens of a row in the batch that may still grow, 0 if none may.
        """
        batches, slots, share = list[list[int]](), 0, -(-len(prompts) // self.ranks.world_size)
        for number in sorted(range(len(prompts)), key=lambda number: -len(prompts[number].input_ids)):
            alone = self.way == ALONE or bool(prompts[number].pictures)
            if alone or not slots or len(batches[-1]) == min(share, self.most // slots):
                batches.append([number])
                slots = 0 if alone else min(len(prompts[number].input_ids) + tokens, self.most)
            else:
                batches[-1].append(number)
        return batches

    def _answer(self, prompts: Sequence[Document], tokens: int, deadline: Deadline | None) -> list[str]:
        def stops(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            progress()
            return torch.full((len(ids),), deadline is not None and deadline.is_over(), device=ids.device)

        rows, seen = [prompt.input_ids for prompt in prompts], dict[str, torch.Tensor]()
        if self.sight and prompts[0].pictures:
            seen = self.sight.see(prompts, [np.arange(len(rows[0]))], 1, len(rows[0])).arguments
            seen.pop("position_ids", None)  # the model makes its own, which go on in the answer
        seen = {name: values.to(self.model.device) for name, values in seen.items()}
        made = self._generate(rows, tokens, shared=self.way == SHARED, stopping_criteria=[stops], **seen)
        longest = max(map(len, rows))
        return [str(self.tokenizer.decode(row[longest:], skip_special_tokens=True)) for row in made]

    def _generate(self, rows: Sequence[np.ndarray], tokens: int, *, shared: bool = False, **how: Any) -> Any:
        """Run transformers' generation on the padded rows."""
        longest, pad, model = max(map(len, rows)), cast("int | None", self.tokenizer.pad_token_id), self.model
        ids = torch.full((len(rows), longest), pad or 0, device=model.device)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, longest - len(row) :] = torch.from_numpy(row.astype(np.int64))
            mask[number, longest - len(row) :] = 1
        if shared and (cache := self._begin(rows)) is not None:
            how["past_key_values"] = cache
        generate: Any = model.generate
        return generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=pad, **how
        )

    def _begin(self, rows: Sequence[np.ndarray]) -> DynamicCache | None:
        """Run the common beginning of `rows` once. Return its keys and values in the columns of the padded rows."""
        shortest, longest = min(map(len, rows)), max(map(len, rows))
        differs = np.any([row[:shortest] != rows[0][:shortest] for row in rows], axis=0)
        common = min(int(np.argmax([*differs, True])), longest - 1) if len(rows) > 1 else 0
        common = common if common >= _LEAST_SHARED else 0
        if not (max_over_ranks(common, self.model.device) if self.ranks.sharded else common):
            return None
        cache = DynamicCache(config=self.model.config)
        self._generate([rows[0][: common or 1]], 1, past_key_values=cache)
        if not common:
            return None
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise NotImplementedError("the cache has windows or states")
        for layer in cache.layers:
            for name in ("keys", "values"):
                shifted = (F.pad(getattr(layer, name), (0, 0, longest - len(row), 0)) for row in rows)
                setattr(layer, name, torch.cat([own[:, :, :common] for own in shifted]))
        return cache

    def _measure_way(self) -> int:
        """Return the fastest way that is exact for short answers to random prompts. All ranks get the same."""
        ids, other = random_ids(self.model, Segments((32,)))
        rows = [np.concatenate([ids[:12], tail]) for tail in (ids[12:], other[:3], other[3:20])]
        dtype, routed = self.autocast or self.model.dtype, has_routers(self.model)
        tolerance = tolerance_of(dtype, routed=routed).outputs
        statistic = torch.mean if dtype.itemsize < 4 else torch.max

        def is_exact(way: int) -> bool:
            try:
                for row, (tokens, scores) in zip(rows, self._scores(rows, shared=way == SHARED), strict=True):
                    ((wanted, expected),) = self._scores([row])
                    same = int((tokens == wanted).int().cumprod(0).sum()) + 1  # with the first other token
                    if not difference(scores[:same], expected[:same], statistic=statistic) <= tolerance:
                        return False
            except torch.OutOfMemoryError:
                raise
            except Exception:  # models refuse such calls with exceptions of every type
                return False
            return True

        ways = () if rotates_by_length(self.model) else (SHARED, BATCHED)
        return max_over_ranks(next(filter(is_exact, ways), ALONE), self.model.device)

    def _scores(self, rows: Sequence[np.ndarray], *, shared: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tokens of a short answer to each row, and their scores [tokens, vocabulary]."""
        made = self._generate(
            rows, _MEASURED, shared=shared, min_new_tokens=_MEASURED, return_dict_in_generate=True, output_scores=True
        )
        scores = torch.stack(made.scores, dim=1).float()
        return [*zip(made.sequences[:, -_MEASURED:], scores.masked_fill(scores.isinf(), 0), strict=True)]
