"""Reads a request's JSON: strictly, and large documents beside the event loop.

What is refused here could be kept by no database, or would be understood differently by the next
reader: NaN, numbers beyond a float, a key that stands twice, NUL, half a character, deep nesting.
"""

import asyncio
import json
import json.scanner
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from comfyfleet.kernel.errors import InvalidInput, LimitExceeded
from comfyfleet.kernel.texts import problem_with_text

DEPTH_MAX = 100
# What parses them lets others in between; what checks, keeps and frees them does not, and takes about
# half a second for a million. Workflows have some thousands.
VALUES_MAX = 200_000
DIGITS_MAX = 400
# As proxies call it: answered to one who has hung up before all of the body had come.
CALLER_GONE = 499
# A larger body takes long enough to parse for others to notice.
SMALL_BYTES = 256 * 1024
# Not the shared pool: its threads read and write files.
_parsers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="json")
# Only texts with these escapes, or with bytes of their own, can hold what no database keeps.
_SUSPECT = ("\\u0000", "\\ud", "\\uD")
_NOT_KEPT = re.compile("[\0\ud800-\udfff]")


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
    """Of operators and customers."""

    request_kind: type[Request] = JsonRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(self.request_kind(request.scope, request.receive, request._send))

        return handle_json


class WorkerRoute(JsonRoute):
    """Of workers, who pass on what backends say: odd texts must not cost a job its result."""

    request_kind = ToleratedJsonRequest


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise caller_gone() from None


def caller_gone() -> HTTPException:
    """Nobody reads it; any other error would be taken for a wrong body."""
    return HTTPException(CALLER_GONE, "the caller has hung up")


async def read_json(body: bytes, parse: Callable[[bytes], Any]) -> Any:
    try:
        if len(body) <= SMALL_BYTES:
            return parse(body)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_parsers, parse, body)
    except InvalidInput as error:
        # The one kind that the framework lets through while it reads a body.
        raise HTTPException(422, error.message) from None
    except LimitExceeded as error:
        raise HTTPException(413, error.message) from None


def parse(body: bytes) -> Any:
    """InvalidInput says what can't be kept; json.JSONDecodeError what is no JSON."""
    text = _text_of(body)
    value = _decoded(text, _STRICT, _STRICT_IN_STEPS)
    if any(each in text for each in _SUSPECT):
        _check_texts(value)
    return value


def parse_tolerantly(body: bytes) -> Any:
    """What can't be kept is replaced: NaN and numbers beyond a float by null, a NUL and half a
    character by U+FFFD."""
    text = _text_of(body)
    value = _decoded(text, _TOLERANT, _TOLERANT_IN_STEPS)
    return _cleaned(value) if any(each in text for each in _SUSPECT) else value


def _text_of(body: bytes) -> str:
    """In whichever encoding JSON may have: what is looked for must be looked for in the text."""
    return body.decode(json.detect_encoding(body))


def _cleaned(value: Any) -> Any:
    """As deep as a body may be, and no deeper."""
    if isinstance(value, str):
        return _NOT_KEPT.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_cleaned(name): _cleaned(inner) for name, inner in value.items()}
    return [_cleaned(each) for each in value] if isinstance(value, list) else value


def _decoded(text: str, decoder: json.JSONDecoder, in_steps: json.JSONDecoder) -> Any:
    opened = text.count("[") + text.count("{")
    if opened + text.count(",") > VALUES_MAX:
        raise LimitExceeded(f"a request has at most {VALUES_MAX:,} values")
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
            child for each in level for child in _inside(each) if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidInput:
    return InvalidInput(f"the body is nested more than {DEPTH_MAX} levels deep")


def _check_texts(value: Any) -> None:
    left = [value]
    while left:
        found = left.pop()
        left.extend(_inside(found))
        for text in (found, *found) if isinstance(found, dict) else (found,):
            if isinstance(text, str) and (problem := problem_with_text(text)):
                raise InvalidInput(problem)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # All counted in one pass: there may be as many names as a body has values.
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise InvalidInput(f"the field {twice[:100]!r} stands twice in the same object")
    return found


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
    raise InvalidInput(f"{text} is no number that JSON has")


def _float_or_none(text: str) -> float | None:
    number = float(text)
    return None if math.isinf(number) else number


def _int_or_none(text: str) -> int | None:
    return None if len(text) > DIGITS_MAX else int(text)


def _decoder(*, is_strict: bool, in_steps: bool) -> json.JSONDecoder:
    decoder = (
        json.JSONDecoder(
            object_pairs_hook=_object,
            parse_float=_float,
            parse_int=_int,
            parse_constant=_constant,
        )
        if is_strict
        else json.JSONDecoder(
            parse_float=_float_or_none, parse_int=_int_or_none, parse_constant=lambda _: None
        )
    )
    if in_steps:
        # The scanner in C keeps all other threads waiting to its end; this one lets them in between.
        decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder


_STRICT = _decoder(is_strict=True, in_steps=False)
_STRICT_IN_STEPS = _decoder(is_strict=True, in_steps=True)
_TOLERANT = _decoder(is_strict=False, in_steps=False)
_TOLERANT_IN_STEPS = _decoder(is_strict=False, in_steps=True)
