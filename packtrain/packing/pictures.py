"""Turn the pictures of documents into arguments of a model.

The pixels of a micro-batch are concatenated in the order of their tokens. A vision tower attends within each picture, and
the model puts the tower's outputs in place of the picture tokens, in the same order. A picture in a shared beginning is
there once. Pictures of different shapes are padded with zeros, as image processors do; models cut this padding off.

Some models have positions in time, height and width. Their own `get_rope_index` makes the positions of each document alone,
on the CPU, in the process that loads the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from packtrain.data.pictures.encoded import Picture
from packtrain.data.tokens.cache import Document
from packtrain.errors import UserError
from packtrain.packing.segments import PlacedPicture, TwoWay

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments that mark tokens: 1 for pictures, 0 for text."""
_PLACEHOLDERS = ("image_token_id", "image_token_index")
_PADDING = {"image_position_ids": -1}  # position of a missing patch; other arguments are padded with 0
_TWO_WAY = {
    "gemma3": TwoWay(in_global_layers=True, beyond_window=False),
    "gemma4": TwoWay(in_global_layers=False, beyond_window=False),
    "gemma4_unified": TwoWay(in_global_layers=True, beyond_window=True),
}
"""Model types whose picture tokens see each other both ways.

The proof finds a type that is missing here: it fails for rows, and documents run one by one.
"""


def two_way_of(model: PreTrainedModel) -> TwoWay | None:
    """Return how the tokens of a picture see each other in `model`. None: causally, like text."""
    model_type, both_ways = str(model.config.model_type), _both_ways(model)
    return _TWO_WAY.get(model_type) if both_ways == "vision" or model_type == "gemma3" else None


def _both_ways(model: PreTrainedModel) -> object:
    """Return the config's word for tokens that see ahead: "vision", "all", True, or None."""
    config: Any = model.config
    return getattr(config.get_text_config(), "use_bidirectional_attention", None)


