"""Values on the wire: what nodes of a run showed as text, number, boolean or JSON. Pure."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import Field, field_validator

from comfyfleet.kernel.texts import is_storable
from comfyfleet.wire.files import NAME_CHARACTERS_MAX, Message

VALUES_MAX = 200
VALUES_BYTES_MAX = 256 * 1024
VALUE_BYTES_MAX = 64 * 1024
VALUE_DEPTH_MAX = 32
_UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class ShownValue(Message):
    """One value. `name` is the node's word for it, often `text`."""

    node_id: str = Field(max_length=NAME_CHARACTERS_MAX)
    name: str = Field(max_length=NAME_CHARACTERS_MAX)
    value: Any = None

    @field_validator("value")
    @classmethod
    def _clean(cls, value: Any) -> Any:
        return clean(value)


def clean(value: Any, depth: int = 0) -> Any:
    """As every database can keep it: no NUL, no half characters, no number that JSON lacks."""
    if depth > VALUE_DEPTH_MAX:
        return None
    match value:
        case str():
            return _storable(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case None | bool() | int():
            return value
        case list() | tuple():
            return [clean(each, depth + 1) for each in value]
        case dict():
            return {_storable(str(key)): clean(each, depth + 1) for key, each in value.items()}
    return _storable(str(value))


def _storable(text: str) -> str:
    if is_storable(text):
        return text
    return text.encode(errors="replace").decode().replace("\0", _UNKNOWN_CHARACTER)


def size_of(value: Any) -> int:
    """In bytes, as JSON."""
    return len(json.dumps(value).encode())


def fitting(values: Iterable[ShownValue]) -> Iterator[ShownValue]:
    """Those that a `complete` may carry: long texts are cut, what is too much is left out."""
    room = VALUES_BYTES_MAX
    for count, each in enumerate(map(_cut, values)):
        size = size_of(each.model_dump())
        if count >= VALUES_MAX or size > room:
            return
        if size_of(each.value) <= VALUE_BYTES_MAX:
            room -= size
            yield each


def _cut(shown: ShownValue) -> ShownValue:
    if not isinstance(shown.value, str) or size_of(shown.value) <= VALUE_BYTES_MAX:
        return shown
    # A character takes up to 12 bytes of JSON; the longest part that surely fits is found by halves.
    fits, long = 0, len(shown.value)
    while long - fits > 1:
        middle = (fits + long) // 2
        if size_of(shown.value[:middle]) <= VALUE_BYTES_MAX:
            fits = middle
        else:
            long = middle
    return shown.model_copy(update={"value": shown.value[:fits]})


def text_of(values: Sequence[ShownValue]) -> str | None:
    """All texts of the first node that showed any, each on a line of its own."""
    texts = [each for each in values if isinstance(each.value, str)]
    if not texts:
        return None
    return "\n".join(each.value for each in texts if each.node_id == texts[0].node_id)
