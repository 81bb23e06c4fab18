"""The model's own processor: the text in place of a picture, and its pixels.

The chat template writes a placeholder for each picture. transformers' processors replace it by a text, whose length depends on the
picture's size alone. We ask them once for each size, with a black picture that is not resized: 8 times faster at 12 megapixels.

A process loads the processor at its first picture. The PIL variants of the image processors make the pixels, so that they are
equal on all machines. Parts for films and sounds are left out.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from packtrain.config.schema import Model
from packtrain.data.pictures.encoded import Picture, decode
from packtrain.data.pictures.made import FILES, make_files
from packtrain.data.pictures.source import MISPLACED
from packtrain.data.sources.chunks import BadRow
from packtrain.data.tokens.cache import Document
from packtrain.data.tokens.pretrained import find_files, hub, load_tokenizer, location
from packtrain.errors import Json, UserError
from packtrain.plan.known_model import below_adapters
from packtrain.system import holding
from packtrain.wording import first_line

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Size = tuple[int, int]
"""Height and width in pixels."""
Span = tuple[int, int]
"""Characters of a text: the first, and the one after the last."""
_BICUBIC = 3  # PIL's Image.Resampling.BICUBIC
_SHRINK = 0.97
"""Each try of a smaller size is smaller at least by this factor."""
_PIXTRAL = "PixtralProcessor"
_TRIED_SIZES: tuple[Size, ...] = ((48, 64), (300, 100), (700, 900))
"""Sizes that show whether a processor gives the same texts without resizing."""
_resizing = threading.Lock()
"""Held while transformers' resize is replaced, and by calls that need it."""


