"""Limits the connections and requests without a valid key, by client address.

A connection counts for its address until it sends a valid key or closes. If it later sends a
request without a valid key, it counts again. A trusted proxy shares its connections among its
clients, so its connections aren't limited. Instead, each forwarded request counts for the client's
address until its key is known to be valid or the request ends.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address, ip_network
from time import monotonic
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from comfyfleet.errors import TooManyCalls
from comfyfleet.server.http.body_times import has_body
from comfyfleet.server.http.connections import (
    CALLER_LIMITS,
    REQUEST_TALLY,
    HttpConnection,
    connection_of,
    has_valid_key,
)
from comfyfleet.server.http.errors import response_to_error
from comfyfleet.server.http.tallies import Tally

logger = logging.getLogger(__name__)
PER_ADDRESS_MAX = 100
RETRY_SECONDS = 5
WARN_SECONDS = 60.0
HEALTH_CHECKS = ("/healthz", "/readyz")


def network_of(address: str) -> str:
    """Returns the network whose addresses count as one client.

    For IPv6 this is a /64 network, because a single subscriber has 2**64 addresses.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, IPv6Address):
        return str(ip.ipv4_mapped or ip_network((ip, 64), strict=False))
    return address


def is_loopback(address: str) -> bool:
    """Checks whether an address belongs to this machine. A Unix socket's address is empty."""
    try:
        ip = ip_address(address)
    except ValueError:
        return not address
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return (mapped or ip).is_loopback


def trusted_proxies(allowed: list[str] | str | None = None) -> Callable[[str], bool]:
    """Returns a function that checks whether an address is a trusted proxy.

    The server uses the `X-Forwarded-For` header of trusted proxies only. By default, they are
    listed in `FORWARDED_ALLOW_IPS`.
    """
    if allowed is None:
        allowed = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")
    no_app: Any = None
    return ProxyHeadersMiddleware(no_app, allowed).trusted_hosts.__contains__


class AddressSlot:
    """One connection or request that counts for its address until it is released."""

    __slots__ = ("_counts", "_is_counted", "_limit", "_network")

    def __init__(
        self, counts: Counter[str] | None = None, network: str = "", limit: int = 0
    ) -> None:
        """Starts counting for the address. Without `counts`, the address is exempt from the
        limit."""
        self._counts = counts
        self._network = network
        self._limit = limit
        self._is_counted = False
        self.resume()

    def release(self) -> None:
        """Stops counting. Further calls have no effect."""
        if self._counts is not None and self._is_counted:
            self._is_counted = False
            self._counts[self._network] -= 1
            if self._counts[self._network] <= 0:
                del self._counts[self._network]

    def resume(self) -> bool:
        """Counts again, even if the address exceeds its limit. Returns False in that case."""
        if self._counts is None:
            return True
        if not self._is_counted:
            self._is_counted = True
            self._counts[self._network] += 1
        return self._counts[self._network] <= self._limit


class AddressLimiter:
    """Counts connections or requests by the address of their client."""

    def __init__(
        self,
        per_address: int = PER_ADDRESS_MAX,
        is_exempt: Callable[[str], bool] = is_loopback,
        what: str = "connections",
    ) -> None:
        self._per_address = per_address
        self._is_exempt = is_exempt
        self._what = what
        self._counts: Counter[str] = Counter()
        self._warned_at = -WARN_SECONDS

    def enter(self, address: str) -> AddressSlot | None:
        """Counts a connection or request. Returns None if the address has reached its limit."""
        if self._is_exempt(address):
            return AddressSlot()
        network = network_of(address)
        if self._counts[network] >= self._per_address:
            self._warn(network)
            return None
        return AddressSlot(self._counts, network, self._per_address)

    def exempting(self, is_exempt: Callable[[str], bool]) -> "AddressLimiter":
        """Returns a copy of this limiter that exempts additional addresses."""
        mine = self._is_exempt
        return AddressLimiter(
            self._per_address, lambda address: mine(address) or is_exempt(address), self._what
        )

    def _warn(self, network: str) -> None:
        if monotonic() - self._warned_at >= WARN_SECONDS:
            self._warned_at = monotonic()
            logger.warning(
                "%s has %d %s without a valid key (the limit); refusing new ones",
                network,
                self._per_address,
                self._what,
            )


