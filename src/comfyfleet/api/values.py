"""Values that nodes of a run show, files in API messages, and strings that every database can
store. Pure."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

NAME_CHARACTERS_MAX = 200
ROW_ID_MAX = 2**63 - 1
# A number that a database can store: a row's id, or a number of bytes.
RowId: TypeAlias = Annotated[int, Field(ge=0, le=ROW_ID_MAX)]
WANTED_MAX = 500
# A name in workers' reports: a node type, an input, a model file or a workflow.
Name: TypeAlias = Annotated[str, Field(max_length=1_000)]
PATH_CHARACTERS_MAX = 4_096  # maximum length of a path on a worker's machine


class Message(BaseModel):
    """The base class of messages. Unknown fields are ignored, because the other side may be
    newer."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def _require_all(schema: dict[str, Any]) -> None:
    for property_schema in schema.get("properties", {}).values():
        property_schema.pop("default", None)
    schema["required"] = list(schema.get("properties", {}))


class Response(Message):
    """A response of the server. The server sends every field, so the OpenAPI document marks all of
    them as required.

    The defaults are for clients: entries of lists have fewer fields, and an older server may not
    send all of them.
    """

    model_config = ConfigDict(json_schema_extra=_require_all)


class Page(Response):
    """A part of a list. Each subclass declares `next` after its entries, which identifies where the
    next part begins."""

    if TYPE_CHECKING:
        next: Any


def _parse_or_keep(value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
    try:
        return parse(value)
    except ValidationError:
        if isinstance(value, str):
            return value
        raise


# For an enum that a newer server may have extended. Older clients get the added values as a str.
OPEN_ENUM = WrapValidator(_parse_or_keep)


class Asset(Message):
    """A file that the worker uploads to its backend. The resulting name is written to `binding`."""

    name: str
    filename: str
    url: str
    content_hash: str | None = None
    size: int | None = None
    binding: str | None = None  # node.input
    # An alternative to `binding`: a string that occurs somewhere in the prompt.
    placeholder: str | None = None
    is_primary_input: bool = False


class OutputSlot(Message):
    """The URL to which the worker uploads an output."""

    name: str
    method: Literal["PUT"] = "PUT"
    url: str
    headers: dict[str, str] = Field(default_factory=dict)


class WantedOutput(Message):
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS_MAX)
    content_type: Name = "application/octet-stream"


# Limit for the total size of the files in a final report.
INLINE_BYTES_MAX = 512 * 1024
INLINE_CHARACTERS_MAX = (INLINE_BYTES_MAX + 2) // 3 * 4


class DeliveredOutput(Message):
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS_MAX)
    size: RowId
    content_type: Name = "application/octet-stream"
    content_hash: Name | None = None
    filename: Name | None = None  # the backend's name for it
    node_id: Name | None = None
    kind: Name | None = None  # images, gifs, audio … according to the node
    width: int | None = Field(default=None, ge=0)  # width of an image in pixels
    height: int | None = Field(default=None, ge=0)
    is_stripped: bool = (
        False  # prepared for delivery, without prompts; otherwise the control plane does it
    )
    lost_manifest: bool = False  # a C2PA manifest was removed with the prompt
    # The location on the backend. Sent for a job that `records_run`. Always inside the job's own
    # folder.
    folder: Name | None = None  # output or temp
    subfolder: str | None = Field(default=None, max_length=PATH_CHARACTERS_MAX)
    # The file itself as base64, instead of an upload. See the job's `inline_bytes_max`.
    content: str | None = Field(default=None, max_length=INLINE_CHARACTERS_MAX)


_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def is_plain_line(text: str) -> bool:
    """Checks whether a string has no control characters, such as line breaks."""
    return _CONTROL_CHARACTER.search(text) is None


def problem_with_text(text: str) -> str | None:
    if "\0" in text:
        return "the text contains a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "the text contains half a character (a lone surrogate)"
    return None


def is_storable(text: str) -> bool:
    return problem_with_text(text) is None


VALUES_MAX = 200
VALUES_BYTES_MAX = 256 * 1024
VALUE_BYTES_MAX = 64 * 1024
VALUE_DEPTH_MAX = 32
_UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class ShownValue(Message):
    """A value that a node showed. `name` is the node's key for it, often `text`."""

    node_id: str = Field(max_length=NAME_CHARACTERS_MAX)
    name: str = Field(max_length=NAME_CHARACTERS_MAX)
    value: Any = None

    @field_validator("value")
    @classmethod
    def _clean(cls, value: Any) -> Any:
        return clean(value)


def clean(value: Any, depth: int = 0) -> Any:
    """Converts a value to a form that every database can store: without NUL, surrogates, NaN and
    infinity."""
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
            return [clean(item, depth + 1) for item in value]
        case dict():
            return {_storable(str(key)): clean(item, depth + 1) for key, item in value.items()}
    return _storable(str(value))


def _storable(text: str) -> str:
    if is_storable(text):
        return text
    return text.encode(errors="replace").decode().replace("\0", _UNKNOWN_CHARACTER)


def at_most(count: int) -> Callable[[Any], Any]:
    """Returns a validator that refuses collections with more than `count` items before the items
    are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, Sized) and len(value) > count:
            raise ValueError(f"has more than {count:,} items")
        return value

    return check


def size_of(value: Any) -> int:
    """Returns the size as JSON, in bytes."""
    return len(json.dumps(value).encode())


def fitting(values: Iterable[ShownValue]) -> Iterator[ShownValue]:
    """Yields the values that `complete` may send. Long strings are truncated, and values beyond the
    limit are dropped."""
    room = VALUES_BYTES_MAX
    for count, value in enumerate(map(_cut, values)):
        size = size_of(value.model_dump())
        if count >= VALUES_MAX or size > room:
            return
        if size_of(value.value) <= VALUE_BYTES_MAX:
            room -= size
            yield value


def _cut(shown: ShownValue) -> ShownValue:
    if not isinstance(shown.value, str) or size_of(shown.value) <= VALUE_BYTES_MAX:
        return shown
    # Finds the longest part that fits by bisection, because a character takes 1 to 12 bytes of
    # JSON.
    fits, long = 0, len(shown.value)
    while long - fits > 1:
        middle = (fits + long) // 2
        if size_of(shown.value[:middle]) <= VALUE_BYTES_MAX:
            fits = middle
        else:
            long = middle
    return shown.model_copy(update={"value": shown.value[:fits]})


def text_of(values: Sequence[ShownValue]) -> str | None:
    """Joins the strings that the first node with strings showed, one per line."""
    texts = [value for value in values if isinstance(value.value, str)]
    if not texts:
        return None
    return "\n".join(value.value for value in texts if value.node_id == texts[0].node_id)