@dataclass(frozen=True)
class PictureProcessor:
    """Processor of a model's pictures. It can be pickled: each process loads its own at the first picture.

    `max_tokens`: data.max_picture_tokens. Larger pictures are scaled down first.
    """

    model: Model
    max_tokens: int | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"model": self.model, "max_tokens": self.max_tokens}

    @cached_property
    def content(self) -> str:
        """Return a hash of the processor's files and of `max_tokens`. "" for a model without a processor."""
        files = [*files_of(self.model).values()]
        return hashlib.blake2b(repr((files, self.max_tokens)).encode(), digest_size=16).hexdigest() if files else ""

    @cached_property
    def _loaded(self) -> ProcessorMixin:
        model = below_adapters(self.model)
        config = json.dumps(self.model.config) if model.path is None else ""
        loaded = _load(model.path, self.model.tokenizer, model.revision, model.trust_remote_code, config)
        if isinstance(loaded, BadRow):
            raise loaded
        return loaded

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        """Return the arguments that the processor gives its image processor."""
        loaded = self._loaded
        return loaded._merge_kwargs(tokenizer_init_kwargs=loaded.tokenizer.init_kwargs)["images_kwargs"]

    @cached_property
    def _texts(self) -> dict[Size, str]:
        return {}

    @cached_property
    def _scaled(self) -> dict[Size, Size]:
        return {}

    def text_of(self, height: int, width: int) -> str:
        """Return the text of a picture of this size. Raises BadRow if the model refuses it, or takes no pictures."""
        return self._text_of(*self.scale(height, width))

    def _text_of(self, height: int, width: int) -> str:
        if (text := self._texts.get((height, width))) is None:
            try:
                text = self._ask(height, width, quick=self._counts_without_pixels)
            except BadRow:
                raise
            except Exception as error:  # processors raise anything, mostly ValueError
                what = f"the model's image processor refuses a picture of {width}×{height} pixels: {first_line(error)}"
                raise BadRow("picture refused", what) from error
            self._texts[height, width] = text
        return text

    def _ask(self, height: int, width: int, *, quick: bool) -> str:
        """Ask the processor for the text of a black picture. With `quick` no pixel is resized."""
        from PIL import Image
        from transformers import image_processing_backends

        arguments = {**self._arguments, "do_rescale": False, "do_normalize": False}
        if not quick:
            return self._loaded._process_images([Image.new("RGB", (width, height))], **arguments)[1][0]
        black = np.broadcast_to(np.uint8(0), (height, width, 3))
        with _resizing, holding(image_processing_backends, np_resize=_without_pixels):
            return self._loaded._process_images([black], **arguments, input_data_format="channels_last")[1][0]

    @cached_property
    def _counts_without_pixels(self) -> bool:
        """Return whether this processor gives the same texts without resizing, for the tried sizes."""
        try:
            return all(self._ask(*size, quick=True) == self._ask(*size, quick=False) for size in _TRIED_SIZES)
        except Exception:  # an image processor with a resize of its own may raise anything
            return False

    def count(self, height: int, width: int) -> int:
        """Return the number of tokens of a picture of this size, without scaling."""
        return len(self._loaded.tokenizer(self._text_of(height, width), add_special_tokens=False)["input_ids"])

    def scale(self, height: int, width: int) -> Size:
        """Scale a picture's size down to at most `max_tokens` tokens."""
        if self.max_tokens is None:
            return height, width
        if (scaled := self._scaled.get((height, width))) is None:
            scaled, factor = (height, width), 1.0
            tokens = most = self.count(height, width)
            while tokens > self.max_tokens:
                factor *= min(math.sqrt(self.max_tokens / tokens), _SHRINK)
                if factor * max(height, width) < 1:
                    what = f"a picture of {width}×{height} pixels has {most} tokens in this model, and {tokens} at any smaller size"
                    fix = f"Raise data.max_picture_tokens from {self.max_tokens}, or change the model's {FILES[0]}."
                    raise UserError(what, where="data.max_picture_tokens", fix=fix, code="picture-tokens")
                scaled = max(1, math.floor(height * factor)), max(1, math.floor(width * factor))
                tokens = self.count(*scaled)
            self._scaled[height, width] = scaled
        return scaled

    def expand(self, text: str, pictures: Sequence[Picture]) -> tuple[str, list[Span], list[Span]]:
        """Put the text of each picture in place of its placeholder.

        Return the text, and for each picture the characters of its placeholder before and of its text after.
        """
        token = self.placeholder
        between = text.split(token)
        if len(between) - 1 != len(pictures):
            what = f"the rendered conversation has {len(between) - 1} × {token} for {len(pictures)} pictures"
            fix = f"Take {token} out of the texts; or put pictures into user turns (some templates leave others out)."
            raise BadRow(MISPLACED, what, "messages", fix)
        made, before, after, at = between[0], list[Span](), list[Span](), len(between[0])
        for picture, rest in zip(pictures, between[1:], strict=True):
            own = self.text_of(picture.height, picture.width)
            before.append((at, at + len(token)))
            after.append((len(made), len(made) + len(own)))
            made += own + rest
            at += len(token) + len(rest)
        return made, before, after

    @property
    def placeholder(self) -> str:
        """Return the text that stands for a picture in a rendered conversation."""
        return str(cast(Any, self._loaded).image_token)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the ids that stand for pictures."""
        return tuple(cast(Any, self._loaded).image_token_ids)

    def document(self, height: int, width: int) -> Document:
        """Return a document of one picture of noise in this size, without targets."""
        from PIL import Image

        ids = self._loaded.tokenizer(self.text_of(height, width), add_special_tokens=False)["input_ids"]
        noise = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file := io.BytesIO(), "png")
        content, inside = file.getvalue(), np.flatnonzero(np.isin(ids, self.tokens))
        picture = Picture("", 0, len(content), height, width, int(inside[0]), int(inside[-1]) + 1, content=content)
        return Document(np.array(ids, np.int32), np.zeros(len(ids), bool), (picture,))

    def pixels(self, image: Image.Image) -> dict[str, Any]:
        """Return the image processor's tensors for one picture in RGB."""
        loaded = self._loaded
        height, width = self.scale(image.height, image.width)
        if (width, height) != image.size:
            image = image.resize((width, height), _BICUBIC)
        with _resizing:
            made, _ = loaded._process_images([image], **{**self._arguments, "return_tensors": "pt"})
        kept = {*loaded.image_processor.model_input_names} - {*loaded.unused_input_names}
        return {name: value for name, value in made.items() if name in kept}


@dataclass(frozen=True)
class PictureReader:
    """Reader of pictures. It pickles, and loads its processor at the first picture."""

    processor: PictureProcessor

    def read(self, pictures: Sequence[Picture]) -> list[dict[str, torch.Tensor]]:
        """Decode pictures; return the image processor's tensors for each alone. Raises UserError naming the file."""
        return [self._read(picture) for picture in pictures]

    def _read(self, picture: Picture) -> dict[str, torch.Tensor]:
        image = decode(picture)
        try:
            return self.processor.pixels(image)
        except BadRow as bad:
            raise UserError(bad.what, where=picture.name, fix=bad.fix, code="picture-refused") from bad


