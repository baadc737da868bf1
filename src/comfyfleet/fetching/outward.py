"""One request to a customer's address: looked up once, checked, and called by what was found."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, TypeAlias

from comfyfleet.fetching.addresses import Address, is_public, parsed
from comfyfleet.fetching.targets import USUAL_PORTS, Target
from comfyfleet.kernel.errors import InputUnavailable

if TYPE_CHECKING:
    import httpx

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 30.0
ADDRESSES_MAX = 32


async def resolved(host: str, port: int) -> Sequence[str]:
    """By the system's resolver, which also reads such spellings of an address as 0x7f.1."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return [str(address[0]) for *_, address in found]


class Outward:
    """The one way out of the control plane to where somebody else says."""

    def __init__(
        self,
        *,
        resolver: Resolver = resolved,
        transport: "httpx.AsyncBaseTransport | None" = None,
        ports: frozenset[int] | None = USUAL_PORTS,
        user_agent: str = "comfyfleet",
    ) -> None:
        self.ports = ports
        self._resolver = resolver
        self._transport = transport
        self._user_agent = user_agent

    @cached_property
    def _client(self) -> "httpx.AsyncClient":
        """Made for the first request: it and the system's certificates take memory, and time at the
        start, and many control planes never call anybody."""
        import httpx

        return httpx.AsyncClient(
            transport=self._transport or _transport(_trusted()),
            # A proxy from the environment would look the name up again, and go where it pleases.
            trust_env=False,
            follow_redirects=False,
            headers={"User-Agent": self._user_agent, "Accept-Encoding": "identity"},
            timeout=httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
        )

    @asynccontextmanager
    async def request(
        self,
        method: str,
        target: Target,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> "AsyncIterator[httpx.Response]":
        """The answer as it begins; a redirect is an answer like others."""
        import httpx

        address = await self._address_of(target)
        # A name in the certificate is asked for by the host's name, not by the address.
        extensions = {"sni_hostname": target.host} if target.scheme == "https" else {}
        request = self._client.build_request(
            method,
            target.at(address),
            headers={**(headers or {}), "Host": target.authority},
            content=content,
            extensions=extensions,
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _unavailable(f"{target.host} did not answer", error) from error
        try:
            # One host's cookies are no other's, and all of them are nobody's of ours.
            self._client.cookies.clear()
            yield response
        except httpx.HTTPError as error:
            raise _unavailable(f"{target.host} broke off", error) from error
        finally:
            await response.aclose()

    async def refuse_private(self, target: Target) -> None:
        """InputUnavailable if it leads into a network of ours. A name that nobody knows yet may do
        later: it is looked up again at each call."""
        if await self._addresses_of(target):
            await self._address_of(target)

    async def aclose(self) -> None:
        if "_client" in self.__dict__:
            await self._client.aclose()

    async def _address_of(self, target: Target) -> Address:
        """One private address among several is enough to refuse: the next call might get that one."""
        found = [parsed(text) for text in await self._addresses_of(target)]
        if not found:
            raise InputUnavailable(f"the host {target.host} can't be found", field="url")
        public = [each for each in found if each is not None and is_public(each)]
        if len(public) < len(found):
            raise InputUnavailable(f"the host {target.host} has no public address", field="url")
        return public[0]

    async def _addresses_of(self, target: Target) -> Sequence[str]:
        """None if nobody knows the name."""
        literal = parsed(target.host)
        texts = [target.host] if literal else await self._resolver(target.host, target.port)
        return texts[:ADDRESSES_MAX]


@cache
def _trusted() -> ssl.SSLContext:
    """Read once: the system's certificates are hundreds."""
    return ssl.create_default_context()


def _transport(trusted: ssl.SSLContext) -> "httpx.AsyncHTTPTransport":
    """Without keep-alive: connections are pooled by address, and a certificate that was checked for
    one name would serve every other name at the same address."""
    import httpx

    return httpx.AsyncHTTPTransport(
        verify=trusted, limits=httpx.Limits(max_keepalive_connections=0)
    )


def _unavailable(says: str, error: Exception) -> InputUnavailable:
    return InputUnavailable(f"{says} ({type(error).__name__})", field="url")
