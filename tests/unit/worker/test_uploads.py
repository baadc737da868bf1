"""Uploads to a store that is away: few log lines, growing pauses, no new URL for each attempt."""

import logging
from pathlib import Path
from typing import cast

import httpx
import pytest
from tests.unit.worker.test_failures import JOB

from comfyfleet.api.values import OutputSlot, WantedOutput
from comfyfleet.transport.retry import RetryPolicy
from comfyfleet.worker.files import OutputUploads, ReadyFile
from comfyfleet.worker.heartbeat import HeartbeatLoop

FILE = ReadyFile(Path("made.png"), 4, "hash", content=b"made")


class Urls:
    """Counts the URLs that were requested."""

    def __init__(self) -> None:
        self.requested = 0

    async def renew_outputs(self, wanted: list[WantedOutput]) -> dict[str, OutputSlot]:
        self.requested += 1
        return {each.name: OutputSlot(name=each.name, url="http://store/new") for each in wanted}


class Store(httpx.AsyncBaseTransport):
    """Refuses or doesn't answer the first attempts. None stands for no answer."""

    def __init__(self, *statuses: int | None) -> None:
        self.statuses = list(statuses)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        status = self.statuses.pop(0) if self.statuses else 200
        if status is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(status)


async def upload(store: Store) -> tuple[list[float], Urls]:
    """Returns the pauses between attempts, and the URLs that were requested."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    urls = Urls()
    async with httpx.AsyncClient(transport=store) as client:
        retry = RetryPolicy(sleep=pause, chance=lambda: 1.0)
        uploads = OutputUploads(client, cast(HeartbeatLoop, urls), JOB, retry)
        await uploads.put(FILE, name="made.png", content_type="image/png")
    return pauses, urls


@pytest.mark.parametrize("trouble", [None, 503])
async def test_the_pauses_grow_while_the_store_is_away(
    trouble: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pauses, urls = await upload(Store(*[trouble] * 100))
    assert pauses[:5] == [0.5, 1, 2, 4, 8]
    assert set(pauses[5:]) == {8}
    assert len(caplog.records) == 7, "the attempts 1, 2, 4, 8, 16, 32, 64"
    assert urls.requested == 1, "the URL is still good"


async def test_a_refused_upload_gets_another_url_at_once() -> None:
    pauses, urls = await upload(Store(403))
    assert pauses == []
    assert urls.requested == 2