def _without_pixels(image: np.ndarray, size: tuple[int, int], **_: object) -> np.ndarray:
    """Stand in for transformers' resize of an image [channels, height, width]."""
    return np.broadcast_to(image.dtype.type(0), (image.shape[0], *size))


def files_of(model: Model) -> dict[str, bytes]:
    """Return the contents of the model's processor files by name. They are made for a model without a path."""
    model = below_adapters(model)
    if model.path is None:
        return make_files(model.config)
    return {file.name: file.read_bytes() for file in find_files(FILES, model.path, model)}


def load_processor(model: Model, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Load the model's processor with this tokenizer and a PIL image processor.

    Parts for films and sounds are None, since they need packages of their own. transformers has no setting for this: so we replace
    its table of parts while it loads.
    """
    from transformers import AutoImageProcessor, AutoProcessor, processing_utils
    from transformers.models.auto import processing_auto

    model = below_adapters(model)

    def load_by_pil(*given: Any, **options: Any) -> Any:
        return AutoImageProcessor.from_pretrained(*given, **{**options, "backend": "pil"})

    def loader(load: Any) -> SimpleNamespace:
        return SimpleNamespace(from_pretrained=load, __name__="")

    none = loader(lambda *_, **__: None)
    parts = dict.fromkeys(("video_processor", "feature_extractor", "audio_processor"), none)
    parts |= {"tokenizer": loader(lambda *_, **__: tokenizer), "image_processor": loader(load_by_pil)}
    base, find = processing_utils.ProcessorMixin, processing_auto.processor_class_from_name

    def find_class(name: str) -> Any:
        found = find(name)
        return _import_pixtral() if name == _PIXTRAL and getattr(found, "is_dummy", False) else found

    with (
        hub(model.path),
        holding(processing_utils, MODALITY_TO_AUTOPROCESSOR_MAPPING=parts),
        holding(processing_auto, processor_class_from_name=find_class),
        holding(base, check_argument_for_proper_class=lambda self, name, argument: type(argument)),
    ):
        return AutoProcessor.from_pretrained(**location(str(model.path), model))


def _import_pixtral() -> Any:
    """Import the processor of Mistral's models without torchvision.

    It needs torchvision for one function. The PIL variant of its image processor has the same function, and takes the module's place.
    """
    family = "transformers.models.pixtral"
    name = f"{family}.image_processing_pixtral"
    sys.modules[name] = import_module(f"{family}.image_processing_pil_pixtral")
    try:
        return getattr(import_module(f"{family}.processing_pixtral"), _PIXTRAL)
    finally:
        del sys.modules[name]


@lru_cache(4)
def _load(
    path: str | None, tokenizer: str | None, revision: str | None, trust_remote_code: bool, config: str
) -> ProcessorMixin | BadRow:
    """Load a processor once in this process. Return the error if it fails.

    `config`: model.config as JSON for a model without path, else "".
    """
    from transformers import ProcessorMixin

    read: Json = json.loads(config or "{}")
    model = Model(path=path, tokenizer=tokenizer, revision=revision, trust_remote_code=trust_remote_code, config=read)
    reason, fix = "no image processor", "Train a model that takes pictures, or take them out of the data."
    if not (files := files_of(model)):
        what = f"{path or 'the model'} takes no pictures: it has no {FILES[0]}"
        return BadRow(reason, what, fix=fix)
    try:
        with TemporaryDirectory(prefix="packtrain-processor-") as folder:
            for name, content in files.items() if path is None else ():
                Path(folder, name).write_bytes(content)
            loaded = load_processor(replace(model, path=path or folder), load_tokenizer(model))
    except Exception as error:  # transformers, or the model's own code, may raise anything
        what = f"the processor of {path} cannot be loaded: {first_line(error)}"
        return BadRow(reason, what, fix="Install what it names; or take the pictures out.")
    base = ProcessorMixin.replace_image_token
    if not getattr(loaded, "image_token", None) or type(loaded).replace_image_token is base:
        return BadRow(reason, f"the processor of {path} ({type(loaded).__name__}) writes no text for pictures", fix=fix)
    return loaded
