"""Turn the pictures of documents into arguments of a model.

Pixels of all documents of a micro-batch stand one after the other, in the order of their tokens: a vision tower attends within each picture, and its
outputs go to the picture tokens in this order. A picture in a beginning that documents share stands there once. Where pictures have other
shapes they are padded with zeros, as image processors do; models cut the padding off again. Models with positions in time, height and width get
them for each document alone, by their own `get_rope_index`, which runs on the CPU, in the process that loads the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from packtrain.data.pictures.picture import Picture
from packtrain.data.tokens.cache import Document
from packtrain.errors import UserError
from packtrain.packing.segments import PlacedPicture, TwoWay

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments that say which tokens are of pictures: 1 for pictures, 0 for text."""
_PLACEHOLDERS = ("image_token_id", "image_token_index")
_PADDING = {"image_position_ids": -1}  # of patches that are none; all else is padded with 0
_TWO_WAY = {
    "gemma3": TwoWay(in_global_layers=True, beyond_window=False),
    "gemma4": TwoWay(in_global_layers=False, beyond_window=False),
    "gemma4_unified": TwoWay(in_global_layers=True, beyond_window=True),
}
"""Types whose picture tokens see each other both ways. The proof finds a type that is missing here: then documents run one by one."""


def two_way_of(model: PreTrainedModel) -> TwoWay | None:
    """Return how tokens of a picture see each other in `model`; None: as text does."""
    kind: Any = model.config
    both_ways = getattr(kind.get_text_config(), "use_bidirectional_attention", None)
    return _TWO_WAY.get(kind.model_type) if both_ways == "vision" or kind.model_type == "gemma3" else None


class PixelSource(Protocol):
    """Maker of pixels: the tensors of the model's image processor for each picture alone."""

    def read(self, pictures: Sequence[Picture], /) -> list[dict[str, torch.Tensor]]: ...