class ForwardedRequests:
    """ASGI middleware that limits concurrent requests without a valid key by forwarded address.

    Clients with and without keys may share an address. Health checks and requests with keys that
    were valid before are never refused. Requests with other keys have a separate limit until their
    key is checked, provided that `is_checked` returns True for the path, which means that the check
    happens before the body is read.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: AddressLimiter | None = None,
        is_checked: Callable[[str], bool] = lambda _path: False,
    ) -> None:
        self._app = app
        self._limits = limits or AddressLimiter(what="concurrent requests")
        self._unchecked = AddressLimiter(what="concurrent requests with keys to check")
        self._is_checked = is_checked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = _forwarded_address(scope)
        if address is None or _is_health_check(scope):
            await self._app(scope, receive, send)
            return
        slot = self._slot(scope, address)
        if slot is None:
            await _refuse(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        tally = state[REQUEST_TALLY] = Tally(slot, state.get(CALLER_LIMITS))
        try:
            await self._app(scope, receive, send)
        finally:
            tally.close()

    def _slot(self, scope: Scope, address: str) -> AddressSlot | None:
        keys = _keys_of(scope)
        if any(map(scope["app"].state.wrong_keys.knows, keys)):
            return AddressSlot()
        has_check = bool(keys) and scope["type"] == "http" and self._is_checked(scope["path"])
        return (self._unchecked if has_check else self._limits).enter(address)


class KeylessRequests:
    """ASGI middleware that counts a connection for its address again if a request has no valid key.

    This is decided when the body is read or the response starts, because keys are checked before
    that. If the address exceeds its limit, a request with a body is refused, and the connection
    closes after the response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope) if scope["type"] == "http" else None
        if connection is None:
            await self._app(scope, receive, send)
            return
        request = _KeylessRequest(scope, connection, receive, send)
        try:
            await self._app(scope, request.receive, request.send)
        except Exception:
            if not request.is_refused:
                raise
        if request.is_refused:
            await _refuse(scope, receive, send)


class _KeylessRequest:
    def __init__(
        self, scope: Scope, connection: HttpConnection, receive: Receive, send: Send
    ) -> None:
        self._scope, self._connection = scope, connection
        self._receive, self._send = receive, send
        self._has_body = has_body(scope)
        self._has_started = False
        self.is_refused = False  # whether the request was refused before its response started

    async def receive(self) -> Message:
        if self._has_body and not self._has_started and not self._is_counted():
            self.is_refused = True
            raise HTTPException(429)
        return await self._receive()

    async def send(self, message: Message) -> None:
        if self.is_refused:
            return
        if not self._has_started:
            self._has_started = True
            self._is_counted()
        await self._send(message)

    def _is_counted(self) -> bool:
        """Counts a connection without a valid key for its address. Returns False if the address
        exceeds its limit."""
        if has_valid_key(self._scope) or self._connection.tally.count_for_address():
            return True
        self._connection.close_soon()
        return False


def _is_health_check(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in HEALTH_CHECKS


def _keys_of(scope: Scope) -> list[str]:
    """Returns the keys in the headers of a request, with and without their scheme."""
    headers = Headers(scope=scope)
    values = [headers.get("authorization", ""), headers.get("x-fleet-secret", "")]
    return [key for text in values for key in (text, text.partition(" ")[2].strip()) if key]


def _forwarded_address(scope: Scope) -> str | None:
    """Returns the client's address if a proxy forwarded the request, and otherwise None.

    For WebSockets it isn't known whether a proxy was used, so their address is always returned.
    """
    client = scope.get("client")
    if scope["type"] not in ("http", "websocket") or not client:
        return None
    if scope["type"] == "http":
        connection = connection_of(scope)
        if connection is None or connection.client is None or connection.client[0] == client[0]:
            return None
    return str(client[0])


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013})
        return
    error = TooManyCalls(
        f"this address has {PER_ADDRESS_MAX} concurrent requests without a valid key (the limit)",
        retry_after_seconds=RETRY_SECONDS,
    )
    await response_to_error(error, scope["path"])(scope, receive, send)
