"""Limits the size and duration of request bodies, parses JSON strictly (in threads if large), and
defines field types that databases can store."""

import asyncio
import json
import json.scanner
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Annotated, Any, TypeAlias

from fastapi.routing import APIRoute
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from comfyfleet.api.values import problem_with_text
from comfyfleet.errors import InvalidInput, LimitExceeded
from comfyfleet.server.http.errors import error_response
from comfyfleet.server.storage.local import OBJECTS_PATH

DEPTH_MAX = 100
# Maximum number of values in a body. Parsing runs in a thread, but checking and freeing a million
# values blocks the event loop for about half a second. Workflows have a few thousand values.
VALUES_MAX = 200_000
DIGITS_MAX = 400
# The status that is logged if a client disconnects before its body is complete, as in nginx.
CALLER_GONE = 499
# Bodies larger than this are parsed in a thread, because parsing would delay other requests.
SMALL_BYTES = 256 * 1024
# A separate thread pool, because the shared pool may be busy with file operations.
_parsers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="json")
# Only bodies with one of these escapes can contain characters that databases can't store.
_SUSPECT = ("\\u0000", "\\ud", "\\uD")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = await read_json(await _body(self), parse)
        return self._json


class ToleratedJsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = await read_json(await _body(self), parse_tolerantly)
        return self._json


class JsonRoute(APIRoute):
    """A route for operators or customers, which parses JSON strictly."""

    request_kind: type[Request] = JsonRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(self.request_kind(request.scope, request.receive, request._send))

        return handle_json


class WorkerRoute(JsonRoute):
    """A route for workers, which parses JSON tolerantly.

    Workers pass on data from backends. Values that can't be stored are replaced, so that no result
    is lost.
    """

    request_kind = ToleratedJsonRequest


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise caller_gone() from None


def caller_gone() -> HTTPException:
    """Returns an error for a disconnected client. FastAPI would report any other error as an
    invalid body."""
    return HTTPException(CALLER_GONE, "the client disconnected")


async def read_json(body: bytes, parse: Callable[[bytes], Any]) -> Any:
    try:
        return await parsed(body, parse)
    except InvalidInput as error:
        # While FastAPI reads a body, it converts every error except HTTPException.
        raise HTTPException(422, error.message) from None
    except LimitExceeded as error:
        raise HTTPException(413, error.message) from None


