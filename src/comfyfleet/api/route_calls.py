"""Calls of custom nodes' routes, which a worker forwards to its backend: their messages, and the
requests that are allowed."""

import base64
import re
from typing import Annotated, Any, Literal, TypeAlias
from uuid import UUID

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from comfyfleet.api.values import Message
from comfyfleet.api.worker import WAIT_SECONDS_MAX, WorkerId

PREFIXES_MAX = 20
# Limit for a body in either direction. It is sent as base64 in a message of at most 16 MiB.
ROUTE_BYTES_MAX = 10 * 1000**2
TARGET_CHARACTERS_MAX = 8_192
HEADER_CHARACTERS_MAX = 1_000
REASON_CHARACTERS_MAX = 500
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
# The methods that only read. All others may change data on a backend.
READING = frozenset({"GET", "HEAD"})
# The headers that are forwarded. Credentials, cookies and hop-by-hop headers are not forwarded.
REQUEST_HEADERS = ("accept", "accept-language", "content-type", "range", "if-none-match")
RESPONSE_HEADERS = ("content-type", "content-range", "accept-ranges", "etag", "last-modified")
# An octet that would be decoded if the path were parsed a second time, such as %2e.
_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}")

# Matches whole segments only: /api/etn matches /api/etn and /api/etn/..., but not /api/etnx. Dots
# are not allowed, because they could lead out of the prefix.
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
    """A worker's request for a call to a route under one of these prefixes."""

    worker_id: WorkerId
    prefixes: Annotated[RoutePrefixes, Field(min_length=1)]
    wait_seconds: float = Field(default=0, ge=0, le=WAIT_SECONDS_MAX)


class RouteCall(Message):
    """A call to send to the backend once. `target` is its path and query."""

    id: UUID
    method: Literal["GET", "HEAD", "POST", "PUT", "DELETE"]
    target: str = Field(max_length=TARGET_CHARACTERS_MAX)
    headers: RouteHeaders = Field(default_factory=dict)
    body: Body = b""
    answer_seconds: float = Field(gt=0)


class RoutePolled(Message):
    call: RouteCall | None = None


class RouteAnswer(Message):
    """The backend's response. `error` has a short reason if the backend didn't respond."""

    worker_id: WorkerId
    call_id: UUID
    status: int = Field(default=502, ge=200, le=599)
    headers: RouteHeaders = Field(default_factory=dict)
    body: Body = b""
    error: str | None = Field(default=None, max_length=REASON_CHARACTERS_MAX)


def is_below(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def is_plain(path: str) -> bool:
    """Checks whether no part of a decoded path can lead elsewhere, regardless of how a backend
    parses it."""
    *folders, last = (segment.partition(";")[0] for segment in path.split("/")[1:])
    leads_on = all(segment not in ("", ".", "..") for segment in folders) and last not in (
        ".",
        "..",
    )
    return leads_on and "\\" not in path and path.isprintable() and not _ENCODED.search(path)


def passed_headers(headers: Any, names: tuple[str, ...]) -> dict[str, str]:
    """Returns the named headers that exist and aren't too long to forward."""
    values = {name: headers[name] for name in names if name in headers}
    return {
        name: text
        for name, text in values.items()
        if len(text) <= HEADER_CHARACTERS_MAX and text.isascii() and text.isprintable()
    }