class Seen(NamedTuple):
    """Additions to a micro-batch: `arguments` of the model, its `pictures`, and `blocks` of tokens that see each other."""

    arguments: dict[str, torch.Tensor]
    pictures: tuple[PlacedPicture, ...]
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Sight:
    """Maker of the arguments by which a model sees pictures. It can be pickled.

    `takes`: arguments of its forward. `tokens`: ids that stand for pictures. `two_way`: how tokens of a picture see each other, None: as text does.
    `blank`: a document with a picture that joins micro-batches without one, so that all processes run and train the towers alike. None: none does.
    `rotary`: the class with `get_rope_index`, and its config; None if positions count tokens.
    """

    reader: PixelSource
    takes: frozenset[str]
    tokens: tuple[int, ...]
    two_way: TwoWay | None = None
    blank: Document | None = None
    rotary: tuple[type[nn.Module], PreTrainedConfig] | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, reader: PixelSource, tokens: Sequence[int] = ()) -> Sight:
        """Return the sight of a loaded model. `tokens`: the processor's `image_token_ids`. By default the config names them.

        Raises UserError for a model that also sees its text both ways: it cannot learn to write.
        """
        config: Any = model.config
        both_ways = getattr(config.get_text_config(), "use_bidirectional_attention", None)
        if both_ways in (True, "all"):
            what = f"{type(model).__name__} sees the text before an answer both ways, which training with pictures does not support"
            raise UserError(what, where="model.path", fix="take another model", code="text-both-ways")
        ids = tuple(tokens) or tuple(getattr(config, name) for name in _PLACEHOLDERS if hasattr(config, name))
        takes = frozenset(inspect.signature(type(model).forward).parameters)
        if unknown := [name for name in takes if name.endswith("token_type_ids") and name not in TYPES]:
            what = f"{type(model).__name__} wants {unknown[0]} with pictures, which packtrain does not make"
            raise UserError(what, where="model.path", fix="take another model", code="unknown-token-types")
        part = next((part for part in model.modules() if hasattr(part, "get_rope_index")), None)
        rotary = None if part is None else (type(part), cast("PreTrainedConfig", part.config))
        return cls(reader, takes, ids, two_way_of(model), rotary=rotary)

    @property
    def text(self) -> int:
        """The first token that is of no picture."""
        return min({*range(len(self.tokens) + 1)} - {*self.tokens})

    def as_text(self, ids: np.ndarray) -> np.ndarray:
        """Return `ids` with `text` in place of tokens of pictures."""
        return np.where(np.isin(ids, self.tokens), self.text, ids)

    def with_blank(self, documents: Sequence[Document]) -> list[Document]:
        """Add the `blank` document to documents without pictures."""
        if self.blank is None or any(document.pictures for document in documents):
            return [*documents]
        return [*documents, self.blank]

    def see(self, documents: Sequence[Document], places: Sequence[np.ndarray], rows: int, tokens: int) -> Seen:
        """Return what a micro-batch of [rows, tokens] adds. `places`, int64 [length]: of each document's tokens in the flattened micro-batch.

        Without pictures nothing is added.
        """
        found = {
            int(at[picture.start]): picture
            for document, at in zip(documents, places, strict=True)
            for picture in document.pictures
        }
        if not found:
            return Seen({}, (), ())
        starts = sorted(found)
        read = [
            {name: values for name, values in tensors.items() if name in self.takes}
            for tensors in self.reader.read([found[start] for start in starts])
        ]
        arguments = _concatenated(read)
        types, blocks = np.zeros(rows * tokens, np.int64), set[tuple[int, int]]()
        for document, at in zip(documents, places, strict=True):
            types[at] = of_picture = np.isin(document.input_ids, self.tokens)
            borders = np.flatnonzero(np.diff(of_picture.astype(np.int8), prepend=0, append=0)).tolist()
            runs = zip(borders[::2], borders[1::2], strict=True)
            blocks |= {(int(at[start]), int(at[end - 1]) + 1) for start, end in runs}
        arguments |= {name: torch.as_tensor(types).view(rows, tokens) for name in TYPES if name in self.takes}
        if self.rotary is not None:
            own = dict(zip(starts, read, strict=True))
            arguments["position_ids"] = self._positions(documents, places, own, rows, tokens)
        placed = (
            PlacedPicture(start, {name: len(values) for name, values in own.items()})
            for start, own in zip(starts, read, strict=True)
        )
        return Seen(arguments, tuple(placed), tuple(sorted(blocks)) if self.two_way else ())

    def _positions(
        self,
        documents: Sequence[Document],
        places: Sequence[np.ndarray],
        read: dict[int, dict[str, torch.Tensor]],
        rows: int,
        tokens: int,
    ) -> torch.Tensor:
        """Return the positions of each document alone: int64 [axes, rows, tokens]. `read`: tensors of pictures by the place of their first token."""
        assert self.rotary is not None
        kind, config = self.rotary
        model: Any = kind.__new__(kind)  # without weights: the method reads the config
        nn.Module.__init__(model)
        model.config = config
        wanted = inspect.signature(kind.get_rope_index).parameters  # type: ignore[attr-defined]
        own: list[torch.Tensor] = []
        for document, at in zip(documents, places, strict=True):
            ids = torch.as_tensor(document.input_ids.astype(np.int64))[None]
            if not document.pictures:
                own.append(torch.arange(ids.shape[1])[None])
                continue
            given = _concatenated([read[int(at[picture.start])] for picture in document.pictures], wanted)
            given |= {name: torch.isin(ids, torch.tensor(self.tokens)).int() for name in TYPES if name in wanted}
            own.append(model.get_rope_index(input_ids=ids, **given)[0][:, 0])
        positions = torch.zeros(max(map(len, own)), rows * tokens, dtype=torch.int64)
        for at, values in zip(places, own, strict=True):
            positions[:, torch.as_tensor(at)] = values
        return positions.view(-1, rows, tokens)


def _concatenated(read: Sequence[dict[str, torch.Tensor]], wanted: Any = None) -> dict[str, torch.Tensor]:
    """Concatenate the tensors of pictures along their first axis. Other axes are padded. `wanted`: names, None: all."""
    joined: dict[str, torch.Tensor] = {}
    for name in read[0]:
        if wanted is None or name in wanted:
            values = [one[name] for one in read]
            shape = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
            joined[name] = torch.cat([_padded(value, shape, _PADDING.get(name, 0)) for value in values])
    return joined


def _padded(value: torch.Tensor, shape: Sequence[int], filler: int) -> torch.Tensor:
    """Pad all axes but the first at their end."""
    lacking = [wide - own for wide, own in zip(shape, value.shape[1:], strict=True)]
    return (
        F.pad(value, [part for more in reversed(lacking) for part in (0, more)], value=filler)
        if any(lacking)
        else value
    )
