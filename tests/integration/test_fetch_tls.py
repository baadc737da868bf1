"""Called by its address, a server must still prove that it has the name."""

import asyncio
import ssl
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.server.certificate import certificate

from comfyfleet.errors import InputUnavailable
from comfyfleet.transport.fetch import PublicHttpClient, _transport
from comfyfleet.transport.ssrf import parse_public_url


class Rerouted(httpx.AsyncBaseTransport):
    """The transport of `Outward` itself, to a server of this test."""

    def __init__(self, port: int, trusted: Path) -> None:
        self._inner = _transport(ssl.create_default_context(cafile=str(trusted)))
        self._port = port

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert request.url.host == "1.1.1.1"
        request.url = request.url.copy_with(host="127.0.0.1", port=self._port)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


@asynccontextmanager
async def serving(pem: Path) -> Any:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As many requests as the client likes to send by one connection."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                await writer.drain()
        writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def resolve(_host: str, _port: int) -> Sequence[str]:
    return ["1.1.1.1"]


async def test_the_certificate_is_held_against_the_name(tmp_path: Path) -> None:
    pem = certificate(tmp_path, "example.com")
    async with serving(pem) as port:
        outward = PublicHttpClient(resolver=resolve, transport=Rerouted(port, pem))
        async with outward.request("GET", parse_public_url("https://example.com/")) as response:
            assert response.status_code == 204
        await outward.aclose()


async def test_a_certificate_of_another_name_is_refused(tmp_path: Path) -> None:
    pem = certificate(tmp_path, "evil.example")
    async with serving(pem) as port:
        outward = PublicHttpClient(resolver=resolve, transport=Rerouted(port, pem))
        with pytest.raises(InputUnavailable, match="did not respond"):
            async with outward.request("GET", parse_public_url("https://example.com/")):
                pass
        await outward.aclose()


async def test_a_second_name_at_the_same_address_must_prove_itself_too(tmp_path: Path) -> None:
    """A connection that is kept would serve it with the certificate of the first."""
    pem = certificate(tmp_path, "example.com")
    async with serving(pem) as port:
        outward = PublicHttpClient(resolver=resolve, transport=Rerouted(port, pem))
        async with outward.request("GET", parse_public_url("https://example.com/")) as answer:
            assert await answer.aread() == b""  # what is read to its end could be kept
        with pytest.raises(InputUnavailable, match=r"other\.example did not respond"):
            async with outward.request("GET", parse_public_url("https://other.example/")):
                pass
        await outward.aclose()
