"""The HTTP client that the SDK, the worker and backends build on. It retries a call only if this is
safe.
"""

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
# Seconds until an idle connection is closed. This is shorter than the keep-alive time of common
# servers, so that they don't close a connection that is about to be used.
KEEP_ALIVE_SECONDS = 4.0
# Errors that occur before a request is sent, so the request can't have had an effect.
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
# Statuses for requests that were refused before they were processed.
UNPROCESSED_STATUSES = frozenset({429})
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504, 507})
PROXY_KINDS = frozenset({"http", "https", "all"})
CHAIN_MAX = 10
_CAUSE_TEXTS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "the connection was lost"),
    (socket.gaierror, "the host name can't be resolved"),
    (httpx.ConnectTimeout, "connecting timed out"),
    (httpx.TimeoutException, "no response before the timeout"),
    (TimeoutError, "no response before the timeout"),
    (httpx.RemoteProtocolError, "the connection was closed without a response"),
)

# OpenSSL reports these reasons if the server responds in plain HTTP.
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
    """Returns our own transport, or None for httpx's, which supports the proxies in the
    environment."""
    if not PROXY_KINDS.isdisjoint(urllib.request.getproxies()):
        return None
    return Http1Transport(verify=verify, keep_alive_seconds=KEEP_ALIVE_SECONDS)


@dataclass(frozen=True, slots=True)
class Call:
    """A request.

    - `route` is the path without ids, for logs and metrics. Neither contains the query.
    - `path` is the real path, if it differs from the route.
    - `files` maps fields to (name, open file).
    - `read_seconds` is the read timeout, if it differs from the client's.
    - `is_repeatable` means that the caller knows the call to be safe to repeat. GET, PUT and DELETE
      always are.
    - `is_poll` means that the call is repeated all the time, so failures are logged at a low level.
      The polling caller reports the outage once.
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
    """Data about a call for the log. It is filled in while the call runs."""

    status: int | None = None


class HttpClient:
    """Sends calls to a server. `headers` are added to each call, but not to other requests of
    `client`."""

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
        """Makes one attempt and returns the response with any status. Raises
        httpx.TransportError."""
        with self.recorded(call) as note:
            response = await self.client.send(self.request(call))
            note.status = response.status_code
            return response

    async def send(self, call: Call, *, may_repeat: bool) -> httpx.Response:
        """Sends a call with retries and returns the response, whose status may be an error.

        Retries calls that were not sent, and calls with a `retryable` response. A call that was
        sent but got no response is retried only if `may_repeat` is set. Otherwise, raises
        OutcomeUnknown. Raises ServerUnavailable after the last attempt.
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
                        f"{call.operation} was sent, but the server may not have received it: "
                        f"{reason}"
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
        """Sleeps for as long as the server requests. Returns False if that is too long."""
        seconds = retry_after_seconds(response.headers)
        if seconds is None:
            await self.retry.back_off(attempt)
        elif seconds > RETRY_AFTER_SECONDS_MAX:
            return False
        else:
            await self.retry.sleep(seconds)
        return True

    def retryable(self, response: httpx.Response, *, may_repeat: bool) -> bool:
        """Checks whether another attempt is safe and might get a different response."""
        statuses = RETRYABLE_STATUSES if may_repeat else UNPROCESSED_STATUSES
        return response.status_code in statuses

    @contextlib.asynccontextmanager
    async def stream(
        self, call: Call, *, follow_redirects: bool = False
    ) -> AsyncIterator[httpx.Response]:
        """Makes one attempt. The caller reads the body inside the block. Raises
        httpx.TransportError."""
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
        """Wraps each attempt. Subclasses log and count calls here."""
        return contextlib.nullcontext(CallRecord())

    @property
    def place(self) -> str:
        """Returns the server's host and port, for messages."""
        return f"{self.client.base_url.host}:{self.client.base_url.port or ''}".rstrip(":")

    def unavailable(self, call: Call, error: Exception) -> ServerUnavailable:
        return ServerUnavailable(
            f"{call.operation} at {self.place} failed: {describe_network_error(error)}"
        )

    def request(self, call: Call) -> httpx.Request:
        for part in (call.files or {}).values():
            part[1].seek(0)
        params = call.params and {
            name: value for name, value in call.params.items() if value is not None
        }
        usual, read_seconds = self.client.timeout, call.read_seconds
        return self.client.build_request(
            call.method,
            call.path or call.route,
            params=params,
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
    """Describes an error by its first cause with a known description, or otherwise by its own
    text."""
    for cause in _chain(error):
        if isinstance(cause, ssl.SSLError) and cause.reason in _PLAIN_ANSWERS:
            return "the server doesn't support TLS; use http:// instead of https://"
        for kind, words in _CAUSE_TEXTS:
            if isinstance(cause, kind):
                return words
    return str(error) or type(error).__name__


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the error, its cause, the cause of its cause, and so on. Of an exception group, only
    the first error is followed."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and len(chain) < CHAIN_MAX:
        chain.append(current)
        inside = current.exceptions[0] if isinstance(current, BaseExceptionGroup) else None
        current = inside or current.__cause__ or current.__context__
    return chain
