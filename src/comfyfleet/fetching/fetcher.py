"""Brings a file from a customer's URL: limited in size, time and hops, and by what it really is."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from comfyfleet.fetching.outward import Outward
from comfyfleet.fetching.targets import Target, redirected, target_of
from comfyfleet.kernel.errors import InputUnavailable, LimitExceeded

if TYPE_CHECKING:
    import httpx

REDIRECTS_MAX = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
CHUNK_BYTES = 64 * 1024
HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Limits:
    max_bytes: int
    total_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Source:
    """A file that has begun to arrive. `chunks` can be read once, and only while it is open."""

    media_type: str
    size: int | None  # as announced
    filename: str
    chunks: AsyncIterator[bytes]


class Fetcher:
    """`media_type_of` tells what the first bytes are, or none, and then nothing is fetched."""

    def __init__(self, outward: Outward, *, media_type_of: Callable[[bytes], str | None]) -> None:
        self._outward = outward
        self._media_type_of = media_type_of

    @asynccontextmanager
    async def open(self, url: str, limits: Limits) -> AsyncIterator[Source]:
        """All of it within the limits, the reading by whoever opened it included."""
        try:
            async with (
                asyncio.timeout(limits.total_seconds),
                self._arriving(url) as (
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
    async def _arriving(self, url: str) -> "AsyncIterator[tuple[Target, httpx.Response]]":
        """Each hop is looked up and checked like the first."""
        target = target_of(url, ports=self._outward.ports)
        for _ in range(REDIRECTS_MAX + 1):
            async with self._outward.request("GET", target) as response:
                if response.status_code not in REDIRECTS:
                    _check_answer(target, response)
                    yield target, response
                    return
                location = response.headers.get("Location", "")
            target = redirected(target, location, ports=self._outward.ports)
        raise InputUnavailable(f"more than {REDIRECTS_MAX} redirects", field="url")

    async def _source(self, target: Target, response: "httpx.Response", limits: Limits) -> Source:
        announced = response.headers.get("Content-Length", "")
        size = int(announced) if announced.isdecimal() else None
        if size is not None and size > limits.max_bytes:
            raise _too_large(limits)
        chunks = _limited(response.aiter_raw(CHUNK_BYTES), limits)
        head = await _head(chunks)
        media_type = self._media_type_of(head)
        if media_type is None:
            raise InputUnavailable("the URL leads to no media that we know", field="url")
        return Source(media_type, size, _filename(target), _joined(head, chunks))


def _check_answer(target: Target, response: "httpx.Response") -> None:
    if response.status_code != 200:
        raise InputUnavailable(f"{target.host} answered {response.status_code}", field="url")
    # Asked for as it is: what unpacks to more than was counted is not accepted.
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise InputUnavailable(f"{target.host} sent the file packed", field="url")


async def _limited(chunks: AsyncIterator[bytes], limits: Limits) -> AsyncIterator[bytes]:
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


def _filename(target: Target) -> str:
    """For show only; keys are made by `files`, which lets no name become a path."""
    return target.path.partition("?")[0].rpartition("/")[2] or "file"


def _too_large(limits: Limits) -> LimitExceeded:
    return LimitExceeded(
        f"the file at the URL has more than {limits.max_bytes:,} bytes",
        field="url",
        max_bytes=limits.max_bytes,
    )
