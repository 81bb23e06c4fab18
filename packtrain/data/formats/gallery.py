"""Put the pictures of a row's column `images` into its messages.

Their places are parts of type image without a picture (TRL's form), else the words <image> in the texts (LLaMA-Factory, ms-swift,
axolotl). Without any place the pictures stand in front of the first user's words, as in TRL and ms-swift.
"""

from __future__ import annotations

from collections.abc import Iterator

from packtrain.config import is_list
from packtrain.data.formats.columns import Row, list_of
from packtrain.data.formats.messages import Messages, has_pictures
from packtrain.data.pictures.source import KEYS, PictureSource, read_source
from packtrain.data.sources.chunks import BadRow, Json

PLACE = "<image>"


def place_pictures(row: Row, messages: Messages) -> Messages:
    """Return the messages with all pictures of the row. Raises BadRow unless each place has a picture, and each picture a place."""
    given, where = _read_column(row), row.name("images")
    parts = [part for message in messages if has_pictures(message) for part in message["content"]]
    holes = sum(part["type"] == "image" and part["image"] is None for part in parts)
    if not given:
        if holes:
            what = f"{holes} × {{'type': 'image'}} without a picture, and there is no column 'images'"
            raise BadRow("no picture", what, "messages", f"Give them one under a key of {', '.join(KEYS)}.")
        return messages
    if holes:
        places, kind = holes, "parts of type image without a picture"
    else:
        messages = [_split_at_places(message) for message in messages]
        places = sum(part.get("image", part) is None for message in messages for part in _parts(message))
        kind = PLACE
    if not places:
        return _put_first(messages, given, where)
    if places != len(given):
        what = f"{places} × {kind} for {len(given)} pictures of the column {where!r}"
        raise BadRow("pictures misplaced", what, where, "Write one place for each picture.")
    sources = iter(given)
    return [_fill(message, sources) for message in messages]


def _read_column(row: Row) -> list[PictureSource]:
    value, where = row.optional("images"), row.name("images")
    if value is None or value == "":
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = list_of(value, where)
    found = list[PictureSource]()
    for index, picture in enumerate(value if is_list(value) else [value]):
        source = read_source(picture, f"{where}[{index}]" if is_list(value) else where, row.folder)
        if source is None:
            raise BadRow("no picture", "there is neither a path nor bytes of a picture", where)
        found.append(source)
    return found


def _parts(message: Json) -> list[Json]:
    return message["content"] if is_list(message["content"]) else []


def _split_at_places(message: Json) -> Json:
    """Return the message with each PLACE in its text as a part of its own."""
    whole = {"type": "text", "text": message["content"]}
    given = message["content"] if is_list(message["content"]) else [whole]
    if not any(PLACE in (part.get("text") or "") for part in given):
        return message
    if message["role"] == "assistant":
        raise BadRow("not text", f"{PLACE} in what the assistant says", "messages", "Take it out.")
    parts = list[Json]()
    for part in given:
        if part["type"] != "text":
            parts.append(part)
            continue
        for number, text in enumerate(part["text"].split(PLACE)):
            parts += [{"type": "image", "image": None}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def _fill(message: Json, sources: Iterator[PictureSource]) -> Json:
    if not is_list(message["content"]):
        return message
    parts = [
        {"type": "image", "image": next(sources)} if part.get("image", part) is None else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _put_first(messages: Messages, pictures: list[PictureSource], where: str) -> Messages:
    if any(map(has_pictures, messages)):
        what = "the messages have pictures already, and no place for these"
        raise BadRow("pictures misplaced", what, where, f"Write {PLACE} where each belongs.")
    for index, message in enumerate(messages):
        if message["role"] == "user":
            shown = [{"type": "image", "image": picture} for picture in pictures]
            text = [{"type": "text", "text": message["content"]}] if message["content"] else []
            return [*messages[:index], {**message, "content": [*shown, *text]}, *messages[index + 1 :]]
    raise BadRow("pictures misplaced", "there is no user's turn to put the pictures into", where)
