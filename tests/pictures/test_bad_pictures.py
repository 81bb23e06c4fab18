"""Pictures that cannot be trained on are named by file and line, or skipped and counted."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eyes import encoded, picture, said, see, shown
from PIL import Image
from prepared import TOKENIZER, ready, write

from packtrain.config.schema import Model
from packtrain.data.pictures.processor import PictureProcessor, PictureReader
from packtrain.errors import UserError

WHOLE = {kind: encoded(picture(64, 96), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")}
FRAMES = [picture(32, 32, seed) for seed in range(2)]


def bomb() -> bytes:
    """A PNG of 20,000 × 20,000 pixels in a few bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


BAD: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "no-picture"),
    "empty": (b"", "broken-picture"),
    "text": (b"<html>404</html>", "broken-picture"),
    **{f"cut {kind}": (content[: len(content) * 2 // 3], "broken-picture") for kind, content in WHOLE.items()},
    "a bomb": (bomb(), "huge-picture"),
    "long": (encoded(picture(2, 900)), "picture-refused"),
    "16 bits": (encoded(Image.fromarray(np.full((32, 32), 40_000, np.uint16))), "picture-of-many-bits"),
    **{
        f"animated {kind}": (encoded(FRAMES[0], kind, save_all=True, append_images=FRAMES[1:]), "animated-picture")
        for kind in ("GIF", "WEBP", "PNG", "TIFF")
    },
}


def test_bad_pictures_are_named_by_line_or_skipped(models: dict[str, Model], folder: Path) -> None:
    rows: list[Any] = [{"messages": [shown("cat.png"), said()]}]
    for number, (content, _) in enumerate(BAD.values()):
        if content is not None:
            (folder / f"bad{number}").write_bytes(content)
        rows.append({"messages": [shown(f"bad{number}"), said()]})
    model = models["qwen2_vl"]
    for number, (name, (_, code)) in enumerate(BAD.items()):
        path = write(folder / f"{number}.jsonl", rows[0], rows[number + 1])
        with pytest.raises(UserError) as caught:
            see(folder, model, train=path)
        (problem,) = caught.value.problems
        assert (problem.where, problem.code) == (f"{path}:2, messages[0].content[0].path", f"row-{code}"), name
        assert code == "picture-refused" or str(folder / f"bad{number}") in problem.what
    data = see(folder, model, *rows, bad_rows="skip").train
    assert len(data) == 1 and sum(data.report.dropped.values()) == len(BAD)


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(64, 96), "JPEG", exif=exif)


def late_exif() -> bytes:
    """A PNG whose EXIF stands behind its pixels."""
    content = encoded(picture(64, 96))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = exif.tobytes().removeprefix(b"Exif\x00\x00")
    chunk = struct.pack(">I", len(data)) + b"eXIf" + data + struct.pack(">I", zlib.crc32(b"eXIf" + data))
    return content[:-12] + chunk + content[-12:]


ODD: dict[str, bytes] = {
    "cmyk": encoded(picture(64, 96, mode="CMYK"), "JPEG"),
    "palette": encoded(picture(64, 96, mode="P")),
    "palette with transparency": encoded(picture(64, 96).quantize(16), transparency=3),
    "alpha": encoded(picture(64, 96, mode="RGBA")),
    "grey": encoded(picture(64, 96, mode="L")),
    "grey with alpha": encoded(picture(64, 96, mode="LA")),
    "black and white": encoded(picture(64, 96, mode="1")),
    "turned": turned(),
    "turned late": late_exif(),
    "one pixel": encoded(picture(1, 1)),
    "three wide": encoded(picture(40, 3)),
    "a still gif": WHOLE["GIF"],
    "two pictures in a JPEG, as telephones write": encoded(FRAMES[0], "MPO", save_all=True, append_images=FRAMES[1:]),
    "bytes behind the end": WHOLE["JPEG"] + b"\0" * 9000,
}


def test_odd_pictures_are_read_as_transformers_does(models: dict[str, Model], folder: Path) -> None:
    from transformers.image_utils import load_image

    for number, content in enumerate(ODD.values()):
        (folder / f"odd{number}").write_bytes(content)
    rows = [{"messages": [shown(f"odd{number}"), said()]} for number in range(len(ODD))]
    model = models["qwen2_vl"]
    data, processor = see(folder, model, *rows).train, PictureProcessor(model)
    for number, name in enumerate(ODD):
        wanted = load_image(str(folder / f"odd{number}"))
        (seen,) = data[number].pictures
        assert (seen.height, seen.width) == (wanted.height, wanted.width), name
        (made,) = PictureReader(processor).read([seen])
        assert (made["pixel_values"] == processor.pixels(wanted)["pixel_values"]).all(), name
        assert seen.end - seen.start == int(made["image_grid_thw"].prod()) // 4, name


ASKED = {"role": "user", "content": "<image>What? <image>"}
COUNTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "fewer": ({"messages": [ASKED, said()], "images": ["cat.png"]}, "pictures-misplaced", "images"),
    "more": ({"messages": [ASKED, said()], "images": ["cat.png"] * 3}, "pictures-misplaced", "images"),
    "holes": ({"messages": [{"role": "user", "content": [{"type": "image"}]}, said()]}, "no-picture", "messages"),
    "the model's own token": (
        {"messages": [shown("cat.png", text="<|image_pad|>"), said()]},
        "pictures-misplaced",
        "messages",
    ),
    "an answer": ({"messages": [ASKED, said("<image>")], "images": ["cat.png"] * 3}, "not-text", "messages"),
    "a part of an answer": (
        {"messages": [shown("cat.png"), {"role": "assistant", "content": [{"type": "image", "path": "cat.png"}]}]},
        "not-text",
        "messages[1].content[0]",
    ),
    "a film": (
        {"messages": [{"role": "user", "content": [{"type": "video", "path": "a.mp4"}]}, said()]},
        "not-text",
        "messages[0].content[0]",
    ),
    "a column of films": ({"messages": [shown("cat.png"), said()], "videos": ["a.mp4"]}, "not-text", "videos"),
    "plain text": (
        {"prompt": "<image>What?", "completion": "A cat.", "images": ["cat.png"]},
        "not-plain-text",
        "images",
    ),
    "the model's token without a picture": (
        {"messages": [{"role": "user", "content": "<|image_pad|>"}, said()]},
        "stray-placeholder",
        "",
    ),
    "running text": ({"text": "A cat.", "image": "cat.png"}, "not-plain-text", "image"),
    "no base64": (
        {"messages": [{"role": "user", "content": [{"type": "image", "base64": "?"}]}, said()]},
        "broken-picture",
        "messages[0].content[0].base64",
    ),
    "a number": ({"messages": [ASKED, said()], "images": [1, 2]}, "wrong-type", "images[0]"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_pictures_and_places_that_do_not_fit_are_named(models: dict[str, Model], folder: Path, name: str) -> None:
    row, code, field = COUNTS[name]
    with pytest.raises(UserError) as caught:
        see(folder, models["qwen2_vl"], row)
    (problem,) = caught.value.problems
    place = f"{folder / 'train.jsonl'}:1" + f", {field}" * bool(field)
    assert (problem.where, problem.code) == (place, f"row-{code}")


def test_a_model_without_an_image_processor_takes_text_alone(models: dict[str, Model], folder: Path) -> None:
    row = {"messages": [shown("cat.png"), said()]}
    bare = folder / "bare"
    TOKENIZER.save_pretrained(bare)
    for model, what in ((Model(path=str(bare)), "takes no pictures"), (models["smolvlm"], "num2words")):
        with pytest.raises(UserError, match=rf"(?s)train.jsonl:1, .*{what}.*\[row-no-image-processor\]"):
            see(folder, model, row)
    with pytest.raises(UserError, match=r"\[row-no-image-processor\]"):
        ready(folder, str(folder / "train.jsonl"))


def test_a_template_that_only_the_processor_has_is_found(models: dict[str, Model], folder: Path) -> None:
    """As in older models: chat_template.json."""
    old = folder / "old"
    shutil.copytree(str(models["llava"].path), old)
    template = old / "chat_template.jinja"
    (old / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    row = {"messages": [shown("cat.png"), said()]}
    ids = [see(folder, model, row).train[0].input_ids.tolist() for model in (Model(path=str(old)), models["llava"])]
    assert ids[0] == ids[1]


def test_text_alone_loads_no_processor(models: dict[str, Model], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the template leaves out contents that are strings, as LLaVA's does."""
    monkeypatch.delattr("packtrain.data.pictures.processor._load")
    for name in ("qwen2_vl", "llava"):
        data = see(folder, models[name], {"messages": [{"role": "user", "content": "What?"}, said()]})
        assert data.train[0].loss_mask.any() and not data.train[0].pictures
        assert not [*data.train.stores[0].folder.glob("pictures.*")]
