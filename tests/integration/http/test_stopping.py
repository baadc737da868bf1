"""A control plane that stops answers whoever waits, ends streams whole, and never returns a 500."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from tests.support.databases.factory import Databases
from tests.support.server.asgi import free_listener, url_of
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import effect_setup_on

from comfyfleet.server.http import listener as listening
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.connections import HAS_HTTPTOOLS, H11Connection, with_limits
from comfyfleet.server.http.listener import serve

PATIENCE_SECONDS = 20
WAIT_SECONDS = 60
PARSERS = ["h11", *(["httptools"] if HAS_HTTPTOOLS else [])]


@dataclass
class Served:
    app: FastAPI
    client: httpx.AsyncClient  # with a customer's key
    job_id: str
    stop: asyncio.Event
    serving: "asyncio.Task[None]"

    async def until_waiting(self, requests: int) -> None:
        """Waits until so many requests wait for a change of the job."""
        following = self.app.state.plane.context.notifier._following
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(following.get(UUID(self.job_id), ())) < requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.serving


@pytest.fixture(params=PARSERS)
async def served(
    request: pytest.FixtureRequest, sqlite_databases: Databases, tmp_path: Path
) -> AsyncIterator[Served]:
    async with plane_on(sqlite_databases, tmp_path) as plane, effect_setup_on(plane) as setup:
        customer = await setup.customer()
        job_id = await customer.job(setup.draw)
        listener, stop, app = free_listener(), asyncio.Event(), create_app(plane)
        app.state.stop = stop
        kind = with_limits(H11Connection) if request.param == "h11" else with_limits()
        serving = asyncio.create_task(
            serve(app, listener, stop, at_stop=plane.end_waits, connection=kind)
        )
        async with httpx.AsyncClient(
            base_url=url_of(listener),
            headers={"Authorization": f"Bearer {customer.key}"},
            timeout=PATIENCE_SECONDS,
        ) as client:
            served = Served(app, client, job_id, stop, serving)
            yield served
            await served.end()


async def test_who_waits_for_a_job_gets_it_as_it_is(served: Served) -> None:
    path = f"/api/ai-jobs/{served.job_id}"
    waiting = [
        asyncio.create_task(served.client.get(path, params={"wait": WAIT_SECONDS}))
        for _ in range(8)
    ]
    await served.until_waiting(8)
    await served.end()
    for answer in await asyncio.gather(*waiting):
        assert (answer.status_code, answer.json()["status"]) == (200, "queued")
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    "path", ["/api/ai-jobs/{}/events", "/api/account/events", "/api/graph-runs/events"]
)
async def test_event_streams_end_whole_and_tell_readers_to_reconnect(
    served: Served, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served.client.stream("GET", path.format(served.job_id)) as stream:
        parts = stream.aiter_text()
        text = await anext(parts)
        served.stop.set()
        # A stream without its last chunk would raise RemoteProtocolError here.
        text += "".join([part async for part in parts])
    await served.end()
    assert text.endswith("retry: 1000\n\n")
    assert "Traceback" not in caplog.text
    assert "exceeded" not in caplog.text


async def test_it_is_not_ready_as_soon_as_it_stops(served: Served) -> None:
    assert (await served.client.get("/readyz")).status_code == 200
    served.stop.set()
    answer = await served.client.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "stopping")
    served.stop.set()


async def test_new_connections_are_refused_while_open_requests_are_answered(
    served: Served,
) -> None:
    release = asyncio.Event()

    async def slow(_: Request) -> Response:
        await release.wait()
        return Response("done")

    served.app.router.add_route("/slow", slow)
    waiting = asyncio.create_task(served.client.get("/slow"))
    await _until_asked(served, 1)
    served.stop.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await _is_refused(served):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    release.set()
    assert (await waiting).text == "done"


async def _is_refused(served: Served) -> bool:
    url = served.client.base_url
    try:
        _, writer = await asyncio.open_connection(url.host, url.port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def _until_asked(served: Served, requests: int) -> None:
    tasks = asyncio.all_tasks
    async with asyncio.timeout(PATIENCE_SECONDS):
        while sum("run_asgi" in repr(task) for task in tasks()) < requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_does_not_end_in_time_is_answered_with_503_and_no_traceback(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "GRACE_SECONDS", 0.1)

    async def never(_: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def endless(_: Request) -> Response:
        async def chunks() -> AsyncIterator[str]:
            yield "first"
            await asyncio.Event().wait()

        return StreamingResponse(chunks())

    served.app.router.add_route("/never", never)
    served.app.router.add_route("/endless", endless)
    waiting = asyncio.create_task(served.client.get("/never"))
    streaming = asyncio.create_task(served.client.get("/endless"))
    await _until_asked(served, 2)
    with caplog.at_level(logging.WARNING):
        await served.end()
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"]
    with pytest.raises(httpx.RemoteProtocolError):
        await streaming
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "canceling 2 requests that didn't finish in time"
