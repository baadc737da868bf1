"""An HTTP client for customers' URLs that is safe against SSRF.

Each host name is resolved once, its addresses are checked, and the checked address is called.
Downloads are limited in size, time, redirects and media type.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from comfyfleet.errors import InputUnavailable, LimitExceeded
from comfyfleet.transport.names import NameLookups, Resolver, resolve_host
from comfyfleet.transport.ssrf import (
    USUAL_PORTS,
    Address,
    HostPort,
    PublicUrl,
    is_listed,
    is_public,
    parse_address,
    parse_public_url,
    redirect_target,
)

if TYPE_CHECKING:
    import httpx


CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 30.0
ADDRESSES_MAX = 32


class PublicHttpClient:
    """Calls URLs from customers. The control plane calls such URLs only through this client."""

    def __init__(
        self,
        *,
        resolver: Resolver = resolve_host,
        transport: "httpx.AsyncBaseTransport | None" = None,
        ports: frozenset[int] | None = USUAL_PORTS,
        user_agent: str = "comfyfleet",
        private_hosts: frozenset[HostPort] = frozenset(),
    ) -> None:
        """Creates the client. `private_hosts` are hosts outside the public network that only
        webhooks may call."""
        self.ports = ports
        self.private_hosts = private_hosts
        self._names = NameLookups(resolver)
        self._transport = transport
        self._user_agent = user_agent
        self._opening = asyncio.Lock()
        self._client: httpx.AsyncClient | None = None

    async def _open(self) -> "httpx.AsyncClient":
        """Returns the client. The first request creates it in a thread.

        The client and the system's certificates cost memory and start-up time, and many control
        planes never need them. Reading the certificates in the event loop would block it for too
        long.
        """
        async with self._opening:
            if self._client is None:
                self._client = await asyncio.to_thread(self._new_client)
            return self._client

    def _new_client(self) -> "httpx.AsyncClient":
        import httpx

        return httpx.AsyncClient(
            transport=self._transport or _transport(_trusted()),
            # Proxies from the environment are ignored. They would resolve the name again, possibly
            # to a private address.
            trust_env=False,
            follow_redirects=False,
            headers={"User-Agent": self._user_agent, "Accept-Encoding": "identity"},
            timeout=httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
        )

    @asynccontextmanager
    async def request(
        self,
        method: str,
        target: PublicUrl,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        listed: Collection[HostPort] = (),
        who: Hashable = None,
    ) -> "AsyncIterator[httpx.Response]":
        """Sends a request and yields the response before its body is read. Redirects are not
        followed.

        `listed` are hosts and ports that may have a private address. `who` is the user that the URL
        belongs to, because lookups of host names are limited per user.
        """
        address = await self._address_of(target, listed, who)
        client = await self._open()
        import httpx

        # The URL contains the address, so request and check the certificate for the host's name.
        extensions = {"sni_hostname": target.host} if target.scheme == "https" else {}
        request = client.build_request(
            method,
            target.at(address),
            headers={**(headers or {}), "Host": target.authority},
            content=content,
            extensions=extensions,
        )
        try:
            response = await client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _unavailable(f"{target.host} did not respond", error) from error
        try:
            # Drop all cookies, so that one host's cookies are never sent to another.
            client.cookies.clear()
            yield response
        except httpx.HTTPError as error:
            raise _unavailable(f"{target.host} closed the connection", error) from error
        finally:
            await response.aclose()

    async def refuse_private(
        self, target: PublicUrl, listed: Collection[HostPort] = (), *, who: Hashable
    ) -> None:
        """Raises InputUnavailable if the URL leads into a private network.

        A name that can't be resolved yet passes, because it is resolved again at each call.
        """
        if addresses := await self._addresses_of(target, who):
            _require_allowed(target, addresses, listed)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _address_of(
        self, target: PublicUrl, listed: Collection[HostPort], who: Hashable
    ) -> Address:
        addresses = await self._addresses_of(target, who)
        if not addresses:
            raise InputUnavailable(f"the host {target.host} can't be resolved", field="url")
        return _require_allowed(target, addresses, listed)

    async def _addresses_of(self, target: PublicUrl, who: Hashable) -> Sequence[str]:
        """Returns the addresses of the host, or none if the name can't be resolved."""
        if parse_address(target.host):
            return [target.host]
        addresses = await self._names.addresses(target.host, target.port, who)
        return addresses[:ADDRESSES_MAX]


def _require_allowed(
    target: PublicUrl, texts: Sequence[str], listed: Collection[HostPort]
) -> Address:
    """Refuses the host if any of its addresses is private, because the next call might use that
    one. A host and port that the operator has listed may have any address."""
    addresses = [parse_address(text) for text in texts]
    valid_addresses = [address for address in addresses if address is not None]
    if valid_addresses and is_listed(target, listed):
        return valid_addresses[0]
    public = [address for address in addresses if address is not None and is_public(address)]
    if len(public) < len(addresses):
        raise InputUnavailable(f"the host {target.host} has no public address", field="url")
    return public[0]


