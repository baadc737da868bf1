"""Limits the connections, forwarded requests and file transfers of callers and client addresses.

A connection counts for its address until it sends a valid key. Then it counts for its callers until
it closes or serves other callers. As soon as it serves a request without a valid key, it counts for
its address again.

Transfers keep files open in addition to their connections. One tenant's files may use half of all
downloads or uploads, and one object a quarter, so that a widely shared URL can't block other
tenants' files.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple, Protocol

from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from comfyfleet.errors import TooManyCalls
from comfyfleet.server.fleets.model import FleetWorker
from comfyfleet.server.media.small_pictures import tenant_of
from comfyfleet.server.storage.local import LocalStore, OpenObject
from comfyfleet.server.tenants.model import ActingOperator, BrowserSession, Caller

logger = logging.getLogger(__name__)
RETRY_SECONDS = 5
WARN_SECONDS = 60.0
# Maximum number of connections per user, even if the server's limit would allow more.
USER_CONNECTIONS_MAX = 500


class Holder(NamedTuple):
    """A caller whose connections are limited."""

    kind: str
    id: object


# The holder for workers that register, because their fleet is unknown until the body has been read.
REGISTRATION = Holder("fleet", "registration")
METRICS = Holder("user", "metrics")


def holders_of(caller: object) -> tuple[Holder, ...]:
    """Returns the holders that a caller's connections count for: a customer's user and tenant, a
    worker's fleet, or an operator."""
    match caller:
        case Caller():
            return Holder("user", caller.user_id), Holder("tenant", caller.tenant.id)
        case FleetWorker():
            return (Holder("fleet", caller.fleet_id),)
        case ActingOperator():
            return (Holder("user", caller.actor),)
        case BrowserSession():
            return holders_of(caller.customer or caller.operator)
    return (REGISTRATION,)


def holder_of_file(key: str) -> Holder:
    """Returns the holder that requests with signed URLs of a tenant's objects count for."""
    return Holder("files", tenant_of(key))


