"""Calls of the API: retried with back-off, errors raised as the control plane raised them, lists page by page,
event streams resumed. The key goes to the control plane only.

A call that may have been heard is made again only if hearing it twice does no harm."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
from pydantic import ValidationError

from comfyfleet import errors
from comfyfleet.api.values import Message
from comfyfleet.errors import (
    FleetError,
    InsufficientTokens,
    LimitExceeded,
    OutcomeUnknown,
    ServerUnavailable,
    UnexpectedAnswer,
)
from comfyfleet.transport.sse import EventParser, ServerEvent

BACKOFF_FIRST_SECONDS = 0.25
BACKOFF_SECONDS_MAX = 8.0
# A server that wants more than this is not waited for: the caller hears when to come again.
RETRY_AFTER_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Replaced in tests. `clock` is monotonic, `chance` gives 0 to 1."""

    attempts_max: int = 6
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.SystemRandom().random

    async def back_off(self, attempt: int) -> None:
        """Before the next attempt; `attempt` have failed."""
        await self.sleep(backoff_seconds(attempt, self.chance()))


def backoff_seconds(attempt: int, chance: float) -> float:
    """Twice as long each time, half of it by chance: callers that failed together spread out."""
    full = min(BACKOFF_FIRST_SECONDS * 2.0 ** (attempt - 1), BACKOFF_SECONDS_MAX)
    return full * (0.5 + chance / 2)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Only as a number: our control plane sends no dates."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


Answer = TypeVar("Answer", bound=Message)
BEGINNING_CHARACTERS = 200
ERROR_CLASSES: dict[str, type[FleetError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FleetError)
}


class ApiError(FleetError):
    """An error that this version has no name for; `details["code"]` is what the API calls it."""


def error_from_response(response: httpx.Response) -> FleetError:
    """`details` are the API's own, and `status`."""
    said = _error_fields(response)
    if said is None:
        return UnexpectedAnswer(
            f"{response.url.host} is no control plane: it answered {response.status_code} with "
            f"{response.text[:BEGINNING_CHARACTERS]!r}",
            status=response.status_code,
        )
    code, message = str(said.get("code") or ""), str(said["message"])
    details = {**_mapping(said.get("details")), "status": response.status_code}
    kind = ERROR_CLASSES.get(code)
    if kind is InsufficientTokens:
        return _insufficient(message, details)
    return kind(message, **details) if kind else ApiError(message, **{"code": code, **details})


def _insufficient(message: str, details: dict[str, Any]) -> FleetError:
    wanted, balance = details.get("required_tokens"), details.get("balance")
    if isinstance(wanted, int) and isinstance(balance, int):
        return InsufficientTokens(required_tokens=wanted, balance=balance)
    return errors.Refused(message, **details)


def _error_fields(response: httpx.Response) -> dict[str, Any] | None:
    try:
        body = response.json()
    except ValueError:
        return None
    said = body.get("error") if isinstance(body, dict) else None
    return said if isinstance(said, dict) and "message" in said else None


def _mapping(value: object) -> dict[str, Any]:
    # Names that a constructor of ours has for itself can't be given twice.
    named = value if isinstance(value, dict) else {}
    return {str(name): each for name, each in named.items() if name not in ("message", "self")}


def parse_answer(kind: type[Answer], response: httpx.Response) -> Answer:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise UnexpectedAnswer(
            f"{response.url.path} was answered in a shape that this client doesn't know: {error}",
            received=response.text[:BEGINNING_CHARACTERS],
        ) from error


CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
TRANSFER_SECONDS = 300.0
# Shorter than what servers commonly keep idle connections for: they would be closed under us.
KEEP_ALIVE_SECONDS = 4.0
# Refused before anything was done: our control plane's 429 is that, a 503 may come from behind.
UNPROCESSED_STATUSES = frozenset({429})
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
# Nothing was sent yet.
UNSENT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True, slots=True)
class ApiCall:
    method: str
    path: str  # below the base URL
    body: Mapping[str, Any] | None = None
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = False  # as far as the caller knows; GET, PUT and DELETE always are
    answer_seconds: float = ANSWER_SECONDS

    @property
    def may_repeat(self) -> bool:
        return self.is_repeatable or self.method in ("GET", "PUT", "DELETE")