async def parsed(body: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Parses a body, in a thread if it is large."""
    if len(body) <= SMALL_BYTES:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(_parsers, parse, body)


def parse(body: bytes) -> Any:
    """Parses JSON strictly. Raises InvalidInput for values that can't be stored, and
    json.JSONDecodeError for invalid JSON."""
    return _parse(body, _STRICT, _STRICT_IN_STEPS)


def parse_leniently(body: bytes) -> Any:
    """Parses JSON like `parse`, but if an object has a name twice, the last value is used."""
    return _parse(body, _LENIENT, _LENIENT_IN_STEPS)


def _parse(body: bytes, decoder: json.JSONDecoder, in_steps: json.JSONDecoder) -> Any:
    text = _text_of(body)
    value = _decode(text, decoder, in_steps)
    if any(escape in text for escape in _SUSPECT):
        _check_texts(value)
    return value


def parse_tolerantly(body: bytes) -> Any:
    """Parses JSON and replaces values that can't be stored.

    NaN and numbers too large for a float become null. NUL characters and lone surrogates become
    U+FFFD.
    """
    text = _text_of(body)
    value = _decode(text, _TOLERANT, _TOLERANT_IN_STEPS)
    return _clean(value) if any(escape in text for escape in _SUSPECT) else value


def _text_of(body: bytes) -> str:
    """Decodes the body from UTF-8, UTF-16 or UTF-32."""
    return body.decode(json.detect_encoding(body))


def _clean(value: Any) -> Any:
    """Replaces characters that can't be stored. Recursion is safe, because the depth was
    checked."""
    if isinstance(value, str):
        return _UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_clean(name): _clean(inner) for name, inner in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value


def _decode(text: str, decoder: json.JSONDecoder, in_steps: json.JSONDecoder) -> Any:
    opened = text.count("[") + text.count("{")
    if opened + text.count(",") > VALUES_MAX:
        raise LimitExceeded(f"a request can have at most {VALUES_MAX:,} values")
    try:
        value = (decoder if len(text) <= SMALL_BYTES else in_steps).decode(text)
    except RecursionError:
        raise _too_deep() from None
    if opened > DEPTH_MAX:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level: Sequence[Any] = [value]
    for _ in range(DEPTH_MAX):
        level = [
            child for parent in level for child in _inside(parent) if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidInput:
    return InvalidInput(f"the body is nested more than {DEPTH_MAX} levels deep")


def _check_texts(value: Any) -> None:
    remaining = [value]
    while remaining:
        item = remaining.pop()
        remaining.extend(_inside(item))
        for text in (item, *item) if isinstance(item, dict) else (item,):
            if isinstance(text, str) and (problem := problem_with_text(text)):
                raise InvalidInput(problem)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        # Counts all names in one pass, because an object may have very many.
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise InvalidInput(f"the field {twice[:100]!r} occurs twice in the same object")
    return fields


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise InvalidInput(f"the number {text[:20]} is too large")
    return number


def _int(text: str) -> int:
    if len(text) > DIGITS_MAX:
        raise InvalidInput(f"the number {text[:20]}… is too large")
    return int(text)


def _constant(text: str) -> float:
    raise InvalidInput(f"{text} is not a JSON number")


def _float_or_none(text: str) -> float | None:
    number = float(text)
    return None if math.isinf(number) else number


def _int_or_none(text: str) -> int | None:
    return None if len(text) > DIGITS_MAX else int(text)


def _decoder(*, in_steps: bool, **hooks: Any) -> json.JSONDecoder:
    decoder = json.JSONDecoder(**hooks)
    if in_steps:
        # The C scanner holds the GIL until it is done. The Python scanner lets other threads run.
        decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder


_OF_LENIENT: dict[str, Callable[..., Any]] = {
    "parse_float": _float,
    "parse_int": _int,
    "parse_constant": _constant,
}
_OF_STRICT = {**_OF_LENIENT, "object_pairs_hook": _object}
_OF_TOLERANT: dict[str, Callable[..., Any]] = {
    "parse_float": _float_or_none,
    "parse_int": _int_or_none,
    "parse_constant": lambda _: None,
}
_STRICT = _decoder(in_steps=False, **_OF_STRICT)
_STRICT_IN_STEPS = _decoder(in_steps=True, **_OF_STRICT)
_LENIENT = _decoder(in_steps=False, **_OF_LENIENT)
_LENIENT_IN_STEPS = _decoder(in_steps=True, **_OF_LENIENT)
_TOLERANT = _decoder(in_steps=False, **_OF_TOLERANT)
_TOLERANT_IN_STEPS = _decoder(in_steps=True, **_OF_TOLERANT)


INTEGER_MAX = 2**31 - 1
VersionNumber: TypeAlias = Annotated[int, Field(ge=1, le=INTEGER_MAX)]
# The index of an item in a fan-out.
ItemIndex: TypeAlias = Annotated[int, Field(ge=0, le=INTEGER_MAX)]
# An amount of tokens. It is strict, so that `true` or "5" isn't accepted as a number.
Tokens: TypeAlias = Annotated[int, Field(strict=True)]
UNKNOWN_FIELD = "unknown_field"
UNKNOWN_FIELDS_SHOWN_MAX = 20


class Body(BaseModel):
    """Base class for the request bodies of operators and customers.

    Unknown fields are rejected, because one of them may be a misspelled limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        names = list(cls._names())
        known_names = {name for same in names for name in same}
        if unknown := [name for name in body if name not in known_names]:
            message = _unknown_fields_message(unknown, names)
            raise PydanticCustomError(UNKNOWN_FIELD, "{message}", {"message": message})
        return _without_repeats(body, names)

    @classmethod
    def _names(cls) -> Iterator[tuple[str, ...]]:
        """Yields the accepted names of each field, with our own name first."""
        for name, field in cls.model_fields.items():
            alias = field.validation_alias
            if isinstance(alias, AliasChoices):
                yield tuple(str(choice) for choice in alias.choices)
            else:
                yield (alias if isinstance(alias, str) else name,)


def _without_repeats(body: dict[str, Any], names: Iterable[tuple[str, ...]]) -> dict[str, Any]:
    """Removes duplicates of fields that were sent under several names.

    Raises an error if their values differ.
    """
    for same in names:
        first, *others = [name for name in same if name in body] or [""]
        for other in others:
            if body[other] != body[first]:
                message = f"{first!r} and {other!r} are the same field; send only {first!r}"
                raise PydanticCustomError(UNKNOWN_FIELD, "{message}", {"message": message})
        if others:
            body = {name: value for name, value in body.items() if name not in others}
    return body


def _unknown_fields_message(unknown: Iterable[object], names: list[tuple[str, ...]]) -> str:
    """Returns one message about all unknown fields. Fields that resemble a known one come first."""
    ours = {name: same[0] for same in names for name in same}
    hints, others = list[str](), list[str]()
    for name in [str(name)[:100] for name in unknown][:UNKNOWN_FIELDS_SHOWN_MAX]:
        if close := get_close_matches(name, ours, n=1):
            hints.append(f"unknown field {name!r}; did you mean {ours[close[0]]!r}?")
        else:
            others.append(repr(name))
    if others:
        field_names = [same[0] for same in names]
        listed = f"use {', '.join(field_names)}" if field_names else "this body has no fields"
        fields = "field" if len(others) == 1 else "fields"
        hints.append(f"unknown {fields} {', '.join(others)}; {listed}")
    return hints[0] + "".join(f" U{hint[1:]}" for hint in hints[1:])


def _storable(text: str) -> str:
    if problem := problem_with_text(text):
        raise ValueError(problem)
    return text


Text: TypeAlias = Annotated[str, AfterValidator(_storable)]


def in_utc(moment: datetime) -> datetime:
    """Treats a time without a zone as UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


BODY_BYTES_MAX = 64 * 1024**2
WORKER_BYTES_MAX = 16 * 1024**2
STRANGER_BYTES_MAX = 64 * 1024
# Maximum seconds from the end of the headers to the last byte of the body.
BODY_SECONDS_MAX = 60.0
# Size limits by path prefix. Operators send workflows, and workers send facts about backends.
# Callers of the session routes aren't authenticated yet. Customers use all other paths.
_LIMITS_BY_PREFIX = (
    ("/api/admin/", BODY_BYTES_MAX),
    ("/api/worker/", WORKER_BYTES_MAX),
    ("/api/session", STRANGER_BYTES_MAX),
)
_API_PREFIX = "/api/"


class BodyLimits:
    """ASGI middleware that limits the size and time of request bodies.

    If Content-Length exceeds the limit, the request is rejected before its body is read. Other
    bodies are checked while they are received.
    """

    def __init__(
        self, app: ASGIApp, of_customers: int, seconds_max: float = BODY_SECONDS_MAX
    ) -> None:
        self._app = app
        self._of_customers = of_customers
        self._seconds_max = seconds_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(f"{OBJECTS_PATH}/"):
            await self._app(scope, receive, send)
            return
        most = self._bytes_max(scope["path"])
        if content_length(scope) > most:
            await error_response(413, LimitExceeded.code, _message(most))(scope, receive, send)
        else:
            await self._app(scope, _LimitedBody(receive, most, self._seconds_max).receive, send)

    def _bytes_max(self, path: str) -> int:
        if not path.startswith(_API_PREFIX):
            return STRANGER_BYTES_MAX
        return next(
            (most for prefix, most in _LIMITS_BY_PREFIX if path.startswith(prefix)),
            self._of_customers,
        )


def _message(most: int) -> str:
    return f"a request can have at most {most:,} bytes"


def content_length(scope: Scope) -> int:
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(length) if length.isdigit() else 0


class _LimitedBody:
    """Limits the size and time of a request body while it is received."""

    def __init__(self, receive: Receive, most: int, seconds_max: float) -> None:
        self._receive = receive
        self._bytes_max = most
        self._size = 0
        self._is_complete = False
        self._seconds_max = seconds_max
        self._deadline = asyncio.get_running_loop().time() + seconds_max

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        message = await self._receive_in_time()
        self._size += len(message.get("body", b""))
        if self._size > self._bytes_max:
            # While FastAPI reads a body, it converts every error except HTTPException.
            raise HTTPException(413, _message(self._bytes_max))
        self._is_complete = not message.get("more_body", False)
        return message

    async def _receive_in_time(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError:
            message = f"the body did not arrive within {self._seconds_max:g} seconds"
            raise HTTPException(408, message, {"Connection": "close"}) from None
