"""Calls of routes of custom nodes, which a worker passes on to its backend: messages, and what may pass."""

import base64
import re
from typing import Annotated, Any, Literal, TypeAlias
from uuid import UUID

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from comfyfleet.api.values import Message
from comfyfleet.api.worker import WAIT_SECONDS_MAX, WorkerId

PREFIXES_MAX = 20
# Of a body, either way: it comes as text in a message of at most 16 MiB.
ROUTE_BYTES_MAX = 10 * 1000**2
TARGET_CHARACTERS_MAX = 8_192
HEADER_CHARACTERS_MAX = 1_000
REASON_CHARACTERS_MAX = 500
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
READING = frozenset({"GET", "HEAD"})  # the others may change something on a backend
# Neither keys and cookies, nor what is between two machines only.
REQUEST_HEADERS = ("accept", "accept-language", "content-type", "range", "if-none-match")
RESPONSE_HEADERS = ("content-type", "content-range", "accept-ranges", "etag", "last-modified")
# An octet that a second reading of the path would decode, such as %2e.
_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}")

# Whole segments only: /api/etn is /api/etn and /api/etn/..., not /api/etnx. No dots: they could lead out of it.
RoutePrefix: TypeAlias = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9_-]{1,60}){1,6}$")]
RoutePrefixes: TypeAlias = Annotated[tuple[RoutePrefix, ...], Field(max_length=PREFIXES_MAX)]


def _decoded(value: Any) -> Any:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


Body: TypeAlias = Annotated[
    bytes,
    Field(max_length=ROUTE_BYTES_MAX),
    BeforeValidator(_decoded),
    PlainSerializer(lambda body: base64.b64encode(body).decode(), return_type=str),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]
_HeaderText: TypeAlias = Annotated[str, Field(max_length=HEADER_CHARACTERS_MAX)]
RouteHeaders: TypeAlias = Annotated[dict[str, _HeaderText], Field(max_length=20)]


class RoutePoll(Message):
    """Asks for a call of a route below one of these prefixes."""

    worker_id: WorkerId
    prefixes: Annotated[RoutePrefixes, Field(min_length=1)]
    wait_seconds: float = Field(default=0, ge=0, le=WAIT_SECONDS_MAX)


class RouteCall(Message):
    """A call to send to the backend once. `target`: its path and query."""

    id: UUID
    method: Literal["GET", "HEAD", "POST", "PUT", "DELETE"]
    target: str = Field(max_length=TARGET_CHARACTERS_MAX)
    headers: RouteHeaders = Field(default_factory=dict)
    body: Body = b""
    answer_seconds: float = Field(gt=0)


class RoutePolled(Message):
    call: RouteCall | None = None


class RouteAnswer(Message):
    """What the backend answered. `error`: why it did not, in a few words."""

    worker_id: WorkerId
    call_id: UUID
    status: int = Field(default=502, ge=200, le=599)
    headers: RouteHeaders = Field(default_factory=dict)
    body: Body = b""
    error: str | None = Field(default=None, max_length=REASON_CHARACTERS_MAX)


def is_below(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def is_plain(path: str) -> bool:
    """Whether no part of a decoded path can lead elsewhere, however a backend reads it."""
    *folders, last = (each.partition(";")[0] for each in path.split("/")[1:])
    leads_on = all(each not in ("", ".", "..") for each in folders) and last not in (".", "..")
    return leads_on and "\\" not in path and path.isprintable() and not _ENCODED.search(path)


def passed_headers(given: Any, names: tuple[str, ...]) -> dict[str, str]:
    """Those of the named headers that are there, and not too long to be sent on."""
    found = {name: given[name] for name in names if name in given}
    return {
        name: text
        for name, text in found.items()
        if len(text) <= HEADER_CHARACTERS_MAX and text.isascii() and text.isprintable()
    }
