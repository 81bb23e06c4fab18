"""Put the pictures of a row's column `images` into its messages.

A place for a picture is a part of type image without a picture (TRL), else the word <image> in a text (LLaMA-Factory, ms-swift,
axolotl). Without any place all pictures go before the words of the first user turn, as in TRL and ms-swift.
"""

from __future__ import annotations

from collections.abc import Iterator

from packtrain.config import is_list
from packtrain.data.formats.columns import Row, list_of
from packtrain.data.formats.messages import Messages, has_pictures, texts_of
from packtrain.data.pictures.source import KEYS, MISPLACED, PictureSource, read_source
from packtrain.data.sources.chunks import BadRow, Json

PLACE = "<image>"


def place_pictures(row: Row, messages: Messages) -> Messages:
    """Return the messages with all pictures of the row.

    Raises BadRow unless each place has a picture, and each picture a place.
    """
    given, where = _read_column(row), row.name("images")
    kind, places = "parts of type image without a picture", _count_places(messages)
    if not given:
        if places:
            what = f"{places} × {{'type': 'image'}} without a picture, and there is no column 'images'"
            raise BadRow("no picture", what, "messages", f"Give them one under a key of {', '.join(KEYS)}.")
        if row.has("images") and any(PLACE in text for message in messages for text in texts_of(message)):
            raise BadRow(MISPLACED, f"{PLACE} in a text, and no picture in the column", where, "Give it its picture.")
        return messages
    if not places:
        messages = [_split_at_places(message) for message in messages]
        kind, places = PLACE, _count_places(messages)
    if not places:
        return _put_first(messages, given, where)
    if places != len(given):
        what = f"{places} × {kind} for {len(given)} pictures of the column {where!r}"
        raise BadRow(MISPLACED, what, where, "Write one place for each picture.")
    sources = iter(given)
    return [_fill(message, sources) for message in messages]


def _read_column(row: Row) -> list[PictureSource]:
    """Return the pictures of the row's column: one, a list, or a list as JSON."""
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


def _count_places(messages: Messages) -> int:
    return sum(_is_place(part) for message in messages if is_list(message["content"]) for part in message["content"])


def _is_place(part: Json) -> bool:
    return part["type"] == "image" and part["image"] is None


def _split_at_places(message: Json) -> Json:
    """Make each PLACE in the message's texts a part of type image without a picture."""
    content = message["content"]
    given = content if is_list(content) else [{"type": "text", "text": content}]
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
    """Put the next pictures into the places of the message."""
    if not is_list(message["content"]):
        return message
    parts = [{"type": "image", "image": next(sources)} if _is_place(part) else part for part in message["content"]]
    return {**message, "content": parts}


def _put_first(messages: Messages, pictures: list[PictureSource], where: str) -> Messages:
    """Put all pictures before the words of the first user turn."""
    if any(map(has_pictures, messages)):
        what = "the messages have pictures already, and no place for these"
        raise BadRow(MISPLACED, what, where, f"Write {PLACE} where each belongs.")
    for index, message in enumerate(messages):
        if message["role"] == "user":
            shown = [{"type": "image", "image": picture} for picture in pictures]
            text = [{"type": "text", "text": message["content"]}] if message["content"] else []
            return [*messages[:index], {**message, "content": [*shown, *text]}, *messages[index + 1 :]]
    raise BadRow(MISPLACED, "there is no user's turn to put the pictures into", where)
