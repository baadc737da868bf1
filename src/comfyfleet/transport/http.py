"""The HTTP client base of SDK, worker and backends: a call is sent once, and repeated only where
that is safe."""

import contextlib
import socket
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO

import httpx

from comfyfleet.errors import OutcomeUnknown, ServerUnavailable
from comfyfleet.transport.http1 import Http1Transport
from comfyfleet.transport.retry import RETRY_AFTER_SECONDS_MAX, RetryPolicy, retry_after_seconds

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
# Shorter than what servers commonly keep idle connections for: they would be closed under us.
KEEP_ALIVE_SECONDS = 4.0
# The request did not leave: nothing can have come of it.
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
# Refused before anything was done.
UNPROCESSED_STATUSES = frozenset({429})
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504, 507})
PROXY_KINDS = frozenset({"http", "https", "all"})
CHAIN_MAX = 10
_CAUSE_TEXTS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "the connection was cut"),
    (socket.gaierror, "its name can't be resolved"),
    (httpx.ConnectTimeout, "no connection within the time allowed"),
    (httpx.TimeoutException, "no answer within the time allowed"),
    (TimeoutError, "no answer within the time allowed"),
    (httpx.RemoteProtocolError, "the connection was closed without an answer"),
)

# What OpenSSL says of an answer in plain HTTP.
_PLAIN_ANSWERS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")


def open_client(
    base_url: str,
    *,
    headers: Mapping[str, str] | None = None,
    answer_seconds: float = ANSWER_SECONDS,
    connect_seconds: float = CONNECT_SECONDS,
    verify: ssl.SSLContext | bool = True,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=base_url,
        headers=headers,
        timeout=httpx.Timeout(answer_seconds, connect=connect_seconds),
        limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS),
        verify=verify,
        transport=transport or _transport(verify),
    )


