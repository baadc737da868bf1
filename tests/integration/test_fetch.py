"""Files from customers' URLs, from a real server that the made-up internet leads to."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from comfyfleet.errors import FleetError, InputUnavailable, InvalidInput, LimitExceeded
from comfyfleet.server.media.model import sniff_type
from comfyfleet.transport.fetch import Fetcher, FetchLimits, PublicHttpClient
from comfyfleet.transport.names import resolve_host
from comfyfleet.transport.ssrf import parse_public_url

PNG = b"\x89PNG\r\n\x1a\n" + bytes(2000)
PUBLIC, SECOND, PRIVATE = "93.184.216.34", "1.1.1.1", "10.0.0.7"
LIMITS = FetchLimits(max_bytes=100_000, total_seconds=20)


@dataclass
class Internet:
    """Names and their addresses, one answer after another; every address is our server."""

    port: int
    names: dict[str, list[Sequence[str]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    called: list[tuple[str, str]] = field(default_factory=list)
    heard: list[bytes] = field(default_factory=list)

    async def resolve(self, host: str, _port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self.names.get(host, [()])
        return answers.pop(0) if len(answers) > 1 else answers[0]


class Rerouted(httpx.AsyncHTTPTransport):
    def __init__(self, internet: Internet) -> None:
        super().__init__()
        self._internet = internet

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._internet.called.append((request.url.host, request.headers["Host"]))
        request.url = request.url.copy_with(host="127.0.0.1", port=self._internet.port)
        return await super().handle_async_request(request)


def plain(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", "Connection: close", *headers])
    return head.encode() + b"\r\n\r\n" + body


def redirect(location: str) -> bytes:
    return plain(b"", f"Location: {location}", status="302 Found")


ANSWERS = {
    "/photo.png": plain(PNG, f"Content-Length: {len(PNG)}"),
    "/endless": plain(PNG + bytes(1_000_000)),
    "/announced": plain(PNG, "Content-Length: 100001"),
    "/page": plain(b"<html>" * 200),
    "/empty": plain(b""),
    "/gone": plain(b"", status="404 Not Found"),
    "/packed": plain(PNG, "Content-Encoding: gzip"),
    "/cut": plain(PNG, "Content-Length: 9000"),
    "/to-photo": redirect("/photo.png"),
    "/to-other": redirect("http://other.example/photo.png"),
    "/to-inside": redirect("http://inside.example/photo.png"),
    "/to-metadata": redirect("http://169.254.169.254/latest/meta-data/"),
    "/to-file": redirect("file:///etc/passwd"),
    "/around": redirect("/around"),
    "/cookie": plain(b"", "Set-Cookie: a=b", "Location: /photo.png", status="302 Found"),
}


@pytest.fixture
async def internet() -> AsyncIterator[Internet]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            found.heard.append(head)
            path = head.split(b" ")[1].decode()
            if path == "/silent":
                await asyncio.sleep(30)
            writer.write(ANSWERS[path])
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    found = Internet(server.sockets[0].getsockname()[1])
    found.names = {
        "example.com": [[PUBLIC, SECOND]],
        "other.example": [[SECOND]],
        "inside.example": [[PRIVATE]],
        "mixed.example": [[PUBLIC, PRIVATE]],
        "rebound.example": [[PUBLIC], [PRIVATE]],
    }
    yield found
    server.close()


@pytest.fixture
async def outward(internet: Internet) -> AsyncIterator[PublicHttpClient]:
    made = PublicHttpClient(resolver=internet.resolve, transport=Rerouted(internet))
    yield made
    await made.aclose()


async def fetched(outward: PublicHttpClient, url: str, limits: FetchLimits = LIMITS) -> bytes:
    async with Fetcher(outward, media_type_of=sniff_type).open(url, limits) as source:
        assert source.media_type == "image/png"
        return b"".join([chunk async for chunk in source.chunks])


async def test_a_file_is_fetched_from_the_address_that_was_looked_up(
    internet: Internet, outward: PublicHttpClient
) -> None:
    async with Fetcher(outward, media_type_of=sniff_type).open(
        "http://example.com/photo.png", LIMITS
    ) as source:
        assert (source.media_type, source.size) == ("image/png", len(PNG))
        assert source.filename == "photo.png"
        assert b"".join([chunk async for chunk in source.chunks]) == PNG
    assert internet.called == [(PUBLIC, "example.com")]
    assert internet.asked == ["example.com"]


async def test_a_name_that_changes_its_address_gains_nothing(
    internet: Internet, outward: PublicHttpClient
) -> None:
    assert await fetched(outward, "http://rebound.example/photo.png") == PNG
    assert internet.called == [(PUBLIC, "rebound.example")]
    with pytest.raises(InputUnavailable):
        await fetched(outward, "http://rebound.example/photo.png")
    assert len(internet.called) == 1


@pytest.mark.parametrize(
    "host",
    ["inside.example", "mixed.example", "127.0.0.1", "169.254.169.254", "[::1]"],
)
async def test_what_is_not_public_is_never_called(
    internet: Internet, outward: PublicHttpClient, host: str
) -> None:
    with pytest.raises(InputUnavailable, match="no public address"):
        await fetched(outward, f"http://{host}/photo.png")
    assert internet.called == []
    assert internet.heard == []


async def test_a_name_that_nobody_knows_is_told_as_such(outward: PublicHttpClient) -> None:
    with pytest.raises(InputUnavailable, match=r"unknown\.example can't be resolved"):
        await fetched(outward, "http://unknown.example/photo.png")


@pytest.mark.parametrize("spelled", ["2130706433", "0x7f.1", "017700000001", "localhost"])
async def test_odd_spellings_of_ones_own_machine_are_seen_through(
    internet: Internet, spelled: str
) -> None:
    real = PublicHttpClient(resolver=resolve_host, transport=Rerouted(internet))
    with pytest.raises(InputUnavailable, match="no public address"):
        await fetched(real, f"http://{spelled}/photo.png")
    await real.aclose()
    assert internet.called == []


@pytest.mark.parametrize("path", ["/to-photo", "/to-other"])
async def test_a_redirect_is_followed_to_public_addresses(
    outward: PublicHttpClient, path: str
) -> None:
    assert await fetched(outward, f"http://example.com{path}") == PNG


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/to-inside", InputUnavailable),
        ("/to-metadata", InputUnavailable),
        ("/to-file", InvalidInput),
        ("/around", InputUnavailable),
    ],
)
async def test_a_redirect_elsewhere_is_not(
    internet: Internet, outward: PublicHttpClient, path: str, error: type[FleetError]
) -> None:
    with pytest.raises(error):
        await fetched(outward, f"http://example.com{path}")
    assert {address for address, _ in internet.called} == {PUBLIC}
    assert len(internet.called) <= 6


async def test_a_cookie_is_not_carried_on(internet: Internet, outward: PublicHttpClient) -> None:
    await fetched(outward, "http://example.com/cookie")
    assert not any(b"cookie:" in head.lower() for head in internet.heard)


@pytest.mark.parametrize("path", ["/endless", "/announced"])
async def test_more_than_allowed_is_broken_off(outward: PublicHttpClient, path: str) -> None:
    with pytest.raises(LimitExceeded):
        await fetched(outward, f"http://example.com{path}")


@pytest.mark.parametrize("path", ["/page", "/empty", "/gone", "/packed", "/cut"])
async def test_what_is_no_whole_medium_is_refused(outward: PublicHttpClient, path: str) -> None:
    with pytest.raises(InputUnavailable):
        await fetched(outward, f"http://example.com{path}")


async def test_a_server_that_says_nothing_is_left_in_time(outward: PublicHttpClient) -> None:
    with pytest.raises(InputUnavailable, match=r"within 0\.2 seconds"):
        await fetched(outward, "http://example.com/silent", FetchLimits(1000, total_seconds=0.2))


async def test_a_word_can_be_sent_and_redirects_are_then_only_answers(
    internet: Internet, outward: PublicHttpClient
) -> None:
    target = parse_public_url("http://example.com/to-photo")
    headers = {"Host": "evil.example", "X-Sign": "1"}
    async with outward.request("POST", target, headers=headers, content=b"{}") as response:
        assert response.status_code == 302
    assert internet.called == [(PUBLIC, "example.com")]
    assert internet.heard[0].startswith(b"POST /to-photo ")


async def test_the_client_is_created_in_a_thread_and_once(
    internet: Internet, outward: PublicHttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing the library and reading the system's certificates would stop the event loop."""
    threads: list[int] = []
    create = httpx.AsyncClient

    def create_and_note(**options: Any) -> httpx.AsyncClient:
        threads.append(threading.get_ident())
        return create(**options)

    monkeypatch.setattr(httpx, "AsyncClient", create_and_note)
    urls = ("http://example.com/photo.png", "http://other.example/photo.png")
    assert await asyncio.gather(*(fetched(outward, url) for url in urls)) == [PNG, PNG]
    (thread,) = threads
    assert thread != threading.get_ident()
