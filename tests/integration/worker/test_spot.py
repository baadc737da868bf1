"""Spot notices from a metadata service that is as strict as EC2's."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from tests.support.workers.metadata_server import MetadataServer, serving_metadata

from comfyfleet.worker.aws import InstanceMetadata, MetadataUnavailable, SpotNotice, SpotWatch

ACTION = "/latest/meta-data/spot/instance-action"
WAIT_SECONDS_MAX = 10


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with serving_metadata(instance_id="i-0123456789abcdef0") as found:
        yield found


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[InstanceMetadata]:
    metadata = InstanceMetadata(url)
    try:
        yield metadata
    finally:
        await metadata.aclose()


class Looks:
    """A pause that lets a test act between looks, and writes down how long each would last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._taken = asyncio.Semaphore(0)
        self._allowed = asyncio.Semaphore(0)

    async def pause(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._taken.release()
        await self._allowed.acquire()

    async def take(self, count: int = 1) -> None:
        """Until the watch has looked so many times more."""
        for _ in range(count):
            await asyncio.wait_for(self._taken.acquire(), WAIT_SECONDS_MAX)
            self._allowed.release()


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[tuple[Looks, list[SpotNotice]]]:
    looks, heard = Looks(), list[SpotNotice]()
    async with opened(url) as metadata:

        async def listen() -> None:
            async for notice in SpotWatch(metadata, pause=looks.pause).notices():
                heard.append(notice)

        listening = asyncio.create_task(listen())
        try:
            yield looks, heard
        finally:
            listening.cancel()
            await asyncio.wait([listening])
            assert listening.cancelled(), listening.exception()


async def test_a_value_is_read_with_a_session_key_that_serves_many_questions(
    server: MetadataServer,
) -> None:
    async with opened(server.url) as metadata:
        assert [await metadata.get("instance-id") for _ in range(3)] == ["i-0123456789abcdef0"] * 3
        assert await metadata.get("spot/instance-action") is None
    assert server.asked["PUT /latest/api/token"] == 1


async def test_a_session_key_is_renewed_before_it_ends(server: MetadataServer) -> None:
    moments = [0.0, 299.0, 301.0, 599.0, 602.0]
    looks = iter(moments)
    metadata = InstanceMetadata(server.url, key_seconds=600, monotonic=lambda: next(looks))
    for _ in moments:
        assert await metadata.get("instance-id")
    await metadata.aclose()
    assert server.asked["PUT /latest/api/token"] == 3
    assert all(count == 5 for path, count in server.asked.items() if path.startswith("GET"))


async def test_a_key_that_the_service_forgot_is_asked_for_again(server: MetadataServer) -> None:
    async with opened(server.url) as metadata:
        await metadata.get("instance-id")
        server.forget_keys()
        assert await metadata.get("instance-id") == "i-0123456789abcdef0"
    assert server.asked["PUT /latest/api/token"] == 2


async def test_a_service_that_refuses_every_key_is_asked_twice_and_no_more(
    server: MetadataServer,
) -> None:
    server.raw[ACTION] = (401, b"")
    async with opened(server.url) as metadata:
        with pytest.raises(MetadataUnavailable):
            await metadata.get("spot/instance-action")
    assert server.asked[f"GET {ACTION}"] == 2


@pytest.mark.parametrize(
    "answer", [(404, b""), (200, b""), (200, b"two\nlines"), (200, b"\xff\xfe"), (503, b"")]
)
async def test_what_gives_no_session_key_is_not_ec2(
    server: MetadataServer, answer: tuple[int, bytes]
) -> None:
    server.raw["/latest/api/token"] = answer
    server.raw[ACTION] = (200, b'{"action": "terminate"}')
    async with opened(server.url) as metadata:
        with pytest.raises(MetadataUnavailable):
            await metadata.get("spot/instance-action")
    assert not server.asked[f"GET {ACTION}"]


async def test_a_proxy_is_never_asked(
    server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with opened(server.url) as metadata:
        assert await metadata.get("instance-id")


async def test_a_spot_notice_is_told_once_and_again_when_its_time_changes(
    server: MetadataServer,
) -> None:
    async with watching(server.url) as (looks, heard):
        await looks.take(2)
        assert heard == []
        at = server.announce_spot(seconds=120)
        await looks.take(3)
        assert heard == [SpotNotice("spot", at)]
        sooner = server.announce_spot(seconds=60)
        await looks.take(2)
        assert heard == [SpotNotice("spot", at), SpotNotice("spot", sooner)]
    assert set(looks.seconds) == {5.0}


async def test_rebalance_advice_is_told_once(server: MetadataServer) -> None:
    async with watching(server.url) as (looks, heard):
        server.advise_rebalance()
        await looks.take(3)
        assert heard == [SpotNotice("rebalance")]


@pytest.mark.parametrize("body", [b"<html>", b"{", b"\xff\xfe\x00", b"x" * 200_000])
async def test_a_malformed_answer_stops_nothing_and_is_said_once(
    server: MetadataServer, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with watching(server.url) as (looks, heard):
            await looks.take(1)
            server.raw[ACTION] = (200, body)
            await looks.take(4)
            assert heard == []
            del server.raw[ACTION]
            server.announce_spot()
            await looks.take(2)
    assert [notice.kind for notice in heard] == ["spot"]
    assert len(caplog.records) == 1


async def test_off_ec2_it_is_noticed_once_and_looked_for_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unheard:
        port = unheard.getsockname()[1]
    with caplog.at_level(logging.INFO, logger="comfyfleet"):
        async with watching(f"http://127.0.0.1:{port}") as (looks, heard):
            await looks.take(4)
    assert heard == []
    assert set(looks.seconds) == {60.0}
    assert len(caplog.records) == 1


async def test_a_service_that_pauses_is_asked_as_often_as_before(
    server: MetadataServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with watching(server.url) as (looks, heard):
            await looks.take(1)
            server.raw[ACTION] = (503, b"")
            await looks.take(3)
            del server.raw[ACTION]
            server.announce_spot()
            await looks.take(2)
    assert [notice.kind for notice in heard] == ["spot"]
    assert set(looks.seconds) == {5.0}
    assert len(caplog.records) == 1