def _transport(verify: ssl.SSLContext | bool) -> httpx.AsyncBaseTransport | None:
    """None is httpx's own, which knows proxies: it takes them from the environment."""
    if not PROXY_KINDS.isdisjoint(urllib.request.getproxies()):
        return None
    return Http1Transport(verify=verify, keep_alive_seconds=KEEP_ALIVE_SECONDS)


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    `route` is its path without ids, for logs and metrics; neither contains the query. `path`: the
    real path, if it is not the route. `files`: field to (name, open file). `read_seconds`: the read
    timeout, if it is not the client's. `is_repeatable`: safe to repeat as far as the caller knows;
    GET, PUT and DELETE always are. `is_poll`: repeated all the time, so a failure is logged at a
    low level; the caller that polls reports the outage, once.
    """

    method: str
    route: str
    json: object = None
    path: str | None = None
    params: Mapping[str, Any] | None = None
    content: str | bytes | None = None
    files: Mapping[str, tuple[str, BinaryIO]] | None = None
    data: Mapping[str, str] | None = None
    headers: Mapping[str, str] | None = None
    read_seconds: float | None = None
    is_repeatable: bool = False
    is_poll: bool = False

    @property
    def operation(self) -> str:
        return f"{self.method} {self.route}"

    @property
    def may_repeat(self) -> bool:
        return self.is_repeatable or self.method in ("GET", "PUT", "DELETE")


@dataclass(slots=True)
class CallRecord:
    """What is logged about a call: filled in while it runs."""

    status: int | None = None


class HttpClient:
    """Sends calls to one server. `headers` are added to each call, but not to other requests of `client`."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        retry: RetryPolicy,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.client = client
        self.retry = retry
        self.headers = headers or {}

    async def once(self, call: Call) -> httpx.Response:
        """Makes one attempt. Any status is returned; raises httpx.TransportError."""
        with self.recorded(call) as note:
            response = await self.client.send(self.request(call))
            note.status = response.status_code
            return response

    async def send(self, call: Call, *, may_repeat: bool) -> httpx.Response:
        """Returns the response, after as many attempts as are allowed; its status may still be an error.

        Repeats calls that were not sent and answers that are `retryable`; calls that were sent and
        got no answer only if they `may_repeat`. Raises ServerUnavailable; and OutcomeUnknown for a
        call that was sent, got no answer and may not be repeated.
        """
        attempt = 0
        while True:
            attempt += 1
            is_last = attempt >= self.retry.attempts_max
            try:
                response = await self.once(call)
            except httpx.TransportError as error:
                was_sent = not isinstance(error, NOT_SENT)
                if was_sent and not may_repeat:
                    reason = describe_network_error(error)
                    raise OutcomeUnknown(
                        f"{call.operation} was sent, and nobody can tell whether it was heard: {reason}"
                    ) from error
                if is_last:
                    raise self.unavailable(call, error) from error
                await self.retry.back_off(attempt)
                continue
            if is_last or not self.retryable(response, may_repeat=may_repeat):
                return response
            if not await self._wait(response, attempt):
                return response

    async def _wait(self, response: httpx.Response, attempt: int) -> bool:
        """Sleeps as long as the server asks for; False if that is too long."""
        seconds = retry_after_seconds(response.headers)
        if seconds is None:
            await self.retry.back_off(attempt)
        elif seconds > RETRY_AFTER_SECONDS_MAX:
            return False
        else:
            await self.retry.sleep(seconds)
        return True

    def retryable(self, response: httpx.Response, *, may_repeat: bool) -> bool:
        """Whether another attempt may get another answer and is safe."""
        statuses = RETRYABLE_STATUSES if may_repeat else UNPROCESSED_STATUSES
        return response.status_code in statuses

    @contextlib.asynccontextmanager
    async def stream(
        self, call: Call, *, follow_redirects: bool = False
    ) -> AsyncIterator[httpx.Response]:
        """Makes one attempt; the caller reads the body inside the block. Raises httpx.TransportError."""
        with self.recorded(call) as note:
            response = await self.client.send(
                self.request(call), stream=True, follow_redirects=follow_redirects
            )
            note.status = response.status_code
            try:
                yield response
            finally:
                await response.aclose()

    def recorded(self, call: Call) -> AbstractContextManager[CallRecord]:
        """Wraps each attempt: subclasses log and count here."""
        return contextlib.nullcontext(CallRecord())

    @property
    def place(self) -> str:
        """The server's host and port, for messages."""
        return f"{self.client.base_url.host}:{self.client.base_url.port or ''}".rstrip(":")

    def unavailable(self, call: Call, error: Exception) -> ServerUnavailable:
        return ServerUnavailable(
            f"{call.operation} at {self.place} failed: {describe_network_error(error)}"
        )

    def request(self, call: Call) -> httpx.Request:
        for part in (call.files or {}).values():
            part[1].seek(0)
        given = call.params and {
            name: each for name, each in call.params.items() if each is not None
        }
        usual, read_seconds = self.client.timeout, call.read_seconds
        return self.client.build_request(
            call.method,
            call.path or call.route,
            params=given,
            content=call.content,
            json=call.json,
            files=call.files,
            data=call.data,
            headers={**self.headers, **(call.headers or {})},
            timeout=usual
            if read_seconds is None
            else httpx.Timeout(usual.write, connect=usual.connect, read=read_seconds),
        )


def describe_network_error(error: BaseException) -> str:
    """Describes an error by the first cause that has a known text; otherwise by its own text."""
    for each in _chain(error):
        if isinstance(each, ssl.SSLError) and each.reason in _PLAIN_ANSWERS:
            return "it doesn't speak TLS; use http:// instead of https://"
        for kind, words in _CAUSE_TEXTS:
            if isinstance(each, kind):
                return words
    return str(error) or type(error).__name__


def _chain(error: BaseException) -> list[BaseException]:
    """The error, its cause, and so on; of a group the first."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and len(found) < CHAIN_MAX:
        found.append(each)
        inside = each.exceptions[0] if isinstance(each, BaseExceptionGroup) else None
        each = inside or each.__cause__ or each.__context__
    return found