def rotary_part(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the module that makes positions in time, height and width. None if positions count tokens."""
    part = next((part for part in model.modules() if hasattr(part, "get_rope_index")), None)
    return cast("PreTrainedModel | None", part)


def runs_of(marks: np.ndarray) -> list[tuple[int, int]]:
    """Return (start, end) of each run of True in `marks`, bool [length]."""
    borders = np.flatnonzero(np.diff(marks, prepend=False, append=False)).tolist()
    return [*zip(borders[::2], borders[1::2], strict=True)]


class PixelSource(Protocol):
    """Source of pixels: `read` returns the image processor's tensors of each picture alone."""

    def read(self, pictures: Sequence[Picture], /) -> list[dict[str, torch.Tensor]]: ...


class Seen(NamedTuple):
    """Additions to a micro-batch with pictures.

    `arguments` of the model by name, the `pictures` in the order of their tokens, and `blocks` (start, end) of tokens that
    see each other both ways.
    """

    arguments: dict[str, torch.Tensor]
    pictures: tuple[PlacedPicture, ...]
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Sight:
    """Maker of a model's arguments for pictures. It can be pickled.

    `takes`: names of the arguments of the model's forward. `tokens`: ids that stand for pictures. `two_way`: see
    `two_way_of`. `rotary`: class and config of the model's `rotary_part`, None without one. `blank`: document with a picture.
    It joins each micro-batch without pictures, so that all processes run and train the towers in every step.
    """

    reader: PixelSource
    takes: frozenset[str]
    tokens: tuple[int, ...]
    two_way: TwoWay | None = None
    blank: Document | None = None
    rotary: tuple[type[nn.Module], PreTrainedConfig] | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, reader: PixelSource, tokens: Sequence[int] = ()) -> Sight:
        """Return the sight of a loaded model. `tokens`: the processor's `image_token_ids`, by default those in the config.

        Raises UserError for a model that also sees its text both ways: it would see the answer that it has to predict.
        """
        if _both_ways(model) in (True, "all"):
            what = f"{type(model).__name__} sees the text before an answer both ways, which training with pictures does not support"
            raise UserError(what, where="model.path", fix="take another model", code="text-both-ways")
        config = model.config
        ids = tuple(tokens) or tuple(getattr(config, name) for name in _PLACEHOLDERS if hasattr(config, name))
        takes = frozenset(inspect.signature(type(model).forward).parameters)
        if unknown := [name for name in takes if name.endswith("token_type_ids") and name not in TYPES]:
            what = f"{type(model).__name__} wants {unknown[0]} with pictures, which packtrain does not make"
            raise UserError(what, where="model.path", fix="take another model", code="unknown-token-types")
        part = rotary_part(model)
        return cls(reader, takes, ids, two_way_of(model), rotary=None if part is None else (type(part), part.config))

    @property
    def text(self) -> int:
        """The first token that is of no picture."""
        return min({*range(len(self.tokens) + 1)} - {*self.tokens})

    def as_text(self, ids: np.ndarray) -> np.ndarray:
        """Return `ids` with `text` in place of tokens of pictures."""
        return np.where(np.isin(ids, self.tokens), self.text, ids)

    def with_blank(self, documents: Sequence[Document]) -> list[Document]:
        """Add the `blank` document, if there is one and no document has a picture."""
        if self.blank is None or any(document.pictures for document in documents):
            return [*documents]
        return [*documents, self.blank]

    def see(self, documents: Sequence[Document], places: Sequence[np.ndarray], rows: int, tokens: int) -> Seen:
        """Return the additions to a micro-batch of [rows, tokens]; without pictures they are empty.

        `places`, int64 [length] for each document: where its tokens are in the flattened micro-batch.
        """
        found = {  # by place: documents that share a beginning share its pictures
            int(at[picture.start]): picture
            for document, at in zip(documents, places, strict=True)
            for picture in document.pictures
        }
        if not found:
            return Seen({}, (), ())
        starts = sorted(found)
        read = {
            start: {name: values for name, values in tensors.items() if name in self.takes}
            for start, tensors in zip(starts, self.reader.read([found[start] for start in starts]), strict=True)
        }
        arguments = _concatenated([*read.values()])
        types, blocks = np.zeros(rows * tokens, np.int64), set[tuple[int, int]]()
        for document, at in zip(documents, places, strict=True):
            types[at] = of_picture = np.isin(document.input_ids, self.tokens)
            blocks |= {(int(at[start]), int(at[end - 1]) + 1) for start, end in runs_of(of_picture)}
        arguments |= {name: torch.as_tensor(types).view(rows, tokens) for name in TYPES if name in self.takes}
        if self.rotary is not None:
            arguments["position_ids"] = self._positions(documents, places, read, rows, tokens)
        placed = [
            PlacedPicture(start, {name: len(values) for name, values in tensors.items()})
            for start, tensors in read.items()
        ]
        return Seen(arguments, tuple(placed), tuple(sorted(blocks)) if self.two_way else ())

    def _positions(
        self,
        documents: Sequence[Document],
        places: Sequence[np.ndarray],
        read: dict[int, dict[str, torch.Tensor]],
        rows: int,
        tokens: int,
    ) -> torch.Tensor:
        """Return the positions of each document alone: int64 [axes, rows, tokens].

        `read`: tensors of each picture, by the place of its first token.
        """
        assert self.rotary is not None
        part_class, config = self.rotary
        part: Any = part_class.__new__(part_class)  # without weights: the method reads the config alone
        nn.Module.__init__(part)
        part.config = config
        wanted = inspect.signature(part.get_rope_index).parameters
        alone: list[torch.Tensor] = []
        for document, at in zip(documents, places, strict=True):
            ids = torch.as_tensor(document.input_ids.astype(np.int64))[None]
            if not document.pictures:
                alone.append(torch.arange(ids.shape[1])[None])
                continue
            given = _concatenated([read[int(at[picture.start])] for picture in document.pictures], wanted)
            given |= {name: torch.isin(ids, torch.tensor(self.tokens)).int() for name in TYPES if name in wanted}
            alone.append(part.get_rope_index(input_ids=ids, **given)[0][:, 0])
        positions = torch.zeros(max(map(len, alone)), rows * tokens, dtype=torch.int64)
        for at, values in zip(places, alone, strict=True):
            positions[:, torch.as_tensor(at)] = values
        return positions.view(-1, rows, tokens)


def _concatenated(
    pictures: Sequence[dict[str, torch.Tensor]], wanted: Container[str] | None = None
) -> dict[str, torch.Tensor]:
    """Concatenate the tensors of pictures along the first axis, and pad the other axes. `wanted`: names, None: all."""
    joined: dict[str, torch.Tensor] = {}
    for name in pictures[0]:
        if wanted is None or name in wanted:
            tensors = [picture[name] for picture in pictures]
            shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
            joined[name] = torch.cat([_padded(tensor, shape, _PADDING.get(name, 0)) for tensor in tensors])
    return joined


def _padded(tensor: torch.Tensor, shape: Sequence[int], filler: int) -> torch.Tensor:
    """Pad all axes but the first to `shape`, at their ends."""
    lacking = [wide - own for wide, own in zip(shape, tensor.shape[1:], strict=True)]
    if not any(lacking):
        return tensor
    return F.pad(tensor, [width for more in reversed(lacking) for width in (0, more)], value=filler)
