"""Reading answers at the border: the shape that we know, or UnexpectedAnswer with what came."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from comfyfleet.kernel.errors import UnexpectedAnswer

RECEIVED_CHARS_MAX = 500


def unexpected(what: str, received: object) -> UnexpectedAnswer:
    shown = cut(received)
    return UnexpectedAnswer(f"{what}; received {shown}", received=shown)


def cut(received: object) -> str:
    text = received if isinstance(received, str) else repr(received)
    if len(text) <= RECEIVED_CHARS_MAX:
        return text
    return f"{text[:RECEIVED_CHARS_MAX]}… ({len(text)} characters)"


def parse_json(text: str | bytes, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unexpected(f"{what} is not JSON", text) from error


def mapping_in(value: object, what: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise unexpected(f"{what} should be an object", value)


def list_in(value: object, what: str) -> Sequence[Any]:
    if isinstance(value, list):
        return value
    raise unexpected(f"{what} should be a list", value)


def mapping_at(data: Mapping[str, Any], key: str, what: str) -> Mapping[str, Any]:
    value = data.get(key)
    if isinstance(value, dict):
        return value
    raise unexpected(f"{what} should have an object {key!r}", dict(data))


def text_at(data: Mapping[str, Any], key: str, what: str) -> str:
    value = data.get(key)
    if isinstance(value, str):
        return value
    raise unexpected(f"{what} should have a text {key!r}", dict(data))


def number_at(data: Mapping[str, Any], key: str, what: str) -> float:
    value = data.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise unexpected(f"{what} should have a number {key!r}", dict(data))


def texts_at(data: Mapping[str, Any], key: str, what: str) -> tuple[str, ...]:
    items = list_in(data.get(key), f"{key!r} of {what}")
    if all(isinstance(item, str) for item in items):
        return tuple(items)
    raise unexpected(f"{key!r} of {what} should hold texts", items)
