"""A poll that waits on our own server keeps its socket and little else; nobody can tell from outside."""

import asyncio
import contextlib
import gc
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.dispatches import parked
from tests.support.server.asgi import free_listener
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on
from tests.support.workers.memory_plane import eventually

from comfyfleet.server.http import connections
from comfyfleet.server.http import connections as parking
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.connections import H11Connection, HttpConnection, with_limits
from comfyfleet.server.http.listener import serve
from comfyfleet.server.jobs import poll

WAIT_SECONDS = 30
PATIENCE_SECONDS = 10


@dataclass
class Line:
    """A worker's connection, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: str

    def send(self, word: str, *more: str, version: str = "1.1", **body: Any) -> None:
        self.writer.write(self.request(word, *more, version=version, **body))

    def request(self, word: str, *more: str, version: str = "1.1", **body: Any) -> bytes:
        content = json.dumps({"worker_id": "w1", **body}).encode()
        lines = [
            f"POST /api/worker/{word} HTTP/{version}",
            "Host: control.test",
            f"Authorization: Bearer {self.key}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *more,
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + content

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = head.rstrip().split("\r\n")
            headers = {each.partition(": ")[0].lower(): each.partition(": ")[2] for each in lines}
            content = await self.reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, json.loads(content)

    async def end(self) -> bytes:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.reader.read()


@dataclass
class Served:
    fleet_setup: FleetSetup
    port: int
    stop: asyncio.Event
    serving: "asyncio.Task[None]"
    lines: list[Line] = field(default_factory=list)

    async def line(self, worker_id: str = "w1") -> Line:
        return await self._opened((await self.fleet_setup.register(worker_id)).json()["token"])

    async def again(self, line: Line) -> Line:
        """Another connection of the same worker."""
        return await self._opened(line.key)

    async def _opened(self, key: str) -> Line:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.lines.append(Line(reader, writer, key))
        return self.lines[-1]

    async def close(self) -> None:
        for each in self.lines:
            each.writer.close()
            with contextlib.suppress(OSError):
                await each.writer.wait_closed()
        self.stop.set()
        await self.serving

    async def waits(self, number: int = 1) -> None:
        await parked(self.fleet_setup.plane.queue, number)

    def calls(self, status: str, word: str = "poll") -> float:
        counted = self.fleet_setup.plane.meters.calls.labels("POST", f"/api/worker/{word}", status)
        return float(counted._value.get())


@pytest.fixture
async def served(databases: Databases, tmp_path: Path) -> AsyncIterator[Served]:
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        listener, stop = free_listener(), asyncio.Event()
        # Either parser once: databases make no difference to them.
        serving = asyncio.create_task(
            serve(
                create_app(plane),
                listener,
                stop,
                at_stop=plane.end_waits,
                connection=with_limits() if databases.server_url else with_limits(H11Connection),
            )
        )
        served = Served(fleet_setup, listener.getsockname()[1], stop, serving)
        yield served
        await served.close()


async def test_a_parked_poll_gets_its_job_and_its_connection_goes_on(served: Served) -> None:
    line = await served.line()
    line.send("poll", "X-Request-Id: mine", wait_seconds=WAIT_SECONDS)
    await served.waits()
    job_id = await served.fleet_setup.submit()
    status, headers, polled = await line.answer()
    assert (status, polled["job"]["job_id"]) == (200, str(job_id))
    assert polled["job"]["output_url"], "it did not ask for a brief answer"
    assert headers["x-request-id"] == "mine"
    assert headers["content-type"] == "application/json"
    assert "date" in headers
    assert served.calls("200") == 1
    job = polled["job"]
    lease = {name: job[name] for name in ("dispatch_id", "lease_token")}
    line.send("heartbeat", **lease, started=True)
    assert (await line.answer())[0] == 200
    line.send("poll", wait_seconds=0)
    assert (await line.answer())[2]["job"] is None


async def test_what_comes_while_a_poll_waits_is_answered_after_it(served: Served) -> None:
    line = await served.line()
    first = line.request("poll", wait_seconds=WAIT_SECONDS)
    second = line.request("poll", "X-Request-Id: second")
    # With the first, then in the middle of its wait.
    line.writer.write(first + second[:20])
    await served.waits()
    line.writer.write(second[20:])
    await line.writer.drain()
    job_id = await served.fleet_setup.submit()
    assert (await line.answer())[2]["job"]["job_id"] == str(job_id)
    status, headers, polled = await line.answer()
    assert (status, headers["x-request-id"], polled["job"]) == (200, "second", None)


async def test_who_sends_without_end_while_it_waits_is_not_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "EARLY_BYTES_MAX", 10)
    line = await served.line()
    line.send("poll", wait_seconds=WAIT_SECONDS)
    await served.waits()
    job_id = await served.fleet_setup.submit()
    line.writer.write(line.request("poll", wait_seconds=0, models_loaded=["x" * 1_000] * 100))
    assert (await line.answer())[2]["job"]["job_id"] == str(job_id)
    assert (await line.answer())[2]["job"] is None


async def test_a_parked_poll_whose_worker_hangs_up_takes_no_job_along(served: Served) -> None:
    line = await served.line()
    line.send("poll", wait_seconds=WAIT_SECONDS)
    await served.waits()
    line.writer.close()
    await served.waits(0)
    other = await served.line("w2")
    job_id = await served.fleet_setup.submit()
    other.send("poll", worker_id="w2")
    polled = (await other.answer())[2]
    assert (polled["job"]["job_id"], polled["job"]["attempt"]) == (str(job_id), 1)
    assert served.calls("gone") == 1


async def test_one_that_hangs_up_as_its_job_comes_gives_it_back(served: Served) -> None:
    line = await served.line()
    line.send("poll", wait_seconds=WAIT_SECONDS)
    await served.waits()
    other = await served.line("w2")
    await asyncio.gather(
        served.fleet_setup.submit(), asyncio.to_thread(line.writer.transport.abort)
    )
    other.send("poll", worker_id="w2", wait_seconds=WAIT_SECONDS)
    polled = (await other.answer())[2]
    assert polled["job"]["attempt"] == 1


async def test_one_that_was_parked_is_not_turned_away_after_its_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = await served.line()
    line.send("poll", wait_seconds=WAIT_SECONDS)
    await served.waits()
    monkeypatch.setattr(HttpConnection, "connections_max", 0)
    await served.fleet_setup.submit()
    assert (await line.answer())[2]["job"]
    line.send("poll", current_load=1)
    assert (await line.answer())[0] == 200


async def test_one_that_wants_its_connection_closed_gets_that(served: Served) -> None:
    line = await served.line()
    line.send("poll", "Connection: close", wait_seconds=WAIT_SECONDS)
    await served.waits()
    await served.fleet_setup.submit()
    status, headers, polled = await line.answer()
    assert (status, headers["connection"]) == (200, "close")
    assert polled["job"]
    assert await line.end() == b""


async def test_a_client_of_old_is_answered_too(served: Served) -> None:
    line = await served.line()
    line.send("poll", version="1.0", wait_seconds=WAIT_SECONDS)
    await served.waits()
    await served.fleet_setup.submit()
    assert (await line.answer())[2]["job"]


async def test_a_worker_that_is_revoked_while_it_waits_is_told_so(served: Served) -> None:
    line = await served.line()
    line.send("poll", wait_seconds=WAIT_SECONDS)
    await served.waits()
    await served.fleet_setup.act("workers/w1/revoke")
    status, headers, told = await line.answer()
    assert (status, told["error"]["code"]) == (401, "worker_revoked")
    assert headers["www-authenticate"] == "Bearer"


async def test_a_worker_that_is_drained_while_it_waits_is_told_at_once_and_only_once(
    served: Served,
) -> None:
    line = await served.line()
    line.send("poll", wait_seconds=WAIT_SECONDS)
    await served.waits()
    await served.fleet_setup.act("workers/w1/drain")
    told = (await line.answer())[2]
    assert (told["drain"], told["reason"]) == (True, "this worker is draining")
    line.send("poll", wait_seconds=WAIT_SECONDS)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await line.reader.readexactly(1)


async def test_one_that_hangs_up_before_it_was_read_is_no_wrong_call(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="comfyfleet.access")
    line = await served.line()
    whole = line.request("heartbeat", dispatch_id=1)
    line.writer.write(whole[:-5])
    await line.writer.drain()
    line.writer.close()
    await eventually(lambda: served.calls("gone", "heartbeat"))
    assert served.calls("400", "heartbeat") == 0
    assert "heartbeat" not in caplog.text, "it happens with every job"


async def test_a_wait_that_is_over_says_why_there_is_no_job(served: Served) -> None:
    line = await served.line()
    line.send("poll", wait_seconds=0.05)
    polled = (await line.answer())[2]
    assert polled["reason"] == "no job is queued for this worker"
    await served.fleet_setup.assign()
    line.send("poll", wait_seconds=0.05)
    assert (await line.answer())[2]["reason"].startswith("no workflow")


async def test_an_order_during_a_wait_is_the_reason_if_the_connection_is_to_close(
    served: Served,
) -> None:
    """Workers of the standard library close the connection after each request."""
    line = await served.line()
    line.send("poll", "Connection: close", wait_seconds=3)
    await served.waits()
    await served.fleet_setup.assign()
    assert (await line.answer())[2]["reason"].startswith("no workflow")
    assert await line.end() == b""


async def test_a_server_that_stops_answers_who_is_parked_and_ends_at_once(served: Served) -> None:
    line = await served.line()
    line.send("poll", wait_seconds=WAIT_SECONDS)
    await served.waits()
    served.stop.set()
    with contextlib.suppress(asyncio.IncompleteReadError):
        await line.answer()
    assert await line.end() == b""
    async with asyncio.timeout(PATIENCE_SECONDS):
        await served.serving


@pytest.fixture
def one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "POLLS_AT_ONCE", 1)


@pytest.mark.usefixtures("one_at_once")
async def test_polls_that_come_at_once_are_let_in_one_after_the_other(served: Served) -> None:
    lines = [await served.line(f"w{number}") for number in range(6)]
    for number, line in enumerate(lines):
        line.send("poll", worker_id=f"w{number}", wait_seconds=WAIT_SECONDS)
    await served.waits(6)
    served.fleet_setup.plane.queue.dismiss()
    await served.waits(6)
    await served.fleet_setup.submit()
    answers = [asyncio.create_task(line.answer()) for line in lines]
    done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    assert [each.result()[2]["job"] is not None for each in done] == [True]
    for each in waiting:
        each.cancel()


@pytest.mark.usefixtures("one_at_once")
async def test_half_a_poll_keeps_nobody_out(served: Served) -> None:
    half, whole = await served.line(), await served.line("w2")
    half.writer.write(half.request("poll", wait_seconds=WAIT_SECONDS)[:-5])
    await half.writer.drain()
    whole.send("poll", worker_id="w2", wait_seconds=WAIT_SECONDS)
    await served.waits(1)
    half.writer.write(half.request("poll", wait_seconds=WAIT_SECONDS)[-5:])
    await served.waits(2)


@pytest.mark.usefixtures("one_at_once")
async def test_a_poll_with_a_wrong_key_keeps_nobody_out(served: Served) -> None:
    wrong, right = await served.line(), await served.line("w2")
    wrong.key = "wrong"
    for _ in range(3):
        wrong.send("poll", wait_seconds=WAIT_SECONDS)
        assert (await wrong.answer())[0] == 401
    wrong.send("poll", wait_seconds=WAIT_SECONDS)
    right.send("poll", worker_id="w2", wait_seconds=WAIT_SECONDS)
    await served.waits(1)


@pytest.mark.usefixtures("one_at_once")
async def test_a_poll_that_is_answered_or_waits_unparked_makes_room(served: Served) -> None:
    of_old, other = await served.line(), await served.line("w2")
    of_old.send("poll", version="1.0", wait_seconds=WAIT_SECONDS)
    await served.waits(1)
    for _ in range(3):
        other.send("poll", worker_id="w2", wait_seconds=0)
        assert (await other.answer())[0] == 200


async def test_only_so_many_polls_of_one_worker_wait(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll, "WAITING_PER_WORKER_MAX", 2)
    first = await served.line()
    # A client of old is not parked, and counts all the same.
    lines = [first, *[await served.again(first) for _ in range(2)]]
    first.send("poll", wait_seconds=WAIT_SECONDS)
    lines[1].send("poll", version="1.0", wait_seconds=WAIT_SECONDS)
    await served.waits(2)
    lines[2].send("poll", wait_seconds=WAIT_SECONDS)
    status, _, refused = await lines[2].answer()
    assert (status, refused["error"]["code"]) == (429, "too_many_calls")
    lines[2].send("poll", wait_seconds=0)
    assert (await lines[2].answer())[0] == 200, "one that does not wait is no burden"
    for leaving in lines[:2]:
        leaving.writer.close()
    await served.waits(0)
    lines[2].send("poll", wait_seconds=WAIT_SECONDS)
    await served.waits(1)
    await served.fleet_setup.submit()
    assert (await lines[2].answer())[2]["job"]
    assert not served.fleet_setup.plane.context.polls.waiting


async def test_a_poll_that_said_too_much_to_be_kept_does_not_wait(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll, "KEPT_BYTES_MAX", 1_000)
    line = await served.line()
    backend = {"node_types": [f"Node{number}" for number in range(200)]}
    line.send("poll", wait_seconds=WAIT_SECONDS, backend=backend)
    status, _, polled = await line.answer()
    assert (status, polled["job"]) == (200, None)
    assert not served.fleet_setup.plane.context.polls.waiting
    line.send("poll", wait_seconds=WAIT_SECONDS)
    await served.waits(1)


async def test_a_worker_that_does_not_read_is_waited_for_after_its_poll_too(served: Served) -> None:
    line, unread = await served.line(), bytes(2**23)
    line.send("poll", wait_seconds=WAIT_SECONDS)
    await served.waits()
    # By its type: asking a proxy of something that is gone raises.
    known = [each for each in gc.get_objects() if type(each) is parking.ParkedConnection]
    (parked,) = [each for each in known if each.waiting is not None]
    parked.transport.write(unread)
    job_id = await served.fleet_setup.submit()
    await eventually(lambda: isinstance(parked.transport.get_protocol(), HttpConnection))
    after = parked.transport.get_protocol()
    assert isinstance(after, HttpConnection)
    assert after.flow.write_paused
    # And is not parked while so much is unread.
    line.send("poll", wait_seconds=WAIT_SECONDS)
    await served.waits()
    assert parked.transport.get_protocol() is after
    assert await line.reader.readexactly(len(unread)) == unread
    assert (await line.answer())[2]["job"]["job_id"] == str(job_id)
    assert not after.flow.write_paused
    second = await served.fleet_setup.submit()
    assert (await line.answer())[2]["job"]["job_id"] == str(second)
