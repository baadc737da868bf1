"""Values that nodes of a run showed, files in API messages, and texts that every database can
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
# A number that a database can keep: of a row, or of bytes.
RowId: TypeAlias = Annotated[int, Field(ge=0, le=ROW_ID_MAX)]
WANTED_MAX = 500
# A name in reports of workers: a node type, an input, a model file or a workflow.
Name: TypeAlias = Annotated[str, Field(max_length=1_000)]
PATH_CHARACTERS_MAX = 4_096  # of a path on a worker's machine


class Message(BaseModel):
    """The base of messages. Unknown fields are ignored, as either side may be newer."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def _require_all(schema: dict[str, Any]) -> None:
    for each in schema.get("properties", {}).values():
        each.pop("default", None)
    schema["required"] = list(schema.get("properties", {}))


class Response(Message):
    """A response of the server, which sends every field; the OpenAPI document therefore marks all
    as required.

    The defaults are for clients: entries of lists have fewer fields, and an older server may not
    send all.
    """

    model_config = ConfigDict(json_schema_extra=_require_all)


class Page(Response):
    """A part of a list. `next`, which each kind declares after its entries, names where the next part begins."""

    if TYPE_CHECKING:
        next: Any


def _parse_or_keep(value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
    try:
        return parse(value)
    except ValidationError:
        if isinstance(value, str):
            return value
        raise


# For an enum to which a newer server may have added a value: older clients get it as a str.
OPEN_ENUM = WrapValidator(_parse_or_keep)


class Asset(Message):
    """A file that the worker uploads to its backend; the resulting name goes to `binding`."""

    name: str
    filename: str
    url: str
    content_hash: str | None = None
    size: int | None = None
    binding: str | None = None  # node.input
    placeholder: str | None = None  # or a text that stands somewhere in the prompt
    is_primary_input: bool = False


class OutputSlot(Message):
    """Where the worker uploads one output."""

    name: str
    method: Literal["PUT"] = "PUT"
    url: str
    headers: dict[str, str] = Field(default_factory=dict)


class WantedOutput(Message):
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS_MAX)
    content_type: Name = "application/octet-stream"


# The files that a final report may contain, all together.
INLINE_BYTES_MAX = 512 * 1024
INLINE_CHARACTERS_MAX = (INLINE_BYTES_MAX + 2) // 3 * 4


class DeliveredOutput(Message):
    name: str = Field(min_length=1, max_length=NAME_CHARACTERS_MAX)
    size: RowId
    content_type: Name = "application/octet-stream"
    content_hash: Name | None = None
    filename: Name | None = None  # as the backend named it
    node_id: Name | None = None
    kind: Name | None = None  # images, gifs, audio … as the node sorted it
    width: int | None = Field(default=None, ge=0)  # of a picture
    height: int | None = Field(default=None, ge=0)
    is_stripped: bool = (
        False  # prepared for delivery, without prompts; otherwise the control plane does it
    )
    lost_manifest: bool = False  # a C2PA manifest was removed with the prompt
    # Where the backend has it; told with a job that `records_run`. Inside the job's own folder.
    folder: Name | None = None  # output or temp
    subfolder: str | None = Field(default=None, max_length=PATH_CHARACTERS_MAX)
    # The file itself in base64, instead of an upload; see `inline_bytes_max` of the job.
    content: str | None = Field(default=None, max_length=INLINE_CHARACTERS_MAX)


_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def is_plain_line(text: str) -> bool:
    """Checks that a text has no control characters, such as line breaks."""
    return _CONTROL_CHARACTER.search(text) is None


def problem_with_text(text: str) -> str | None:
    if "\0" in text:
        return "the text holds a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "the text holds half a character (a lone surrogate)"
    return None


def is_storable(text: str) -> bool:
    return problem_with_text(text) is None


VALUES_MAX = 200
VALUES_BYTES_MAX = 256 * 1024
VALUE_BYTES_MAX = 64 * 1024
VALUE_DEPTH_MAX = 32
_UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class ShownValue(Message):
    """One value that a node showed; `name` is the node's key for it, often `text`."""

    node_id: str = Field(max_length=NAME_CHARACTERS_MAX)
    name: str = Field(max_length=NAME_CHARACTERS_MAX)
    value: Any = None

    @field_validator("value")
    @classmethod
    def _clean(cls, value: Any) -> Any:
        return clean(value)


def clean(value: Any, depth: int = 0) -> Any:
    """Converts a value to what every database can store: without NUL, surrogates, NaN and infinity."""
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


def at_most(count: int) -> Callable[[Any], Any]:
    """Returns a validator that refuses larger collections before their items are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, Sized) and len(value) > count:
            raise ValueError(f"has more than {count:,} items")
        return value

    return check


def size_of(value: Any) -> int:
    """Returns the size as JSON, in bytes."""
    return len(json.dumps(value).encode())


def fitting(values: Iterable[ShownValue]) -> Iterator[ShownValue]:
    """Yields the values that `complete` may send: long texts are truncated, and values beyond the
    limit left out."""
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
    """Joins the texts of the first node that showed any, one per line."""
    texts = [each for each in values if isinstance(each.value, str)]
    if not texts:
        return None
    return "\n".join(each.value for each in texts if each.node_id == texts[0].node_id)