class ApiCalls:
    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        patience: Patience,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.patience = patience
        self._base = base_url.rstrip("/")
        self._key = key
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS),
            transport=transport,
        )

    async def ask(self, call: ApiCall) -> httpx.Response:
        """An answer of success. Raises our errors, ServerUnavailable and OutcomeUnknown."""
        attempt = 0
        while True:
            attempt += 1
            is_last = attempt >= self.patience.attempts_max
            try:
                response = await self._send(call)
            except httpx.TransportError as error:
                if is_last or not (call.may_repeat or isinstance(error, UNSENT_ERRORS)):
                    raise _no_answer(call, error) from error
                await self.patience.back_off(attempt)
                continue
            if response.is_success or response.status_code == httpx.codes.NOT_MODIFIED:
                return response
            if is_last or not await self._waited(call, response, attempt):
                raise error_from_response(response)

    async def _send(self, call: ApiCall) -> httpx.Response:
        return await self.client.request(
            call.method,
            f"{self._base}{call.path}",
            json=None if call.body is None else dict(call.body),
            params={name: value for name, value in call.query.items() if value is not None},
            headers={**self._bearer, **call.headers},
            timeout=httpx.Timeout(call.answer_seconds, connect=CONNECT_SECONDS),
        )

    async def _waited(self, call: ApiCall, response: httpx.Response, attempt: int) -> bool:
        """Whether it is worth asking again, now that the time has passed."""
        if response.status_code not in (
            RETRYABLE_STATUSES if call.may_repeat else UNPROCESSED_STATUSES
        ):
            return False
        seconds = retry_after_seconds(response.headers)
        if seconds is None:
            await self.patience.back_off(attempt)
            return True
        if seconds > RETRY_AFTER_SECONDS_MAX:
            return False
        await self.patience.sleep(seconds)
        return True

    @asynccontextmanager
    async def stream(self, call: ApiCall) -> AsyncIterator[httpx.Response]:
        """Asked once; whoever reads it decides about another time."""
        async with self.client.stream(
            call.method,
            f"{self._base}{call.path}",
            headers={**self._bearer, **call.headers},
            timeout=httpx.Timeout(call.answer_seconds, connect=CONNECT_SECONDS),
        ) as response:
            yield response

    @property
    def _bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"}


def _no_answer(call: ApiCall, error: httpx.TransportError) -> ServerUnavailable | OutcomeUnknown:
    reason = str(error) or type(error).__name__
    if call.may_repeat or isinstance(error, UNSENT_ERRORS):
        return ServerUnavailable(f"{call.method} {call.path}: no answer: {reason}")
    return OutcomeUnknown(
        f"{call.method} {call.path} was sent, and nobody can tell whether it was heard: {reason}"
    )


PAGE = 100


async def fetch_pages(
    calls: ApiCalls,
    path: str,
    kind: type[Answer],
    query: Mapping[str, Any],
    *,
    by: str = "before",
) -> AsyncIterator[Answer]:
    """Each names where the next one begins; the last names nothing."""
    begin = None
    while True:
        page = parse_answer(kind, await calls.ask(ApiCall("GET", path, query={**query, by: begin})))
        yield page
        begin = page.model_dump(include={"next"})["next"]
        if begin is None:
            return


# A stream says something, if only that it lives, more often than this.
SILENCE_SECONDS_MAX = 45.0
# Streams in a row that told nothing; then something else is tried.
EMPTY_STREAMS_MAX = 3
NO_STREAM = frozenset({404, 405, 406, 501})
Told = TypeVar("Told")


class ResumableStream(Generic[Told]):
    """`last_id` is where it stands: a later reader may begin there."""

    def __init__(
        self,
        calls: ApiCalls,
        path: str,
        parse: Callable[[ServerEvent], Told | None],
        *,
        last_id: str = "",
    ) -> None:
        self._calls = calls
        self._path = path
        self._parse = parse
        self.last_id = last_id
        self.is_over = False  # nothing more will come
        self.may_stream = True

    async def heard(self) -> AsyncGenerator[Told, None]:
        """What one stream tells, until it is cut or the server ends it: to hang up on it would be rude."""
        headers = {"Accept": "text/event-stream"}
        if self.last_id:
            headers["Last-Event-ID"] = self.last_id
        call = ApiCall("GET", self._path, headers=headers, answer_seconds=SILENCE_SECONDS_MAX)
        parser = EventParser(self.last_id)
        try:
            async with self._calls.stream(call) as response:
                if not await self._is_stream(response):
                    return
                async for piece in response.aiter_bytes():
                    for found in parser.feed(piece):
                        event = self._parse(found)
                        if event is not None:
                            # Only what was told counts as heard: an id whose event was cut off is asked for again.
                            self.last_id = found.id
                            yield event
                    if self.is_over and parser.comments:
                        return  # the server keeps the stream open, and has nothing more to tell
                    parser.comments = 0
        except (httpx.TransportError, LimitExceeded):
            return

    async def _is_stream(self, response: httpx.Response) -> bool:
        if response.status_code == httpx.codes.NO_CONTENT:
            self.is_over = True  # all has been told
            return False
        kind = response.headers.get("content-type", "")
        if response.is_success and kind.startswith("text/event-stream"):
            return True
        self.may_stream = response.status_code in RETRYABLE_STATUSES
        if response.is_success or response.status_code in RETRYABLE_STATUSES | NO_STREAM:
            return False
        await response.aread()
        raise error_from_response(response)

    async def all_events(self) -> AsyncGenerator[Told, None]:
        """Stream after stream, until it is over or they are given up."""
        fruitless = 0
        while not self.is_over and self.may_stream and fruitless < EMPTY_STREAMS_MAX:
            fruitless += 1
            async with aclosing(self.heard()) as heard:
                async for event in heard:
                    fruitless = 0
                    yield event
            if fruitless and self.may_stream and not self.is_over:
                await self._calls.patience.back_off(fruitless)