@cache
def _trusted() -> ssl.SSLContext:
    """Returns a TLS context with the system's certificates. It is created once, because reading
    hundreds of certificates takes time."""
    return ssl.create_default_context()


def _transport(trusted: ssl.SSLContext) -> "httpx.AsyncHTTPTransport":
    """Returns a transport without keep-alive. httpx pools connections by address, so it would reuse
    a connection for other names at that address, although the certificate was checked for only one
    of them."""
    import httpx

    return httpx.AsyncHTTPTransport(
        verify=trusted, limits=httpx.Limits(max_keepalive_connections=0)
    )


def _unavailable(message: str, error: Exception) -> InputUnavailable:
    return InputUnavailable(f"{message} ({type(error).__name__})", field="url")


REDIRECTS_MAX = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
CHUNK_BYTES = 64 * 1024
HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class FetchLimits:
    max_bytes: int
    total_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class FetchedSource:
    """A download that has started. `chunks` can be read once, while it is open."""

    media_type: str
    size: int | None  # as announced
    filename: str
    chunks: AsyncIterator[bytes]


class Fetcher:
    """Downloads files. `media_type_of` determines the media type from the first bytes. If it
    returns None, the file is not downloaded."""

    def __init__(
        self, outward: PublicHttpClient, *, media_type_of: Callable[[bytes], str | None]
    ) -> None:
        self._outward = outward
        self._media_type_of = media_type_of

    @asynccontextmanager
    async def open(
        self, url: str, limits: FetchLimits, *, who: Hashable = None
    ) -> AsyncIterator[FetchedSource]:
        """Opens a download. The time limit includes the time that the caller takes to read it."""
        try:
            async with (
                asyncio.timeout(limits.total_seconds),
                self._arriving(url, who) as (
                    target,
                    response,
                ),
            ):
                yield await self._source(target, response, limits)
        except TimeoutError:
            raise InputUnavailable(
                f"the file did not arrive within {limits.total_seconds:g} seconds", field="url"
            ) from None

    @asynccontextmanager
    async def _arriving(
        self, url: str, who: Hashable
    ) -> "AsyncIterator[tuple[PublicUrl, httpx.Response]]":
        """Follows redirects. The host of each hop is resolved and checked like that of the first
        URL."""
        target = parse_public_url(url, ports=self._outward.ports)
        for _ in range(REDIRECTS_MAX + 1):
            async with self._outward.request("GET", target, who=who) as response:
                if response.status_code not in REDIRECTS:
                    _check_answer(target, response)
                    yield target, response
                    return
                location = response.headers.get("Location", "")
            target = redirect_target(target, location, ports=self._outward.ports)
        raise InputUnavailable(f"the URL redirects more than {REDIRECTS_MAX} times", field="url")

    async def _source(
        self, target: PublicUrl, response: "httpx.Response", limits: FetchLimits
    ) -> FetchedSource:
        announced = response.headers.get("Content-Length", "")
        size = int(announced) if announced.isdecimal() else None
        if size is not None and size > limits.max_bytes:
            raise _too_large(limits)
        chunks = _limited(response.aiter_raw(CHUNK_BYTES), limits)
        head = await _head(chunks)
        media_type = self._media_type_of(head)
        if media_type is None:
            raise InputUnavailable("the file at the URL isn't a supported media type", field="url")
        return FetchedSource(media_type, size, _filename(target), _joined(head, chunks))


def _check_answer(target: PublicUrl, response: "httpx.Response") -> None:
    if response.status_code != 200:
        raise InputUnavailable(f"{target.host} returned {response.status_code}", field="url")
    # We request an unencoded body and refuse a compressed one, because it could unpack to more
    # bytes than the limit.
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise InputUnavailable(
            f"{target.host} sent the file with a content encoding, which isn't supported",
            field="url",
        )


async def _limited(chunks: AsyncIterator[bytes], limits: FetchLimits) -> AsyncIterator[bytes]:
    total = 0
    async for chunk in chunks:
        total += len(chunk)
        if total > limits.max_bytes:
            raise _too_large(limits)
        yield chunk


async def _head(chunks: AsyncIterator[bytes]) -> bytes:
    head = b""
    while len(head) < HEAD_BYTES:
        chunk = await anext(chunks, None)
        if chunk is None:
            break
        head += chunk
    return head


async def _joined(head: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for chunk in chunks:
        yield chunk


def _filename(target: PublicUrl) -> str:
    """Returns a file name for display. It isn't used as a path, because `files` creates the storage
    keys."""
    return target.path.partition("?")[0].rpartition("/")[2] or "file"


def _too_large(limits: FetchLimits) -> LimitExceeded:
    return LimitExceeded(
        f"the file at the URL is larger than {limits.max_bytes:,} bytes",
        field="url",
        max_bytes=limits.max_bytes,
    )
