"""What a worker's log tells of those that don't answer, and of its own leaving."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.support.server.command_process import STOP_SECONDS_MAX, started
from tests.support.workers.memory_plane import SECRET, Plane, eventually
from tests.support.workers.prompts import picture, steps
from tests.support.workers.workers import running_worker, settings_for

from comfyfleet.api.worker import Heartbeat, Poll, Register
from comfyfleet.engine import serve_in_thread
from comfyfleet.engine.serve import Served as Engine
from comfyfleet.errors import InvalidInput, Unavailable
from comfyfleet.transport.http import Call
from comfyfleet.worker.control_client import ControlClient
from comfyfleet.worker.factory import open_worker


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    found = [each for each in caplog.records if each.levelno >= logging.WARNING]
    return [each.getMessage() for each in found if word in each.getMessage()]


async def test_a_backend_that_is_not_there_is_told_once_and_that_it_is_back(
    plane: Plane, tmp_path: Path, unused_tcp_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    # Commands that ran in this process before have set a level of their own.
    for name in ("comfyfleet", "comfyfleet.comfy.calls"):
        caplog.set_level(logging.INFO, logger=name)
    job = plane.add(picture())
    place = f"127.0.0.1:{unused_tcp_port}"
    async with running_worker(settings_for(plane, f"http://{place}", tmp_path)):
        calls = "comfyfleet.comfy.calls"
        await eventually(lambda: sum(each.name == calls for each in caplog.records) >= 2)
        with serve_in_thread(port=unused_tcp_port):
            await eventually(lambda: job.word)
            told = lines(caplog, place)
    assert len(told) == 2
    assert told[0].startswith(f"waiting for the backend at http://{place}: ")
    assert told[0].endswith("connection refused")
    assert told[1] == f"the backend at http://{place} is ready"


async def test_a_control_plane_that_is_not_there_is_told_once_with_its_url(
    unused_tcp_port: int, plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    control = ControlClient(url)
    said = Register(worker_id="w", fleet_slug="gpus")
    for _ in range(3):
        with pytest.raises(Unavailable):
            await control.register(said, SECRET)
    await control.aclose()
    assert lines(caplog, "control plane") == [
        f"the control plane at {url} isn't responding: register at {url}: connection refused"
    ]
    plane.errors["register"] = 1
    control = ControlClient(plane.url)
    with pytest.raises(Unavailable):
        await control.register(said, SECRET)
    await control.register(said, SECRET)
    await control.aclose()
    last = lines(caplog, "control plane")[-1]
    assert last == f"the control plane at {plane.url} is responding again"


async def test_a_part_of_the_service_that_is_away_is_no_control_plane_that_does_not_answer(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool of tenants is down: their jobs' results are not taken, all else goes on."""
    control = ControlClient(plane.url)
    await control.register(Register(worker_id="w", fleet_slug="gpus"), SECRET)
    plane.errors["heartbeat"] = 2
    for _ in range(2):
        with pytest.raises(Unavailable):
            await control.heartbeat(Heartbeat(dispatch_id=1, lease_token=uuid4()))
        await control.poll(Poll(worker_id="w"))
    assert lines(caplog, "control plane") == []
    plane.errors["poll"] = plane.errors["heartbeat"] = 1
    with pytest.raises(Unavailable):
        await control.poll(Poll(worker_id="w"))
    with pytest.raises(Unavailable):
        await control.heartbeat(Heartbeat(dispatch_id=1, lease_token=uuid4()))
    await control.poll(Poll(worker_id="w"))
    await control.aclose()
    told = lines(caplog, "control plane")
    assert [each.rpartition(plane.url)[2].partition(":")[0] for each in told] == [
        " isn't responding",
        " is responding again",
    ]


async def test_a_worker_without_a_secret_says_that_it_is_not_set(
    plane: Plane, tmp_path: Path
) -> None:
    settings = settings_for(plane, "http://127.0.0.1:1", tmp_path, secret="")
    async with open_worker(settings, {}) as worker:
        with pytest.raises(InvalidInput, match="secret is not set"):
            await worker.work()


def test_the_command_names_the_variable_that_is_not_set(plane: Plane, tmp_path: Path) -> None:
    where = ("--control", plane.url, "--fleet", "gpus", "--backend", "http://127.0.0.1:1")
    with started("worker", *where, "--state", str(tmp_path), folder=tmp_path) as running:
        running.wait_for_line("secret is not set")
        running.wait_for_line("export COMFYFLEET_FLEET_SECRET=")
        assert running.process.wait(STOP_SECONDS_MAX) == 1