def shares_of(connections_max: int) -> dict[str, int]:
    """Returns the connection limit for each kind of caller. No single caller can use all
    connections."""
    return {
        "user": max(1, min(USER_CONNECTIONS_MAX, connections_max // 4)),
        # Requests with signed URLs for a tenant's files. People without a key can send them as
        # well.
        "files": max(1, connections_max // 4),
        "tenant": max(1, connections_max // 2),
        "fleet": max(1, connections_max * 3 // 4),
    }


class CallerLimits:
    """Counts the connections and forwarded requests of each caller."""

    def __init__(self, connections_max: int) -> None:
        self._limits = shares_of(connections_max)
        self._counts: Counter[Holder] = Counter()

    def exchange(self, old: tuple[Holder, ...], new: tuple[Holder, ...]) -> None:
        """Counts for the `new` holders instead of the `old` ones.

        If a new holder has reached its limit, raises TooManyCalls and changes nothing.
        """
        for holder in new:
            limit = self._limits[holder.kind]
            if holder not in old and self._counts[holder] >= limit:
                subject = (
                    "this tenant's files have"
                    if holder.kind == "files"
                    else f"this {holder.kind} has"
                )
                raise TooManyCalls(
                    f"{subject} {limit} concurrent connections (the limit)",
                    retry_after_seconds=RETRY_SECONDS,
                )
        self._counts.update(new)
        for holder in old:
            self._counts[holder] -= 1
            if self._counts[holder] <= 0:
                del self._counts[holder]


class StrangerSlot(Protocol):
    """A connection or request that counts for its address until it is released."""

    def release(self) -> None: ...

    def resume(self) -> bool:
        """Counts again. Returns False if the address now exceeds its limit."""


class KeylessConnections:
    """The connections without a valid key, oldest first.

    If the server is full, the oldest one is closed for each new connection, because the new one may
    have a valid key. Connections with a valid key are limited by caller and aren't closed.
    """

    def __init__(self) -> None:
        self._tallies: dict[Tally, None] = {}
        self._warned_at = -WARN_SECONDS

    def add(self, tally: "Tally") -> None:
        self._tallies[tally] = None

    def remove(self, tally: "Tally") -> None:
        self._tallies.pop(tally, None)

    def end_oldest(self, *, but: "Tally") -> bool:
        """Closes the oldest connection except `but`. Returns False if there is no other one."""
        oldest = next((tally for tally in self._tallies if tally is not but), None)
        if oldest is None:
            return False
        self.remove(oldest)
        self._warn()
        oldest.end()
        return True

    def _warn(self) -> None:
        if monotonic() - self._warned_at >= WARN_SECONDS:
            self._warned_at = monotonic()
            logger.warning(
                "connection limit reached; closing the oldest connections without a valid key"
            )


class Tally:
    """Tracks whether a connection or forwarded request counts for its address or for its
    callers."""

    __slots__ = ("_address", "_holders", "_is_closed", "_is_keyless", "_keyless", "_limits", "end")

    def __init__(
        self,
        address: StrangerSlot | None = None,
        limits: CallerLimits | None = None,
        keyless: KeylessConnections | None = None,
    ) -> None:
        self._address = address
        self._limits = limits
        self._keyless = keyless
        self._holders: tuple[Holder, ...] = ()
        self._is_keyless = True
        self._is_closed = False
        self.end: Callable[[], object] = lambda: None

    def open(self, end: Callable[[], object]) -> None:
        """Registers a function that closes the connection if the server needs room for others."""
        self.end = end
        if self._keyless is not None:
            self._keyless.add(self)

    def count_for(self, holders: tuple[Holder, ...]) -> None:
        """Counts for these callers instead of the address. Raises TooManyCalls if one of them has
        reached its limit."""
        if self._is_closed:
            return
        if self._limits is not None and holders != self._holders:
            self._limits.exchange(self._holders, holders)
            self._holders = holders
        if self._is_keyless:
            self._is_keyless = False
            self.release_address()
            if self._keyless is not None:
                self._keyless.remove(self)

    def count_for_address(self) -> bool:
        """Counts for the address again. Until the connection closes, it also still counts for its
        last callers.

        Returns False if the address exceeds its limit.
        """
        if self._is_closed or self._is_keyless:
            return True
        self._is_keyless = True
        if self._keyless is not None:
            self._keyless.add(self)
        return self._address is None or self._address.resume()

    def end_another(self) -> bool:
        """Closes the oldest other connection without a valid key. Returns False if all other
        connections have a valid key."""
        return self._keyless is not None and self._keyless.end_oldest(but=self)

    def release_address(self) -> None:
        if self._address is not None:
            self._address.release()

    def close(self) -> None:
        """Stops counting. Further calls have no effect."""
        if self._is_closed:
            return
        self._is_closed = True
        self.release_address()
        if self._keyless is not None:
            self._keyless.remove(self)
        if self._limits is not None:
            self._limits.exchange(self._holders, ())


# Default limit of concurrent transfers, if the process's limit of open files is unknown.
TRANSFERS_MAX = 1000
# One tenant may use 1/2 of the transfers, and one object 1/4.
TENANT_SHARE, OBJECT_SHARE = 2, 4


class TransferSlot:
    """A file transfer that counts toward the limits until it is released."""

    __slots__ = ("_counts", "_names")

    def __init__(self, counts: Counter[str], names: tuple[str, ...]) -> None:
        self._counts: Counter[str] | None = counts
        self._names = names

    def release(self) -> None:
        """Stops counting. Further calls have no effect."""
        counts, self._counts = self._counts, None
        if counts is not None:
            for name in self._names:
                counts[name] -= 1
                if not counts[name]:
                    del counts[name]

    def __del__(self) -> None:
        """Releases the slot even if its response was never sent."""
        self.release()


class TransferLimit:
    """Counts open transfers in total, by tenant and by object."""

    def __init__(self, what: str, limit: int = TRANSFERS_MAX) -> None:
        self._what = what
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def begin(self, key: str) -> TransferSlot:
        """Counts a transfer of an object. Raises TooManyCalls if a limit is reached."""
        shares = {"": 1, f"tenant {tenant_of(key)}": TENANT_SHARE, f"object {key}": OBJECT_SHARE}
        for name, share in shares.items():
            most = max(1, self._limit // share)
            if self._counts[name] >= most:
                subject = {1: "the server", TENANT_SHARE: "the tenant"}.get(share, "this file")
                raise TooManyCalls(
                    f"{subject} has {most} concurrent {self._what} (the limit)",
                    retry_after_seconds=RETRY_SECONDS,
                )
        self._counts.update(shares.keys())
        return TransferSlot(self._counts, tuple(shares))


def limit_transfers(
    app: Starlette, *, downloads: int = TRANSFERS_MAX, uploads: int = TRANSFERS_MAX
) -> None:
    app.state.downloads = TransferLimit("downloads", downloads)
    app.state.uploads = TransferLimit("uploads", uploads)


def downloads_of(request: HTTPConnection) -> TransferLimit:
    limit: TransferLimit = request.app.state.downloads
    return limit


def uploads_of(request: HTTPConnection) -> TransferLimit:
    limit: TransferLimit = request.app.state.uploads
    return limit


@dataclass(frozen=True, slots=True)
class OpenDownload:
    """An opened object that counts as a download until it is closed."""

    opened: OpenObject
    slot: TransferSlot

    def close(self) -> None:
        self.opened.file.close()
        self.slot.release()


async def open_download(request: HTTPConnection, store: LocalStore, key: str) -> OpenDownload:
    """Opens an object for sending. Raises NotFound, or TooManyCalls if a limit is reached."""
    slot = downloads_of(request).begin(key)
    try:
        return OpenDownload(await store.open(key), slot)
    except BaseException:
        slot.release()
        raise


async def counted_chunks(chunks: AsyncIterator[bytes], slot: TransferSlot) -> AsyncIterator[bytes]:
    """Yields the chunks, and releases the slot at the end or after an error."""
    try:
        async with aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk
    finally:
        slot.release()
