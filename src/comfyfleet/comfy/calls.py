"""HTTP calls to a backend: retried where that is safe, logged, counted."""

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import httpx

from comfyfleet.comfy.causes import in_words
from comfyfleet.comfy.meter import Meter
from comfyfleet.comfy.settings import Limits
from comfyfleet.comfy.shapes import cut, parse_json
from comfyfleet.comfy.surroundings import Surroundings
from comfyfleet.kernel.errors import AccessDenied, ServerUnavailable, UnexpectedAnswer

logger = logging.getLogger(__name__)

# The request did not leave: nothing can have come of it.
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
# What a httpx call raises when the network or the other side fails.
NETWORK_ERRORS = (httpx.TransportError,)


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `route` is its path without ids, for logs and metrics; neither has the query.

    `files`: field to (name, open file). `is_look`: it is made again and again while something is wrong;
    whoever looks tells of it, once.
    """

    method: str
    route: str
    path: str | None = None
    params: Mapping[str, str] | None = None
    json: object = None
    files: Mapping[str, tuple[str, BinaryIO]] | None = None
    data: Mapping[str, str] | None = None
    headers: Mapping[str, str] | None = None
    is_look: bool = False

    @property
    def operation(self) -> str:
        return f"{self.method} {self.route}"


class Calls:
    """A client's way to one server."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        limits: Limits,
        meter: Meter,
        surroundings: Surroundings,
    ) -> None:
        self.client = client
        self.limits = limits
        self.meter = meter
        self.surroundings = surroundings

    async def once(self, call: Call) -> httpx.Response:
        """One attempt. Raises httpx.TransportError; any status is an answer."""
        with self.noting(call) as note:
            response = await self.client.send(self._request(call))
            note.status = response.status_code
            return response

    async def ask(self, call: Call) -> httpx.Response:
        """Attempts until an answer below 500. Only for calls that may safely be made twice.

        Raises ServerUnavailable and AccessDenied; other statuses are the caller's.
        """
        for attempt in range(self.limits.max_retries + 1):
            if attempt:
                await self.surroundings.back_off(attempt)
            try:
                response = await self.once(call)
            except NETWORK_ERRORS as error:
                trouble = self.unavailable(call, error)
                continue
            if response.status_code < 500:
                return checked(call, response)
            trouble = answered_badly(call, response)
        raise trouble

    async def ask_json(self, call: Call) -> Any:
        """The JSON of a 200. Raises UnexpectedAnswer, too."""
        response = await self.ask(call)
        with self.reading(call.operation, logging.INFO if call.is_look else logging.ERROR):
            return json_of(call, response)

    @contextlib.asynccontextmanager
    async def stream(
        self, call: Call, *, follow_redirects: bool = False
    ) -> AsyncIterator[httpx.Response]:
        """One attempt; the body is read inside. Raises httpx.TransportError."""
        with self.noting(call) as note:
            response = await self.client.send(
                self._request(call), stream=True, follow_redirects=follow_redirects
            )
            note.status = response.status_code
            try:
                yield response
            finally:
                await response.aclose()

    @contextlib.contextmanager
    def reading(self, operation: str, level: int = logging.ERROR) -> Iterator[None]:
        """Counts and logs an answer of an unexpected shape that is found inside."""
        try:
            yield
        except UnexpectedAnswer as error:
            self.meter.unexpected(operation)
            logger.log(
                level,
                "unexpected answer",
                extra={"operation": operation, "received": error.message},
            )
            raise

    @contextlib.contextmanager
    def noting(self, call: Call) -> Iterator["Note"]:
        """Logs and counts what is done inside as one call."""
        note, started = Note(), self.surroundings.clock()
        failure: str | None = None
        try:
            yield note
        except BaseException as error:
            failure = in_words(error)
            raise
        finally:
            seconds = self.surroundings.clock() - started
            ok = failure is None and (note.status or 0) < 400
            self.meter.called(call.operation, ok=ok, seconds=seconds)
            _log(call, self.place, note.status, failure, seconds)

    @property
    def place(self) -> str:
        """For people."""
        return f"{self.client.base_url.host}:{self.client.base_url.port or ''}".rstrip(":")

    def unavailable(self, call: Call, error: Exception) -> ServerUnavailable:
        return ServerUnavailable(f"{call.operation} at {self.place} failed: {in_words(error)}")

    def _request(self, call: Call) -> httpx.Request:
        for part in (call.files or {}).values():
            part[1].seek(0)
        return self.client.build_request(
            call.method,
            call.path or call.route,
            params=call.params,
            json=call.json,
            files=call.files,
            data=call.data,
            headers=call.headers,
        )


@dataclass(slots=True)
class Note:
    """What is to be logged about a call, as far as it has come."""

    status: int | None = None


def checked(call: Call, response: httpx.Response) -> httpx.Response:
    if response.status_code in (401, 403):
        raise AccessDenied(
            f"{call.operation} was answered {response.status_code}: {cut(response.text)}"
        )
    return response


def answered_badly(call: Call, response: httpx.Response) -> ServerUnavailable:
    status = response.status_code
    return ServerUnavailable(
        f"{call.operation} was answered {status}: {cut(response.text)}", status=status
    )


def json_of(call: Call, response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise UnexpectedAnswer(
            f"{call.operation} was answered {response.status_code}: {cut(response.text)}",
            status=response.status_code,
            received=cut(response.text),
        )
    return parse_json(response.content, f"the answer to {call.operation}")


def _log(call: Call, place: str, status: int | None, failure: str | None, seconds: float) -> None:
    """That nobody answers, or not what should, is told by whoever waits, once; not with every attempt."""
    level = logging.WARNING if (status or 0) >= 400 and not call.is_look else logging.INFO
    logger.log(
        level,
        "backend call",
        extra={
            "backend": place,
            "method": call.method,
            "path": call.path or call.route,
            "status": status,
            "failure": failure,
            "duration_ms": round(seconds * 1000, 1),
        },
    )