async def test_who_stops_while_a_job_runs_tells_that_it_waits(
    plane: Plane, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = plane.add(steps(20, 50))
    async with open_worker(settings_for(plane, engine.url, tmp_path), {}) as worker:
        work = asyncio.create_task(worker.work())
        await eventually(lambda: job.started)
        worker.stop.ask("shutdown", 10)
        await work
    assert job.result.outputs
    (told,) = lines(caplog, "second Ctrl-C")
    assert "jobs: 1" in told


async def test_why_there_are_no_jobs_is_told_once_until_it_is_something_else(
    plane: Plane, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plane.reason = "this worker waits for an operator's approval"
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: len(plane.polls) > 2)
        plane.reason = "this worker is draining"
        asked = len(plane.polls)
        await eventually(lambda: len(plane.polls) > asked + 1)
    told = [each.getMessage() for each in caplog.records]
    assert [each for each in told if each.startswith("no jobs: ")] == [
        "no jobs: this worker waits for an operator's approval",
        "no jobs: this worker is draining",
    ]


async def test_an_address_that_does_not_answer_is_logged_by_its_own_name(
    unused_tcp_port_factory: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (f"http://127.0.0.1:{unused_tcp_port_factory()}" for _ in range(2))
    control = ControlClient(first, second)
    with pytest.raises(Unavailable):
        await control.register(Register(worker_id="w", fleet_slug="gpus"), SECRET)
    await control.aclose()
    assert lines(caplog, "control plane") == [
        f"the control plane at {first} isn't responding (register at {first}: connection refused);"
        f" using {second}"
    ]


class ScriptedCalls:
    """Answers each call as its function says."""

    def __init__(self, answer: Callable[[Call], Awaitable[httpx.Response]]) -> None:
        self.once = answer
        self.client = httpx.AsyncClient()


async def answered(_: Call) -> httpx.Response:
    return httpx.Response(200, content=b"{}")


async def refused(_: Call) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def script(control: ControlClient, number: int, answer: Any) -> None:
    address = sorted(control._addresses, key=lambda each: each.url)[number]
    address.calls = ScriptedCalls(answer)  # type: ignore[assignment]


async def beat(control: ControlClient) -> None:
    with contextlib.suppress(Unavailable):
        await control.heartbeat(Heartbeat(dispatch_id=1, lease_token=uuid4()))


async def test_each_switch_between_control_planes_is_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    control = ControlClient("http://a", "http://b", key="k")
    script(control, 0, refused)
    script(control, 1, answered)
    for _ in range(3):
        await beat(control)
    script(control, 0, answered)
    script(control, 1, refused)
    for _ in range(3):
        await beat(control)
    script(control, 0, refused)
    for _ in range(6):
        await beat(control)
    script(control, 0, answered)
    for _ in range(3):
        await beat(control)
    assert lines(caplog, "control plane") == [
        "the control plane at http://a isn't responding (heartbeat at http://a: connection refused); using http://b",
        "the control plane at http://b isn't responding (heartbeat at http://b: connection refused); using http://a",
        "the control plane at http://a isn't responding (heartbeat at http://a: connection refused); using http://b",
        "the control plane at http://b isn't responding: heartbeat at http://b: connection refused",
        "the control plane at http://a is responding again",
    ]
    await control.aclose()


async def test_calls_that_fail_together_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    control, release = ControlClient("http://a", "http://b", key="k"), asyncio.Event()

    async def refused_later(call: Call) -> httpx.Response:
        await release.wait()
        return await refused(call)

    script(control, 0, refused_later)
    script(control, 1, answered)
    beats = [asyncio.create_task(beat(control)) for _ in range(3)]
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*beats)
    await beat(control)
    assert len(lines(caplog, "control plane")) == 1
    await control.aclose()


@pytest.mark.parametrize("answers_others", [True, False])
async def test_one_slow_call_is_no_control_plane_that_does_not_answer(
    answers_others: bool, caplog: pytest.LogCaptureFixture
) -> None:
    control, slow_ended = ControlClient("http://a", "http://b", key="k"), asyncio.Event()

    async def answer(call: Call) -> httpx.Response:
        if "heartbeat" not in call.route:
            return await answered(call)
        await slow_ended.wait()
        raise httpx.ReadTimeout("")

    script(control, 0, answer)
    slow = asyncio.create_task(beat(control))
    await asyncio.sleep(0)
    if answers_others:
        await control.poll(Poll(worker_id="w"))
    slow_ended.set()
    await slow
    assert len(lines(caplog, "isn't responding")) == (0 if answers_others else 1)
    assert control._url == ("http://a" if answers_others else "http://b")
    await control.aclose()
