"""A ComfyUI whose WebSocket a proxy refuses: its runs are polled."""

import logging
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from tests.support.backends.proxy import faulty_proxy
from tests.support.workers.memory_plane import eventually
from tests.support.workers.plane_server import serving_plane
from tests.support.workers.prompts import failing, picture, steps
from tests.support.workers.workers import running_worker, settings_for

from comfyfleet.api.worker import Fail
from comfyfleet.comfy import BackendLimits, Cancellation, ComfyServer, ServerSettings
from comfyfleet.comfy.events import Cancelled, End, Started, Succeeded
from comfyfleet.engine import Served, serve_in_thread
from comfyfleet.errors import ServerUnavailable

# Much shorter than the runs below: that a run shows no progress must be no stall.
LIMITS = BackendLimits(max_retries=0, stall_seconds=0.4)


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    with serve_in_thread() as served:
        yield served


@pytest.mark.parametrize("status", [403, 404, 502])
async def test_a_run_is_polled_to_its_end_and_one_line_says_so(
    engine: Served, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with faulty_proxy(engine.url) as proxy:
        proxy.socket_status = status
        async with ComfyServer(ServerSettings(proxy.url, LIMITS)) as server:
            for prompt in (steps(10, 100), picture()):
                run = await server.submit(prompt, prompt_id=str(uuid4()))
                events = [event async for event in server.follow(run.run_id)]
                assert any(isinstance(event, Started) for event in events)
                assert isinstance(events[-1], Succeeded)
                assert (await server.outputs(run.run_id)).files
    told = [each for each in caplog.messages if "no WebSocket" in each]
    assert len(told) == 1
    assert str(status) in told[0]


async def test_a_polled_run_can_be_cancelled(engine: Served) -> None:
    async with faulty_proxy(engine.url) as proxy:
        proxy.socket_status = 404
        async with ComfyServer(ServerSettings(proxy.url, LIMITS)) as server:
            run = await server.submit(steps(1000, 50), prompt_id=str(uuid4()))
            end: End | None = None
            async for event in server.follow(run.run_id):
                if isinstance(event, Started):
                    assert await server.cancel(run.run_id) is Cancellation.CANCELLED
                end = event if isinstance(event, End) else end
            assert isinstance(end, Cancelled)


async def test_a_server_that_answers_nothing_is_not_polled(engine: Served) -> None:
    async with faulty_proxy(engine.url) as proxy:
        proxy.target = "http://127.0.0.1:1"
        async with ComfyServer(ServerSettings(proxy.url, LIMITS)) as server:
            with pytest.raises(ServerUnavailable):
                await server.submit(picture(), prompt_id=str(uuid4()))


async def test_a_worker_completes_jobs_of_a_backend_without_a_socket(
    engine: Served, tmp_path: Path
) -> None:
    with serving_plane() as served:
        async with faulty_proxy(engine.url) as proxy:
            proxy.socket_status = 404
            jobs = [served.plane.add(steps(3, 50)) for _ in range(2)]
            async with running_worker(settings_for(served.plane, proxy.url, tmp_path)):
                await eventually(lambda: all(job.word for job in jobs))
    assert all(job.result.outputs and job.leases == 1 for job in jobs)


async def test_a_worker_reports_the_error_that_only_the_history_contains(
    engine: Served, tmp_path: Path
) -> None:
    with serving_plane() as served:
        async with faulty_proxy(engine.url) as proxy:
            proxy.socket_status = 404
            job = served.plane.add(failing("no such color"), records_run=True)
            async with running_worker(settings_for(served.plane, proxy.url, tmp_path)):
                await eventually(lambda: job.word)
    assert isinstance(job.word, Fail)
    ((kind, error),) = job.word.events
    async with httpx.AsyncClient(base_url=engine.url) as client:
        history = (await client.get(f"/history/{error['prompt_id']}")).json()
    (entry,) = history.values()
    assert [kind, error] == entry["status"]["messages"][-1]
    assert kind == "execution_error"
    assert (error["node_id"], error["node_type"]) == ("1", "ComfyfleetFail")
    assert "no such color" in error["exception_message"]
    assert error["traceback"]
