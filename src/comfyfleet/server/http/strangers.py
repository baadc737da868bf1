"""Limits the connections and requests of clients that have not sent a valid key, by their address.

A connection counts until it sends a valid key or closes. A trusted proxy shares its connections among
its clients, so its connections aren't limited. Instead, each request that it forwards counts for the
forwarded address until its key is known to be valid, or until the request ends.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address, ip_network
from time import monotonic
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from comfyfleet.errors import TooManyCalls
from comfyfleet.server.http.connections import REQUEST_SLOT, connection_of
from comfyfleet.server.http.errors import response_to_error

logger = logging.getLogger(__name__)
PER_ADDRESS_MAX = 100
RETRY_SECONDS = 5
WARN_SECONDS = 60.0


def network_of(address: str) -> str:
    """Returns the network that counts as one client: an IPv6 subscriber has 2**64 addresses."""
    try:
        ip = ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, IPv6Address):
        return str(ip.ipv4_mapped or ip_network((ip, 64), strict=False))
    return address


def is_loopback(address: str) -> bool:
    """Checks for an address of this machine; a Unix socket has none."""
    try:
        ip = ip_address(address)
    except ValueError:
        return not address
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return (mapped or ip).is_loopback


def trusted_proxies(allowed: list[str] | str | None = None) -> Callable[[str], bool]:
    """Returns a check for the proxies whose `X-Forwarded-For` the server believes; without an argument,
    those of `FORWARDED_ALLOW_IPS`."""
    if allowed is None:
        allowed = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")
    no_app: Any = None
    return ProxyHeadersMiddleware(no_app, allowed).trusted_hosts.__contains__


class AddressSlot:
    """One connection or request that counts for its address until it is released."""

    __slots__ = ("_counts", "_network")

    def __init__(self, counts: Counter[str] | None = None, network: str = "") -> None:
        self._counts = counts
        self._network = network

    def release(self) -> None:
        """Stops counting; further calls do nothing."""
        counts, self._counts = self._counts, None
        if counts is not None:
            counts[self._network] -= 1
            if counts[self._network] <= 0:
                del counts[self._network]


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
        """Counts one more; returns None if the address has reached its limit."""
        if self._is_exempt(address):
            return AddressSlot()
        network = network_of(address)
        if self._counts[network] >= self._per_address:
            self._warn(network)
            return None
        self._counts[network] += 1
        return AddressSlot(self._counts, network)

    def exempting(self, is_exempt: Callable[[str], bool]) -> "AddressLimiter":
        """Returns a limiter like this one that exempts more addresses."""
        mine = self._is_exempt
        return AddressLimiter(
            self._per_address, lambda address: mine(address) or is_exempt(address), self._what
        )

    def _warn(self, network: str) -> None:
        if monotonic() - self._warned_at >= WARN_SECONDS:
            self._warned_at = monotonic()
            logger.warning(
                "%s has %d %s without a valid key (the limit); more are refused",
                network,
                self._per_address,
                self._what,
            )


class ForwardedRequests:
    """ASGI middleware that limits concurrent requests without a valid key by their forwarded address."""

    def __init__(self, app: ASGIApp, limits: AddressLimiter | None = None) -> None:
        self._app = app
        self._limits = limits or AddressLimiter(what="concurrent requests")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = _forwarded_address(scope)
        if address is None:
            await self._app(scope, receive, send)
            return
        slot = self._limits.enter(address)
        if slot is None:
            await _refuse(scope, receive, send)
            return
        scope.setdefault("state", {})[REQUEST_SLOT] = slot
        try:
            await self._app(scope, receive, send)
        finally:
            slot.release()


def _forwarded_address(scope: Scope) -> str | None:
    """Returns the address if a proxy forwarded the request. A websocket's proxy isn't known, so each
    websocket counts."""
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
        f"this address has {PER_ADDRESS_MAX} requests without a valid key at once (the limit)",
        retry_after_seconds=RETRY_SECONDS,
    )
    await response_to_error(error, scope["path"])(scope, receive, send)
